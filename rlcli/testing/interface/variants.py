"""Cheap checks, once for each value of every flag and choice, and not only for the defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rlcli.api.interface import ModelInterface
from rlcli.api.key_meaning import REWARDS
from rlcli.testing.arguments import Changes
from rlcli.testing.contract import Violation
from rlcli.testing.interface.arguments import batches_for, effects_of
from rlcli.testing.interface.inference import InferenceChecks
from rlcli.testing.interface.inference_trial import CallSubject, CallTrial
from rlcli.testing.interface.layouts import InvarianceChecks
from rlcli.testing.interface.training import TrainingChecks
from rlcli.testing.interface.training_trial import Batches, Make, Rehearsal

OF_TRAINING: Sequence[Callable[[Any, Rehearsal], None]] = (
    TrainingChecks.test_the_loss_is_finite,
    TrainingChecks.test_masked_tokens_get_no_gradient,
    TrainingChecks.test_numbers_on_prompts_are_not_read,
    TrainingChecks.test_goes_on_from_its_state,
    InvarianceChecks.test_micro_batches_change_nothing,
    InvarianceChecks.test_order_changes_nothing,
    InvarianceChecks.test_padding_changes_nothing,
)
"""Not the comparison of ranks: a choice may be to let each have its own share."""
OF_REWARDS: Sequence[Callable[[Any, CallTrial], None]] = (
    InferenceChecks.test_inference_returns_what_it_declares,
    InferenceChecks.test_inference_returns_plain_numbers,
)
"""A reward may take a second for a batch, to execute programs."""
OF_INFERENCE = (
    *OF_REWARDS,
    InferenceChecks.test_inference_does_not_depend_on_the_other_samples,
    InferenceChecks.test_inference_does_not_depend_on_the_order,
    InferenceChecks.test_inference_leaves_its_input_alone,
)


class VariantChecks(CallSubject):
    def test_every_variant_trains(self, make: Make, rehearsal: Rehearsal, tokenizer: Any) -> None:
        """with each value of each flag and choice, a step is finite, resumes, and depends on
        neither micro-batches, order, padding nor prompts"""

        def check(variant: Make) -> None:
            changed = Rehearsal(variant, batches_for(variant(), rehearsal.batches))
            for test in OF_TRAINING:
                _run(test, self, changed)

        _check_variants(make, rehearsal.batches, tokenizer, check)

    def test_every_variant_infers(
        self, make: Make, batches: Batches, inferring: CallTrial, tokenizer: Any
    ) -> None:
        """with each value of each flag and choice, inference is finite and as declared, and a
        sample gets the same in any batch"""

        def check(variant: Make) -> None:
            changed = CallTrial(variant, "inference", inferring.batch, tokenizer)
            declared = changed.interface.reads("inference")
            if declared is None or set(declared.needed) <= set(inferring.batch.keys):
                for test in OF_REWARDS if REWARDS in changed.result.keys else OF_INFERENCE:
                    _run(test, self, changed)

        _check_variants(make, batches, tokenizer, check)


def _check_variants(
    make: Make, batches: Batches, tokenizer: Any, check: Callable[[Make], None]
) -> None:
    """Make a check with one flag or choice changed at a time."""
    variants = list(effects_of(make, batches, tokenizer).variants())
    if not variants:
        pytest.skip("has neither flags nor choices")
    for changes in variants:
        try:
            check(_changed(make, changes))
        except Violation as violation:
            settings = ", ".join(f"{name}={value}" for name, value in changes.items())
            finding = f"with {settings}: {violation.finding}"
            raise Violation(finding, violation.cause, violation.where) from violation


def _changed(make: Make, changes: Changes) -> Make:
    def changed(**further: Any) -> ModelInterface:
        return make(**changes, **further)

    return changed


def _run(test: Callable[[Any, Any], None], checks: CallSubject, subject: Any) -> None:
    """Run a check, unless it does not concern the subject."""
    try:
        test(checks, subject)
    except pytest.skip.Exception:
        return
