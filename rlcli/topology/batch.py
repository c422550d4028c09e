"""What one training step is made of: prompts, sequences, minibatches, micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli.recipe.components import argument_of
from rlcli.recipe.lengths import sequences_of_row
from rlcli.units import count

if TYPE_CHECKING:
    from rlcli.recipe.mesh import Mesh
    from rlcli.recipe.schema import Component, Recipe


@dataclass(frozen=True)
class BatchArithmetic:
    """The contents of one training step."""

    prompts: int
    """Rows of the dataset."""
    responses_per_prompt: int
    """1 if nothing is generated."""
    sequences_per_row: int
    """Maximum per row; 1 if something is generated."""
    sequences_per_rank: Mapping[str, tuple[int, int]]
    """Trained role → the fewest and the most sequences that one of its data-parallel ranks trains
    on."""
    minibatches: Mapping[str, int]
    """Trained role → optimizer steps that the batch is spread over."""
    max_tokens_per_microbatch: int
    steps: int | None
    epochs: int | None

    @property
    def sequences(self) -> int:
        """Sequences of one step, over all ranks."""
        return self.prompts * self.responses_per_prompt * self.sequences_per_row

    def lines(self) -> list[str]:
        """The arithmetic in words."""
        rows = count(self.prompts, "row")
        if self.responses_per_prompt > 1:
            rows = (
                f"{count(self.prompts, 'prompt')} x {self.responses_per_prompt} responses = "
                f"{self.sequences} sequences"
            )
        elif self.sequences_per_row > 1:
            rows = (
                f"{rows} x {self.sequences_per_row} sequences at most = {self.sequences} sequences"
            )
        lines = [f"{self._length()} of {rows}"]
        updates = {
            role: self._updates(self.minibatches.get(role, 1), *share)
            for role, share in self.sequences_per_rank.items()
        }
        for text in dict.fromkeys(updates.values()):
            roles = ", ".join(role for role, of_role in updates.items() if of_role == text)
            lines.append(f"{roles}: {text}")
        return lines

    def _length(self) -> str:
        if self.steps is not None:
            return count(self.steps, "step")
        assert self.epochs is not None
        return count(self.epochs, "epoch")

    def _updates(self, number: int, least: int, most: int) -> str:
        """What a role trains on in a step: in all, on each rank, and in each of its updates."""
        share = f"{least}" if least == most else f"{least} to {most}"
        step = f"{count(self.sequences, 'sequence')} ({share} per rank)"
        if number == 1:
            return f"{step} in 1 update"
        about = "" if most % number == 0 and least == most else "about "
        updates = f"{number} updates of {_quotient(self.sequences, number)}"
        return f"{step} in {updates} ({about}{-(-most // number)} per rank)"


def batch_of(recipe: Recipe, meshes: Mapping[str, Mesh]) -> BatchArithmetic:
    """The arithmetic of a recipe whose roles have these meshes."""
    generates = any(call.call == "generate" for call in recipe.graph.values())
    responses = recipe.generation.responses_per_prompt if generates else 1
    per_row = 1 if generates else sequences_of_row(recipe)
    group = responses * per_row
    rows = recipe.train.prompts_per_step
    trained = {call.model: call for call in recipe.graph.values() if call.call == "train_step"}
    shares = {}
    for role in trained:
        dp = meshes[role].dp
        shares[role] = (rows // dp * group, -(-rows // dp) * group)
    return BatchArithmetic(
        prompts=rows,
        responses_per_prompt=responses,
        sequences_per_row=per_row,
        sequences_per_rank=shares,
        minibatches={role: _minibatches(call.interface) for role, call in trained.items()},
        max_tokens_per_microbatch=recipe.train.max_tokens_per_microbatch,
        steps=recipe.train.steps,
        epochs=recipe.train.epochs,
    )


def _minibatches(interface: Component) -> int:
    """The `minibatches` of an interface: given, or its default; 1 if it has no such argument."""
    minibatches = argument_of("interfaces", interface, "minibatches")
    return max(1, minibatches) if isinstance(minibatches, int) else 1


def _quotient(total: int, parts: int) -> str:
    return (
        str(total // parts) if total % parts == 0 else f"{total // parts} or {total // parts + 1}"
    )
