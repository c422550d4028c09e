"""Checks of a family's parameters: names, shapes, and conversion in both directions."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from rlcli.api.family import HFFamily, ModelConfig
from rlcli.errors import ModelError
from rlcli.testing.contract import Contract, Violation
from rlcli.testing.family_checks.examples import Example, configured, with_models
from rlcli.testing.family_checks.place import place_in

Weights = Mapping[str, torch.Tensor]


class WeightChecks(Contract):
    """Weights under transformers' names and ours."""

    def test_weights_there_and_back(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """weights converted to our names and back are the same bits"""
        for example, config in configured(family, examples):
            halved = {name: tensor.to(torch.bfloat16) for name, tensor in example.tensors.items()}
            originals = {name: tensor.clone() for name, tensor in halved.items()}
            ours = family.sd_from_hf(halved, config)
            back = family.sd_to_hf(ours, config)
            _demand_same(back, originals, f"{example.about}: there and back", family)
            _demand_same(halved, originals, f"{example.about}: the weights that were given", family)
            if _numbers(ours) != _numbers(originals):
                raise Violation(
                    f"{example.about}: {_numbers(originals)} numbers become {_numbers(ours)}",
                    "every link must say which of our parameters it holds, each once",
                    place_in(family, "block_links"),
                )

    def test_module_names(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """a module's names give the same parameters as files"""
        for example, config in configured(family, with_models(examples)):
            module = {name: p.detach() for name, p in example.model.named_parameters()}
            ours = family.sd_from_hf(module, config, "module")
            of_file = family.sd_from_hf(example.tensors, config)
            back = family.sd_to_hf(ours, config, "module")
            _demand_same(ours, of_file, f"{example.about}: read from a module", family)
            _demand_same(back, module, f"{example.about}: as a module's", family)

    def test_subsets(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """any subset converts as it does within the whole"""
        for example, config in configured(family, examples):
            converted = family.sd_from_hf(example.tensors, config)
            for names in _subsets(sorted(example.tensors)):
                subset = {name: example.tensors[name] for name in names}
                ours = family.sd_from_hf(subset, config)
                within = {name: converted[name] for name in ours if name in converted}
                about = f"{example.about}: a subset of {len(names)} parameters"
                _demand_same(ours, within, about, family)
                back = family.sd_to_hf(ours, config)
                _demand_same(back, subset, f"{about}, there and back", family)

    def test_torn_subsets(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """an incomplete group of parameters is not written"""
        for example, config in configured(family, examples):
            layout = family.layout(config, "module")
            converted = family.sd_from_hf(example.tensors, config)
            torn = next((name for name in converted if len(layout.together(name)) > 1), None)
            if torn is None:
                continue
            try:
                family.sd_to_hf({torn: converted[torn]}, config, "module")
            except ModelError:
                continue
            raise Violation(
                f"{example.about}: {torn} alone is written, without "
                f"{', '.join(layout.together(torn)[1:3])}",
                "leave that to Layout, which refuses what it cannot join",
                place_in(family, "sd_to_hf"),
            )

    def test_names_are_all(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """embedding, blocks and head name each parameter once"""
        for example, config in configured(family, examples):
            blocks = [family.tblock_param_names(config, index) for index in range(config.layers)]
            named = Counter(chain(*blocks, family.embedding_param_names(config)))
            named.update(family.head_param_names(config))
            for name in sorted({*named, *example.tensors}):
                if named[name] != (name in example.tensors):
                    existing = "" if name in example.tensors else ", and does not exist"
                    raise Violation(
                        f"{example.about}: {name} is named {named[name]} times{existing}",
                        "list every parameter in embedding_links, block_links or head_links, as "
                        "config.json has it",
                        place_in(family, "block_links"),
                    )
            for index, block in enumerate(blocks):
                for name in block:
                    if f".{index}." in name:
                        continue
                    raise Violation(
                        f"{example.about}: {name} is said to be part of block {index}",
                        "blocks are counted from 0; parameters outside them are embedding or head",
                        place_in(family, "block_links"),
                    )

    def test_our_names_and_shapes(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """our names and shapes are those of rlcli.api.family"""
        for example, config in configured(family, examples):
            for name, tensor in family.sd_from_hf(example.tensors, config).items():
                shape = _shape_of(name, config)
                if shape == tuple(tensor.shape):
                    continue
                fault = f"has the shape {tuple(tensor.shape)}, not {shape}"
                raise Violation(
                    f"{example.about}: {name} {fault if shape else 'is not one of our names'}",
                    "see rlcli/api/family.py for names and shapes; a Link can transpose, and "
                    "split rows and experts",
                    place_in(family, "block_links"),
                )

    def test_strange_weights(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """a parameter that is not of this model is refused"""
        config = family.config_from_hf(examples[0].hf)
        try:
            family.sd_from_hf({"nobody.calls.a.parameter.so": torch.zeros(2, 2)}, config)
        except ModelError:
            return
        raise Violation(
            "a parameter with an unknown name is ignored",
            "leave that to Layout: weights that are lost silently are noticed too late",
            place_in(family, "sd_from_hf"),
        )


def _demand_same(actual: Weights, expected: Weights, about: str, family: HFFamily) -> None:
    for name in sorted({*actual, *expected}):
        fault = _fault(actual.get(name), expected.get(name))
        if fault:
            raise Violation(
                f"{about}, {name} {fault}",
                "a link only moves numbers: see rows, experts and transposed of Link",
                place_in(family, "block_links"),
            )


def _fault(tensor: torch.Tensor | None, expected: torch.Tensor | None) -> str:
    """How a parameter differs from what was expected; empty if it does not."""
    if tensor is None or expected is None:
        return "is lost" if tensor is None else "is there too"
    if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
        before = f"{tuple(expected.shape)} and {expected.dtype}"
        return f"is {tuple(tensor.shape)} and {tensor.dtype}, it was {before}"
    count = int((tensor != expected).sum())
    return f"differs in {count} of {tensor.numel()} numbers" if count else ""


def _numbers(weights: Weights) -> int:
    return sum(tensor.numel() for tensor in weights.values())


def _subsets(names: list[str]) -> list[list[str]]:
    """Single parameters, and a few fixed random subsets."""
    rng = random.Random(0)
    drawn = [sorted(rng.sample(names, rng.randint(2, len(names) - 1))) for _ in range(4)]
    return [[], *([name] for name in rng.sample(names, min(6, len(names)))), *drawn]


SHAPES = {
    r"embedding\.tokens": "vocabulary hidden",
    r"embedding\.positions": "positions hidden",
    r"layers\.\d+\.(attention|mlp)\.norm|head\.norm": "hidden",
    r"layers\.\d+\.attention\.q": "queries hidden",
    r"layers\.\d+\.attention\.[kv]": "keys hidden",
    r"layers\.\d+\.attention\.[qk]_norm": "head_dim",
    r"layers\.\d+\.attention\.output": "hidden queries",
    r"layers\.\d+\.mlp\.(gate|up)": "mlp hidden",
    r"layers\.\d+\.mlp\.down": "hidden mlp",
    r"layers\.\d+\.mlp\.router": "count hidden",
    r"layers\.\d+\.mlp\.experts\.\d+\.(gate|up)": "width hidden",
    r"layers\.\d+\.mlp\.experts\.\d+\.down": "hidden width",
    r"layers\.\d+\.mlp\.shared_expert\.(gate|up)": "shared hidden",
    r"layers\.\d+\.mlp\.shared_expert\.down": "hidden shared",
    r"layers\.\d+\.mlp\.shared_expert\.router": "one hidden",
    r"head\.output": "vocabulary hidden",
    r"head\.value": "one hidden",
}
"""Our name of a parameter, without its `.weight` or `.bias` → the sizes of its weight: fields of
`ModelConfig` and `Experts`, and products of them."""


def _shape_of(name: str, config: ModelConfig) -> tuple[int, ...] | None:
    """The shape that one of our parameters must have; None for a name that is not ours."""
    sizes = {
        **vars(config),
        **(vars(config.experts) if config.experts is not None else {}),
        "queries": config.heads * config.head_dim,
        "keys": config.kv_heads * config.head_dim,
        "one": 1,
    }
    stem, _, kind = name.rpartition(".")
    names = next((names for pattern, names in SHAPES.items() if re.fullmatch(pattern, stem)), "")
    # a model without experts has no numbers in theirs
    shape = tuple(sizes.get(size, 0) for size in names.split())
    return (shape[:1] if kind == "bias" else shape) or None
