"""Cheap checks, once for each value of every flag and choice, and not only for the defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlcli.api.interface import ModelInterface
from rlcli.api.key_meaning import ADVANTAGES, REWARDS
from rlcli.testing.arguments import Changes, check_variants, run_each
from rlcli.testing.contract import skip_unless
from rlcli.testing.interface.advantages import AdvantageChecks
from rlcli.testing.interface.arguments import batches_for, effects_of
from rlcli.testing.interface.credit import CreditChecks
from rlcli.testing.interface.directions import DirectionChecks
from rlcli.testing.interface.edge_cases import EdgeChecks
from rlcli.testing.interface.equal_weights import EqualWeightChecks
from rlcli.testing.interface.inference import InferenceChecks
from rlcli.testing.interface.inference_trial import (
    CallSubject,
    CallTrial,
    Gold,
    inference_batches_for,
)
from rlcli.testing.interface.invariants import LawChecks
from rlcli.testing.interface.layouts import InvarianceChecks
from rlcli.testing.interface.prompts import PromptChecks
from rlcli.testing.interface.reward import RewardChecks
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
    EqualWeightChecks.test_a_policy_is_at_no_distance_from_itself,
    EqualWeightChecks.test_a_distance_from_a_reference_is_the_kl,
    DirectionChecks.test_advantages_teach_in_their_direction,
    PromptChecks.test_longer_prompts_change_nothing,
    EdgeChecks.test_all_masked,
    LawChecks.test_a_step_moves_a_pair_apart,
)
"""Not the comparison of ranks: a choice may be to let each have its own share."""
OF_REWARDS: Sequence[Callable[[Any, CallTrial], None]] = (
    InferenceChecks.test_inference_returns_what_it_declares,
    InferenceChecks.test_inference_returns_plain_numbers,
    RewardChecks.demand_less_for_wrong_examples,
)
"""A reward may take a second for a batch, to execute programs."""
OF_INFERENCE = (
    *OF_REWARDS,
    InferenceChecks.test_inference_does_not_depend_on_the_other_samples,
    InferenceChecks.test_inference_does_not_depend_on_the_order,
    InferenceChecks.test_inference_leaves_everything_alone,
    InferenceChecks.test_state_of_inference_comes_back,
)
OF_ADVANTAGES = (
    AdvantageChecks.test_a_reward_reaches_its_last_action,
    AdvantageChecks.test_a_reward_of_a_token_counts_for_the_action_that_chose_it,
    AdvantageChecks.test_the_order_within_a_group_changes_nothing,
    AdvantageChecks.test_nothing_comes_after_an_end,
    AdvantageChecks.test_returns_are_in_the_units_of_the_rewards,
    AdvantageChecks.test_a_penalty_is_paid_once,
    AdvantageChecks.test_a_penalty_does_not_fall_with_the_distance,
    CreditChecks.test_a_discount_counts_for_each_token,
)


class VariantChecks(CallSubject):
    def test_every_variant_trains(self, make: Make, rehearsal: Rehearsal, tokenizer: Any) -> None:
        """with each value of each flag and choice, a step is finite, resumes, and depends on
        neither micro-batches, order, padding nor prompts"""

        def check(variant: Make) -> None:
            changed = Rehearsal(variant, batches_for(variant(), rehearsal.batches))
            run_each(OF_TRAINING, self, changed)

        _check_variants(make, rehearsal.batches, tokenizer, check)

    def test_every_variant_infers(
        self, make: Make, batches: Batches, inferring: CallTrial, tokenizer: Any
    ) -> None:
        """with each value of each flag and choice, inference is finite and as declared, a sample
        gets the same in any batch, and the laws of advantages hold"""

        def check(variant: Make) -> None:
            interface, batch = variant(), inferring.batch
            declared = interface.reads("inference")
            if declared is not None and not set(declared.needed) <= batch.keys:
                batch = inference_batches_for(interface, batches, tokenizer)()
            changed = CallTrial(variant, "inference", batch, tokenizer)
            keys = changed.result.keys
            run_each(OF_REWARDS if REWARDS in keys else OF_INFERENCE, self, changed)
            run_each(OF_ADVANTAGES if ADVANTAGES in keys else (), self, changed)

        _check_variants(make, batches, tokenizer, check)

    def test_every_variant_scores(
        self,
        make: Make,
        batches: Batches,
        scorer: ModelInterface,
        inferring: CallTrial,
        answers: Sequence[str],
        gold: Gold,
    ) -> None:
        """with another value of each argument a run gives what score_texts gives; with another
        flag or choice right answers earn more than wrong ones"""
        tokenizer, rewards = inferring.tokenizer, RewardChecks()

        def check(changes: Changes) -> None:
            changed = CallTrial(_changed(make, changes), "inference", inferring.batch, tokenizer)
            scorer = changed.interface
            rewards.test_a_run_gives_what_score_texts_gives(scorer, changed, tokenizer)
            if all(isinstance(value, bool | str) for value in changes.values()):
                rewards.test_right_answers_earn_more_than_wrong_ones(
                    scorer, answers, gold, lambda *_: None
                )

        check_variants(effects_of(make, batches, tokenizer).of_each_argument(), check)


def _check_variants(
    make: Make, batches: Batches, tokenizer: Any, check: Callable[[Make], None]
) -> None:
    """Make a check with one flag or choice changed at a time."""
    variants = list(effects_of(make, batches, tokenizer).variants())
    skip_unless(variants, "has neither flags nor choices")
    check_variants(variants, lambda changes: check(_changed(make, changes)))


def _changed(make: Make, changes: Changes) -> Make:
    def changed(**further: Any) -> ModelInterface:
        return make(**changes, **further)

    return changed
