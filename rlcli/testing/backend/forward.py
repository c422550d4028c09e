"""Forward passes: however sequences are packed, each gives the same result as alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.micro_batches import MicroBatch
from rlcli.api.model import ForwardEngine, ModelOutput
from rlcli.testing.backend.base import BackendChecks, source_of
from rlcli.testing.backend.differences import (
    distance,
    require_close,
    require_same,
    require_same_weights,
)
from rlcli.testing.backend.plain import TEMPERATURE, logits_of, plain_model, scores_of, values_by
from rlcli.testing.backend.samples import batch, groups
from rlcli.testing.contract import Violation

LEAK = "keep packed sequences apart: attention and positions start afresh with each"
SHARED = (
    "tokens computed once for sequences that begin alike count for each of them: with the same "
    "positions, and after the last shared token with the next token of each"
)
ORDER = "put the micro-batches' rows back in the order of the input"

SCORES = ("log-probs", "entropies")

CUTS = {
    "in 3 micro-batches": MicroBatchSpec(n_mbs=3),
    "in micro-batches of 12 tokens": MicroBatchSpec(max_tokens_per_mb=12),
    "in as many micro-batches as samples": MicroBatchSpec(n_mbs=100),
}


class ForwardChecks(BackendChecks):
    """`forward`, `forward_batch` and what an output offers."""

    def test_scores_are_those_of_each_sequence_alone(self) -> None:
        """log-probs and entropies: each sequence as if alone"""
        for family in self.families:
            engine, plain = self.scoring_engine(family), plain_model(family)
            for quantity, temperature in product(SCORES, (1.0, TEMPERATURE)):
                actual = scores(engine, batch(), quantity, temperature)
                title = f"{quantity} of {family} at temperature {temperature}"
                cause = LEAK
                if temperature != 1.0:
                    cause = _cause_at_temperature(plain_scores(plain, batch(), quantity), actual)
                expected = plain_scores(plain, batch(), quantity, temperature)
                self._require_plain(title, engine, actual, expected, cause)

    def test_logits_are_those_of_each_sequence_alone(self) -> None:
        """logits: each sequence as if alone"""
        for family in self.families:
            engine = self.scoring_engine(family)
            expected = torch.cat(logits_of(plain_model(family), batch()))
            self._require_plain(f"logits of {family}", engine, engine.forward(batch()), expected)

    def test_values_come_from_the_value_head(self) -> None:
        """values: the value head's, each sequence as if alone"""
        self._require_plain_values(batch(), LEAK)

    def test_sequences_that_begin_alike_are_scored_as_if_alone(self) -> None:
        """sequences of a group: each as if alone, whatever they share"""
        for family, quantity in product(self.families, SCORES):
            engine = self.scoring_engine(family)
            actual = scores(engine, groups(), quantity)
            expected = plain_scores(plain_model(family), groups(), quantity)
            self._require_plain(
                f"{quantity} of {family} in groups", engine, actual, expected, SHARED
            )

    def test_sequences_that_begin_alike_have_the_values_of_each_alone(self) -> None:
        """values of a group that is cut: each sequence as if alone"""
        cut = MicroBatchSpec(max_tokens_per_mb=40)
        self._require_plain_values(groups(), SHARED, mb_spec=cut, cut="sequence")

    def _require_plain_values(self, sample: SequenceSample, cause: str, **how: Any) -> None:
        for family in self.families:
            engine = self.scoring_engine(family, head="value")
            actual = engine.forward(sample, post_hook=values_of, **how)
            expected = values_by(plain_model(family, "value"), sample)
            self._require_plain(f"values of {family}", engine, actual, expected, cause)

    def _require_plain(
        self,
        title: str,
        engine: ForwardEngine,
        actual: torch.Tensor,
        expected: torch.Tensor,
        cause: str = LEAK,
    ) -> None:
        where = source_of(engine, "forward_micro_batch", "forward_batch")
        require_close(title, actual, expected, self.tolerance, cause, where)

    def test_bfloat16_stays_close(self) -> None:
        """dtype bfloat16: log-probs and values change, but only slightly"""
        self.scoring_engine()
        self.require_settings("dtype")
        for head, quantity in {"lm": "log-probs", "value": "values"}.items():
            engine = self.scoring_engine(head=head, dtype="bfloat16")
            fine = outputs(self.scoring_engine(head=head, dtype="float32"), batch(), head)
            apart = distance(outputs(engine, batch(), head), fine)
            if not 1e-4 < apart < 0.1:
                are_alike = apart < 1e-4
                raise Violation(
                    f"{quantity} in bfloat16 are {apart:.2g} from those in float32",
                    "run matrix products in dtype"
                    if are_alike
                    else "only matrix products run in 16 bits",
                    source_of(engine, "__init__"),
                )

    def test_outputs_do_not_depend_on_the_cut(self) -> None:
        """outputs are the same, in order, for any micro-batches"""
        engine = self.scoring_engine()
        expected = scores(engine)
        where = source_of(engine, "forward", "forward_micro_batch")
        for how, cut in CUTS.items():
            actual = scores(engine, cut=cut)
            require_close(f"log-probs {how}", actual, expected, self.tolerance, ORDER, where)

    def test_the_token_cap_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """no forward pass has more tokens than max_tokens_per_mb"""
        engine = self.scoring_engine()
        seen: list[int] = []
        forward = engine.forward_batch

        def counted(micro_batches: Sequence[MicroBatch], hook: Any) -> Any:
            seen.extend(len(one.sample.data["packed_input_ids"]) for one in micro_batches)
            return forward(micro_batches, hook)

        monkeypatch.setattr(engine, "forward_batch", counted)
        engine.forward(batch(), MicroBatchSpec(max_tokens_per_mb=12))
        total = len(batch().data["packed_input_ids"])
        if max(seen) > 12 or sum(seen) != total:
            raise Violation(
                f"forward passes over {seen} tokens; the cap is 12 and there are {total}",
                "leave the splitting to ForwardEngine.forward",
                source_of(engine, "forward"),
            )

    def test_edge_batches(self) -> None:
        """one token, one sequence, no sequence at all"""
        engine = self.scoring_engine()
        where = source_of(engine, "forward_micro_batch", "forward")
        numbers = {
            "one token": (batch(lengths=[(1, 0)]), 0),
            "two tokens": (batch(lengths=[(1, 1)]), 1),
            "a longer sequence after two tokens": (batch(lengths=[(1, 0), (1, 0), (2, 4)]), 5),
            "no sequence": (batch().select_indices([]), 0),
        }
        for title, (sample, expected) in numbers.items():
            actual = len(scores(engine, sample))
            if actual != expected:
                raise Violation(
                    f"a batch of {title} has {actual} log-probs in place of {expected}",
                    "the last token of each sequence has none; without sequences there are none",
                    where,
                )

    def test_a_forward_pass_leaves_nothing_behind(self) -> None:
        """a forward pass keeps no gradient, changes no weight"""
        engine = self.scoring_engine()
        before = self.weights(engine)
        first, again = scores(engine), scores(engine)
        where = source_of(engine, "forward")
        if first.requires_grad:
            raise Violation(
                "what forward returns still has its graph",
                "call super().forward or work under torch.no_grad(): activations stay in memory",
                where,
            )
        cause = "dropout is on, or the pass changes the model"
        require_same("log-probs", again, first, "between two passes over one batch", cause, where)
        after, cause = self.weights(engine), "compute out of place"
        require_same_weights(after, before, "after a forward pass", cause, where)


