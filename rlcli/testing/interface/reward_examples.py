"""Checks of the EXAMPLES of a reward: what a response to a row of its own kind earns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields

import pytest

from rlcli.api.interface import Example, ModelInterface
from rlcli.api.key_meaning import REWARDS
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.interface.inference_trial import CallSubject, CallTrial
from rlcli.testing.interface.outputs import TOLERANCE, tensor_of
from rlcli.testing.interface.texts import NONSENSE, RIGHT_AND_WRONG, rows_batch

RIGHT_EXAMPLES = "reward what is right, and no part of it as much; or correct EXAMPLES"


class RewardExampleChecks(CallSubject):
    def test_right_examples_earn_more_than_wrong_ones(self, inferring: CallTrial) -> None:
        """a right response of EXAMPLES earns more than a wrong and an empty one"""
        for text, right, _, nothing in _earned_by_examples(inferring):
            if right <= nothing:
                raise Violation(
                    f"{text!r} earns {right:g}, an empty response {nothing:g}",
                    RIGHT_EXAMPLES,
                    inferring.where,
                )
        self.demand_less_for_wrong_examples(inferring)
        example, *_ = _with_right_and_wrong(inferring.interface)
        right, *malformed = _rewards(inferring, [example], [(example["right"], *NONSENSE)])
        reward, text = max(zip(malformed, NONSENSE, strict=True))
        if not reward < right:
            raise Violation(
                f"{text[:40]!r} earns {reward:g}, as much as {example['right']!r}",
                "accept nothing that is not the answer",
                inferring.where,
            )

    def demand_less_for_wrong_examples(self, inferring: CallTrial) -> None:
        """Raise Violation if a wrong response of EXAMPLES earns as much as a right one, which with
        some arguments is not read as an answer and earns nothing."""
        for text, right, wrong, nothing in _earned_by_examples(inferring):
            if right <= wrong and right != nothing:
                raise Violation(
                    f"{text!r} earns {right:g}, a wrong response {wrong:g}",
                    RIGHT_EXAMPLES,
                    inferring.where,
                )

    def test_examples_earn_what_they_state(self, inferring: CallTrial) -> None:
        """responses of EXAMPLES earn what is stated there"""
        _skip_unless_rewarding(inferring)
        examples = [shown for shown in inferring.interface.EXAMPLES if shown.get("rewards")]
        form = '{…, "rewards": {"a response": 0.5}}'
        skip_unless(examples, f"not tried: EXAMPLES state no rewards: {form}")
        stated = [pair for example in examples for pair in example["rewards"].items()]
        texts = [list(example["rewards"]) for example in examples]
        earned = _rewards(inferring, examples, texts, _with_defaults(inferring.interface))
        for (text, expected), reward in zip(stated, earned, strict=True):
            if reward != pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE):
                raise Violation(
                    f"{text[:60]!r} earns {reward:g}, not {expected:g} as EXAMPLES state",
                    "correct the reward, or what its EXAMPLES state",
                    inferring.where,
                )


def _skip_unless_rewarding(inferring: CallTrial) -> None:
    written = inferring.interface.writes(inferring.call)
    skip_if(written is not None and REWARDS not in written.all, "gives no `rewards`")


def _with_defaults(interface: ModelInterface) -> ModelInterface:
    """The same with every argument at its default that has one."""
    required = {
        argument.name: getattr(interface, argument.name)
        for argument in fields(interface)  # type: ignore[arg-type]
        if argument.init and argument.default is MISSING and argument.default_factory is MISSING
    }
    return type(interface)(**required)


def _with_right_and_wrong(interface: ModelInterface) -> list[Example]:
    """Those of its EXAMPLES that tell them apart."""
    return [shown for shown in interface.EXAMPLES if shown.keys() >= {*RIGHT_AND_WRONG}]


def _earned_by_examples(inferring: CallTrial) -> list[tuple[str, float, float, float]]:
    """The right response of each of the EXAMPLES, what it earns, and what a wrong and an empty
    response to the row earn. Skips the check without any."""
    _skip_unless_rewarding(inferring)
    examples = _with_right_and_wrong(inferring.interface)
    skip_unless(examples, "not tried: shows no EXAMPLES of right and wrong")
    texts = [(example["right"], example["wrong"], "") for example in examples]
    earned = iter(_rewards(inferring, examples, texts))
    return [(right, next(earned), next(earned), next(earned)) for right, _, _ in texts]


def _rewards(
    inferring: CallTrial,
    examples: Sequence[Example],
    texts: Sequence[Sequence[str]],
    interface: ModelInterface | None = None,
) -> list[float]:
    """What each text earns as a response to the row of its example. Skips the check if that is not
    one number."""
    rows = [example["row"] for example in examples]
    prompts = [str(row.get("prompt", "")) for row in rows]
    batch = rows_batch(inferring.tokenizer, [*zip(prompts, texts, strict=True)], rows)
    output = inferring.run(batch, interface=interface)
    skip_if(REWARDS not in output.keys, "gives no `rewards` to compare with EXAMPLES")
    return tensor_of(output, REWARDS).tolist()
