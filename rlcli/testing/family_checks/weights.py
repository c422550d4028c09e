"""Checks of a family's parameters: names, shapes, and conversion in both directions."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlcli.api.family import HFFamily, ModelConfig
from rlcli.errors import ModelError
from rlcli.testing.contract import Contract, Violation
from rlcli.testing.family_checks.examples import Example, with_models
from rlcli.testing.family_checks.place import place_in

Weights = Mapping[str, torch.Tensor]


class WeightChecks(Contract):
    """Weights under transformers' names and ours."""

    def test_weights_there_and_back(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """weights to our names and back are the same bits"""
        for example in examples:
            config = family.config_from_hf(example.hf)
            given = {name: tensor.to(torch.bfloat16) for name, tensor in example.tensors.items()}
            kept = {name: tensor.clone() for name, tensor in given.items()}
            ours = family.sd_from_hf(given, config)
            _demand_same(family.sd_to_hf(ours, config), kept, f"{example.about}: there and back", family)
            _demand_same(given, kept, f"{example.about}: the weights that were given", family)
            numbers = sum(tensor.numel() for tensor in ours.values())
            expected = sum(tensor.numel() for tensor in kept.values())
            if numbers != expected:
                raise Violation(
                    f"{example.about}: {expected} numbers become {numbers}",
                    "every link says which of ours its parameter holds, each once",
                    place_in(family, "block_links"),
                )

    def test_module_names(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """a module's names give the same parameters as files"""
        for example in with_models(examples):
            config = family.config_from_hf(example.hf)
            module = {name: p.detach() for name, p in example.model.named_parameters()}
            ours = family.sd_from_hf(module, config, "module")
            of_file = family.sd_from_hf(example.tensors, config)
            _demand_same(ours, of_file, f"{example.about}: read from a module", family)
            _demand_same(family.sd_to_hf(ours, config, "module"), module, f"{example.about}: as a module's", family)

    def test_subsets(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """any subset converts as it does in the whole"""
        for example in examples:
            config = family.config_from_hf(example.hf)
            whole = family.sd_from_hf(example.tensors, config)
            for names in _subsets(sorted(example.tensors)):
                part = family.sd_from_hf({name: example.tensors[name] for name in names}, config)
                about = f"{example.about}: a subset of {len(names)} parameters"
                _demand_same(part, {name: whole[name] for name in part if name in whole}, about, family)
                back = family.sd_to_hf(part, config)
                _demand_same(back, {name: example.tensors[name] for name in names}, f"{about}, there and back", family)

    def test_torn_subsets(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """parts of what belongs together are not written"""
        for example in examples:
            config = family.config_from_hf(example.hf)
            layout, whole = family.layout(config, "module"), family.sd_from_hf(example.tensors, config)
            torn = next((name for name in whole if len(layout.together(name)) > 1), None)
            if torn is None:
                continue
            try:
                family.sd_to_hf({torn: whole[torn]}, config, "module")
            except ModelError:
                continue
            raise Violation(
                f"{example.about}: {torn} alone is written, without {', '.join(layout.together(torn)[1:3])}",
                "leave that to Layout, which refuses what it cannot join",
                place_in(family, "sd_to_hf"),
            )

    def test_names_are_all(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """embedding, blocks and head name each parameter once"""
        for example in examples:
            config = family.config_from_hf(example.hf)
            blocks = [family.tblock_param_names(config, index) for index in range(config.layers)]
            named = [
                *family.embedding_param_names(config),
                *(name for block in blocks for name in block),
                *family.head_param_names(config),
            ]
            wrong = {
                "names twice": sorted({name for name in named if named.count(name) > 1}),
                "names, though there is none,": sorted(set(named) - set(example.tensors)),
                "does not name": sorted(set(example.tensors) - set(named)),
            }
            for what, names in wrong.items():
                if names:
                    raise Violation(
                        f"{example.about}: it {what} {names[0]}" + (f" and {len(names) - 1} more" * (len(names) > 1)),
                        "list every parameter in embedding_links, block_links or head_links, as config.json has it",
                        place_in(family, "block_links"),
                    )
            for index, block in enumerate(blocks):
                strange = [name for name in block if not re.search(rf"\.{index}\.", name)]
                if strange:
                    raise Violation(
                        f"{example.about}: {strange[0]} is said to be part of block {index}",
                        "blocks are counted from 0; what stands outside them is embedding or head",
                        place_in(family, "block_links"),
                    )

    def test_our_names_and_shapes(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """our names and shapes are those of rlcli.api.family"""
        for example in examples:
            config = family.config_from_hf(example.hf)
            for name, tensor in family.sd_from_hf(example.tensors, config).items():
                shape = _shape_of(name, config)
                if shape is None:
                    found = f"{name} is not one of our names"
                elif shape != tuple(tensor.shape):
                    found = f"{name} has the shape {tuple(tensor.shape)}, not {shape}"
                else:
                    continue
                raise Violation(
                    f"{example.about}: {found}",
                    "see rlcli/api/family.py for names and shapes; a Link can transpose, and split rows and experts",
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
            "a parameter of an unknown name is passed over",
            "leave that to Layout: weights that are silently lost are found when it is too late",
            place_in(family, "sd_from_hf"),
        )


def _demand_same(found: Weights, expected: Weights, about: str, family: HFFamily) -> None:
    cause = "a link only moves numbers: see rows, experts and transposed of Link"
    for name in sorted({*found, *expected}):
        if name not in found:
            raise Violation(f"{about}, {name} is lost", cause, place_in(family, "block_links"))
        if name not in expected:
            raise Violation(f"{about}, there is {name} too", cause, place_in(family, "block_links"))
        one, other = found[name], expected[name]
        if one.dtype != other.dtype or one.shape != other.shape:
            what = f"{name} is {tuple(one.shape)} of {one.dtype}, it was {tuple(other.shape)} of {other.dtype}"
            raise Violation(f"{about}, {what}", cause, place_in(family, "block_links"))
        if not torch.equal(one, other):
            count = int((one != other).sum())
            what = f"{count} of {one.numel()} numbers of {name} differ"
            raise Violation(f"{about}, {what}", cause, place_in(family, "block_links"))


def _subsets(names: list[str]) -> list[list[str]]:
    """Single parameters, and a few fixed random subsets."""
    rng = random.Random(0)
    drawn = [sorted(rng.sample(names, rng.randint(2, len(names) - 1))) for _ in range(4)]
    return [[], *([name] for name in rng.sample(names, min(6, len(names)))), *drawn]


def _shape_of(name: str, config: ModelConfig) -> tuple[int, ...] | None:
    """The shape that one of our parameters must have; None for a name that is not ours."""
    hidden, dim = config.hidden, config.head_dim
    queries, keys = config.heads * dim, config.kv_heads * dim
    experts = config.experts
    norm: dict[str, tuple[int, ...]] = {"weight": (hidden,), "bias": (hidden,)}
    table: list[tuple[str, dict[str, tuple[int, ...]]]] = [
        (r"embedding\.tokens", {"weight": (config.vocabulary, hidden)}),
        (r"embedding\.positions", {"weight": (config.positions, hidden)}),
        (r"layers\.\d+\.(attention|mlp)\.norm|head\.norm", norm),
        (r"layers\.\d+\.attention\.q", _linear(queries, hidden)),
        (r"layers\.\d+\.attention\.[kv]", _linear(keys, hidden)),
        (r"layers\.\d+\.attention\.[qk]_norm", {"weight": (dim,)}),
        (r"layers\.\d+\.attention\.output", _linear(hidden, queries)),
        (r"layers\.\d+\.mlp\.(gate|up)", _linear(config.mlp, hidden)),
        (r"layers\.\d+\.mlp\.down", _linear(hidden, config.mlp)),
        (r"head\.output", {"weight": (config.vocabulary, hidden)}),
        (r"head\.value", _linear(1, hidden)),
    ]
    if experts is not None:
        table += [
            (r"layers\.\d+\.mlp\.router", {"weight": (experts.count, hidden)}),
            (r"layers\.\d+\.mlp\.experts\.\d+\.(gate|up)", _linear(experts.width, hidden)),
            (r"layers\.\d+\.mlp\.experts\.\d+\.down", _linear(hidden, experts.width)),
        ]
    stem, _, kind = name.rpartition(".")
    shapes: dict[str, Any] = next((shapes for pattern, shapes in table if re.fullmatch(pattern, stem)), {})
    return shapes.get(kind)


def _linear(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {"weight": (rows, columns), "bias": (rows,)}
