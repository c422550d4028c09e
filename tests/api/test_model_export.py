"""What is written is what transformers' own `save_pretrained` would have written."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from rlcli.api import model_export
from rlcli.api.model_export import write_weights
from rlcli.api.model_source import open_source
from rlcli.errors import ModelError
from rlcli.testing.tiny_models import tiny_config

CPU = torch.device("cpu")
FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "gemma3_text", "cohere", "granite", "olmo2", "qwen3",
            "mixtral", "qwen3_moe", "olmoe")  # fmt: skip


def random_model(family):
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(tiny_config(family))
    for parameter in lm.parameters():
        nn.init.normal_(parameter)
    return lm


def detached(lm):
    return ((name, parameter.detach()) for name, parameter in lm.named_parameters())


def write(lm, folder, dtype=torch.float32):
    folder.mkdir()
    write_weights(lm, detached(lm), folder, dtype)
    return folder


def stored(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def differing(found, wanted):
    return {name for name in found.keys() | wanted.keys()
            if name not in found or name not in wanted or found[name].dtype != wanted[name].dtype
            or not torch.equal(found[name], wanted[name])}  # fmt: skip


@pytest.mark.parametrize("origin", ["made here", "read from a folder"])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_numbers_are_those_of_transformers(family, origin, tmp_path):
    made = random_model(family)
    made.save_pretrained(tmp_path / "wanted")
    lm = made
    if origin == "read from a folder":
        lm = open_source(str(tmp_path / "wanted"), head="lm", tokenizer=None, seed=1).load(CPU)
    assert differing(stored(write(lm, tmp_path / "found")), stored(tmp_path / "wanted")) == set()


def test_a_prefix_that_files_have_is_written_again(tmp_path):
    """As in the language model of a model of images and text."""
    random_model("gemma3_text").save_pretrained(tmp_path / "one")
    lm = open_source(str(tmp_path / "one"), head="lm", tokenizer=None, seed=1).load(CPU)
    assert stored(write(lm, tmp_path / "two")).keys() == stored(tmp_path / "one").keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_have_the_type_that_is_asked_for(dtype, tmp_path):
    lm = random_model("qwen3_moe")
    wanted = random_model("qwen3_moe").to(dtype)
    wanted.save_pretrained(tmp_path / "wanted")
    assert differing(stored(write(lm, tmp_path / "found", dtype)), stored(tmp_path / "wanted")) == set()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_integers_stay_and_every_number_is_aligned(dtype, tmp_path):
    lm = random_model("llama")
    for place, dtypes in enumerate((torch.uint8, torch.int64, torch.bool, torch.int32)):
        lm.register_buffer(f"counts_{place}", torch.ones(3, dtype=dtypes))
    found = stored(write(lm, tmp_path / "found", dtype))
    assert [found[f"counts_{place}"].dtype for place in range(4)] == [torch.uint8, torch.int64, torch.bool, torch.int32]
    assert torch.equal(found["model.norm.weight"], lm.model.norm.weight.to(dtype))


def test_large_models_are_split_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(model_export, "LARGEST_FILE", 20_000)
    lm = random_model("mixtral")
    folder = write(lm, tmp_path / "found")
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert {index["weight_map"][name] for name in opened.keys()} == {file.name}  # noqa: SIM118
    lm.config.save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert differing(read.state_dict(), lm.state_dict()) == set()


def test_a_number_that_the_type_has_no_room_for(tmp_path):
    lm = random_model("llama")
    with torch.no_grad():
        lm.model.norm.weight[3] = 70_000.0
    with pytest.raises(ModelError, match=r"model.norm.weight holds 7e\+04, which is too large for float16") as raised:
        write(lm, tmp_path / "found", torch.float16)
    assert "checkpoint.save_dtype" in raised.value.hint


def test_one_weight_is_held_at_a_time(tmp_path):
    lm = random_model("mixtral")
    given = []

    def weights():
        import weakref

        for name, tensor in detached(lm):
            assert all(ref() is None for ref in given[:-1])
            copy = tensor.clone()
            given.append(weakref.ref(copy))
            yield name, copy
            del copy

    (tmp_path / "found").mkdir()
    write_weights(lm, weights(), tmp_path / "found", torch.bfloat16)
    assert len(given) > 10
