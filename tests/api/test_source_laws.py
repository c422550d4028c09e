"""Weight sources: a region that is read equals the slice of the full tensor, on any rank; stored
weights equal those that transformers reads; random ones have the distribution of the family's own
initialisation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rlcli.api import model_source
from rlcli.api.model_source import fill, local_part, materialize, open_source
from rlcli.errors import ModelError
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import tiny_config, tiny_model

CPU = torch.device("cpu")
FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "gemma3_text", "cohere", "granite", "olmo2",
            "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")  # fmt: skip
SIZE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip


def write_model(family, folder, dtype=torch.float32):
    """A folder with a model whose numbers are all random, those of norms and biases too."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(tiny_config(family))
    for parameter in lm.parameters():
        nn.init.normal_(parameter)
    lm.to(dtype).save_pretrained(folder)
    return str(folder)


def scratch_config(**changes):
    return {"model_type": "llama", **SIZE, **changes}


def tensors_of(lm):
    return dict(lm.named_parameters()) | dict(lm.named_buffers())


@pytest.fixture(params=[1 << 20, 64], ids=["one block", "many blocks"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(model_source, "BLOCK", request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_weights_equal_those_that_transformers_reads(family, tmp_path, blocks):
    """Including names, experts stored separately, tied weights, and buffers that are not stored."""
    folder = write_model(family, tmp_path)
    expected = tensors_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    lm = open_source(folder, head="lm", tokenizer=None, seed=1).load(CPU)
    actual = tensors_of(lm)
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
    assert not lm.training


def test_experts_are_read_one_at_a_time(tmp_path, monkeypatch):
    source = open_source(write_model("mixtral", tmp_path), head="lm", tokenizer=None, seed=1)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert [block.shape[0] for _, block in source.blocks(name)] == [1, 1, 1, 1]
    assert torch.equal(source.read(name, (slice(1, 3), slice(5, 7))), source.read(name)[1:3, 5:7])


@given(data=st.data(), block=st.sampled_from([16, 64, 1 << 20]))
def test_a_region_equals_the_slice_of_the_full_tensor(data, block, sources):
    source = data.draw(st.sampled_from(sources))
    names = sorted(name for name, _ in source.skeleton().named_parameters())
    name = data.draw(st.sampled_from(names))
    shape = dict(source.skeleton().named_parameters())[name].shape
    spans = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    region = tuple(slice(*span) for span in spans[: data.draw(st.integers(0, len(shape)))])
    assert torch.equal(source.read(name)[region], source.read(name, region))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("laws")
    stored = [
        open_source(write_model(f, folder / f), head="lm", tokenizer=None, seed=1)
        for f in ("llama", "qwen3_moe")
    ]
    return [*stored, open_source(scratch_config(), head="value", tokenizer=None, seed=1)]


def test_a_region_outside_the_tensor_is_refused(sources):
    with pytest.raises(ValueError, match="not a part"):
        sources[0].read("model.norm.weight", (slice(0, 33),))


@pytest.mark.parametrize("degree", [2, 4])
def test_each_rank_fills_its_own_shards(degree, tmp_path):
    """For stored and random weights: the shards equal the slices of what a single process loads."""
    folder = write_model("gpt2", tmp_path)
    gpt2 = {**scratch_config(), "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}
    origins = (folder, scratch_config(), gpt2)

    def work(rank):
        from torch.distributed.fsdp import fully_shard

        differing = []
        for origin in origins:
            source = open_source(origin, head="lm", tokenizer=None, seed=3)
            lm = source.skeleton()
            for child in lm.base_model.children():
                if isinstance(child, nn.ModuleList):
                    for layer in child:
                        fully_shard(layer, mesh=mesh)
            fully_shard(lm, mesh=mesh)
            materialize(lm, CPU)
            fill(lm, source)
            full = dict(source.load(CPU).named_parameters())
            local = dict(lm.named_parameters())
            differing += list(full.keys() ^ local.keys())
            for name, parameter in local.items():
                assert isinstance(parameter, DTensor)
                shard, region = local_part(parameter.detach())
                if not torch.equal(shard, full[name][region]):
                    differing.append(name)
        return {"differing": differing}

    mesh = None

    def with_mesh(rank):
        nonlocal mesh
        mesh = mesh_of_ranks(dp=degree)["dp"]
        return work(rank)

    assert run_on_ranks(degree, with_mesh) == [{"differing": []}] * degree


def test_random_weights_depend_only_on_seed_and_name(blocks):
    """More layers, other widths elsewhere, another head: a parameter of the same name and shape
    does not change."""
    small = open_source(scratch_config(), head="lm", tokenizer=None, seed=7)
    large = open_source(
        scratch_config(num_hidden_layers=3, vocab_size=200), head="value", tokenizer=None, seed=7
    )
    other_seed = open_source(scratch_config(), head="lm", tokenizer=None, seed=8)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(small.read(name), large.read(name))
    assert not torch.equal(small.read(name), other_seed.read(name))
    assert not torch.equal(small.read(name), small.read("model.layers.0.mlp.up_proj.weight"))


def test_blocks_of_one_parameter_differ(monkeypatch):
    monkeypatch.setattr(model_source, "BLOCK", 64)
    rows = open_source(scratch_config(), head="lm", tokenizer=None, seed=7).read(
        "model.layers.0.mlp.up_proj.weight"
    )
    assert len(rows.unique()) > 0.99 * rows.numel()


@pytest.mark.parametrize("family", [*FAMILIES, "modernbert-decoder"])
def test_random_weights_have_the_distribution_of_their_family(family):
    """By transformers' own initialisation: scaled outputs, offsets of norms, a padding row of
    zeros, cut-off tails."""
    config = tiny_config(family)
    torch.manual_seed(1)
    expected = {
        n: p.detach() for n, p in AutoModelForCausalLM.from_config(config).named_parameters()
    }
    fields = {key: value for key, value in config.to_diff_dict().items() if key != "dtype"}
    lm = open_source({"model_type": family, **fields}, head="lm", tokenizer=None, seed=1).load(CPU)
    actual = {n: p.detach() for n, p in lm.named_parameters()}
    assert actual.keys() == expected.keys()
    for name, parameter in expected.items():
        spread, drawn = parameter.std(), actual[name].std()
        if spread == 0:
            assert torch.equal(actual[name], parameter), name
        elif parameter.numel() > 500:
            assert drawn == pytest.approx(float(spread), rel=0.15), name
            assert torch.equal((actual[name] == 0).all(-1), (parameter == 0).all(-1)), name


def test_a_family_without_initialisation_by_parts_is_refused():
    with pytest.raises(ModelError, match=r"cannot be drawn part by part, first .*A_log") as raised:
        open_source(
            {"model_type": "mamba", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1},
            head="lm",
            tokenizer=None,
            seed=1,
        )
    assert "save_pretrained" in raised.value.hint


# -- unusual and invalid folders -------------------------------------------------------------------


def edit_weights(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    save_file(edit(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def test_tied_weights_may_be_stored_under_the_name_of_the_head(tmp_path):
    folder = write_model("gpt2", tmp_path)
    edit_weights(
        tmp_path,
        lambda t: {
            "lm_head.weight" if "wte" in name else name: tensor for name, tensor in t.items()
        },
    )
    lm = open_source(folder, head="lm", tokenizer=None, seed=1).load(CPU)
    assert lm.lm_head.weight is lm.transformer.wte.weight
    assert lm.lm_head.weight.any()


def test_different_stored_weights_are_not_tied(tmp_path):
    folder = write_model("gpt2", tmp_path)
    edit_weights(tmp_path, lambda t: t | {"lm_head.weight": torch.randn(97, 32)})
    lm = open_source(folder, head="lm", tokenizer=None, seed=1).load(CPU)
    assert not torch.equal(lm.lm_head.weight, lm.transformer.wte.weight)
    assert not lm.config.tie_word_embeddings


def test_names_of_a_stored_base_model_have_no_prefix(tmp_path):
    tiny_model("llama").base_model.save_pretrained(tmp_path)
    source = open_source(str(tmp_path), head="value", tokenizer=None, seed=1)
    expected = tiny_model("llama").base_model.state_dict()
    assert all(
        torch.equal(source.read(f"model.{name}"), tensor) for name, tensor in expected.items()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_of_a_source_is_that_of_its_files(dtype, tmp_path):
    folder = write_model("llama", tmp_path, dtype)
    source = open_source(folder, head="lm", tokenizer=None, seed=1)
    assert source.dtype == dtype
    assert {p.dtype for p in source.load(CPU).parameters()} == {torch.float32}
    assert {p.dtype for p in source.load(CPU, torch.bfloat16).parameters()} == {torch.bfloat16}


def test_a_shape_that_contradicts_config_json_is_refused(tmp_path):
    folder = write_model("llama", tmp_path)
    edit_weights(tmp_path, lambda t: t | {"model.norm.weight": torch.zeros(31)})
    with pytest.raises(
        ModelError,
        match=r"model.norm.weight has shape \[31\] in the files, "
        r"but \[32\] according to config.json",
    ):
        open_source(folder, head="lm", tokenizer=None, seed=1)


def test_experts_of_a_wrong_width_are_refused(tmp_path):
    folder = write_model("mixtral", tmp_path)
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    edit_weights(tmp_path, lambda t: t | {name: torch.zeros(23, 32)})
    source = open_source(folder, head="lm", tokenizer=None, seed=1)
    with pytest.raises(
        ModelError, match=r"cannot be loaded: model.layers.0.mlp.experts.gate_up_proj"
    ):
        source.load(CPU)


def test_quantized_weights_are_refused(tmp_path):
    import json

    folder = write_model("llama", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(ModelError, match="are quantized"):
        open_source(folder, head="lm", tokenizer=None, seed=1)
