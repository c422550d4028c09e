"""The log-probs of a tiny model, computed from its two matrices alone."""

from __future__ import annotations

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import PROMPT_MASK, SEQUENCES
from rlcli.testing.contract import Violation
from rlcli.testing.interface.actions import trained_actions
from rlcli.testing.interface.outputs import (
    TOLERANCE,
    sequences,
    tensor_of,
)
from rlcli.testing.tiny_engine import TinyEngine

UNTEMPERED = "they are those of temperature 1: set output.temperature before output.logprobs"
SHIFTED = "log-prob t of a sequence is that of its token t + 1: [T - N] in all"


def check_logprobs(
    output: SequenceSample,
    key: str,
    batch: SequenceSample,
    engine: TinyEngine,
    temperature: float,
    where: str,
) -> None:
    """Raise Violation unless a key has the model's log-probs of a batch's sequences: of each token,
    or of all tokens in its place. Only responses count, where the batch says what they are."""
    rows = _of_chosen_tokens(tensor_of(output, key).double(), batch)
    expected = torch.stack([all_logprobs(engine, batch, by) for by in (temperature, 1.0)])
    if len(rows) != expected.shape[1]:
        raise Violation(f"{key} has {len(rows)} rows", SHIFTED, where)
    counted = batch.select({SEQUENCES, PROMPT_MASK} & batch.keys)
    gaps = (expected - rows).abs()
    if (acting := trained_actions(counted)) is not None:
        gaps = gaps[:, acting]
    tempered, untempered = gaps.amax(1).tolist()
    if not tempered <= TOLERANCE:
        raise Violation(
            f"{key} differs by {tempered:.3g} from the model's at temperature {temperature:g}",
            (UNTEMPERED if untempered <= TOLERANCE else SHIFTED),
            where,
        )


def _of_chosen_tokens(rows: torch.Tensor, batch: SequenceSample) -> torch.Tensor:
    """[A] log-probs of the tokens that were chosen, from those or from [A, V] of all tokens."""
    if rows.dim() == 1:
        return rows
    following = torch.cat([tokens[1:] for tokens in sequences(batch, SEQUENCES)])
    return rows.gather(1, following[:, None])[:, 0]


@torch.no_grad()
def all_logprobs(
    engine: TinyEngine, batch: SequenceSample, temperature: float = 1.0
) -> torch.Tensor:
    """[T - N] log-probs of the model for the sequences of a batch, one at a time."""
    tokens = sequences(batch, SEQUENCES)
    hidden = torch.cat([engine.model(of_one, [len(of_one)])[:-1] for of_one in tokens])
    choices = (hidden @ engine.model.head.T / temperature).log_softmax(-1)
    return _of_chosen_tokens(choices, batch)
