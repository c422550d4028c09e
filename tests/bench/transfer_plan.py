"""How long a rank takes to plan its part of a weight copy between very many ranks, and how evenly
the ranks of the source share the sending.

    python tests/bench/transfer_plan.py [--ranks 1024] [--senders 32]

As many ranks hold the source as the target, and none holds both. Each row is one layout of the
source and one of the target, of a dense model with 32 layers or of one with 48 layers of 128
experts. The seconds are the processor's, for reading what all ranks say that they hold and for
planning, on the slower of a rank of the source and one of the target. The share is the largest of
what the first `--senders` ranks send over their fair shares: ranks that hold the same block should
send as much of it. The exit code is 1 if a figure is above its limit.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlcli.api.weight_blocks import WeightBlock
from rlcli.topology.weight_plan import (
    Bucket,
    Layouts,
    Parameters,
    RankLayout,
    decode_layouts,
    encode_layouts,
    plan_slices,
)

SECONDS, SHARE = 1.0, 1.1
"""Limits."""
BUCKET = 2**26
HIDDEN, INNER, KEYS, VOCABULARY = 4096, 14336, 1024, 128256
EXPERTS, EXPERT = 128, 1536


class Kind(NamedTuple):
    """What parameters have in common."""

    shape: tuple[int, ...]
    axis: int | None = None
    """Along which tensor parallelism cuts them."""


def model(layers: int, experts: int = 0) -> dict[str, Kind]:
    """The parameters of a model by name."""
    layer = dict(_layer(experts))
    return {
        "embed_tokens": Kind((VOCABULARY, HIDDEN), 0),
        **{f"layers.{k}.{name}": kind for k in range(layers) for name, kind in layer.items()},
        "norm": Kind((HIDDEN,)),
        "lm_head": Kind((VOCABULARY, HIDDEN), 0),
    }


def _layer(experts: int) -> Iterator[tuple[str, Kind]]:
    for name, rows in (("q", HIDDEN), ("k", KEYS), ("v", KEYS)):
        yield f"self_attn.{name}_proj", Kind((rows, HIDDEN), 0)
    yield "self_attn.o_proj", Kind((HIDDEN, HIDDEN), 1)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield name, Kind((HIDDEN,))
    inner = EXPERT if experts else INNER
    for prefix in [f"experts.{expert}." for expert in range(experts)] or [""]:
        yield f"mlp.{prefix}gate_proj", Kind((inner, HIDDEN), 0)
        yield f"mlp.{prefix}up_proj", Kind((inner, HIDDEN), 0)
        yield f"mlp.{prefix}down_proj", Kind((HIDDEN, inner), 1)


@dataclass(frozen=True)
class Cutting:
    """How a role's ranks divide a model: along each parameter's axis among `tp` ranks, then its
    rows among `rows` ranks; the ranks that are left hold the same."""

    tp: int = 1
    rows: int = 1

    def layout(self, parameters: Mapping[str, Kind], position: int) -> RankLayout:
        """Of the rank at a position."""
        blocks = {kind: self._block(kind, position) for kind in dict.fromkeys(parameters.values())}
        kinds = [kind for kind, block in blocks.items() if block.numbers]
        numbers = {kind: number for number, kind in enumerate(kinds)}
        cut_of = {name: numbers[kind] for name, kind in parameters.items() if kind in numbers}
        return RankLayout(Parameters(cut_of), tuple((blocks[kind],) for kind in kinds))

    def copies(self, kind: Kind, ranks: int) -> float:
        """How many of the ranks hold the same element."""
        return ranks / self.rows / (1 if kind.axis is None else self.tp)

    def elements(self, kind: Kind, position: int) -> int:
        return self._block(kind, position).numbers

    def _block(self, kind: Kind, position: int) -> WeightBlock:
        block = WeightBlock.whole("", kind.shape)
        if kind.axis is not None:
            block = _portion(block, kind.axis, self.tp, position % self.tp)
        return _portion(block, 0, self.rows, position // self.tp % self.rows)


def _portion(block: WeightBlock, axis: int, count: int, position: int) -> WeightBlock:
    size = -(-block.sizes[axis] // count)
    start, end = (min(block.sizes[axis], size * edge) for edge in (position, position + 1))
    return block.along(axis, start, end)


@dataclass(frozen=True)
class Case:
    title: str
    source: Cutting
    target: Cutting
    layers: int = 32
    experts: int = 0


def cases(ranks: int) -> list[Case]:
    replicated, in_eight, in_rows = Cutting(), Cutting(tp=8), Cutting(rows=ranks)
    mixture = {"layers": 48, "experts": EXPERTS}
    return [
        Case("rows of each rank → whole", in_rows, replicated),
        Case("rows of each rank → tp 8", in_rows, in_eight),
        Case("tp 8, rows of the rest → tp 4", Cutting(8, ranks // 8), Cutting(tp=4)),
        Case("rows of each rank → the same", in_rows, in_rows),
        Case("rows of 16, replicated → tp 8", Cutting(rows=16), in_eight),
        Case("tp 8 → whole", in_eight, replicated),
        Case("whole → whole", replicated, replicated),
        Case("experts: rows of each rank → tp 8", in_rows, in_eight, **mixture),
        Case("experts: tp 8 → whole", in_eight, replicated, **mixture),
    ]


@dataclass(frozen=True)
class Figures:
    seconds: float
    share: float
    """Of the busiest sender, over the mean."""

    @property
    def are_above(self) -> bool:
        return self.seconds > SECONDS or self.share > SHARE


def measure(case: Case, ranks: int, senders: int) -> Figures:
    parameters = model(case.layers, case.experts)
    texts = list(_encoded(case, parameters, ranks))
    seconds = 0.0
    for rank in (0, ranks + ranks // 2):
        began = time.process_time()
        layouts = _read(texts)
        plan_slices(*layouts, BUCKET, rank)
        seconds = max(seconds, time.process_time() - began)
    shares = (
        _elements_sent(plan_slices(*layouts, BUCKET, rank), rank)
        / _fair_share(case, parameters, ranks, rank)
        for rank in range(senders)
    )
    return Figures(seconds, max(shares))


def _encoded(
    case: Case, parameters: Mapping[str, Kind], ranks: int
) -> Iterator[tuple[bytes, bytes]]:
    """What each rank says that it holds. Ranks that hold the same are asked once."""
    nothing = RankLayout.of([])
    for side, cutting in enumerate((case.source, case.target)):
        different = []
        for position in range(cutting.tp * cutting.rows):
            both = [nothing, nothing]
            both[side] = cutting.layout(parameters, position)
            different.append(encode_layouts(both))
        yield from (different[position % len(different)] for position in range(ranks))


def _read(texts: Sequence[tuple[bytes, bytes]]) -> list[Layouts]:
    parameters, cuts = zip(*texts, strict=True)
    return decode_layouts(range(len(texts)), parameters, cuts)


def _fair_share(case: Case, parameters: Mapping[str, Kind], ranks: int, position: int) -> float:
    """Elements that a rank sends if all that hold an element send it equally often."""
    return sum(
        number
        * case.source.elements(kind, position)
        * case.target.copies(kind, ranks)
        / case.source.copies(kind, ranks)
        for kind, number in Counter(parameters.values()).items()
    )


def _elements_sent(plan: Sequence[Bucket], rank: int) -> int:
    routes = (routes for bucket in plan for routes in bucket.routes.values())
    slices = (moving for of_parameter in routes for moving in of_parameter.slices)
    return sum(moving.block.numbers for moving in slices if moving.source == rank)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024, help="of the source; as many follow")
    parser.add_argument("--senders", type=int, default=32)
    options = parser.parse_args(arguments)
    has_failed = False
    print(f"| source → target | seconds, at most {SECONDS} | share of a sender, at most {SHARE} |")
    print("| --- | --- | --- |")
    for case in cases(options.ranks):
        figures = measure(case, options.ranks, min(options.senders, options.ranks))
        print(f"| {case.title} | {figures.seconds:.2f} | {figures.share:.3f} |", flush=True)
        has_failed |= figures.are_above
    return int(has_failed)


if __name__ == "__main__":
    raise SystemExit(main())
