"""Prompts with answers to other prompts, from which KTO estimates how far a policy is from its
reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.config import stable_seed
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.key_meaning import PLACE, PROMPT_MASK, SEQUENCES
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, register_interface

from ._sequences import group_sizes


@dataclass(frozen=True)
class _AllAnswers:
    """The N answers of a step, of all ranks, in the order of its batch."""

    prompts: list[int]
    """N: equal numbers for equal prompts."""
    tokens: list[torch.Tensor]
    """N: the tokens of each."""
    longest: int
    """Tokens of the longest prompt with its answer."""


@dataclass(kw_only=True)
class MismatchedInterface(ModelInterface):
    """Gives each prompt the answer to another prompt of the step. Each answer is used once, cut
    where prompt and answer would be longer than the step's longest sequence. The result does not
    depend on the ranks that hold the samples."""

    ELSEWHERE: ClassVar[str] = "kl_dataset"
    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar[Declaration] = {
        "inference": ("mismatched_input_ids", "mismatched_prompt_mask")
    }
    TAKES_BATCH: ClassVar[tuple[str, ...]] = ("inference",)

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids` and `prompt_mask` → `mismatched_input_ids` and
        `mismatched_prompt_mask`, a sequence for each."""
        numbers, count = _numbered(model, data)
        prompts, answers = _prompts_and_answers(data)
        gathered = _from_all_ranks(model, prompts, answers, numbers, count)
        others = answers_to_others(gathered.prompts)
        sequences, masks = [], []
        for number, prompt in zip(numbers, prompts, strict=True):
            answer = gathered.tokens[others[number]][: gathered.longest - len(prompt)]
            sequences.append(torch.cat([prompt, answer.to(prompt.device)]))
            masks.append(torch.arange(len(sequences[-1]), device=prompt.device) < len(prompt))
        return _with_keys(data, sequences, masks)


def answers_to_others(prompts: Sequence[int]) -> list[int]:
    """For each of N answers, the number of an answer to another prompt; each is used once.

    Ordered by prompt, answers move by as many places as there are answers to the most frequent
    prompt. Only if these are more than half of all, some of them stay with their prompt.
    """
    order = sorted(range(len(prompts)), key=lambda number: (prompts[number], number))
    most = max(Counter(prompts).values(), default=0)
    shift = min(most, len(order) - 1)
    moved = [*order[shift:], *order[:shift]]
    other_of = dict(zip(order, moved, strict=True))
    return [other_of[number] for number in range(len(order))]


def _numbered(model: Model, data: SequenceSample) -> tuple[list[int], int]:
    """The numbers of this rank's sequences among those of the step, and how many there are."""
    places, sizes = data.metadata.get(PLACE) or list(range(data.bs)), group_sizes(data)
    samples = int(model.all_reduce(torch.tensor(data.bs)))
    counts = _at_their_places(model, torch.tensor(sizes, dtype=torch.int64), places, samples)
    first = (counts.cumsum(0) - counts).tolist()
    pairs = zip(places, sizes, strict=True)
    numbers = [first[place] + number for place, size in pairs for number in range(size)]
    return numbers, int(counts.sum())


def _prompts_and_answers(data: SequenceSample) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    lengths = data.flat_seqlens(SEQUENCES)
    tokens, masks = (data.data[key].split(lengths) for key in (SEQUENCES, PROMPT_MASK))
    pairs = list(zip(tokens, masks, strict=True))
    return [row[mask] for row, mask in pairs], [row[~mask] for row, mask in pairs]


def _from_all_ranks(
    model: Model,
    prompts: Sequence[torch.Tensor],
    answers: Sequence[torch.Tensor],
    numbers: Sequence[int],
    count: int,
) -> _AllAnswers:
    """The answers of all ranks; this one has those with these numbers, of `count`."""
    about = [
        (stable_seed(str(prompt.tolist())), len(prompt), len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    columns = torch.tensor(about, dtype=torch.int64).reshape(-1, 3)
    hashes, before, lengths = _at_their_places(model, columns, numbers, count).T
    longest = int((before + lengths).max()) if count else 0
    tokens = _tokens_from_all_ranks(model, answers, numbers, lengths)
    return _AllAnswers(hashes.tolist(), tokens, longest)


def _tokens_from_all_ranks(
    model: Model, answers: Sequence[torch.Tensor], numbers: Sequence[int], lengths: torch.Tensor
) -> list[torch.Tensor]:
    """N: the tokens of each answer. `lengths` [N]: how many they are."""
    ends = lengths.cumsum(0).tolist()
    positions: list[int] = []
    for number, answer in zip(numbers, answers, strict=True):
        positions += range(ends[number] - len(answer), ends[number])
    rows = torch.cat([torch.zeros(0, dtype=torch.int64), *(answer.cpu() for answer in answers)])
    tokens = _at_their_places(model, rows, positions, int(lengths.sum()))
    return list(tokens.split(lengths.tolist()))


def _at_their_places(
    model: Model, rows: torch.Tensor, places: Sequence[int], size: int
) -> torch.Tensor:
    """[size, …] int64: the rows of all ranks, each at its place; this rank has `rows`."""
    table = rows.new_zeros(size, *rows.shape[1:])
    table[torch.tensor(places, dtype=torch.int64)] = rows
    return model.all_reduce(table)


def _with_keys(
    data: SequenceSample, sequences: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]
) -> SequenceSample:
    remaining = iter([len(sequence) for sequence in sequences])
    lengths = [[next(remaining) for _ in range(size)] for size in group_sizes(data)]
    nothing = data.data[SEQUENCES][:0]
    return SequenceSample.from_default(
        ids=data.ids,
        seqlens={"mismatched_input_ids": lengths, "mismatched_prompt_mask": lengths},
        data={
            "mismatched_input_ids": torch.cat([nothing, *sequences]),
            "mismatched_prompt_mask": torch.cat([nothing.bool(), *masks]),
        },
    )


register_interface("mismatched", MismatchedInterface)
