"""Which part of a model a rank of Megatron-Core holds, and in which of its parameters.

Megatron fuses queries, keys and values group by group, and gate and up; tensor-parallel ranks
divide matrices by rows or by columns, and pipeline stages divide the blocks. Each parameter of a
rank is one `Share`: a link to our neutral names, with the rows that this rank has, and the axis
along which ranks divide our parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlcli.api.family import Experts, HFFamily, ModelConfig
from rlcli.api.parameters import Link

Region = tuple[slice, ...]


@dataclass(frozen=True)
class Place:
    """The place of a rank among those that together hold a model."""

    tp: int
    tp_size: int
    pp: int
    pp_size: int
    ep: int = 0
    ep_size: int = 1
    chunks: int = 1
    """Groups of consecutive blocks on each rank (virtual stages): chunk c of all stages comes
    before chunk c + 1 of any."""

    def is_first(self, chunk: int) -> bool:
        return self.pp == 0 and chunk == 0

    def is_last(self, chunk: int) -> bool:
        return self.pp == self.pp_size - 1 and chunk == self.chunks - 1

    def blocks(self, layers: int, chunk: int) -> range:
        """The numbers of the blocks in a chunk."""
        each = layers // (self.pp_size * self.chunks)
        first = (chunk * self.pp_size + self.pp) * each
        return range(first, first + each)


@dataclass(frozen=True)
class Share:
    """A parameter of a rank."""

    link: Link
    """Megatron's name for it, and our names for what it holds."""
    axis: int | None = None
    """The axis of our parameters along which tensor-parallel ranks divide them; None:
    each rank has all of it."""
    is_copy: bool = False
    """Whether another stage has the same parameter and owns it: the embedding,
    if it is also the head."""
    experts: range | None = None
    """If it is a stack of experts: their numbers. The link then names the parts of the first."""


