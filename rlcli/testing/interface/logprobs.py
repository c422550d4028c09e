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


def computed_logprobs(output: SequenceSample, batch: SequenceSample) -> list[str]:
    """The keys of an output with log-probs, of the tokens that were chosen or of all, that are not
    those of the input."""
    return [
        key
        for key in output.keys
        if (key.endswith("logprobs") or _are_distributions(tensor_of(output, key)))
        and not _is_copied(tensor_of(output, key), batch)
    ]


def _are_distributions(rows: torch.Tensor) -> bool:
    """Whether each row has the log-probs of all tokens."""
    if rows.dim() != 2 or not rows.is_floating_point():
        return False
    return bool(((rows.double().exp().sum(1) - 1.0).abs() < 1e-4).all())


def _is_copied(rows: torch.Tensor, batch: SequenceSample) -> bool:
    """Whether rows have, at the actions of responses, the numbers of a key of the batch: no model
    computed them."""
    actions = trained_actions(batch)
    if actions is None:
        actions = torch.ones(len(rows), dtype=torch.bool)
    return any(
        tensor.shape == rows.shape == actions.shape and torch.equal(tensor[actions], rows[actions])
        for tensor in batch.data.values()
    )


def _of_chosen_tokens(rows: torch.Tensor, batch: SequenceSample) -> torch.Tensor:
    """[A] log-probs of the tokens that were chosen, from those or from [A, V] of all tokens."""
    if rows.dim() == 1:
        return rows
    following = torch.cat([tokens[1:] for tokens in sequences(batch, SEQUENCES)])
    return rows.gather(1, following[:, None])[:, 0]


def all_logprobs(
    engine: TinyEngine, batch: SequenceSample, temperature: float = 1.0
) -> torch.Tensor:
    """[T - N] log-probs of the model for the sequences of a batch, one at a time."""
    tokens = sequences(batch, SEQUENCES)
    choices = torch.cat([distributions(engine, of_one, temperature) for of_one in tokens])
    return _of_chosen_tokens(choices, batch)


@torch.no_grad()
def distributions(
    engine: TinyEngine, tokens: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """[T - 1, V] log-probs of all tokens after each but the last token of a sequence [T]."""
    hidden = engine.model(tokens, [len(tokens)])[:-1]
    return (hidden @ engine.model.head.T / temperature).log_softmax(-1)
