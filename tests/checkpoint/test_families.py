"""The built-in families: their contract, their specifics, links, layouts,
and how families are found."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from rlcli.api.family import HFFamily, register_hf_family
from rlcli.api.parameters import Layout, Link
from rlcli.checkpoint.families import family_of
from rlcli.errors import ModelError, ProjectError
from rlcli.testing.family import FamilyContract

from . import family_models

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gpt2",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
)


@pytest.mark.parametrize("name", FAMILIES)
class TestContract(FamilyContract):
    """Every built-in family fulfils the contract."""

    @pytest.fixture(autouse=True)
    def named(self, name):
        self.name = name


@pytest.mark.parametrize(
    ("old_rope", "new_rope"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        ({}, {"rope_theta": 1e4, "rope_type": "default"}),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e6},
            {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
                "rope_theta": 5e5,
            },
            {
                "rope_theta": 5e5,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
    ],
)
def test_rope_settings_of_older_files_are_understood(old_rope, new_rope):
    old = {"model_type": "llama", **family_models.GQA, **old_rope}
    new = {"model_type": "llama", **family_models.GQA, "rope_parameters": new_rope}
    family = family_of("llama")
    assert family.config_from_hf(old).rope == family.config_from_hf(new).rope
    assert family.config_to_hf(family.config_from_hf(old))["rope_parameters"] == new_rope


def test_gelu_in_first_gemma_releases_means_its_tanh_approximation():
    hf = {"model_type": "gemma", **family_models.GQA, "hidden_act": "gelu"}
    assert family_of("gemma").config_from_hf(hf).activation == "gelu_tanh"


@pytest.mark.parametrize(
    ("family", "key"), [("llama", "hidden_act"), ("gpt2", "activation_function")]
)
def test_a_model_with_relu_has_a_family(family, key):
    """Without one, its checkpoints could not be converted."""
    hf = {"model_type": family, **family_models.GQA, key: "relu"}
    config = family_of(family).config_from_hf(hf)
    assert (config.activation, family_of(family).config_to_hf(config)[key]) == ("relu", "relu")


def test_mistral_has_its_default_window_unless_it_is_null():
    family, hf = family_of("mistral"), {"model_type": "mistral", **family_models.GQA}
    assert family.config_from_hf(hf).windows == (4096,) * 3
    assert family.config_from_hf({**hf, "sliding_window": None}).windows == ()


@pytest.mark.parametrize("name", ["qwen2", "qwen2_moe"])
def test_windows_of_a_file_without_layer_types_are_those_of_transformers(name):
    settings = {**family_models.GQA, "use_sliding_window": True, "sliding_window": 5,
                "num_hidden_layers": 5, "max_window_layers": 3}  # fmt: skip
    kinds = AutoConfig.for_model(name, **settings).layer_types
    config = family_of(name).config_from_hf({"model_type": name, **settings})
    assert config.windows == tuple(5 if kind == "sliding_attention" else None for kind in kinds)


def test_wrong_shapes_are_refused():
    family = family_of("gpt2")
    config = family.config_from_hf({"model_type": "gpt2", **family_models.GPT2})
    with pytest.raises(ModelError, match="96 rows"):
        family.sd_from_hf({"transformer.h.0.attn.c_attn.weight": torch.zeros(32, 95)}, config)


@given(
    rows=st.lists(st.integers(1, 4), max_size=3),
    experts=st.integers(0, 3),
    transposed=st.booleans(),
    width=st.integers(1, 5),
    vector=st.booleans(),
    groups=st.integers(1, 3),
)
def test_joining_undoes_separating_for_tensors_and_shapes(
    rows, experts, transposed, width, vector, groups
):
    import numpy as np

    count = (len(rows) or 1) * (experts or 1)
    rows = tuple(groups * size for size in rows)
    link = Link(
        "theirs", tuple(f"ours{i}" for i in range(count)), rows, experts, transposed, groups
    )
    height = sum(rows) or 3
    matrix = (height,) if vector else (width, height) if transposed else (height, width)
    shape = (experts, *matrix) if experts else matrix
    joined = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    separated = link.separate(joined)
    assert {name: part.shape for name, part in separated.items()} == link.separate_shapes(shape)
    assert link.join_shape({name: part.shape for name, part in separated.items()}) == shape
    assert (link.join(separated) == joined).all()
    assert (
        torch.from_numpy(joined.astype("int32"))
        == link.join(link.separate(torch.from_numpy(joined.astype("int32"))))
    ).all()


def test_grouped_rows_are_separated():
    link = Link("qkv", ("q", "k"), rows=(4, 2), groups=2)
    parts = link.separate(torch.arange(6)[:, None])
    assert {name: part.flatten().tolist() for name, part in parts.items()} == {
        "q": [0, 1, 3, 4],
        "k": [2, 5],
    }


def test_a_layout_lists_parameters_that_are_stored_together():
    layout = Layout([Link("qkv", ("q", "k", "v"), rows=(2, 1, 1)), Link("o", ("o",))])
    assert layout.together("k") == ("q", "k", "v")
    assert layout.together("o") == ("o",)


def test_families_of_a_project_are_found_and_checked(tmp_path, monkeypatch):
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
    with pytest.raises(ProjectError, match="must be in"):
        family_of("misnamed")
    (tmp_path / "families" / "llama.py").write_text("")
    with pytest.raises(ProjectError, match="two files are the model family 'llama'"):
        family_of("llama")


@pytest.mark.parametrize(
    "name",
    ["nobody_wrote_this", "../evil", "_decoder", "__init__", "os", "", None, 7, "a.b", "x" * 200],
)
def test_a_model_type_is_never_a_path(name):
    assert family_of(name) is None


def test_a_duplicate_family_name_is_refused():
    class Other(HFFamily):
        pass

    assert family_of("llama") is not None
    with pytest.raises(ProjectError, match="two model families"):
        register_hf_family("llama", Other)
