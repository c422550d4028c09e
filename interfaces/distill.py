"""On-policy distillation: a student learns, on its own responses,
to match its teacher's confidence in each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import Limits, Needs
from rlcli.api.metrics import Metrics
from rlcli.api.micro_batches import Cut
from rlcli.api.model import (
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Stats,
    register_interface,
)
from rlcli.ops.distillation import full_reverse_kl, sampled_reverse_kl
from rlcli.ops.kl import kl_of_policy
from rlcli.ops.packing import action_mask, all_but_last

from ._optimizer_steps import OptimizerSteps, optimizer_steps

Estimator = Literal["sampled", "full"]


@dataclass(kw_only=True)
class DistillInterface(OptimizerSteps, ModelInterface):
    """Minimises the reverse KL from the teacher at each token of the student's responses."""

    ELSEWHERE: ClassVar[str] = "gkd kd opd on_policy_distillation"
    READS: ClassVar[Declaration] = {
        "train_step": (
            "packed_input_ids",
            "prompt_mask",
            "packed_logprobs if estimator=sampled",
            "packed_ref_logprobs if estimator=sampled",
            "teacher_distributions if estimator=full",
        ),
        "inference": ("packed_input_ids",),
    }
    WRITES: ClassVar[Declaration] = {"inference": ("teacher_distributions",)}
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",), "inference": ("lm",)}
    NEEDS: ClassVar[Needs] = {"ratio_cap": "estimator=sampled"}
    LIMITS: ClassVar[Limits] = {"ratio_cap": {"gt": 0}, "temperature": {"gt": 0}}
    CUT: ClassVar[Cut] = "sequence"
    METRICS: ClassVar[Metrics] = {
        "reverse_kl": (
            "nats per token",
            "KL of the student from the teacher, mean over the tokens of responses",
        ),
    }

    estimator: Estimator = "sampled"
    """How the KL of a token is estimated. "sampled": from the log-probs of the sampled tokens, by a
    `reference` call of the teacher. "full": from the whole distribution (an `inference` call of
    this interface by the teacher), exact and with less noise, but it transfers and stores a number
    per vocabulary token, so it suits small vocabularies."""

    temperature: float = 1.0
    """Logits are divided by this first; use the sampling temperature
    (`${generation.temperature}`)."""

    ratio_cap: float = 2.0
    """With estimator: sampled, maximum weight of a token that has become likelier since it was
    sampled."""

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids` → `teacher_distributions` [T - N, V] float32,
        the log-probs of each next token."""

        def distributions(output: ModelOutput, batch: SequenceSample) -> torch.Tensor:
            return self._distributions(output, batch).float()

        seqlens = [
            [length - 1 for length in lengths] for lengths in data.seqlens["packed_input_ids"]
        ]
        tokens = data.select(["packed_input_ids"])
        outputs = model.module.forward(
            tokens, mb_spec, post_hook=distributions, output_seqlens=seqlens, cut=self.CUT
        )
        return SequenceSample.from_default(
            ids=data.ids,
            seqlens={"teacher_distributions": seqlens},
            data={"teacher_distributions": outputs},
        )

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """`minibatches` optimizer steps on the mean reverse KL per response token,
        reported as `reverse_kl`."""
        return optimizer_steps(
            self, model, data, self._loss, _response_tokens, mb_spec, cut=self.CUT
        )

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        mask, tensors = _responses(batch), batch.data
        output.temperature = self.temperature
        if self.estimator == "full":
            terms = divergence = full_reverse_kl(
                self._distributions(output, batch)[mask],
                tensors["teacher_distributions"][mask].to(torch.float32),
            )
        else:
            output.actions = mask
            logprobs, sampled = output.logprobs[mask], tensors["packed_logprobs"][mask]
            teacher = tensors["packed_ref_logprobs"][mask]
            terms = sampled_reverse_kl(logprobs, teacher, sampled, self.ratio_cap)
            divergence = kl_of_policy(logprobs, sampled, teacher)
        return terms.sum(), {"reverse_kl": (divergence.detach().sum(), mask.count_nonzero())}

    def _distributions(self, output: ModelOutput, batch: SequenceSample) -> torch.Tensor:
        """[T - N, V] log-probs; those at a sequence's last token are left out,
        as they predict nothing."""
        output.temperature = self.temperature
        rows = all_but_last(tuple(batch.flat_seqlens("packed_input_ids")), output.logits.device)
        return output.logits[rows].log_softmax(-1)


def _responses(batch: SequenceSample) -> torch.Tensor:
    """[A] the actions that chose a token of a response."""
    return action_mask(batch.data["prompt_mask"], batch.flat_seqlens("packed_input_ids"))


def _response_tokens(batch: SequenceSample) -> torch.Tensor:
    return _responses(batch).count_nonzero()


register_interface("distill", DistillInterface)
