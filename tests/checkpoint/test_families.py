import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.api.family import HFFamily, ModelConfig, register_hf_family
from rlcli.api.parameters import Layout, Link
from rlcli.checkpoint.families import family_of
from rlcli.errors import ModelError, ProjectError


def _beside(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


family_models = _beside("family_models")
neutral_forward = _beside("neutral_forward")
VARIANTS = family_models.VARIANTS


@pytest.fixture(scope="module", params=VARIANTS)
def saved(request, tmp_path_factory):
    """(variant, model, config.json, tensors on disk) of every variant."""
    model = family_models.make_model(request.param)
    folder = family_models.save(model, tmp_path_factory.mktemp("model"))
    return request.param, model, json.loads((folder / "config.json").read_text()), family_models.stored(folder)


def _family_and_config(hf) -> tuple[HFFamily, ModelConfig]:
    family = family_of(hf["model_type"])
    assert family is not None
    return family, family.config_from_hf(hf)


def _same(one, other) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_every_family_has_a_tied_and_an_untied_variant():
    kinds = {
        (name, settings.get("tie_word_embeddings", name in ("gemma", "gpt2"))) for name, settings in VARIANTS.values()
    }
    families = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt2", "mixtral", "qwen3_moe")
    assert kinds == {(name, tied) for name in families for tied in (True, False)}


def test_there_and_back_is_the_same_bits(saved):
    _, _, hf, tensors = saved
    family, config = _family_and_config(hf)
    ours = family.sd_from_hf(tensors, config)
    assert _same(family.sd_to_hf(ours, config), tensors)
    assert sum(t.numel() for t in ours.values()) == sum(t.numel() for t in tensors.values())


def test_names_in_a_module_there_and_back(saved):
    _, model, hf, tensors = saved
    family, config = _family_and_config(hf)
    module = {name: p.detach() for name, p in model.named_parameters()}
    ours = family.sd_from_hf(module, config, "module")
    assert _same(ours, family.sd_from_hf(tensors, config))
    assert _same(family.sd_to_hf(ours, config, "module"), module)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_subset_converts_as_in_the_whole(saved, data):
    _, _, hf, tensors = saved
    family, config = _family_and_config(hf)
    whole = family.sd_from_hf(tensors, config)
    chosen = data.draw(st.sets(st.sampled_from(sorted(tensors))))
    part = family.sd_from_hf({name: tensors[name] for name in chosen}, config)
    assert _same(part, {name: whole[name] for name in part})
    assert _same(family.sd_to_hf(part, config), {name: tensors[name] for name in chosen})


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_subset_of_ours_converts_if_nothing_is_torn(saved, data):
    _, _, hf, tensors = saved
    family, config = _family_and_config(hf)
    layout, whole = family.layout(config), family.sd_from_hf(tensors, config)
    chosen = data.draw(st.sets(st.sampled_from(sorted(whole)), min_size=1))
    torn = {name for name in chosen if not chosen.issuperset(layout.together(name))}
    subset = {name: whole[name] for name in chosen}
    if torn:
        with pytest.raises(ModelError, match="needs"):
            family.sd_to_hf(subset, config)
    closed = {part: whole[part] for name in chosen for part in layout.together(name)}
    converted = family.sd_to_hf(closed, config)
    assert _same(converted, {name: tensors[name] for name in converted})


def test_our_configuration_and_parameters_say_all_that_a_forward_pass_needs(saved):
    _, model, hf, tensors = saved
    family, config = _family_and_config(hf)
    tokens = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        found = neutral_forward.logits(config, family.sd_from_hf(tensors, config), tokens)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def test_configuration_there_and_back(saved):
    from transformers import AutoConfig

    _, _, hf, _ = saved
    family, config = _family_and_config(hf)
    again = family.config_to_hf(config)
    kind = type(AutoConfig.for_model(hf["model_type"]))
    assert kind.from_dict(again).to_dict() == kind.from_dict(hf).to_dict()
    assert dataclasses.replace(family.config_from_hf(again), others={}) == dataclasses.replace(config, others={})


def test_a_configuration_without_leftovers_makes_the_same_model(saved):
    """What only our fields say, such as the number of experts, must be enough."""
    from transformers import AutoConfig, AutoModelForCausalLM

    _, model, hf, _ = saved
    family, config = _family_and_config(hf)
    bare = family.config_to_hf(dataclasses.replace(config, others={}))
    bare = {key: value for key, value in bare.items() if key not in ("model_type", "architectures")}
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(hf["model_type"], **bare))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert {name: p.shape for name, p in made.named_parameters()} == shapes


def test_embedding_blocks_and_head_are_all_there_is(saved):
    _, _, hf, tensors = saved
    family, config = _family_and_config(hf)
    blocks = [family.tblock_param_names(config, index) for index in range(config.layers)]
    named = [
        *family.embedding_param_names(config),
        *(name for block in blocks for name in block),
        *family.head_param_names(config),
    ]
    assert sorted(named) == sorted(tensors)
    assert all(f".{index}." in name for index, block in enumerate(blocks) for name in block)


