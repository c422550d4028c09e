"""Laws of what is not trained on: prompts, and the beginning of a text."""

from __future__ import annotations

import math

import pytest
import torch

from rlcli.api.key_meaning import PROMPT_MASK
from rlcli.testing.batches import Lengths
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.interface.actions import padded, trained_actions, with_tensor
from rlcli.testing.interface.invariants import SIGNALS, ignorant
from rlcli.testing.interface.training_trial import InterfaceSubject, Rehearsal
from rlcli.testing.tiny_engine import TinyLM

SHORT_TEXTS: Lengths = [[(2, 2)], [(2, 3)]]
LONG_TEXTS: Lengths = [[(2, 7)], [(3, 4)]]
SMALL = 1e-5


class MemorylessLM(TinyLM):
    """Predicts a token from the one before it alone."""

    def forward(self, tokens: torch.Tensor, lengths: object) -> torch.Tensor:
        return torch.tanh(self.embedding[tokens])


class PromptChecks(InterfaceSubject):
    def test_texts_without_prompts_weigh_what_is_trained_on(self, rehearsal: Rehearsal) -> None:
        """where the loss is a mean over tokens, it is the same without prompts for a model to which
        all tokens are equally likely"""
        batch = rehearsal.batch
        skip_if(
            PROMPT_MASK not in batch.keys or rehearsal.heads != {"lm"},
            "does not tell prompts from responses, or does not learn tokens",
        )
        skip_if(set(SIGNALS) & batch.keys, "learns from what responses earned")
        losses = [_loss_of_ignorant(rehearsal, lengths) for lengths in (SHORT_TEXTS, LONG_TEXTS)]
        skip_unless(math.isclose(*losses, rel_tol=SMALL), "not tried: its loss depends on lengths")
        loss = _loss_of_ignorant(rehearsal, LONG_TEXTS, has_prompts=False)
        if not math.isclose(loss, losses[0], rel_tol=SMALL):
            raise Violation(
                f"the loss of a model to which all tokens are equally likely is {losses[0]:.6g}, "
                f"and {loss:.6g} without prompts",
                "nothing predicts the first token of a text: it does not count either",
                rehearsal.where,
            )

    def test_longer_prompts_change_nothing(self, rehearsal: Rehearsal) -> None:
        """with a model without memory, longer prompts change nothing"""
        if PROMPT_MASK not in rehearsal.batch.keys or trained_actions(rehearsal.batch) is None:
            pytest.skip("does not tell prompts from responses")
        short, longer = (
            rehearsal.train(batch, model=rehearsal.model(module=MemorylessLM()))
            for batch in (rehearsal.batch, padded(rehearsal.batch, in_front=True))
        )
        rehearsal.demand_same(
            short,
            longer,
            ("with short prompts", "with longer ones"),
            "prompts are not trained on: count and average over response tokens only",
        )


def _loss_of_ignorant(rehearsal: Rehearsal, lengths: Lengths, has_prompts: bool = True) -> float:
    """The loss of a model to which all tokens are equally likely, on texts of these lengths."""
    batch = rehearsal.batches(lengths)
    if not has_prompts:
        batch = with_tensor(batch, PROMPT_MASK, torch.zeros_like(batch.data[PROMPT_MASK]))
    return rehearsal.train(batch, model=ignorant(rehearsal)).stats["loss"]