def rows_per_rank(vocabulary: int, tp_size: int) -> int:
    """Rows of embedding and head on each rank;
    those of the last may reach beyond the vocabulary."""
    return -(-vocabulary // tp_size)


def shares(config: ModelConfig, position: Place, chunk: int) -> Iterator[Share]:
    """All parameters of a rank's chunk, in the order of the forward pass."""
    if position.is_first(chunk):
        yield Share(Link("embedding.word_embeddings.weight", ("embedding.tokens.weight",)), axis=0)
    for number, block in enumerate(position.blocks(config.layers, chunk)):
        yield from _block(config, f"decoder.layers.{number}", block, position)
    if position.is_last(chunk):
        yield Share(Link("decoder.final_layernorm.weight", ("head.norm.weight",)))
        yield from _head(config, has_embedding=position.is_first(chunk))


def _head(config: ModelConfig, has_embedding: bool) -> Iterator[Share]:
    if config.value_head:
        yield Share(Link("output_layer.weight", ("head.value.weight",)))
        yield Share(Link("output_layer.bias", ("head.value.bias",)))
    elif not config.tied:
        yield Share(Link("output_layer.weight", ("head.output.weight",)), axis=0)
    elif not has_embedding:
        yield Share(Link("output_layer.weight", ("embedding.tokens.weight",)), axis=0, is_copy=True)


def _block(config: ModelConfig, theirs: str, number: int, position: Place) -> Iterator[Share]:
    ours = f"layers.{number}"
    yield Share(Link(f"{theirs}.input_layernorm.weight", (f"{ours}.attention.norm.weight",)))
    yield from _attention(config, f"{theirs}.self_attention", f"{ours}.attention", position.tp_size)
    yield Share(Link(f"{theirs}.pre_mlp_layernorm.weight", (f"{ours}.mlp.norm.weight",)))
    if config.experts is not None and number in config.experts.layers:
        yield from _experts(config.experts, f"{theirs}.mlp", f"{ours}.mlp", position)
    else:
        yield from _mlp(config, f"{theirs}.mlp", f"{ours}.mlp", position.tp_size)


def _attention(config: ModelConfig, theirs: str, ours: str, tp_size: int) -> Iterator[Share]:
    head, groups = config.head_dim, config.kv_heads // tp_size
    rows = (config.heads // tp_size * head, groups * head, groups * head)
    for kind in _kinds(config.qkv_bias):
        names = tuple(f"{ours}.{letter}.{kind}" for letter in "qkv")
        yield Share(Link(f"{theirs}.linear_qkv.{kind}", names, rows=rows, groups=groups), axis=0)
    if config.qk_norm:
        yield Share(Link(f"{theirs}.q_layernorm.weight", (f"{ours}.q_norm.weight",)))
        yield Share(Link(f"{theirs}.k_layernorm.weight", (f"{ours}.k_norm.weight",)))
    yield from _output(f"{theirs}.linear_proj", f"{ours}.output", config.output_bias)


def _mlp(config: ModelConfig, theirs: str, ours: str, tp_size: int) -> Iterator[Share]:
    rows = config.mlp // tp_size
    for kind in _kinds(config.mlp_bias):
        names = tuple(f"{ours}.{matrix}.{kind}" for matrix in ("gate", "up"))
        yield Share(Link(f"{theirs}.linear_fc1.{kind}", names, rows=(rows, rows)), axis=0)
    yield from _output(f"{theirs}.linear_fc2", f"{ours}.down", config.mlp_bias)


def _experts(experts: Experts, theirs: str, ours: str, position: Place) -> Iterator[Share]:
    each = experts.count // position.ep_size
    numbers = range(position.ep * each, (position.ep + 1) * each)
    yield Share(Link(f"{theirs}.router.weight", (f"{ours}.router.weight",)))
    first, stack = f"{ours}.experts.0", f"{theirs}.experts"
    fused = (f"{first}.gate.weight", f"{first}.up.weight")
    yield Share(Link(f"{stack}.gate_up_proj", fused), axis=0, experts=numbers)
    yield Share(Link(f"{stack}.down_proj", (f"{first}.down.weight",)), axis=1, experts=numbers)
    if experts.shared:
        rows = experts.shared // position.tp_size
        yield from _shared_expert(rows, f"{theirs}.shared", f"{ours}.shared_expert")


def _shared_expert(rows: int, theirs: str, ours: str) -> Iterator[Share]:
    yield Share(Link(f"{theirs}_router.weight", (f"{ours}.router.weight",)))
    names = tuple(f"{ours}.{matrix}.weight" for matrix in ("gate", "up"))
    yield Share(Link(f"{theirs}_expert.linear_fc1.weight", names, rows=(rows, rows)), axis=0)
    yield from _output(f"{theirs}_expert.linear_fc2", f"{ours}.down", bias=False)


def _output(theirs: str, ours: str, bias: bool) -> Iterator[Share]:
    yield Share(Link(f"{theirs}.weight", (f"{ours}.weight",)), axis=1)
    if bias:
        yield Share(Link(f"{theirs}.bias", (f"{ours}.bias",)))


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


@dataclass(frozen=True)
class HeldPart:
    """The part of one of transformers' parameters that a rank holds."""

    name: str
    """Its name in transformers."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    region: Region


Held = Sequence[tuple[Share, nn.Parameter]]
"""The parameters of a rank."""


class StageLayout:
    """The parameters of one rank and the parts of transformers' parameters that they hold."""

    def __init__(
        self,
        config: ModelConfig,
        family: HFFamily,
        shapes: Mapping[str, Sequence[int]],
        position: Place,
    ):
        """`shapes` are those of transformers' parameters, tied ones once."""
        self.position = position
        self._shares = [
            {share.link.theirs: share for share in shares(config, position, chunk)}
            for chunk in range(position.chunks)
        ]
        self._names = {
            ours: link.theirs
            for link in family.layout(config, "module").links
            for ours in link.ours
        }
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}

    def parameters_of(self, chunks: Sequence[nn.Module]) -> Held:
        """The parameters of the rank's chunks, each with its share."""
        return [
            (of_chunk[name], parameter)
            for of_chunk, chunk in zip(self._shares, chunks, strict=True)
            for name, parameter in chunk.named_parameters()
        ]

    def parts(self, share: Share) -> list[HeldPart]:
        """The parts that a parameter holds."""
        names = [self._names[ours] for ours in share.link.ours]
        if share.experts is None:
            return [self._part(name, share.axis) for name in names]
        return [self._part_of_experts(share, name, number) for number, name in enumerate(names)]

    def separate(self, share: Share, tensor: torch.Tensor) -> list[tuple[HeldPart, torch.Tensor]]:
        """The parts that a tensor in the form of a parameter holds, as views where possible,
        without rows beyond the vocabulary."""
        views: Any = share.link.separate(tensor).values() if share.experts is None else None
        if views is None:
            views = tensor.chunk(len(share.link.ours), dim=1)
        parts = zip(self.parts(share), views, strict=True)
        return [(part, view[tuple(map(slice, _sizes(part.region)))]) for part, view in parts]

    def join(self, share: Share, tensors: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Fill a tensor in the form of a parameter from its parts, in their order; rows beyond the
        vocabulary become zero."""
        if share.experts is not None:
            into.copy_(torch.cat(list(tensors), dim=1))
            return
        joined = share.link.join(dict(zip(share.link.ours, tensors, strict=True)))
        into[: joined.shape[0]].copy_(joined)
        into[joined.shape[0] :].zero_()

    def _part_of_experts(self, share: Share, name: str, number: int) -> HeldPart:
        """The part of a stack [E, rows, columns] of experts, which may have several matrices one
        above the other."""
        assert share.experts is not None
        assert share.axis is not None
        shape = self._shapes[name]
        rows = shape[1] // len(share.link.ours)
        above = number * rows
        region = [
            slice(share.experts.start, share.experts.stop),
            slice(above, above + rows),
            slice(0, shape[2]),
        ]
        extent = region[1 + share.axis]
        each = (extent.stop - extent.start) // self.position.tp_size
        first = extent.start + self.position.tp * each
        region[1 + share.axis] = slice(first, first + each)
        return HeldPart(name, shape, tuple(region))

    def _part(self, name: str, axis: int | None) -> HeldPart:
        shape = self._shapes[name]
        region = [slice(0, size) for size in shape]
        if axis is not None:
            each = rows_per_rank(shape[axis], self.position.tp_size)
            first = min(shape[axis], self.position.tp * each)
            region[axis] = slice(first, min(shape[axis], first + each))
        return HeldPart(name, shape, tuple(region))


def mark_shared(parameters: Held) -> None:
    """Mark for Megatron the parameters that ranks divide: gradients of the others count once in the
    norm."""
    for share, parameter in parameters:
        if share.axis is not None and not hasattr(parameter, "tensor_model_parallel"):
            marks: Any = {
                "tensor_model_parallel": True,
                "partition_dim": share.axis,
                "partition_stride": 1,
            }
            for mark, value in marks.items():
                setattr(parameter, mark, value)


def _sizes(region: Region) -> list[int]:
    return [extent.stop - extent.start for extent in region]