@pytest.mark.parametrize("variant", ["llama", "gemma-tied", "gpt2", "qwen3_moe"])
def test_a_value_head_is_part_of_the_head(variant, tmp_path):
    model = family_models.make_model(variant, head="value")
    folder = family_models.save(model, tmp_path)
    hf, tensors = json.loads((folder / "config.json").read_text()), family_models.stored(folder)
    family, config = _family_and_config(hf)
    ours = family.sd_from_hf(tensors, config)
    assert config.value_head
    assert _same(family.sd_to_hf(ours, config), tensors)
    assert family.config_to_hf(config)["architectures"] == hf["architectures"]
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected, found = model(input_ids=tokens).logits, neutral_forward.logits(config, ours, tokens)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("written", "as_now"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        ({}, {"rope_theta": 1e4, "rope_type": "default"}),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e6},
            {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0},
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 16}, "rope_theta": 5e5},
            {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 16},
        ),
    ],
)  # fmt: skip
def test_rope_as_older_files_write_it(written, as_now):
    old = {"model_type": "llama", **family_models.GQA, **written}
    new = {"model_type": "llama", **family_models.GQA, "rope_parameters": as_now}
    family = family_of("llama")
    assert family.config_from_hf(old).rope == family.config_from_hf(new).rope
    assert family.config_to_hf(family.config_from_hf(old))["rope_parameters"] == as_now


def test_gemma_of_the_first_releases_means_the_approximation():
    hf = {"model_type": "gemma", **family_models.GQA, "hidden_act": "gelu"}
    assert family_of("gemma").config_from_hf(hf).activation == "gelu_tanh"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_act": "relu2"}, "relu2"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        family_of("llama").config_from_hf({"model_type": "llama", **family_models.GQA, **changes})


def test_unknown_names_and_wrong_shapes_are_refused():
    family, config = _family_and_config({"model_type": "gpt2", **family_models.GPT2})
    with pytest.raises(ModelError, match=r"no parameter model\.layers"):
        family.sd_from_hf({"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}, config)
    with pytest.raises(ModelError, match="96 rows"):
        family.sd_from_hf({"transformer.h.0.attn.c_attn.weight": torch.zeros(32, 95)}, config)


@given(
    rows=st.lists(st.integers(1, 4), max_size=3),
    experts=st.integers(0, 3),
    transposed=st.booleans(),
    width=st.integers(1, 5),
    vector=st.booleans(),
)
def test_a_link_and_its_shapes_are_their_own_inverse(rows, experts, transposed, width, vector):
    import numpy as np

    count = (len(rows) or 1) * (experts or 1)
    link = Link("theirs", tuple(f"ours{i}" for i in range(count)), tuple(rows), experts, transposed)
    height = sum(rows) or 3
    matrix = (height,) if vector else (width, height) if transposed else (height, width)
    shape = (experts, *matrix) if experts else matrix
    whole = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    parts = link.separate(whole)
    assert {name: part.shape for name, part in parts.items()} == link.separate_shapes(shape)
    assert link.join_shape({name: part.shape for name, part in parts.items()}) == shape
    assert (link.join(parts) == whole).all()
    assert (
        torch.from_numpy(whole.astype("int32")) == link.join(link.separate(torch.from_numpy(whole.astype("int32"))))
    ).all()


def test_a_layout_tells_what_belongs_together():
    layout = Layout([Link("qkv", ("q", "k", "v"), rows=(2, 1, 1)), Link("o", ("o",))])
    assert layout.together("k") == ("q", "k", "v")
    assert layout.together("o") == ("o",)


def test_a_family_of_a_project(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "tinyllm.py").write_text(
        "from rlcli.api.family import register_hf_family\n"
        "from rlcli.checkpoint.families.llama import Llama\n"
        "@register_hf_family('tinyllm')\n"
        "class TinyLLM(Llama):\n    architecture = 'TinyLLMForCausalLM'\n"
    )
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))
    family = family_of("tinyllm")
    assert family.architecture == "TinyLLMForCausalLM"
    (tmp_path / "families" / "misnamed.py").write_text(
        "from rlcli.api.family import register_hf_family\n"
        "from rlcli.checkpoint.families.llama import Llama\n"
        "register_hf_family('other', type('Other', (Llama,), {'__module__': __name__}))\n"
    )
    with pytest.raises(ProjectError, match="must live"):
        family_of("misnamed")
    (tmp_path / "families" / "llama.py").write_text("")
    with pytest.raises(ProjectError, match="two files are the model family 'llama'"):
        family_of("llama")


@pytest.mark.parametrize(
    "name", ["nobody_wrote_this", "../evil", "_decoder", "__init__", "os", "", None, 7, "a.b", "x" * 200]
)
def test_a_model_type_is_never_a_path(name):
    assert family_of(name) is None


def test_a_name_is_taken_once():
    class Other(HFFamily):
        pass

    assert family_of("llama") is not None
    with pytest.raises(ProjectError, match="two model families"):
        register_hf_family("llama", Other)
