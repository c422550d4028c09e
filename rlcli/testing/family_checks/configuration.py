"""Checks of how a family describes a model: its configuration, and the resulting logits."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rlcli.api.family import HFFamily, ModelConfig
from rlcli.errors import ModelError
from rlcli.testing.contract import Contract, Violation, place_of
from rlcli.testing.family_checks.examples import Example, configured, with_models
from rlcli.testing.family_checks.forward import Weights, logits
from rlcli.testing.family_checks.place import place_in

TOLERANCE = 2e-4
SENSELESS: tuple[tuple[str, Any], ...] = (
    ("num_hidden_layers", 0),
    ("num_hidden_layers", 2**62),
    ("hidden_size", "big"),
    ("num_attention_heads", True),
    ("hidden_act", "no_such_activation"),
)
"""Values that no model has."""


class ConfigurationChecks(Contract):
    """The configuration in transformers' form and in ours."""

    def test_registers(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """is found by its model_type; prefix fits the names"""
        config = family.config_from_hf(examples[0].hf)
        if config.family != self.name:
            raise Violation(
                f"the family of its configuration is {config.family!r}, not {self.name!r}",
                "family=hf['model_type'], so that config.json is the same after a round trip",
                place_in(family, "config_from_hf"),
            )
        inside = [*family.embedding_param_names(config), *family.tblock_param_names(config, 0)]
        strange = [name for name in inside if not name.startswith(family.prefix)]
        if strange:
            raise Violation(
                f"{strange[0]} does not begin with {family.prefix!r}",
                "prefix is what the names of the model without its head begin with",
                place_of(type(family)),
            )

    def test_configuration_there_and_back(
        self, family: HFFamily, examples: Sequence[Example]
    ) -> None:
        """the configuration survives a round trip"""
        for example, config in configured(family, examples):
            again = family.config_from_hf(family.config_to_hf(config))
            _demand_alike(
                _fields(config),
                _fields(again),
                f"{example.about}: after a round trip",
                "write in config_to_hf what config_from_hf reads",
                place_in(family, "config_to_hf"),
            )

    def test_configuration_in_transformers(
        self, family: HFFamily, examples: Sequence[Example]
    ) -> None:
        """transformers reads the same configuration from ours"""
        for example in with_models(examples):
            kind = type(example.model.config)
            written = family.config_to_hf(family.config_from_hf(example.hf))
            as_given, as_written = (
                kind.from_dict({**hf, "model_type": kind.model_type})
                for hf in (example.hf, written)
            )
            _demand_alike(
                as_given.to_dict(),
                as_written.to_dict(),
                f"{example.about}: as it is written",
                "keep keys without an rlcli field in `others`; write all further keys as "
                "transformers does",
                place_in(family, "config_to_hf"),
            )

    def test_defaults(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """keys that config.json lacks get transformers' defaults"""
        example = with_models(examples)[0]
        minimal = {"model_type": self.name, "architectures": example.hf["architectures"]}
        usual = type(example.model.config)().to_dict() | minimal
        bare, spelled_out = (_fields(family.config_from_hf(hf)) for hf in (minimal, usual))
        _demand_alike(
            spelled_out,
            bare,
            "of a config.json without it",
            "use transformers' default for a missing key: see `defaults`",
            place_in(family, "config_from_hf"),
        )

    def test_logits(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """our configuration and weights give the same logits"""
        tokens = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(1))
        for example, config in configured(family, with_models(examples)):
            ours = family.sd_from_hf(example.tensors, config)
            with torch.no_grad():
                expected = example.model(input_ids=tokens).logits
                gap = _gap(config, ours, tokens, expected)
                if gap <= TOLERANCE:
                    continue
                cure = _cure(config, ours, tokens, expected)
            finding = f"logits differ by {gap:.2g}" if math.isfinite(gap) else "they give no logits"
            hint = f"; with {cure} they would be equal" if cure else ""
            raise Violation(
                f"{example.about}: {finding}{hint}",
                "a field of ModelConfig does not say what config.json says, or a link takes a "
                "wrong parameter",
                place_in(family, "config_from_hf"),
            )

    def test_senseless_configurations(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """a nonsensical configuration is refused"""
        hf = examples[0].hf
        kind = type(getattr(examples[0].model, "config", None))
        names = {"hidden_act": "activation_function", **getattr(kind, "attribute_map", {})}
        for key, value in SENSELESS:
            key = key if key in hf else names.get(key, key)
            if key not in hf:
                continue
            fault = _fault_of_refusal(family, {**hf, key: value}, key)
            if fault:
                raise Violation(
                    f"{key}: {value!r} {fault}",
                    "raise ModelError with the key and its value: read sizes with size_in, and "
                    "look activations up in ACTIVATIONS",
                    place_in(family, "config_from_hf"),
                )


def _fault_of_refusal(family: HFFamily, hf: Mapping[str, Any], key: str) -> str:
    """What is wrong with how a value is refused; empty if nothing is."""
    try:
        family.config_from_hf(hf)
    except ModelError as error:
        is_named = str(hf[key]) in str(error) or key in str(error)
        return "" if is_named else f"is refused by {error.what!r:.80}"
    except Exception as error:
        return f"ends in {type(error).__name__}: {error}"
    return "is accepted as if it made sense"


def _fields(config: ModelConfig) -> dict[str, Any]:
    """Its fields; what is in `others` has none of ours."""
    return {**dataclasses.asdict(config), "others": None}


def _demand_alike(
    expected: Mapping[str, Any], actual: Mapping[str, Any], occasion: str, cause: str, where: str
) -> None:
    """Raise Violation that names the first key which differs."""
    for key in {**expected, **actual}:
        values = [entries.get(key, "missing") for entries in (actual, expected)]
        if values[0] != values[1]:
            raise Violation(
                f"{occasion}, {key} is {values[0]!r:.60}, not {values[1]!r:.60}", cause, where
            )


def _gap(config: ModelConfig, ours: Weights, tokens: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of logits, relative where they are large;
    infinite if there is no result."""
    try:
        actual = logits(config, ours, tokens)
        gap = float(((actual - expected).abs() / expected.abs().clamp(min=1)).max())
    except (KeyError, RuntimeError, IndexError, AttributeError):
        return math.inf
    return gap if actual.shape == expected.shape and math.isfinite(gap) else math.inf


def _cure(config: ModelConfig, ours: Weights, tokens: torch.Tensor, expected: torch.Tensor) -> str:
    """A single change that would make the logits right, in words; empty if there is none."""
    for words, other_config, other_weights in _changes(config, ours):
        if _gap(other_config, other_weights, tokens, expected) <= TOLERANCE:
            return words
    return ""


CHANGES: dict[str, tuple[Any, ...]] = {
    "activation": ("silu", "gelu", "gelu_tanh"),
    "norm_offset": (0.0, 1.0),
    "norm_eps": (1e-5, 1e-6),
    "experts.normalized": (True, False),
    "rope.base": (1e4, 5e5, 1e6),
}
"""Field → values that could be the right ones; so could others of a bool."""
EXCHANGES = (
    ("gate", "up"),
    ("q", "k"),
    ("k", "v"),
    ("q_norm", "k_norm"),
    ("attention.norm", "mlp.norm"),
)


def _changes(config: ModelConfig, ours: Weights) -> Iterator[tuple[str, ModelConfig, Weights]]:
    """Single changes, each in words: most faults are one of them."""
    flags = [name for name, value in vars(config).items() if isinstance(value, bool)]
    windows = tuple((size,) * config.layers for size in (5, 6, 7))
    of_sizes = {"embedding_scale": (1.0, config.hidden**0.5), "windows": ((), *windows)}
    for field, values in {**dict.fromkeys(flags, (True, False)), **CHANGES, **of_sizes}.items():
        for value in values:
            yield f"{field} = {value!r}", _changed(config, field, value), ours
    for first, second in EXCHANGES:
        yield f"{first} and {second} exchanged", config, _exchanged(ours, first, second)


def _changed(described: Any, field: str, value: Any) -> Any:
    """A dataclass with another value of a field, or of `field.field`, if there is such a part."""
    name, _, inner = field.partition(".")
    current = getattr(described, name)
    if inner:
        value = None if current is None else _changed(current, inner, value)
    return dataclasses.replace(described, **{name: value})


def _exchanged(ours: Weights, first: str, second: str) -> Weights:
    """Weights of which those of two parts have each other's names."""
    others = {f".{first}.": f".{second}.", f".{second}.": f".{first}."}
    parts = re.compile("|".join(map(re.escape, others)))
    return {
        parts.sub(lambda match: others[match[0]], name): tensor for name, tensor in ours.items()
    }
