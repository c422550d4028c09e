"""The custom interface of AReaL's documentation works as it stands there."""

import importlib.util
from pathlib import Path

import pytest
import torch

from rlcli.api.component import registered
from rlcli.api.data import SequenceSample
from rlcli.api.model import MicroBatchSpec
from rlcli.testing.tiny_engine import tiny_model

EXAMPLE = Path(__file__).with_name("custom_interface_example.txt")


@pytest.fixture
def custom(tmp_path, monkeypatch):
    file = tmp_path / "custom.py"
    file.write_text(EXAMPLE.read_text())
    spec = importlib.util.spec_from_file_location("custom", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(registered("interfaces"), "custom", None)
    registered("interfaces").pop("custom")
    spec.loader.exec_module(module)
    return registered("interfaces")["custom"]


def test_the_documented_interface_trains_and_saves(custom, rollout, tmp_path):
    lengths = rollout.seqlens["packed_logprobs"]
    mask = torch.rand(sum(map(sum, lengths)), generator=torch.Generator().manual_seed(0)) < 0.5
    data = SequenceSample.from_default(
        ids=rollout.ids,
        seqlens={"packed_input_ids": rollout.seqlens["packed_input_ids"], "mask": lengths},
        data={"packed_input_ids": rollout.data["packed_input_ids"], "mask": mask},
    )
    assert custom().custom_param == 1.0
    results = []
    for n_mbs in (1, 3):
        model = tiny_model()
        stats = custom(custom_param=2.0).train_step(model, data, MicroBatchSpec(n_mbs=n_mbs))
        assert model.version.global_step == 1
        assert stats["loss_weight"] == int(mask.sum())
        results.append((stats["loss"], stats["grad_norm"]))
    assert results[0] == pytest.approx(results[1], rel=1e-9)
    custom().save(model, str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()
