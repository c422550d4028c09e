"""A rank's files of a checkpoint: its own, and none that another rank has half done in the same
folder."""

import shutil
from pathlib import Path

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.engine import EngineState
from rlcli.api.model import Model
from rlcli.checkpoint.rank_files import read_samples, restore_roles, write_roles, write_samples
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


class WithSeveralTemplates(BesideAnotherRank):
    """Its tokenizer has a folder of chat templates."""

    def save_description(self, tokenizer, folder):
        templates = Path(folder) / "additional_chat_templates"
        templates.mkdir()
        (templates / "tool_use.jinja").write_text("{{ tools }}")
        super().save_description(tokenizer, folder)


def written_by(engine, checkpoint):
    """The files that rank 0 writes."""
    engine.checkpoint = checkpoint
    model = Model("actor", engine, None, torch.device("cpu"))
    copies = {"actor": copy_to_host(engine.state(), leads=True)}
    files = write_roles(copies, {"actor": model}, checkpoint, rank=0)
    assert all(file.is_file() for file in files)
    return {str(file.relative_to(checkpoint)) for file in files}


def test_chat_templates_in_a_folder_of_their_own_are_files_of_the_checkpoint(tmp_path):
    assert written_by(WithSeveralTemplates(TinyLM()), tmp_path) == {
        "models/actor/additional_chat_templates/tool_use.jinja",
        "models/actor/config.json",
        "models/actor/model.safetensors",
    }


def test_unfinished_files_of_another_rank_are_not_part_of_the_description(tmp_path):
    assert written_by(BesideAnotherRank(TinyLM()), tmp_path) == {
        "models/actor/config.json",
        "models/actor/model.safetensors",
    }


def tiny(role, seed):
    engine = BesideAnotherRank(TinyLM(seed=seed))
    return {role: Model(role, engine, None, torch.device("cpu"))}


def test_a_role_has_its_own_weights_if_they_are_stored_or_else_those_it_mirrored(tmp_path):
    for role, seed in (("actor", 0), ("ref", 1)):
        model = tiny(role, seed)
        model[role].module.checkpoint = tmp_path / role
        copy = copy_to_host(model[role].module.state(), leads=True)
        write_roles({role: copy}, model, tmp_path / "both", rank=0)
    mirrored = tmp_path / "mirrored"
    shutil.copytree(tmp_path / "both/models/actor", mirrored / "models/actor")
    for folder, seed in ((tmp_path / "both", 1), (mirrored, 0)):
        model = tiny("ref", seed=2)
        restore_roles(model, folder, {"ref": "actor"}, {"actor": 0, "ref": 0}, rank=0)
        assert torch.equal(model["ref"].module.model.head, TinyLM(seed=seed).head)


def test_keys_of_samples_may_share_a_tensor(tmp_path):
    scores = torch.tensor([0.0, 1.0])
    data = {"rewards": scores, "solved": scores, "values": torch.ones(()).expand(5)}
    batch = SequenceSample.from_default(ids=["a", "b"], seqlens=[3, 2], data=data)
    write_samples(batch.unpack(), tmp_path, rank=0)
    again = SequenceSample.gather(read_samples(tmp_path, ["a", "b"]))
    assert again.as_json() == batch.as_json()
