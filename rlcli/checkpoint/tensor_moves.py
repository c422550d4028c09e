"""Which tensors are made from which: from any form of Hugging Face's names, through ours,
to the desired form.

A move is the smallest group of tensors that can be converted on its own; its size bounds the memory
of a conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlcli.api.family import Form, HFFamily, ModelConfig
from rlcli.api.parameters import Layout, Link
from rlcli.checkpoint.tensor_dtypes import FLOATS, Raw
from rlcli.checkpoint.tensor_files import StoredTensor, TensorSpec
from rlcli.errors import ModelError

ROWS_PER_TOKEN = ("embedding.tokens.weight", "head.output.weight")
"""Our parameters with a row for each token of the vocabulary."""


@dataclass(frozen=True)
class Move:
    """Tensors that become others, by links or by a rule. With neither it is a copy."""

    sources: tuple[StoredTensor, ...]
    outputs: tuple[TensorSpec, ...]
    source_links: tuple[Link, ...] = ()
    output_links: tuple[Link, ...] = ()
    rule: Callable[[dict[str, tuple[str, Raw]]], dict[str, Raw]] | None = None
    """Name → (type, bits) of all sources → bits of all outputs."""

    @property
    def is_copy(self) -> bool:
        """The bytes stay as they are, possibly only the first part of them."""
        return not self.output_links and self.rule is None

    def make(self) -> dict[str, Raw]:
        """Name → bits of every output, in the sources' type.
        Holds the sources and the outputs in memory."""
        if self.rule is not None:
            return self.rule({s.spec.name: (s.spec.dtype, s.read()) for s in self.sources})
        ours: dict[str, Raw] = {}
        for link, source in zip(self.source_links, self.sources, strict=True):
            ours |= link.separate(source.read())
        return {link.theirs: link.join(ours) for link in self.output_links}


def plan_moves(
    tensors: Mapping[str, StoredTensor], family: HFFamily, config: ModelConfig, form: Form
) -> list[Move]:
    """How `tensors` become those of the model in another form. Tensors that the family does not
    know stay as they are. Raises ModelError if parts are missing or duplicated."""
    links = _links_of(tensors, family, config)
    holders: dict[str, str] = {}
    for name, link in links.items():
        for parameter in link.ours:
            if parameter in holders:
                raise ModelError(f"{holders[parameter]} and {name} hold the same parameters")
            holders[parameter] = name
    target = family.layout(config, form)
    targets = [
        link for link in target.links if any(parameter in holders for parameter in link.ours)
    ]
    for link in targets:
        target.refuse_torn(link, holders)
    moves = [_move(group, tensors, links) for group in _groups(targets, holders)]
    return moves + [copy_of(tensor, name) for name, tensor in tensors.items() if name not in links]


def strangers(
    tensors: Mapping[str, StoredTensor], family: HFFamily, config: ModelConfig
) -> list[str]:
    """Names that the family does not know."""
    links = _links_of(tensors, family, config)
    return [name for name in tensors if name not in links]


def in_type(move: Move, dtype: str, stays: Callable[[str], object]) -> Move:
    """The move with floating-point outputs of another type, except those whose name `stays`."""
    return replace(move, outputs=tuple(_in_type(spec, dtype, stays) for spec in move.outputs))


def _in_type(spec: TensorSpec, dtype: str, stays: Callable[[str], object]) -> TensorSpec:
    is_cast = spec.dtype in FLOATS and not stays(spec.name)
    return replace(spec, dtype=dtype) if is_cast else spec


def stays_wide(hf: Mapping[str, Any], dtype: str) -> Callable[[str], object]:
    """Whether a tensor keeps its type in a model of type `dtype`, by its name: those that the class
    of transformers which `hf`, a config.json, names keeps in float32."""
    import torch
    from transformers import PreTrainedModel

    from rlcli.api.model_class import model_class
    from rlcli.api.model_export import kept_wide

    kind = model_class(hf.get("architectures")) or PreTrainedModel
    return kept_wide(kind, getattr(torch, dtype))


def with_vocabulary(
    moves: Sequence[Move], family: HFFamily, config: ModelConfig, form: Form
) -> list[Move]:
    """The moves, cut to the rows of the configuration's vocabulary: a backend may have padded them
    to divide evenly.

    Raises ModelError if there are fewer.
    """
    layout = family.layout(config, form)
    per_token = {layout.of_ours[name].theirs for name in ROWS_PER_TOKEN if name in layout.of_ours}
    return [
        _cut(move, config.vocabulary) if move.outputs[0].name in per_token else move
        for move in moves
    ]


def rows_of_vocabulary(
    moves: Sequence[Move], family: HFFamily, config: ModelConfig, form: Form
) -> int | None:
    """Rows of the embedding as it is stored."""
    name = family.layout(config, form).of_ours[ROWS_PER_TOKEN[0]].theirs
    return next(
        (spec.shape[0] for move in moves for spec in move.outputs if spec.name == name), None
    )


def _links_of(
    tensors: Mapping[str, StoredTensor], family: HFFamily, config: ModelConfig
) -> dict[str, Link]:
    """The link of each known name; it may lack the family's prefix, as in a model that was saved
    without its head."""
    layouts: tuple[Layout, Layout] = (
        family.layout(config, "file"),
        family.layout(config, "module"),
    )
    links = {}
    for name in tensors:
        names = (name, f"{family.prefix}{name}")
        matches = [
            layout.of_theirs[key] for key in names for layout in layouts if key in layout.of_theirs
        ]
        if matches:
            links[name] = matches[0]
    return links


def _groups(
    targets: Sequence[Link], holders: Mapping[str, str]
) -> list[tuple[list[str], list[Link]]]:
    """Sources and the outputs that need them, so that no two groups share a source;
    in the order of the outputs."""
    group_of: dict[str, int] = {}
    groups: dict[int, tuple[list[str], list[Link]]] = {}
    for number, link in enumerate(targets):
        sources = list(dict.fromkeys(holders[parameter] for parameter in link.ours))
        names, outputs = [name for name in sources if name not in group_of], [link]
        joined = sorted({group_of[name] for name in sources if name in group_of})
        for group in joined:
            earlier_names, earlier_outputs = groups.pop(group)
            names, outputs = [*earlier_names, *names], [*earlier_outputs, *outputs]
        first = joined[0] if joined else number
        groups[first] = names, outputs
        group_of |= dict.fromkeys(names, first)
    return [groups[number] for number in sorted(groups)]


def _move(
    group: tuple[list[str], list[Link]],
    tensors: Mapping[str, StoredTensor],
    links: Mapping[str, Link],
) -> Move:
    names, outputs = group
    sources = tuple(tensors[name] for name in names)
    first = outputs[0]
    if len(names) == len(outputs) == 1 and replace(links[names[0]], theirs=first.theirs) == first:
        return copy_of(sources[0], first.theirs)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        shapes |= links[name].separate_shapes(tensors[name].spec.shape)
    dtype = only_type(sources, first.theirs)
    specs = tuple(TensorSpec(link.theirs, dtype, link.join_shape(shapes)) for link in outputs)
    return Move(sources, specs, tuple(links[name] for name in names), tuple(outputs))


def only_type(sources: Sequence[StoredTensor], name: str) -> str:
    """The type of what is made of the sources. Raises ModelError if they have several."""
    dtypes = sorted({source.spec.dtype for source in sources})
    if len(dtypes) > 1:
        raise ModelError(f"{name} would be of several types: {', '.join(dtypes)}")
    return dtypes[0]


def copy_of(tensor: StoredTensor, name: str) -> Move:
    """The tensor as it is, under a name."""
    return Move((tensor,), (replace(tensor.spec, name=name),))


def _cut(move: Move, rows: int) -> Move:
    (spec,) = move.outputs
    if spec.shape[0] < rows:
        raise ModelError(
            f"{spec.name} has {spec.shape[0]} rows, but the vocabulary of config.json has {rows}",
            hint="the file of a rank may be missing, or config.json may belong to another model",
        )
    return replace(move, outputs=(replace(spec, shape=(rows, *spec.shape[1:])),))