def scores(
    engine: ForwardEngine,
    sample: SequenceSample | None = None,
    quantity: str = "log-probs",
    temperature: float = 1.0,
    cut: MicroBatchSpec | None = None,
) -> torch.Tensor:
    """[T − N] log-probs or entropies from the engine, on the host; by default of the usual
    batch."""
    sample = batch() if sample is None else sample

    def hook(output: ModelOutput, _: SequenceSample) -> torch.Tensor:
        output.temperature = temperature
        return output.logprobs if quantity == "log-probs" else output.entropy

    rows = [[length - 1 for length in lengths] for lengths in sample.seqlens["packed_input_ids"]]
    return engine.forward(sample, cut, hook, rows).cpu()


def values_of(output: ModelOutput, _: SequenceSample) -> torch.Tensor:
    """A hook."""
    return output.values


def outputs(
    engine: ForwardEngine, sample: SequenceSample, head: str, cut: MicroBatchSpec | None = None
) -> torch.Tensor:
    """Log-probs [T − N], or the values [T] of a value head, on the host."""
    if head == "lm":
        return scores(engine, sample, cut=cut)
    return engine.forward(sample, cut, values_of).cpu()


def plain_scores(
    plain: nn.Module, sample: SequenceSample, quantity: str = "log-probs", temperature: float = 1.0
) -> torch.Tensor:
    """What `scores` should be."""
    return scores_of(plain, sample, temperature)[SCORES.index(quantity)]


def plain_outputs(plain: nn.Module, sample: SequenceSample, head: str) -> torch.Tensor:
    """What `outputs` should be."""
    return plain_scores(plain, sample) if head == "lm" else values_by(plain, sample)


def _cause_at_temperature(untempered: torch.Tensor, actual: torch.Tensor) -> str:
    """Of scores that are wrong at a temperature; `untempered` are the right ones at 1."""
    if distance(actual, untempered) < 1e-3:
        return "divide the logits by output.temperature, as it is when the scores are asked for"
    return "divide all logits by output.temperature, before the softmax"
