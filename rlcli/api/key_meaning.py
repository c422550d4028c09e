"""The meaning of a batch's well-known keys: one table, which all other parts of rlcli use.

Code that needs the sequences of a batch, or the numbers that people want to see, takes the names
from here. A key that is not in the table is known only to its own components, and nothing is
assumed about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SEQUENCES = "packed_input_ids"
"""The sequences that a model works on, prompts and responses;
other keys have rows for their tokens."""
PROMPTS = "packed_prompts"
"""The prompts: a dataset whose rows have this key needs responses."""
PROMPT_MASK = "prompt_mask"
"""Which tokens of SEQUENCES the policy did not sample: the prompt, and what it observed between its
turns."""
FORKS = "forks"
"""Which tokens of SEQUENCES begin another row of a response. A chat template that rewrites earlier
turns makes them: the policy then continues a text that does not begin with what it has seen so far.
The rows of a response follow each other in one sequence, and an engine computes each by itself
(`rlcli.api.forked_rows`)."""
REWARDS = "rewards"
"""The reward of a response; shown next to it."""
SOLVED = "solved"
"""Whether a response is right."""
ANSWER_CLASSES = "answer_classes"
"""Which final answer a response gives: responses to one prompt with equal answers have equal
numbers, from 0 in the order in which the answers first appear; -1 for a response without an answer.
Majority votes are counted with it."""
SAMPLED_LOGPROBS = "packed_logprobs"
"""The log-probs with which the tokens of responses were sampled."""
REFERENCE = "packed_ref_logprobs"
"""Those of the same tokens by a model that the policy is to stay near."""
ROUTED_EXPERTS = "routed_experts"
"""The experts that tokens were routed to while responses were sampled: [layers with experts,
experts per token] for each token but the last, which the sampler has not read. An engine that
computes with such a batch routes the tokens to these experts."""
NOT_ENDED = "seq_no_eos_mask"
"""Which responses were cut off before they ended by themselves."""
DENSE_REWARDS = "dense_rewards"
"""A reward, or a score, after each token; of an episode, that of a turn at its last token."""
ADVANTAGES = "advantages"
"""How much better each token of a response was than expected."""
CHOSEN = "chosen"
"""Which responses are trained on, where a call chooses; without it, all are."""
DESIRABLE = "desirable"
"""Which answers are good examples; the others show what to avoid."""

SOURCE = "source"
"""Metadata of a sample: which dataset it comes from, if the run's dataset combines several."""
MESSAGES = "messages"
"""Metadata of a sample: its prompt as messages, where a chat template has written it. Tools can
then be added to it, and further turns."""
ATTEMPT = "attempt"
"""Metadata of a sample: how many times it was started before.
Every attempt has its own responses."""
PLACE = "batch_index"
"""Metadata of a sample in a call that takes the batch of a step: its place there."""
AGE = "age"
"""Metadata of a sample in a call that takes the batch of a step: training steps between the weights
that generated the oldest part of it and those with which the step begins. Absent where no sample is
generated ahead of its step."""
DROPPED = "dropped"
"""Metadata of a call's output: for each sample the reason why it is not trained on, or None."""
UNPLAYED = "environment_failed"
"""The reason of samples whose environment failed: they have no scores, in an evaluation neither."""
WEIGHT_VERSIONS = "weight_versions"
"""Metadata of a generating call's output: for each sample a list with `(version, tokens)` of each
segment of each response, where weights may change while responses are in progress."""
REASONS = "reward_reasons"
"""Metadata of a reward's output: for each sample a list with a short text for each response, why it
has its reward, or None. It is shown next to the response."""


def one(_length: int) -> int:
    return 1


def full(length: int) -> int:
    return length


def minus_one(length: int) -> int:
    return max(length - 1, 0)


_PER = {one: "one per sequence", full: "one per token", minus_one: "one per token except the first"}


@dataclass(frozen=True)
class Numbers:
    """A kind of numbers."""

    expected: str
    """The dtypes that they may have, in words."""
    fits: Callable[[torch.dtype], bool]


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or str(dtype) == "torch.bool")


TOKENS = Numbers("whole numbers (int64)", _is_whole)
NUMBERED = Numbers("whole numbers (int64)", _is_whole)
EXPERTS = Numbers("whole numbers (uint8 or int16)", _is_whole)
FLAGS = Numbers("bool", lambda dtype: str(dtype) == "torch.bool")
LOGPROBS = Numbers("floating-point (float32)", lambda dtype: dtype.is_floating_point)
REALS = Numbers("floating-point (float32)", lambda dtype: dtype.is_floating_point)
SCORES = Numbers("numbers (float32)", lambda dtype: not dtype.is_complex)
ANYTHING = Numbers("anything", lambda _: True)


@dataclass(frozen=True)
class Meaning:
    """The meaning of one key."""

    rows: Callable[[int], int]
    """Number of tokens in a sequence → number of its rows."""
    numbers: Numbers
    is_flat: bool = True
    """Whether a row is one number."""
    has_own_sequences: bool = False
    """Whether its sequences may differ from those of SEQUENCES."""
    shown_as: str | None = None
    """Name of the mean over the samples in metrics; None: it is not reported."""

    @property
    def per(self) -> str:
        return _PER[self.rows]


_TABLE: tuple[tuple[str, Meaning], ...] = (
    (SEQUENCES, Meaning(full, TOKENS)),
    (f"{PROMPTS} packed_seq input_ids seq", Meaning(full, TOKENS, has_own_sequences=True)),
    (f"{PROMPT_MASK} {FORKS}", Meaning(full, FLAGS)),
    ("loss_mask ppo_loss_mask", Meaning(minus_one, FLAGS)),
    (f"{NOT_ENDED} greedy_seq_no_eos_mask {CHOSEN} {DESIRABLE}", Meaning(one, FLAGS)),
    (
        f"{SAMPLED_LOGPROBS} {REFERENCE} proximal_logprobs old_logprobs",
        Meaning(minus_one, LOGPROBS),
    ),
    ("mismatched_input_ids", Meaning(full, TOKENS, has_own_sequences=True)),
    ("mismatched_prompt_mask", Meaning(full, FLAGS, has_own_sequences=True)),
    ("mismatched_ref_logprobs", Meaning(minus_one, LOGPROBS, has_own_sequences=True)),
    ("logprobs old_logp prox_logp ref_logp", Meaning(minus_one, LOGPROBS)),
    (ROUTED_EXPERTS, Meaning(minus_one, EXPERTS, is_flat=False)),
    (f"values {DENSE_REWARDS}", Meaning(full, REALS)),
    (f"{ADVANTAGES} returns kl_rewards loss_weights kl_weights", Meaning(minus_one, REALS)),
    (REWARDS, Meaning(one, SCORES, shown_as="reward")),
    (SOLVED, Meaning(one, SCORES, shown_as="accuracy")),
    (ANSWER_CLASSES, Meaning(one, NUMBERED)),
    ("base_scores greedy_base_scores greedy_rewards", Meaning(one, SCORES)),
    ("margins", Meaning(one, SCORES)),
    ("task_ids", Meaning(one, ANYTHING)),
    ("logits_mask packed_logits_mask", Meaning(full, ANYTHING, is_flat=False)),
)

MEANINGS: Mapping[str, Meaning] = {key: meaning for keys, meaning in _TABLE for key in keys.split()}
"""Key → its meaning."""

COMPANIONS: Mapping[str, str] = {SEQUENCES: FORKS}
"""Key → the key that goes along with it, if a batch has that: without it the first is misread."""
