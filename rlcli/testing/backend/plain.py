"""Reference results: transformers' own forward pass in float64, one sequence at a time,
and torch's AdamW.

Nothing here knows about packing, micro-batches, ranks or engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlcli.api.data import SequenceSample
from rlcli.testing.on_host import on_host
from rlcli.testing.tiny_models import VOCABULARY, tiny_model

TEMPERATURE = 0.8

Stats = dict[str, float]
"""Name of a number of a step → its value."""

Loss = Callable[[nn.Module, SequenceSample], tuple[torch.Tensor, float]]
"""(model, batch) → loss summed over its tokens, and the weight to divide by."""


@dataclass(frozen=True)
class AdamW:
    """An optimizer's settings, including wrong ones: each is a mistake that a backend can make."""

    lr: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = math.inf
    decays_vectors: bool = False
    """Biases and norms decay too."""
    is_decoupled: bool = True
    """Weight decay is applied separately, not added to the gradient."""
    keeps_gradients: bool = False
    """A step adds to the gradients of the previous one."""

    @classmethod
    def described_by(cls, backend: object) -> AdamW:
        """Take a backend's settings of these names; neutral values where it has none."""
        names = ("lr", "weight_decay", "beta1", "beta2", "eps", "max_grad_norm")
        return cls(**{name: getattr(backend, name) for name in names if hasattr(backend, name)})

    def optimizer(self, lm: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in lm.parameters() if parameter.requires_grad]
        vectors = {
            "params": [parameter for parameter in trained if parameter.dim() <= 1],
            "weight_decay": self.weight_decay if self.decays_vectors else 0.0,
        }
        matrices = {
            "params": [parameter for parameter in trained if parameter.dim() > 1],
            "weight_decay": self.weight_decay,
        }
        groups = [matrices, vectors]
        kind = torch.optim.AdamW if self.is_decoupled else torch.optim.Adam
        return kind(groups, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, foreach=False)


def exact(lm: Any) -> nn.Module:
    """The model in float64, in which torch has no grouped products for experts."""
    lm.set_experts_implementation("eager")
    return lm.double()


def plain_model(family: str, head: str = "lm") -> nn.Module:
    """A tiny model in float64, without gradients."""
    return exact(tiny_model(family, head=head)).requires_grad_(False)


class PlainTraining:
    """A training loop over an unmodified model."""

    def __init__(self, lm: nn.Module, settings: AdamW):
        self.lm = exact(lm)
        self.settings = settings
        self.optimizer = settings.optimizer(self.lm)

    @on_host()
    def step(self, shares: Sequence[SequenceSample], loss: Loss, rate: float) -> Stats:
        """One step at `rate` times the learning rate, on the mean over `shares` of each one's mean
        over its tokens."""
        if not self.settings.keeps_gradients:
            self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for share in shares:
            summed, weight = loss(self.lm, share)
            total = total + summed / max(weight, 1.0) / len(shares)
        total.backward()
        norm = nn.utils.clip_grad_norm_(self.lm.parameters(), self.settings.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * rate
        self.optimizer.step()
        return {"loss": float(total.detach()), "grad_norm": float(norm)}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.lm.named_parameters()}


# -- one sequence at a time ------------------------------------------------------------------------


def sequences(sample: SequenceSample, key: str = "packed_input_ids") -> list[torch.Tensor]:
    return list(sample.data[key].split(sample.flat_seqlens(key)))


def packed(texts: Sequence[torch.Tensor]) -> SequenceSample:
    """A sample of each of these sequences of tokens."""
    ids = [str(number) for number in range(len(texts))]
    data = {"packed_input_ids": torch.cat(list(texts))}
    return SequenceSample.from_default(ids=ids, seqlens=list(map(len, texts)), data=data)


def acting(sample: SequenceSample) -> torch.Tensor:
    """[T − N] bool: the next token belongs to the response."""
    return torch.cat([~mask[1:] for mask in sequences(sample, "prompt_mask")])


def value_targets(sample: SequenceSample) -> torch.Tensor:
    """[T]: the target of a value head for each token."""
    return torch.cat(sequences(sample)) / VOCABULARY


@on_host()
def logits_of(lm: nn.Module, sample: SequenceSample) -> list[torch.Tensor]:
    """For each sequence [T_i, vocab], or [T_i, 1] for a value head."""
    return [lm(input_ids=tokens[None], use_cache=False).logits[0] for tokens in sequences(sample)]


@on_host()
def scores_of(
    lm: nn.Module, sample: SequenceSample, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the next tokens and entropies, [T − N] each."""
    logprobs, entropies = [], []
    for tokens, logits in zip(sequences(sample), logits_of(lm, sample), strict=True):
        choices = (logits[:-1] / temperature).log_softmax(-1)
        logprobs.append(choices.gather(1, tokens[1:, None])[:, 0])
        entropies.append(-(choices.exp() * choices).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def values_by(lm: nn.Module, sample: SequenceSample) -> torch.Tensor:
    """[T] the values of a value head."""
    return torch.cat(logits_of(lm, sample))[:, 0]


def plain_answer_loss(lm: nn.Module, sample: SequenceSample) -> tuple[torch.Tensor, float]:
    mask = acting(sample)
    logprobs, entropies = scores_of(lm, sample, TEMPERATURE)
    return -(logprobs * mask).sum() - 0.1 * (entropies * mask).sum(), float(mask.sum())


def plain_value_loss(lm: nn.Module, sample: SequenceSample) -> tuple[torch.Tensor, float]:
    values = values_by(lm, sample)
    return (values - value_targets(sample)).square().sum(), float(len(values))


@on_host()
def greedy_answers(lm: nn.Module, sample: SequenceSample, new_tokens: int) -> list[list[int]]:
    """The answers of transformers' own `generate` to each prompt."""
    decode: Any = lm.generate
    answers = []
    for prompt in sequences(sample, "packed_prompts"):
        mask = torch.ones_like(prompt[None])
        text = decode(prompt[None], attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        answers.append(text[0, len(prompt) :].tolist())
    return answers
