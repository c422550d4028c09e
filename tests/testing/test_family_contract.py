"""The contract of families: a correct family passes, and each fault is reported."""

import itertools
import re
from unittest.mock import Mock

import pytest
import torch

from rlcli.checkpoint.families import family_of
from rlcli.testing.contract import Violation
from rlcli.testing.family import Example, FamilyContract
from rlcli.testing.family_checks.examples import made_examples
from rlcli.testing.runner import run_checks
from rlcli.testing.subjects import Subject

CORRECT_SOURCE = '''\
"""A decoder like Qwen3."""

from collections.abc import Mapping
from typing import Any

from rlcli.api.family import ModelConfig, register_hf_family
from rlcli.api.parameters import Link
from rlcli.checkpoint.families.qwen3 import Qwen3


@register_hf_family("NAME")
class Tiny(Qwen3):
    """It repeats what may go wrong."""

    architecture = "Qwen3ForCausalLM"

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig:
        return super().config_from_hf(hf)

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        return super().config_to_hf(config)

    def block_links(self, config, index, form):
        yield from super().block_links(config, index, form)
'''
NUMBERS = itertools.count()


@pytest.fixture
def make_family(tmp_path, monkeypatch):
    """The name of a family with some of its text changed, in a project of its own."""
    (tmp_path / "families").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))

    def make(*changes):
        name, text = f"tinyfamily{next(NUMBERS)}", CORRECT_SOURCE
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (tmp_path / "families" / f"{name}.py").write_text(text.replace("NAME", name))
        return name

    return make


class TestCorrectFamily(FamilyContract):
    """No false alarm on a family of a project."""

    @pytest.fixture(autouse=True)
    def set_name(self, make_family):
        self.name = make_family()


