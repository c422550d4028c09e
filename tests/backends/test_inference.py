"""inference: the contract, over more families, and what its engine refuses or leaves behind when the disk is full."""

import json
import resource

import pytest
import torch
from safetensors.torch import load_file

from rlcli.api.model import ForwardEngine, GenerationEngine, TrainEngine
from rlcli.checkpoint.disk import explain_disk_errors
from rlcli.errors import ModelError, ResourceError
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import batch
from rlcli.testing.backend.generation import generate
from rlcli.testing.tiny_models import tiny_model


class TestContract(BackendContract):
    name = "inference"
    families = ("llama", "gpt2", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_neox", "cohere", "granite",
                "olmo2")  # fmt: skip


def test_it_scores_and_generates_and_nothing_more():
    engine = TestContract().engine()
    assert isinstance(engine, ForwardEngine)
    assert isinstance(engine, GenerationEngine)
    assert not isinstance(engine, TrainEngine)


def test_what_is_saved_has_the_type_that_it_began_with(tmp_path):
    engine = TestContract().engine(lm=tiny_model().bfloat16())
    assert {parameter.dtype for parameter in engine.lm.parameters()} == {torch.float32}
    engine.save_to_hf(None, str(tmp_path / "actor"))
    assert {tensor.dtype for tensor in load_file(tmp_path / "actor" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "actor" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_value_head_has_no_log_probs():
    with pytest.raises(ModelError, match="language-model head"):
        TestContract().engine(head="value").forward(batch(), post_hook=lambda output, _: output.logprobs)


def test_too_long_for_the_model_is_said_before_generating():
    with pytest.raises(ModelError, match="128 positions"):
        generate(TestContract().engine(), max_new_tokens=200)


def test_a_folder_that_does_not_fit_on_the_disk_leaves_the_old_one_and_nothing_else(tmp_path):
    engine = TestContract().engine()
    engine.save_to_hf(None, str(tmp_path / "actor"))
    before = (tmp_path / "actor" / "model.safetensors").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(ResourceError) as caught, explain_disk_errors(tmp_path):
            engine.save_to_hf(None, str(tmp_path / "actor"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.code == "F28"
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]
    assert (tmp_path / "actor" / "model.safetensors").read_bytes() == before
