"""Around each call, mode, device and version are set once,
also for interfaces that do so themselves."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
from pathlib import Path

import pytest
import torch

from rlcli.api.component import registered
from rlcli.api.config import FinetuneSpec, MicroBatchSpec
from rlcli.api.model import Model, ModelInterface, call_interface
from rlcli.ops.packing import action_mask
from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.interface.call_engine import ModalEngine
from rlcli.testing.interface.recording_engine import WatchedEngine
from rlcli.testing.tiny_engine import TinyLM

KEYS = ["packed_input_ids", "prompt_mask"]
EXAMPLE = Path(__file__).parents[1] / "interfaces" / "custom_interface_example.txt"


class LeanInterface(ModelInterface):
    """Trains on the answers; leaves mode, device and version to the caller."""

    def train_step(self, model, data, mb_spec):
        return model.module.train_batch(data, self.loss, self.weight, mb_spec=mb_spec)

    def mask(self, batch):
        return action_mask(batch.data["prompt_mask"], batch.flat_seqlens("packed_input_ids"))

    def weight(self, batch):
        return self.mask(batch).sum()

    def loss(self, output, batch):
        return -output.logprobs[self.mask(batch)].sum()


class PortedInterface(LeanInterface):
    """The same, with the bookkeeping that interfaces of other systems do themselves."""

    def train_step(self, model, data, mb_spec):
        model.module.train()
        version = model.version.global_step
        stats = model.module.train_batch(
            data.to(model.module.device),
            self.loss,
            self.weight,
            mb_spec=mb_spec,
            version_steps=version,
        )
        model.inc_version()
        return stats


class CountsEachOptimizerStep(LeanInterface):
    def train_step(self, model, data, mb_spec):
        stats = super().train_step(model, data, mb_spec)
        for _ in range(4):
            model.inc_version()
        return stats


def model_with(engine=WatchedEngine, spec=None):
    return Model("tested", engine(TinyLM()), DigitTokenizer(), torch.device("cpu"), ft_spec=spec)


def train_steps(interface, count=3, spec=None):
    """(model, stats of the last step) after `count` training steps."""
    model = model_with(spec=spec)
    for _ in range(count):
        stats = call_interface(
            interface, "train_step", model, make_batch(KEYS), MicroBatchSpec(n_mbs=2)
        )
    return model, stats


def test_mode_and_version_are_set_around_a_train_step():
    model, _ = train_steps(LeanInterface())
    assert model.version.global_step == 3
    assert model.module.scheduled == [0, 1, 2]
    assert model.module.mode is True


def test_calls_of_one_training_step_have_its_learning_rate():
    """It would fall twice as fast, and be 0 in the second half of a run, if it followed calls."""
    spec = FinetuneSpec(
        total_train_steps=6, dataset_size=16, train_batch_size=8, updates_per_step=2
    )
    model, _ = train_steps(LeanInterface(), count=5, spec=spec)
    assert model.module.scheduled == [0, 0, 1, 1, 2]
    assert vars(model.version) == {"global_step": 5, "epoch": 1, "epoch_step": 1}


@pytest.mark.parametrize("twin", [PortedInterface, CountsEachOptimizerStep])
def test_an_interface_that_also_counts_versions_is_counted_once(twin):
    (lean, expected), (port, stats) = train_steps(LeanInterface()), train_steps(twin())
    assert stats == expected
    assert vars(port.version) == vars(lean.version)
    assert port.module.scheduled == lean.module.scheduled
    for ported_weight, lean_weight in zip(
        port.module.model.parameters(), lean.module.model.parameters(), strict=True
    ):
        assert torch.equal(ported_weight, lean_weight)


def test_an_epoch_is_counted_once():
    spec = FinetuneSpec(total_train_steps=6, dataset_size=16, train_batch_size=8)
    for interface in (LeanInterface(), PortedInterface(), CountsEachOptimizerStep()):
        version = train_steps(interface, count=3, spec=spec)[0].version
        assert (version.global_step, version.epoch, version.epoch_step) == (3, 1, 1)


def test_the_example_of_another_system_counts_each_step_once(monkeypatch):
    """It sets the mode, passes the version step and increments the version itself."""
    table = registered("interfaces")
    monkeypatch.setitem(table, "custom", None)
    table.pop("custom")
    loader = importlib.machinery.SourceFileLoader("custom", str(EXAMPLE))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("custom", loader))
    loader.exec_module(module)
    batch = make_batch(KEYS)
    batch.remap_keys_({"prompt_mask": "mask"})
    batch.data["mask"] = LeanInterface().mask(make_batch(KEYS))
    batch.seqlens["mask"] = [
        [length - 1 for length in group] for group in batch.seqlens["packed_input_ids"]
    ]
    model = model_with()
    for _ in range(2):
        call_interface(table["custom"](), "train_step", model, batch)
    assert model.version.global_step == 2
    assert model.module.scheduled == [0, 1]


class InferenceInterface(ModelInterface):
    WRITES = {"inference": ("values", "seq_no_eos_mask", "packed_logprobs", "rewards")}

    def inference(self, model, data, mb_spec):
        model.module.forward(data, mb_spec, post_hook=lambda output, _: output.values)
        return data

    generate = inference

    def evaluate(self, model, eval_dataloader):
        return {
            "batches": float(len([self.inference(model, batch, None) for batch in eval_dataloader]))
        }


@pytest.mark.parametrize("call", ["inference", "generate", "evaluate"])
def test_only_training_uses_training_mode_or_counts_versions(call):
    model, batch = model_with(ModalEngine), make_batch(KEYS)
    call_interface(
        InferenceInterface(), call, model, [batch, batch] if call == "evaluate" else batch
    )
    assert model.module.passes_in_training_mode == 0
    assert model.version.global_step == 0


class MetaDeviceEngine(WatchedEngine):
    """An engine on a device other than the CPU."""

    device = torch.device("meta")


class RecordsDevices(ModelInterface):
    def __init__(self):
        self.seen = []

    def train_step(self, model, data, mb_spec):
        self.seen.append({tensor.device.type for tensor in data.data.values()})
        return {}

    def inference(self, model, data, mb_spec):
        self.train_step(model, data, mb_spec)

    generate = inference

    def evaluate(self, model, eval_dataloader):
        return self.train_step(model, *eval_dataloader, None)


@pytest.mark.parametrize("call", ["train_step", "inference", "generate", "evaluate"])
def test_data_is_on_the_device_of_the_engine(call):
    interface, batch = RecordsDevices(), make_batch(KEYS)
    call_interface(
        interface, call, model_with(MetaDeviceEngine), [batch] if call == "evaluate" else batch
    )
    call_interface(
        interface,
        call,
        Model("rule", None, None, torch.device("cpu")),
        [batch] if call == "evaluate" else batch,
    )
    assert interface.seen == [{"meta"}, {"cpu"}], (
        "a role without an engine computes where its data is"
    )
    assert {tensor.device.type for tensor in batch.data.values()} == {"cpu"}


def test_mocked_outputs_fit_the_meaning_of_their_keys():
    """Mocked values fit the meaning of their keys, need no model,
    and do not depend on the rest of the batch."""
    model, batch = Model("tested", None, None, torch.device("cpu")), make_batch(KEYS)
    mocked = InferenceInterface().mock("inference", model, batch)
    tensors, tokens = mocked.data, batch.flat_seqlens("packed_input_ids")
    assert set(mocked.keys) == set(InferenceInterface.WRITES["inference"])
    assert len(tensors["values"]) == sum(tokens)
    assert tensors["values"].abs().max() <= 1
    assert tensors["seq_no_eos_mask"].dtype is torch.bool
    assert set(tensors["rewards"].tolist()) == {0.0, 1.0}
    response = LeanInterface().mask(batch)
    assert tensors["packed_logprobs"].dtype is torch.float32
    assert not tensors["packed_logprobs"][~response].any()
    assert -2 <= tensors["packed_logprobs"].min() < tensors["packed_logprobs"].max() <= 0
    alone = InferenceInterface().mock("inference", model, batch.select_indices([3]))
    for key, sample in itertools.product(mocked.keys, [mocked.unpack()[3]]):
        assert torch.equal(alone.data[key], sample.data[key])
    assert not list(InferenceInterface().mock("train_step", model, batch).keys)


class MarksResponses(ModelInterface):
    WRITES = {"inference": ("rewards", "solved")}


def test_whether_a_response_is_right_is_mocked_as_rewards_write_it():
    model, batch = Model("tested", None, None, torch.device("cpu")), make_batch(KEYS)
    mocked = MarksResponses().mock("inference", model, batch)
    assert mocked.data["solved"].dtype is torch.bool
    assert mocked.data["rewards"].dtype is torch.float32


class WritesUnknownKeys(ModelInterface):
    WRITES = {"inference": ("my_numbers",), "generate": ("packed_input_ids",)}


def test_keys_without_a_known_meaning_have_no_mock():
    model, batch = Model("tested", None, None, torch.device("cpu")), make_batch(KEYS)
    with pytest.raises(NotImplementedError, match="my_numbers"):
        WritesUnknownKeys().mock("inference", model, batch)
    with pytest.raises(NotImplementedError, match="no mock of generate"):
        WritesUnknownKeys().mock("generate", model, batch)


def test_an_interface_saves_with_its_tokenizer(tmp_path):
    LeanInterface().save(model_with(), str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()
