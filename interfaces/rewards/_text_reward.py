"""Rewards that are a function of a response and its row's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import ModelInterface
from rlcli.errors import DataError

from ._scores import one_each, ones
from ._text import response_texts

if TYPE_CHECKING:
    import torch

    from rlcli.api.model import Model


@dataclass(kw_only=True)
class TextReward(ModelInterface):
    """A reward by a rule, `score` of its subclass, which is called in the process of the role: for
    fast rules that do not execute the text."""

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar[Declaration] = {"inference": ("rewards", "solved")}

    solved_from: float = 1.0
    """Minimum reward of a response that counts as right; `accuracy` is the fraction of these."""

    def score(self, response: str, answer: str) -> float:
        """The reward of a response to a row with this answer."""
        raise NotImplementedError(f"{type(self).__name__} has no rule")

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids`, `prompt_mask` → `rewards` float32 and `solved` bool, [N] each.
        Raises DataError F31 for rows without an answer."""
        import torch

        groups = zip(_answers(data), data.seqlens["packed_input_ids"], strict=True)
        answers = [answer for answer, lengths in groups for _ in lengths]
        scores = self.score_texts(response_texts(model.data_tokenizer, data), answers)
        return self._rewarded(data, torch.tensor(scores, dtype=torch.float32))

    def score_texts(self, responses: Sequence[str], answers: Sequence[Any]) -> list[float | None]:
        """The reward of each response."""
        pairs = zip(responses, answers, strict=True)
        return [self.score(response, str(answer)) for response, answer in pairs]

    def mock(self, interface_type: str, model: Model, data: SequenceSample) -> SequenceSample:
        """Mock: marks a random half of the responses as correct, whatever they say."""
        import torch

        from rlcli.api.mocks import uniform

        if interface_type != "inference":
            return super().mock(interface_type, model, data)
        is_right = uniform(model, data, ones(data), "rewards") < 0.5
        rewards = torch.where(is_right, self.solved_from, self.solved_from - 1.0)
        return self._rewarded(data, rewards.to(torch.float32))

    def _rewarded(self, data: SequenceSample, rewards: torch.Tensor) -> SequenceSample:
        return one_each(data, {"rewards": rewards, "solved": rewards >= self.solved_from}, {})


def _answers(data: SequenceSample) -> list[Any]:
    answers = data.metadata.get("answer", [None] * data.bs)
    for id_, answer in zip(data.ids, answers, strict=True):
        if answer is None:
            hint = "this reward needs a dataset whose rows have an answer"
            raise DataError(f"sample {id_} has no answer to compare with", hint=hint, code="F31")
    return list(answers)
