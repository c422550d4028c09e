"""A rank's files of a checkpoint: its own, and none that another rank has half done in the same
folder."""

from pathlib import Path

import torch

from rlcli.api.engine import EngineState
from rlcli.api.model import Model
from rlcli.checkpoint.rank_files import write_roles
from rlcli.checkpoint.state import copy_to_host
from rlcli.testing.tiny_engine import TinyEngine, TinyLM


class BesideAnotherRank(TinyEngine):
    """While its description is written, the other rank's file appears under the name that it has
    until it is whole."""

    def state(self, room_for_optimizer=False):
        return EngineState(dict(self.model.state_dict()))

    def save_description(self, tokenizer, folder):
        (Path(folder) / "config.json").write_text("{}")
        shared = self.checkpoint / "models" / "actor"
        shared.mkdir(parents=True, exist_ok=True)
        (shared / ".tmpQ9p2").write_bytes(b"half")


def test_unfinished_files_of_another_rank_are_not_part_of_the_description(tmp_path):
    engine = BesideAnotherRank(TinyLM())
    engine.checkpoint = tmp_path
    model = Model("actor", engine, None, torch.device("cpu"))
    files = write_roles(
        {"actor": copy_to_host(engine.state(), leads=True)}, {"actor": model}, tmp_path, rank=0
    )
    assert {str(file.relative_to(tmp_path)) for file in files} == {
        "models/actor/config.json",
        "models/actor/model.safetensors",
    }
    assert all(file.is_file() for file in files)
