"""The built-in families keep their contract; what it cannot know of them; links, layouts; how families are found."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcli.api.family import HFFamily, register_hf_family
from rlcli.api.parameters import Layout, Link
from rlcli.checkpoint.families import family_of
from rlcli.errors import ModelError, ProjectError
from rlcli.testing.family import FamilyContract

from . import family_models

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt2", "mixtral", "qwen3_moe")


@pytest.mark.parametrize("name", FAMILIES)
class TestContract(FamilyContract):
    """Every built-in family keeps the contract."""

    @pytest.fixture(autouse=True)
    def named(self, name):
        self.name = name


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


def test_a_window_that_is_not_spoken_of_is_the_usual_one():
    family, hf = family_of("mistral"), {"model_type": "mistral", **family_models.GQA}
    assert family.config_from_hf(hf).windows == (4096,) * 3
    assert family.config_from_hf({**hf, "sliding_window": None}).windows == ()


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
def test_a_link_and_its_shapes_are_their_own_inverse(rows, experts, transposed, width, vector, groups):
    import numpy as np

    count = (len(rows) or 1) * (experts or 1)
    rows = tuple(groups * size for size in rows)
    link = Link("theirs", tuple(f"ours{i}" for i in range(count)), rows, experts, transposed, groups)
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


def test_matrices_that_alternate():
    link = Link("qkv", ("q", "k"), rows=(4, 2), groups=2)
    parts = link.separate(torch.arange(6)[:, None])
    assert {name: part.flatten().tolist() for name, part in parts.items()} == {"q": [0, 1, 3, 4], "k": [2, 5]}


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
