"""Forward passes: however sequences are packed, each gives the same result as alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.micro_batches import MicroBatch
from rlcli.api.model import ForwardEngine, ModelOutput
from rlcli.testing.backend.base import (
    BackendChecks,
    batch,
    different,
    distance,
    groups,
    require_close,
    source_of,
)
from rlcli.testing.backend.plain import TEMPERATURE, exact, logits_of, scores_of, values_by
from rlcli.testing.contract import Violation
from rlcli.testing.tiny_models import tiny_model

LEAK = "keep packed sequences apart: attention and positions start afresh with each"
SHARED = (
    "tokens computed once for sequences that begin alike count for each of them: with the same "
    "positions, and after the last shared token with the next token of each"
)
ORDER = "put the micro-batches' rows back in the order of the input"

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
            engine, plain = self.scoring_engine(family), exact(tiny_model(family))
            for temperature in (1.0, TEMPERATURE):
                for quantity, expected in plain_scores(plain, batch(), temperature).items():
                    actual = scores(engine, batch(), quantity, temperature)
                    title = f"{quantity} of {family} at temperature {temperature}"
                    cause = _cause(plain, quantity, temperature, actual)
                    self._require_plain(title, engine, actual, expected, cause)

    def test_logits_are_those_of_each_sequence_alone(self) -> None:
        """logits: each sequence as if alone"""
        for family in self.families:
            engine = self.scoring_engine(family)
            with torch.no_grad():
                expected = torch.cat(logits_of(exact(tiny_model(family)), batch()))
            self._require_plain(f"logits of {family}", engine, engine.forward(batch()), expected)

    def test_values_come_from_the_value_head(self) -> None:
        """values: the value head's, each sequence as if alone"""
        for family in self.families:
            engine = self.scoring_engine(family, head="value")
            actual = engine.forward(batch(), post_hook=values_of)
            expected = plain_values(family, batch())
            self._require_plain(f"values of {family}", engine, actual, expected)

    def test_sequences_that_begin_alike_are_scored_as_if_alone(self) -> None:
        """sequences of a group: each as if alone, whatever they share"""
        for family in self.families:
            engine, plain = self.scoring_engine(family), exact(tiny_model(family))
            for quantity, expected in plain_scores(plain, groups()).items():
                actual = scores(engine, groups(), quantity)
                self._require_plain(
                    f"{quantity} of {family} in groups", engine, actual, expected, SHARED
                )

    def test_sequences_that_begin_alike_have_the_values_of_each_alone(self) -> None:
        """values of a group that is cut: each sequence as if alone"""
        cut = MicroBatchSpec(max_tokens_per_mb=40)
        for family in self.families:
            engine = self.scoring_engine(family, head="value")
            actual = engine.forward(groups(), cut, values_of, cut="sequence")
            expected = plain_values(family, groups())
            self._require_plain(f"values of {family} in groups", engine, actual, expected, SHARED)

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
        if not hasattr(self.backend(), "dtype"):
            self.scoring_engine()
            pytest.skip("has no setting dtype")
        outputs = {}
        for dtype in ("float32", "bfloat16"):
            heads = {head: self.scoring_engine(head=head, dtype=dtype) for head in ("lm", "value")}
            outputs[dtype] = {
                "log-probs": scores(heads["lm"]),
                "values": heads["value"].forward(batch(), post_hook=values_of),
            }
        for quantity, fine in outputs["float32"].items():
            apart = distance(outputs["bfloat16"][quantity], fine)
            if not 1e-4 < apart < 0.1:
                raise Violation(
                    f"{quantity} in bfloat16 are {apart:.2g} from those in float32",
                    (
                        "run matrix products in dtype"
                        if apart < 1e-4
                        else "only matrix products run in 16 bits"
                    ),
                    source_of(heads["lm"], "__init__"),
                )

    def test_outputs_do_not_depend_on_the_cut(self) -> None:
        """outputs are the same, in order, for any micro-batches"""
        engine, sample = self.scoring_engine(), batch()
        expected = scores(engine, sample)
        where = source_of(engine, "forward", "forward_micro_batch")
        for how, cut in CUTS.items():
            actual = scores(engine, sample, cut=cut)
            require_close(f"log-probs {how}", actual, expected, self.tolerance, ORDER, where)

    def test_the_token_cap_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """no forward pass has more tokens than max_tokens_per_mb"""
        engine = self.scoring_engine()
        seen: list[int] = []
        forward = engine.forward_batch

        def counted(micro_batches: Sequence[MicroBatch], hook: Any) -> Any:
            seen.extend(
                sum(micro_batch.sample.flat_seqlens("packed_input_ids"))
                for micro_batch in micro_batches
            )
            return forward(micro_batches, hook)

        monkeypatch.setattr(engine, "forward_batch", counted)
        engine.forward(batch(), MicroBatchSpec(max_tokens_per_mb=12))
        total = sum(batch().flat_seqlens("packed_input_ids"))
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
        for lengths, rows in (([(1, 0)], 0), ([(1, 1)], 1), ([(1, 0), (1, 0), (2, 4)], 5)):
            count = len(scores(engine, batch(lengths=lengths), "log-probs"))
            if count != rows:
                finding = (
                    f"sequences of {[sum(pair) for pair in lengths]} tokens have {count} "
                    f"log-probs in place of {rows}"
                )
                raise Violation(finding, "the last token of each sequence has none", where)
        empty = batch().select_indices([])
        if len(engine.forward(empty, post_hook=lambda output, _: output.logprobs)):
            raise Violation(
                "a batch without sequences has outputs", "return an empty tensor", where
            )

    def test_a_forward_pass_leaves_nothing_behind(self) -> None:
        """a forward pass keeps no gradient, changes no weight"""
        engine = self.scoring_engine()
        before = self.weights(engine)
        first = scores(engine)
        if first.requires_grad:
            cause = (
                "call super().forward or work under torch.no_grad(): its activations stay in memory"
            )
            raise Violation(
                "what forward returns still has its graph", cause, source_of(engine, "forward")
            )
        again = scores(engine)
        if not torch.equal(first, again):
            apart = float((first - again).abs().max())
            cause = "dropout is on, or the pass changes the model"
            raise Violation(
                f"two passes over one batch differ by {apart:.2g}",
                cause,
                source_of(engine, "forward"),
            )
        changed = different(self.weights(engine), before)
        if changed:
            raise Violation(
                f"a forward pass changed {len(changed)} weights, {changed[0]} among them",
                "compute out of place",
                source_of(engine, "forward"),
            )


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


@torch.no_grad()
def plain_scores(
    plain: torch.nn.Module, sample: SequenceSample, temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    logprobs, entropies = scores_of(plain, sample, temperature)
    return {"log-probs": logprobs, "entropies": entropies}


@torch.no_grad()
def plain_values(family: str, sample: SequenceSample) -> torch.Tensor:
    return values_by(exact(tiny_model(family, head="value")), sample)


def _cause(plain: torch.nn.Module, quantity: str, temperature: float, actual: torch.Tensor) -> str:
    """What the wrong scores are instead, if recognised."""
    if temperature == 1.0:
        return LEAK
    untempered = plain_scores(plain, batch())[quantity]
    if actual.shape == untempered.shape and torch.allclose(actual.double(), untempered, atol=1e-3):
        return "divide the logits by output.temperature, as it is when the scores are asked for"
    return "divide all logits by output.temperature, before the softmax"
