"""How full the micro-batches of a recipe's training steps are, with the rows that it would use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli.api.config import stable_seed
from rlcli.api.data import Preview
from rlcli.api.partition import ffd_allocate
from rlcli.inspect.findings import Finding, quantile, share
from rlcli.ops.minibatches import assign_minibatches
from rlcli.recipe.lengths import keeps_groups
from rlcli.runtime.data_order import DataOrder
from rlcli.topology.placement import shares
from rlcli.units import grouped

if TYPE_CHECKING:
    from rlcli.inspect.row_checks import RowLimits
    from rlcli.inspect.rows import OpenDataset
    from rlcli.recipe.schema import Recipe

MOST_STEPS = 20
MOST_ROWS = 4000
"""Maximum rows that are packed, to answer soon."""


@dataclass(frozen=True)
class Packing:
    """Training steps, packed as a run would pack them."""

    rows: Sequence[int]
    """Tokens of each row, over all its sequences."""
    micro_batches: Sequence[int]
    """Number of micro-batches of each rank in each step."""
    capacity: int
    """Maximum tokens of a micro-batch."""

    @property
    def fill(self) -> float:
        """The share of the micro-batches' capacity that is used."""
        return sum(self.rows) / (sum(self.micro_batches) * self.capacity)

    def figures(self) -> dict[str, float]:
        """Tokens per row, micro-batches of a rank per step, and their fill."""
        ordered = sorted(self.rows)
        at = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
        tokens = {f"row_tokens_{name}": quantile(ordered, q) for name, q in at.items()}
        return {
            **tokens,
            "micro_batches_min": min(self.micro_batches),
            "micro_batches_max": max(self.micro_batches),
            "fill": round(self.fill, 4),
        }


def pack_steps(
    steps: Sequence[Sequence[Sequence[int]]], capacity: int, ranks: int, minibatches: int, cut: bool
) -> Packing:
    """`steps`: for each row of each step the tokens of its sequences. `cut`:
    sequences of a row may be separated."""
    counts = []
    for number, rows in enumerate(steps):
        for mine in shares(list(enumerate(rows)), [sum(row) for row in rows], ranks):
            assigned = assign_minibatches(
                [index for index, _ in mine], minibatches, stable_seed("packing", number)
            )
            counts.append(
                sum(
                    _micro_batches([mine[i][1] for i in minibatch], capacity, cut)
                    for minibatch in assigned
                )
            )
    return Packing([sum(row) for rows in steps for row in rows], counts, capacity)


def _micro_batches(rows: Sequence[Sequence[int]], capacity: int, cut: bool) -> int:
    items = [length for row in rows for length in row] if cut else [sum(row) for row in rows]
    # a rank without rows idles along with the others
    return len(ffd_allocate(items, capacity)) if items else 1


def check_packing(
    recipe: Recipe, opened: OpenDataset, rows: Sequence[Preview], limits: RowLimits
) -> Finding | None:
    """The first steps of a run, packed, with responses of full length; None if nothing is trained
    on the dataset, or if a row does not fit at all, which is reported with the lengths."""
    call = next(
        (candidate for candidate in recipe.graph.values() if candidate.call == "train_step"), None
    )
    if call is None or opened.name != recipe.train.dataset:
        return None
    from rlcli.topology import plan_topology

    topology = plan_topology(recipe)
    cut = not keeps_groups(call)

    def with_responses(row: Sequence[int]) -> list[int]:
        lengths = [length + limits.new_tokens for length in row]
        return [length for length in lengths for _ in range(topology.batch.responses_per_prompt)]

    steps = [[with_responses(row) for row in step] for step in _steps(recipe, opened, rows)]
    size = max if cut else sum
    if max(size(row) for step in steps for row in step) > limits.microbatch:
        return None
    packing = pack_steps(
        steps,
        limits.microbatch,
        topology.placement(call.model).mesh.dp,
        topology.batch.minibatches.get(call.model, 1),
        cut,
    )
    figures = packing.figures()
    return Finding(
        level="ok",
        about=f"{opened.name} packing",
        says=_words(figures, len(steps), limits),
        figures=figures,
    )


def _words(figures: Mapping[str, float], steps: int, limits: RowLimits) -> str:
    least, most = (int(figures[f"micro_batches_{end}"]) for end in ("min", "max"))
    number = f"{most}" if least == most else f"{least} to {most}"
    tokens = ", ".join(
        f"{name} {grouped(int(figures[f'row_tokens_{name}']))}"
        for name in ("min", "median", "p95", "max")
    )
    kind = f"rows with responses of {limits.new_tokens} tokens" if limits.new_tokens else "rows"
    full = share(round(figures["fill"] * 10_000), 10_000)
    first = f"first {steps} steps" if steps > 1 else "first step"
    batches = f"{number} micro-batch{'' if number == '1' else 'es'} of a rank per step"
    return f"{kind} have {tokens} tokens; {batches}, {full} full, in the {first}"


def _steps(
    recipe: Recipe, opened: OpenDataset, looked_at: Sequence[Preview]
) -> list[list[list[int]]]:
    """For each row of the first steps the tokens of its sequences."""
    train = recipe.train
    length_of = _lengths(opened, looked_at)
    order, size = DataOrder(len(opened), recipe.seed, train.shuffle), train.prompts_per_step
    total = train.steps or -(-len(opened) * (train.epochs or 1) // train.prompts_per_step)
    count = max(1, min(MOST_STEPS, total, MOST_ROWS // train.prompts_per_step))
    rows = [order.at(position)[1] for position in range(count * size)]
    return [
        [length_of(row) for row in rows[step * size : (step + 1) * size]] for step in range(count)
    ]


def _lengths(opened: OpenDataset, looked_at: Sequence[Preview]) -> Callable[[int], list[int]]:
    """The tokens of a row's sequences; for rows that are costly to reach,
    those of an inspected row."""
    if opened.survey is None:
        lengths = [[len(ids) for ids in row.sequences] for row in looked_at]
        return lambda row: lengths[row % len(lengths)]
    return lambda row: [len(ids) for ids in opened.preview(row).sequences]
