"""From a row in plain Python to the sample that a run uses. Torch is imported here,
and only when needed."""

from __future__ import annotations

from collections.abc import Sequence

from rlcli.api.data import Preview, SequenceSample


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
    """`packed_input_ids` and `prompt_mask`: a prompt with its answer."""
    import torch

    assert preview.trained is not None
    (tokens,), (trained,) = preview.sequences, preview.trained
    return SequenceSample.from_default(
        ids=[preview.id],
        seqlens=[len(tokens)],
        data={
            "packed_input_ids": torch.tensor(tokens),
            "prompt_mask": ~torch.tensor(trained, dtype=torch.bool),
        },
        metadata={name: [value] for name, value in preview.metadata.items()},
    )


def paired_sample(preview: Preview, margins: Sequence[float] | None = None) -> SequenceSample:
    """`packed_input_ids`, `prompt_mask` and `prompt_lens`: a prompt with each of its answers. If
    one margin per pair is given, also `margins`: at the preferred answer,
    with 0 for the rejected one."""
    import torch

    assert preview.trained is not None
    lengths = [len(tokens) for tokens in preview.sequences]
    seqlens = {"packed_input_ids": [lengths], "prompt_mask": [lengths], "prompt_lens": [[1]]}
    data = {
        "packed_input_ids": torch.tensor(
            [token for tokens in preview.sequences for token in tokens]
        ),
        "prompt_mask": ~torch.tensor(
            [flag for flags in preview.trained for flag in flags], dtype=torch.bool
        ),
        "prompt_lens": torch.tensor([preview.trained[0].count(False)]),
    }
    if margins is not None:
        seqlens["margins"] = [[1, 1] * len(margins)]
        data["margins"] = torch.tensor([number for margin in margins for number in (margin, 0.0)])
    metadata = {name: [value] for name, value in preview.metadata.items()}
    return SequenceSample.from_default(
        ids=[preview.id], seqlens=seqlens, data=data, metadata=metadata
    )
