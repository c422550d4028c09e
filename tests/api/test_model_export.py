"""Exported models equal those that `save_pretrained` of transformers writes."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlcli.api import model_export
from rlcli.api.model_export import write_weights
from rlcli.api.model_source import open_source
from rlcli.errors import ModelError
from rlcli.testing.tiny_models import tiny_config

CPU = torch.device("cpu")
FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "gemma3_text", "cohere", "granite", "olmo2",
            "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")  # fmt: skip


def random_model(family):
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(tiny_config(family))
    for parameter in lm.parameters():
        nn.init.normal_(parameter)
    return lm


def detached_parameters(lm):
    return ((name, parameter.detach()) for name, parameter in lm.named_parameters())


def export(lm, folder, dtype=torch.float32):
    folder.mkdir()
    write_weights(lm, detached_parameters(lm), folder, dtype)
    return folder


def read_tensors(folder):
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def differing(actual, expected):
    return {
        name
        for name in actual.keys() | expected.keys()
        if name not in actual
        or name not in expected
        or actual[name].dtype != expected[name].dtype
        or not torch.equal(actual[name], expected[name])
    }


@pytest.mark.parametrize("origin", ["made here", "read from a folder"])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_numbers_equal_those_of_save_pretrained(family, origin, tmp_path):
    reference = random_model(family)
    reference.save_pretrained(tmp_path / "wanted")
    lm = reference
    if origin == "read from a folder":
        lm = open_source(str(tmp_path / "wanted"), head="lm", tokenizer=None, seed=1).load(CPU)
    assert (
        differing(read_tensors(export(lm, tmp_path / "found")), read_tensors(tmp_path / "wanted"))
        == set()
    )


def test_the_prefix_of_names_in_the_original_files_is_kept(tmp_path):
    """For example the prefix of the language model inside a vision-language model."""
    random_model("gemma3_text").save_pretrained(tmp_path / "one")
    lm = open_source(str(tmp_path / "one"), head="lm", tokenizer=None, seed=1).load(CPU)
    assert (
        read_tensors(export(lm, tmp_path / "two")).keys() == read_tensors(tmp_path / "one").keys()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_have_the_requested_dtype(dtype, tmp_path):
    lm = random_model("qwen3_moe")
    expected = random_model("qwen3_moe").to(dtype)
    expected.save_pretrained(tmp_path / "wanted")
    assert (
        differing(
            read_tensors(export(lm, tmp_path / "found", dtype)), read_tensors(tmp_path / "wanted")
        )
        == set()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routers_stay_in_float32_where_transformers_keeps_them_there(dtype, tmp_path):
    """In 16 bits their biases would choose other experts. Sizes are odd: numbers of 16 bits must
    not move wider ones off their alignment."""
    config = AutoConfig.for_model(
        "glm4_moe", vocab_size=97, hidden_size=33, head_dim=8, num_attention_heads=2,
        num_key_value_heads=1, num_hidden_layers=2, first_k_dense_replace=1, intermediate_size=21,
        moe_intermediate_size=13, n_routed_experts=5, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    lm = AutoModelForCausalLM.from_config(config)
    lm.model.layers[1].mlp.gate.e_score_correction_bias.normal_(12, 0.01)
    lm.save_pretrained(tmp_path / "exact")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=dtype)
    read.save_pretrained(tmp_path / "wanted")
    actual = read_tensors(export(lm, tmp_path / "found", dtype))
    assert differing(actual, read_tensors(tmp_path / "wanted")) == set()
    wide = {name for name, tensor in actual.items() if tensor.dtype is torch.float32}
    assert wide == {f"model.layers.1.mlp.gate.{n}" for n in ("weight", "e_score_correction_bias")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_integers_keep_their_dtype_next_to_converted_floats(dtype, tmp_path):
    lm = random_model("llama")
    dtypes = [torch.uint8, torch.int64, torch.bool, torch.int32]
    for index, integers in enumerate(dtypes):
        lm.register_buffer(f"counts_{index}", torch.ones(3, dtype=integers))
    tensors = read_tensors(export(lm, tmp_path / "found", dtype))
    assert [tensors[f"counts_{index}"].dtype for index in range(4)] == dtypes
    assert torch.equal(tensors["model.norm.weight"], lm.model.norm.weight.to(dtype))


def test_large_models_are_split_into_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(model_export, "LARGEST_FILE", 20_000)
    lm = random_model("mixtral")
    folder = export(lm, tmp_path / "found")
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            assert {index["weight_map"][name] for name in names} == {file.name}
    lm.config.save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert differing(read.state_dict(), lm.state_dict()) == set()


def test_a_number_beyond_the_range_of_the_dtype_is_refused(tmp_path):
    lm = random_model("llama")
    with torch.no_grad():
        lm.model.norm.weight[3] = 70_000.0
    with pytest.raises(
        ModelError, match=r"model.norm.weight holds 7e\+04, which is too large for float16"
    ) as raised:
        export(lm, tmp_path / "found", torch.float16)
    assert "checkpoint.save_dtype" in raised.value.hint


def test_only_one_weight_is_in_memory_at_a_time(tmp_path):
    lm = random_model("mixtral")
    references = []

    def weights():
        import weakref

        for name, tensor in detached_parameters(lm):
            assert all(ref() is None for ref in references[:-1])
            copy = tensor.clone()
            references.append(weakref.ref(copy))
            yield name, copy
            del copy

    (tmp_path / "found").mkdir()
    write_weights(lm, weights(), tmp_path / "found", torch.bfloat16)
    assert len(references) > 10
