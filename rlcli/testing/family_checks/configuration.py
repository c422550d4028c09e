"""Checks of how a family describes a model: its configuration, and the resulting logits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rlcli.api.family import HFFamily, ModelConfig
from rlcli.errors import ModelError
from rlcli.testing.contract import Contract, Violation, place_of
from rlcli.testing.family_checks.examples import Example, with_models
from rlcli.testing.family_checks.forward import logits
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
        for example in examples:
            config = family.config_from_hf(example.hf)
            again = family.config_from_hf(family.config_to_hf(config))
            mismatch = _first_difference(
                dataclasses.asdict(config), dataclasses.asdict(again), leave_out=("others",)
            )
            if mismatch:
                raise Violation(
                    f"{example.about}: {mismatch} after a round trip",
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
            mismatch = _first_difference(as_given.to_dict(), as_written.to_dict())
            if mismatch:
                raise Violation(
                    f"{example.about}: {mismatch} in what is written",
                    (
                        "keep keys without an rlcli field in `others`; write all further keys as "
                        "transformers does"
                    ),
                    place_in(family, "config_to_hf"),
                )

    def test_defaults(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """keys that config.json lacks get transformers' defaults"""
        example = with_models(examples)[0]
        minimal = {"model_type": self.name, "architectures": example.hf["architectures"]}
        usual = type(example.model.config)().to_dict() | minimal
        bare, spelled_out = (
            dataclasses.asdict(family.config_from_hf(hf)) for hf in (minimal, usual)
        )
        mismatch = _first_difference(spelled_out, bare, leave_out=("others",))
        if mismatch:
            raise Violation(
                f"of a config.json without it, {mismatch}",
                "use transformers' default for a missing key: see `defaults`",
                place_in(family, "config_from_hf"),
            )

    def test_configuration_is_whole(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """our fields alone make a model of the same shapes"""
        for example in with_models(examples):
            model: Any = example.model
            bare = family.config_to_hf(
                dataclasses.replace(family.config_from_hf(example.hf), others={})
            )
            kind = type(model.config)
            settings = {k: v for k, v in bare.items() if k not in ("model_type", "architectures")}
            settings["pad_token_id"] = None  # transformers' may be outside of a small vocabulary
            with torch.device("meta"):
                model_of_fields = type(model)(
                    kind(**settings, **({"num_labels": 1} if "value" in example.about else {}))
                )
            shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
            mismatch = _first_difference(
                shapes, {name: tuple(p.shape) for name, p in model_of_fields.named_parameters()}
            )
            if mismatch:
                raise Violation(
                    f"{example.about}: {mismatch} in a model made of our fields",
                    "config_to_hf must write every size, from rlcli's fields",
                    place_in(family, "config_to_hf"),
                )

    def test_logits(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """our configuration and weights give the same logits"""
        tokens = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(1))
        for example in with_models(examples):
            config = family.config_from_hf(example.hf)
            ours = family.sd_from_hf(example.tensors, config)
            with torch.no_grad():
                expected = example.model(input_ids=tokens).logits
                gap = _gap(config, ours, tokens, expected)
                if gap <= TOLERANCE:
                    continue
                cure = _cure(config, ours, tokens, expected)
            fault = f"logits differ by {gap:.2g}" if math.isfinite(gap) else "they give no logits"
            raise Violation(
                f"{example.about}: {fault}"
                + (f"; with {cure} they would be equal" if cure else ""),
                (
                    "a field of ModelConfig does not say what config.json says, or a link "
                    "takes a wrong parameter"
                ),
                place_in(family, "config_from_hf"),
            )

    def test_senseless_configurations(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """a nonsensical configuration is refused"""
        hf = examples[0].hf
        names: Mapping[str, str] = getattr(
            type(getattr(examples[0].model, "config", None)), "attribute_map", {}
        )
        names = {"hidden_act": "activation_function", **names}
        for key, value in SENSELESS:
            key = key if key in hf else names.get(key, key)
            if key not in hf:
                continue
            try:
                family.config_from_hf({**hf, key: value})
            except ModelError as error:
                if str(value) in str(error) or key in str(error):
                    continue
                raise Violation(
                    f"{key}: {value!r} is refused by {error.what!r:.80}",
                    "name the key and its value in the ModelError",
                    place_in(family, "config_from_hf"),
                ) from error
            except Exception as error:
                raise Violation(
                    f"{key}: {value!r} ends in {type(error).__name__}: {error}",
                    (
                        "raise ModelError for a model that the family cannot be; "
                        "size_in does so for sizes"
                    ),
                    place_in(family, "config_from_hf"),
                ) from error
            raise Violation(
                f"{key}: {value!r} is accepted as if it made sense",
                "read sizes with size_in, and look activations up in ACTIVATIONS",
                place_in(family, "config_from_hf"),
            )


def _first_difference(
    expected: Mapping[str, Any], actual: Mapping[str, Any], leave_out: Sequence[str] = ()
) -> str:
    """`key is A, not B` for the first key that differs; empty if none does."""
    for key in [*expected, *(key for key in actual if key not in expected)]:
        if key not in leave_out and expected.get(key) != actual.get(key):
            return (
                f"{key} is {actual.get(key, 'missing')!r:.60}, not "
                f"{expected.get(key, 'missing')!r:.60}"
            )
    return ""


def _gap(
    config: ModelConfig, ours: dict[str, torch.Tensor], tokens: torch.Tensor, expected: torch.Tensor
) -> float:
    """The largest difference of logits, relative where they are large;
    infinite if there is no result."""
    try:
        actual = logits(config, ours, tokens)
    except (KeyError, RuntimeError, IndexError, AttributeError):
        return float("inf")
    if actual.shape != expected.shape:
        return float("inf")
    gap = ((actual - expected).abs() / expected.abs().clamp(min=1)).max()
    return float(gap) if bool(torch.isfinite(gap)) else float("inf")


def _cure(
    config: ModelConfig, ours: dict[str, torch.Tensor], tokens: torch.Tensor, expected: torch.Tensor
) -> str:
    """A single change that would make the logits right, in words; empty if there is none."""
    for words, other_config, other_weights in _changes(config, ours):
        if _gap(other_config, other_weights, tokens, expected) <= TOLERANCE:
            return words
    return ""


def _changes(
    config: ModelConfig, ours: dict[str, torch.Tensor]
) -> Iterator[tuple[str, ModelConfig, dict[str, torch.Tensor]]]:
    """Single changes, each in words: most faults are one of them."""
    fields: dict[str, list[Any]] = {
        "activation": ["silu", "gelu", "gelu_tanh"],
        "norm_offset": [0.0, 1.0],
        "norm_eps": [1e-5, 1e-6],
        "embedding_scale": [1.0, config.hidden**0.5],
        "tied": [True, False],
        "qk_norm": [True, False],
        "gated": [True, False],
        "layer_norm": [True, False],
        "scaled_by_head": [True, False],
        "scaled_by_layer": [True, False],
        "windows": [(), *(((size,) * config.layers) for size in (5, 6, 7))],
    }
    for field, values in fields.items():
        for value in values:
            yield f"{field} = {value!r}", dataclasses.replace(config, **{field: value}), ours
    if config.experts is not None:
        for normalized in (True, False):
            experts = dataclasses.replace(config.experts, normalized=normalized)
            yield (
                f"experts.normalized = {normalized}",
                dataclasses.replace(config, experts=experts),
                ours,
            )
    if config.rope is not None:
        for base in (1e4, 5e5, 1e6):
            rope = dataclasses.replace(config.rope, base=base)
            yield f"rope.base = {base:g}", dataclasses.replace(config, rope=rope), ours
    for first, second in (
        ("gate", "up"),
        ("q", "k"),
        ("k", "v"),
        ("q_norm", "k_norm"),
        ("attention.norm", "mlp.norm"),
    ):
        yield f"{first} and {second} exchanged", config, _exchanged(ours, first, second)


def _exchanged(
    ours: Mapping[str, torch.Tensor], first: str, second: str
) -> dict[str, torch.Tensor]:
    names = {first: second, second: first}
    changed = {}
    for name, tensor in ours.items():
        swap = next((piece for piece in names if f".{piece}." in name), None)
        changed[name if swap is None else name.replace(f".{swap}.", f".{names[swap]}.")] = tensor
    return changed