FROM = "return super().config_from_hf(hf)"
TO = "return super().config_to_hf(config)"
LINKS = "yield from super().block_links(config, index, form)"
OTHERS = "config = super().config_from_hf(hf); return __import__('dataclasses').replace(config, "
WRONG = {
    "its name": (
        (FROM, f"{OTHERS}family='qwen3')"),
        "test_registers",
        "the family of its configuration is 'qwen3'",
        "model_type",
    ),
    "a prefix": (
        ('"Qwen3ForCausalLM"\n', '"Qwen3ForCausalLM"\n    prefix = "decoder."\n'),
        "test_registers",
        "model.embed_tokens.weight does not begin with 'decoder.'",
        "prefix",
    ),
    "what is not written": (
        (
            TO,
            (
                f"return {{k: v for k, v in {TO[7:]}.items() if k != 'rms_norm_eps'}} | "
                "{'rms_norm_eps': 1e-3}"
            ),
        ),
        "test_configuration_there_and_back",
        "nothing special: after a round trip, norm_eps is 0.001, not 1e-06",
        "config_to_hf",
    ),
    "keys that are lost": (
        (FROM, f"{OTHERS}others={{}})"),
        "test_configuration_in_transformers",
        "max_window_layers is 28, not 1",
        "others",
    ),
    "a default": (
        (FROM, "return super().config_from_hf({'vocab_size': 7, **hf})"),
        "test_defaults",
        "vocabulary is 7, not 151936",
        "defaults",
    ),
    "an activation": (
        (FROM, f"{OTHERS}activation='gelu')"),
        "test_logits",
        "with activation = 'silu' they would be equal",
        "ModelConfig",
    ),
    "a link": (
        (
            LINKS,
            "for link in super().block_links(config, index, form):\n"
            "            names = {'gate': 'up', 'up': 'gate'}\n"
            "            part = link.ours[0].split('.')[-2]\n"
            "            ours = link.ours[0].replace(f'.{part}.', f'.{names.get(part, part)}.')\n"
            "            yield Link(link.theirs, (ours,))",
        ),
        "test_logits",
        "with gate and up exchanged they would be equal",
        "wrong parameter",
    ),
    "anything goes": (
        (FROM, "return super().config_from_hf({**hf, 'hidden_act': 'silu'})"),
        "test_senseless_configurations",
        "hidden_act: 'no_such_activation' is accepted as if it made sense",
        "ACTIVATIONS",
    ),
    "a crash": (
        (FROM, "hf['num_hidden_layers'] / (hf['num_hidden_layers'] != 0); " + FROM),
        "test_senseless_configurations",
        "num_hidden_layers: 0 ends in ZeroDivisionError",
        "ModelError",
    ),
    "a lost parameter": (
        (
            LINKS,
            (
                "yield from (link for link in super().block_links(config, index, form) if "
                "'q_norm' not in link.theirs)"
            ),
        ),
        "test_names_are_all",
        "model.layers.0.self_attn.q_norm.weight is named 0 times",
        "block_links",
    ),
    "a parameter twice": (
        (LINKS, f"{LINKS}; {LINKS}"),
        "test_names_are_all",
        "model.layers.0.input_layernorm.weight is named 2 times",
        "",
    ),
    "another block": (
        (LINKS, LINKS.replace("index, form", "(index + 1) % config.layers, form")),
        "test_names_are_all",
        "model.layers.1.input_layernorm.weight is said to be part of block 0",
        "counted from 0",
    ),
    "a name of nobody's": (
        (
            LINKS,
            "for link in super().block_links(config, index, form):\n"
            "            yield Link(link.theirs, (link.ours[0].replace('output', 'out'),))",
        ),
        "test_our_names_and_shapes",
        "layers.0.attention.out.weight is not one of our names",
        "api/family.py",
    ),
    "a matrix that lies down": (
        (
            LINKS,
            "for link in super().block_links(config, index, form):\n"
            "            yield Link(link.theirs, link.ours, transposed=True)",
        ),
        "test_our_names_and_shapes",
        r"weight has the shape \(64, 32\), not \(32, 64\)",
        "transpose",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_faulty_family_is_reported_with_cause_and_line(make_family, fault):
    change, check, finding, cause = WRONG[fault]
    name = make_family(change)
    contract = FamilyContract()
    contract.name = name
    with pytest.raises(Violation) as caught:
        getattr(contract, check)(family_of(name), made_examples(name))
    violation = caught.value
    assert re.search(finding, violation.finding), violation.finding
    assert cause in violation.cause
    file, _, line = violation.where.rpartition(":")
    assert file.endswith(f"families/{name}.py")
    assert 1 <= int(line) <= 30


@pytest.mark.parametrize(
    ("method", "check", "finding"),
    [
        ("sd_to_hf", "test_weights_there_and_back", "model.embed_tokens.weight differs in"),
        ("sd_from_hf", "test_subsets", "is lost|differs in"),
    ],
)
def test_weights_changed_by_a_conversion_are_reported(make_family, method, check, finding):
    body = f"""def {method}(self, *given):
        converted = super().{method}(*given)
        return {{n: t * 2 if "embed" in n else t for n, t in converted.items()}}"""
    name = make_family(("    def block_links", f"    {body}\n\n    def block_links"))
    with pytest.raises(Violation, match=finding):
        getattr(FamilyContract(), check)(family_of(name), made_examples(name))


def test_a_parameter_that_is_silently_ignored_is_reported(make_family):
    body = "def sd_from_hf(self, given, *more):\n        return {}"
    name = make_family(("    def block_links", f"    {body}\n\n    def block_links"))
    with pytest.raises(Violation, match="an unknown name is ignored"):
        FamilyContract().test_strange_weights(family_of(name), made_examples(name))


class TestUnknownToTransformers(FamilyContract):
    """Its author brings the models; what takes transformers' own is skipped."""

    @pytest.fixture(autouse=True)
    def set_name(self, make_family):
        self.name = make_family(('"Qwen3ForCausalLM"', '"NobodysForCausalLM"'))

    def make_examples(self):
        family = family_of(self.name)
        hf = {
            "model_type": self.name,
            "vocab_size": 7,
            "hidden_size": 8,
            "num_hidden_layers": 2,
            "head_dim": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 12,
        }
        config = family.config_from_hf(hf)
        shapes = {
            "q_proj": (8, 8),
            "k_proj": (4, 8),
            "v_proj": (4, 8),
            "o_proj": (8, 8),
            "q_norm": (4,),
            "k_norm": (4,),
            "gate_proj": (12, 8),
            "up_proj": (12, 8),
            "down_proj": (8, 12),
            "layernorm": (8,),
            "norm": (8,),
            "embed_tokens": (7, 8),
            "lm_head": (7, 8),
        }
        weight_name = re.compile(rf"({'|'.join(shapes)})\.weight$")
        names = [link.theirs for link in family.layout(config).links]
        return [
            Example(
                "small",
                hf,
                {name: torch.randn(shapes[weight_name.search(name)[1]]) for name in names},
            )
        ]


def test_a_family_that_transformers_does_not_have_needs_examples(make_family, tmp_path):
    name = make_family(('"Qwen3ForCausalLM"', '"NobodysForCausalLM"'))
    first, *others = run_checks(
        [Subject("family", name, tmp_path / "families" / f"{name}.py")], Mock()
    )[0].checks
    assert first.words == "there are models to test it on"
    assert "transformers has no NobodysForCausalLM" in first.failure.finding
    assert "`make_examples`" in first.failure.cause
    assert {check.reason for check in others} == {"not tried: there is no model to test it on"}
