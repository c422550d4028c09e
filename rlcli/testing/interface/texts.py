"""Batches of texts for rewards that read them, and the form of a correct response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlcli.api.data import SequenceSample

ANSWERS = ("7", "3", "3/4", "-5", "1,000", "0.25")
"""Gold answers of rows, all of different value."""

Rows = Sequence[tuple[str, Sequence[str]]]
"""(prompt, responses) of each sample."""


def text_batch(tokenizer: Any, rows: Rows, answers: Sequence[Any]) -> SequenceSample:
    """`packed_input_ids` and `prompt_mask` of texts, each response ending with the end token;
    metadata `answer`."""
    tokens: list[int] = []
    mask: list[bool] = []
    lengths: list[list[int]] = []
    for prompt, responses in rows:
        lengths.append([])
        for response in responses:
            asked = tokenizer(prompt, add_special_tokens=False).input_ids
            answered = [
                *tokenizer(response, add_special_tokens=False).input_ids,
                tokenizer.eos_token_id,
            ]
            tokens += [*asked, *answered]
            mask += [True] * len(asked) + [False] * len(answered)
            lengths[-1].append(len(asked) + len(answered))
    return SequenceSample.from_default(
        ids=[f"s{i}" for i in range(len(rows))],
        seqlens={"packed_input_ids": lengths, "prompt_mask": lengths},
        data={
            "packed_input_ids": torch.tensor(tokens, dtype=torch.int64),
            "prompt_mask": torch.tensor(mask, dtype=torch.bool),
        },
        metadata={"answer": list(answers), "batch_index": list(range(len(rows)))},
    )
