"""An engine with a few hundred parameters: the full engine contract, in milliseconds,
without a backend.

Its language model predicts the next token from the mean of the embeddings so far, so it depends on
every earlier token of the same sequence and on nothing else: leaks between packed sequences are
visible. Several ranks can be simulated by threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.engine_loop import TrainLoop
from rlcli.api.model import (
    FinishedResponse,
    GeneratedResponses,
    Model,
    ModelOutput,
    PipelinableEngine,
    ResponseStream,
)

T = TypeVar("T")


class TinyLM(nn.Module):
    """[T] token ids of packed sequences → logits [T, vocab] and values [T]."""

    def __init__(
        self, vocab: int = 11, width: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64
    ):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=dtype))

        self.embedding = drawn(vocab, width)
        self.head = drawn(vocab, width)
        self.value_head = drawn(width)

    def forward(self, tokens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Hidden states [T, width]."""
        states = []
        for sequence in self.embedding[tokens].split(list(lengths)):
            counts = torch.arange(1, len(sequence) + 1, dtype=sequence.dtype)[:, None]
            states.append(torch.tanh(sequence.cumsum(0) / counts + sequence))
        return torch.cat(states) if states else self.embedding[tokens]


class TinyOutput:
    """`ModelOutput` of a `TinyLM`."""

    def __init__(self, module: TinyLM, tokens: torch.Tensor, lengths: Sequence[int]):
        self.temperature = 1.0
        self.actions: torch.Tensor | None = None
        self._module = module
        self._tokens = tokens
        ends = torch.tensor(list(lengths), dtype=torch.long).cumsum(0) - 1
        self._acting = torch.ones(len(tokens), dtype=torch.bool)
        self._acting[ends] = False
        self._hidden = module(tokens, lengths)

    @property
    def logits(self) -> torch.Tensor:
        return (self._hidden @ self._module.head.T) / self.temperature

    @property
    def logprobs(self) -> torch.Tensor:
        following = self._tokens.roll(-1)[self._acting]
        return self._requested(self._choices.gather(1, following[:, None])[:, 0])

    @property
    def entropy(self) -> torch.Tensor:
        return self._requested(-(self._choices.exp() * self._choices).sum(-1))

    @property
    def _choices(self) -> torch.Tensor:
        """[T - N, vocab] log-probs of all tokens."""
        return self.logits[self._acting].log_softmax(-1)

    def _requested(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.actions is None else torch.where(self.actions, scores, 0.0)

    @property
    def values(self) -> torch.Tensor:
        return self._hidden @ self._module.value_head

    @property
    def zero(self) -> torch.Tensor:
        return torch.stack([parameter.sum() * 0 for parameter in self._module.parameters()]).sum()


class TinyRanks:
    """n data-parallel ranks as threads of this process, with real reductions between them."""

    def __init__(self, n: int):
        self.n = n
        self._barrier = threading.Barrier(n, timeout=60)
        self._slots: list[torch.Tensor] = [torch.empty(0)] * n
        self._is_one_done = False

    def all_reduce(self, rank: int, value: torch.Tensor, op: str) -> torch.Tensor:
        if self._is_one_done:
            self._barrier.abort()
        self._slots[rank] = value.detach().clone()
        self._barrier.wait()
        stacked = torch.stack(self._slots)
        self._barrier.wait()
        return {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """`work(rank)` on all ranks at once; raises the first error of any, and RuntimeError if one
        is done while another still waits for it in a reduction."""

        def on_rank(rank: int) -> T:
            try:
                result = work(rank)
            except BaseException:
                self._barrier.abort()
                raise
            self._is_one_done = True
            if self._barrier.n_waiting:
                self._barrier.abort()
            return result

        self._is_one_done = False
        # after a fork torch renews its pool when it is next needed: not safely in several threads
        torch.set_num_threads(torch.get_num_threads())
        threads = ThreadPoolExecutor(self.n)
        outcomes = [threads.submit(on_rank, rank) for rank in range(self.n)]
        errors = [error for outcome in outcomes if (error := outcome.exception())]
        threads.shutdown()
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        if errors:
            raise RuntimeError(
                "a rank reduces alone: every rank calls all_reduce equally often, "
                "with or without samples"
            )
        return [outcome.result() for outcome in outcomes]


class TinyEngine(TrainLoop, PipelinableEngine):
    """Plain gradient descent on a `TinyLM`, in float64 by default,
    so that equal means equal to 1e-12."""

    def __init__(
        self, module: TinyLM, lr: float = 0.1, ranks: TinyRanks | None = None, rank: int = 0
    ):
        self.model = module
        self.lr = lr
        self.ranks = ranks
        self.rank = rank
        self.steps = 0
        """Optimizer steps applied."""
        self.scheduled: list[int] = []
        """The `version_steps` of every call of the schedule."""
        self.gradient: dict[str, torch.Tensor] = {}
        """Gradients of the last optimizer step, over all ranks."""
        self.micro_batches = 0
        """Number of forward passes so far."""

    def forward_micro_batch(
        self, micro_batch: SequenceSample, then: Callable[[ModelOutput], T]
    ) -> T:
        self.micro_batches += 1
        tokens = micro_batch.data["packed_input_ids"]
        return then(TinyOutput(self.model, tokens, micro_batch.flat_seqlens("packed_input_ids")))

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        if loss.requires_grad:
            loss.backward()

    def optimizer_step(self) -> float:
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            self.gradient[name] = self.all_reduce(gradient)
        norm = float(nn.utils.get_total_norm(list(self.gradient.values())))
        if math.isfinite(norm):
            self.steps += 1
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.sub_(self.lr * self.gradient[name])
        return norm

    def optimizer_zero_grad(self) -> None:
        self.model.zero_grad()

    def lr_scheduler_step(self, version_steps: int) -> float:
        self.scheduled.append(version_steps)
        return self.lr

    def all_reduce(self, value: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return value if self.ranks is None else self.ranks.all_reduce(self.rank, value, op)

    @property
    def dp_size(self) -> int:
        return 1 if self.ranks is None else self.ranks.n

    def save_to_hf(self, tokenizer: Any, save_dir: str) -> None:
        from safetensors.torch import save_file

        Path(save_dir).mkdir(parents=True, exist_ok=True)
        save_file(dict(self.model.state_dict()), str(Path(save_dir) / "model.safetensors"))

    def generate(
        self,
        input_: SequenceSample,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        seeds: Sequence[int],
    ) -> GeneratedResponses:
        prompts = input_.data["packed_prompts"].split(input_.flat_seqlens("packed_prompts"))
        responses = [
            self.respond(
                number, prompts[number // gconfig.responses_per_prompt], seed, tokenizer, gconfig
            )
            for number, seed in enumerate(seeds)
        ]
        tokens = [response.tokens for response in responses]
        logprobs = [response.logprobs for response in responses]
        ended = torch.tensor([response.ended for response in responses], dtype=torch.bool)
        return GeneratedResponses(tokens, logprobs, ended)

    @torch.no_grad()
    def respond(
        self,
        number: int,
        prompt: torch.Tensor,
        seed: int,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
    ) -> FinishedResponse:
        """A response to one prompt, drawn with a seed."""
        generator = torch.Generator().manual_seed(seed)
        tokens = prompt
        logprobs: list[torch.Tensor] = []
        has_ended = False
        while len(logprobs) < gconfig.max_new_tokens and not has_ended:
            output = TinyOutput(self.model, tokens, [len(tokens)])
            output.temperature = gconfig.temperature
            choices = output.logits[-1].log_softmax(-1)
            if gconfig.greedy:
                token = choices.argmax()
            else:
                token = choices.exp().multinomial(1, generator=generator)[0]
            logprobs.append(choices[token])
            tokens = torch.cat([tokens, token[None]])
            has_ended = int(token) in (tokenizer.eos_token_id, *gconfig.stop_token_ids)
        scores = torch.stack(logprobs).float()
        return FinishedResponse(number, tokens[len(prompt) :], scores, has_ended, ())

    def open(
        self, tokenizer: Any, gconfig: GenerationHyperparameters, longest_prompt: int
    ) -> ResponseStream:
        return TinyStream(self, tokenizer, gconfig)


class TinyStream(ResponseStream):
    """Samples whole responses, one with each `collect`; the last requested comes first, so that
    nothing may depend on the order."""

    def __init__(self, engine: TinyEngine, tokenizer: Any, gconfig: GenerationHyperparameters):
        self._engine, self._tokenizer = engine, tokenizer
        self._settings = gconfig
        self._waiting: dict[int, tuple[torch.Tensor, int]] = {}
        self._submitted = 0

    def make_room(self, longest_prompt: int) -> None:
        """It has room for every prompt."""

    def submit(self, prompt: torch.Tensor, seed: int) -> int:
        self._waiting[self._submitted] = prompt, seed
        self._submitted += 1
        return self._submitted - 1

    def collect(self, until: Callable[[], bool] = lambda: False) -> list[FinishedResponse]:
        if not self._waiting or until():
            return []
        number, (prompt, seed) = self._waiting.popitem()
        return [self._engine.respond(number, prompt, seed, self._tokenizer, self._settings)]

    def pause(self) -> None:
        raise NotImplementedError("its weights do not change while it samples")

    def resume(self) -> None:
        raise NotImplementedError("it cannot be paused")

    def abort(self) -> list[FinishedResponse]:
        self._waiting.clear()
        return []

    def close(self) -> None:
        self._waiting.clear()


def tiny_model(
    tokenizer: Any = None,
    ranks: TinyRanks | None = None,
    rank: int = 0,
    lr: float = 0.1,
    **settings: Any,
) -> Model:
    """A role with a `TinyEngine`; `settings` are those of `TinyLM`."""
    engine = TinyEngine(TinyLM(**settings), lr, ranks, rank)
    return Model("tiny", engine, tokenizer, torch.device("cpu"))
