"""From a row in plain Python to the sample that a run uses. Torch is imported here,
and only when needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcli.api.data import Preview, SequenceSample

if TYPE_CHECKING:
    import torch


def prompt_sample(preview: Preview) -> SequenceSample:
    """`packed_prompts`: a prompt without a response."""
    import torch

    (tokens,) = preview.sequences
    return SequenceSample.from_default(
        ids=[preview.id],
        seqlens=[len(tokens)],
        data={"packed_prompts": torch.tensor(tokens)},
        metadata={name: [value] for name, value in preview.metadata.items()},
    )


def answered_sample(preview: Preview) -> SequenceSample:
    """`packed_input_ids` and `prompt_mask`: a prompt with each of its answers."""
    import torch

    assert preview.trained is not None
    tokens = [token for sequence in preview.sequences for token in sequence]
    trained = [flag for flags in preview.trained for flag in flags]
    lengths = [[len(sequence) for sequence in preview.sequences]]
    return SequenceSample.from_default(
        ids=[preview.id],
        seqlens={"packed_input_ids": lengths, "prompt_mask": lengths},
        data={
            "packed_input_ids": torch.tensor(tokens),
            "prompt_mask": ~torch.tensor(trained, dtype=torch.bool),
        },
        metadata={name: [value] for name, value in preview.metadata.items()},
    )


def unpaired_sample(preview: Preview, desirable: Sequence[bool]) -> SequenceSample:
    """An answered sample with `desirable`: whether each answer is a good one."""
    import torch

    sample = answered_sample(preview)
    _add_numbers(sample, "desirable", torch.tensor(desirable, dtype=torch.bool))
    return sample


def paired_sample(preview: Preview, margins: Sequence[float] | None = None) -> SequenceSample:
    """An answered sample with `prompt_lens`, the length of the prompt. If one margin per pair is
    given, also `margins`: at the preferred answer, with 0 for the rejected one."""
    import torch

    assert preview.trained is not None
    sample = answered_sample(preview)
    _add_numbers(sample, "prompt_lens", torch.tensor([preview.trained[0].count(False)]))
    if margins is not None:
        flat = [number for margin in margins for number in (margin, 0.0)]
        _add_numbers(sample, "margins", torch.tensor(flat))
    return sample


def _add_numbers(sample: SequenceSample, key: str, numbers: torch.Tensor) -> None:
    """Add a key to a batch of one sample, whose sequences have a number each."""
    lengths = [[1] * len(numbers)]
    sample.update_(
        SequenceSample.from_default(ids=sample.ids, seqlens={key: lengths}, data={key: numbers})
    )
