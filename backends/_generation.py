"""Batched generation with a static KV cache: packed prefill, one token per row and step,
free slots refilled.

Each response draws from its own random stream, one uniform number per token, and picks each token
by inverting the cumulative distribution. So a response depends only on its prompt, the weights and
its seed, not on the rest of the batch.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.headway import Headway
from rlcli.api.model import GeneratedResponses
from rlcli.ops.attention import CachedAttention, packed_attention
from rlcli.ops.packing import positions

from ._decoding_passes import CapturedPasses, Passes, PassSize, can_be_captured
from ._decoding_rows import ActiveRows, Begun, SlotCache
from ._memory import concurrent_responses
from ._transformers import Pack, compute_in, head_of

if TYPE_CHECKING:
    from ._routing_replay import RouterChoices


BLOCK = 256
"""Tokens of the vocabulary whose probabilities are added up before one of them is drawn."""


class Sampler:
    """Samples next tokens from logits, as `gconfig` says."""

    def __init__(self, gconfig: GenerationHyperparameters, end_ids: torch.Tensor, vocabulary: int):
        self.gconfig = gconfig
        self.end_ids = end_ids[end_ids < vocabulary]
        self.vocabulary = vocabulary
        """Ids from here on are padding of the embedding matrix; they are never sampled."""

    def next(
        self, logits: torch.Tensor, drawn: torch.Tensor, uniform: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their log-probs, [B] each, from logits [B,
        V] already divided by the temperature.

        `drawn` [B] counts each row's tokens so far, `uniform` [B] is its random number. The
        log-prob is that of the whole distribution, before top-p, top-k and bans.
        """
        allowed = self._without_bans(logits, drawn)
        probs = logits.softmax(-1)
        if self.gconfig.greedy:
            tokens = allowed.argmax(-1)
        else:
            permitted = self._truncate(allowed)
            tokens = self._draw(probs if permitted is logits else permitted.softmax(-1), uniform)
        logsumexp = logits.amax(-1) - probs.amax(-1).log()  # without a second pass of exponentials
        return tokens, logits.gather(1, tokens[:, None])[:, 0] - logsumexp

    def _without_bans(self, logits: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """Logits in which what may not be sampled is -inf: padding of the embedding matrix, and
        ends of responses that are too short."""
        allowed = logits
        if self.vocabulary < logits.shape[1]:
            allowed = allowed.clone()
            allowed[:, self.vocabulary :] = -torch.inf
        if self.gconfig.min_new_tokens > 0:
            early = drawn < self.gconfig.min_new_tokens
            ends = allowed[:, self.end_ids].masked_fill(early[:, None], -torch.inf)
            allowed = allowed.index_copy(1, self.end_ids, ends)
        return allowed

    def _truncate(self, logits: torch.Tensor) -> torch.Tensor:
        top_k, top_p = self.gconfig.top_k, self.gconfig.top_p
        if 0 < top_k < logits.shape[1]:
            threshold = logits.topk(top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < threshold, -torch.inf)
        if top_p < 1:
            ordered, order = logits.sort(dim=-1, descending=True)
            probs = ordered.softmax(-1)
            beyond = probs.cumsum(-1) - probs >= top_p
            logits = logits.masked_fill(beyond.scatter(1, order, beyond), -torch.inf)
        return logits

    @staticmethod
    def _draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """The first token whose cumulative probability exceeds the row's uniform number."""
        if missing := -probs.shape[1] % BLOCK:
            probs = nn.functional.pad(probs, (0, missing))
        blocks = probs.unflatten(1, (-1, BLOCK))
        sums = blocks.sum(-1).double()
        number, below = _reached(sums, uniform * sums.sum(-1))
        block = blocks[torch.arange(len(blocks), device=blocks.device), number]
        return number * BLOCK + _reached(block.double(), below)[0]


def _reached(parts: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of `parts` [B, n] with which their running sum exceeds `target` [B], or else the
    last that is not 0; and by how much the sum of those before it is below the target."""
    sums = parts.cumsum(-1)
    first = torch.searchsorted(sums, target[:, None], right=True)
    first = torch.minimum(first, sums.argmax(-1, keepdim=True))
    before = sums.gather(1, first) - parts.gather(1, first)
    return first[:, 0], target - before[:, 0]


def _cache_argument(backbone: nn.Module) -> str:
    """The name under which a model takes its cache: releases of transformers differ."""
    return (
        "cache" if "cache" in inspect.signature(backbone.forward).parameters else "past_key_values"
    )


class DistinctTexts:
    """The texts of several responses, those that share one tensor once, packed one after another;
    on the host."""

    def __init__(self, texts: Sequence[torch.Tensor]):
        distinct = {id(text): text for text in texts}
        numbers = {identity: number for number, identity in enumerate(distinct)}
        self.packed = torch.cat([*distinct.values()])
        """[T] tokens."""
        self.lengths = [len(text) for text in distinct.values()]
        """Of each distinct text."""
        self.lengths_of_responses = [len(text) for text in texts]
        """Of each response's text."""
        self._numbers = [numbers[id(text)] for text in texts]

    def places(self) -> torch.Tensor:
        """[sum of lengths_of_responses] where the tokens of each response are in `packed`."""
        parts = torch.arange(len(self.packed)).split(self.lengths)
        return torch.cat([parts[number] for number in self._numbers])


class BatchDecoder:
    """Answers a list of prompts with one model."""

    def __init__(
        self,
        lm: Any,
        dtype: torch.dtype,
        gconfig: GenerationHyperparameters,
        sampler: Sampler,
        cache_tokens: int | None = None,
        choices: RouterChoices | None = None,
        pack: Pack = packed_attention,
    ):
        self.lm = lm
        self.dtype = dtype
        self.gconfig = gconfig
        self.sampler = sampler
        self.cache_tokens = cache_tokens
        """Capacity of the KV cache; None: as much as `max_concurrent_responses` need."""
        self.choices = choices
        """The choices of the model's routers, which are then recorded."""
        self.device = next(lm.parameters()).device
        self.head = head_of(lm, gconfig.temperature)
        self._captures = (
            choices is None and self.head.shard is None and can_be_captured(lm, self.device)
        )
        self._cache_argument = _cache_argument(lm.base_model)
        self._pack = pack

    def run(self, prompts: Sequence[torch.Tensor], seeds: Sequence[int]) -> GeneratedResponses:
        """`seeds` has responses_per_prompt seeds per prompt, in prompt-major order.

        Raises ValueError if the cache has no room for the longest prompt and its response.
        """
        responses = self._unfinished(len(seeds))
        for _ in self._passes(prompts, seeds, responses):
            pass
        return responses

    def stream(
        self, prompts: Sequence[torch.Tensor], seeds: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """(number of a response, its next token), as soon as it is sampled."""
        for rows, first in self._passes(prompts, seeds, self._unfinished(len(seeds))):
            yield from zip(
                rows.response[first:], rows.last_token[first : rows.active].tolist(), strict=True
            )

    @torch.no_grad()
    def _passes(
        self, prompts: Sequence[torch.Tensor], seeds: Sequence[int], responses: GeneratedResponses
    ) -> Iterator[tuple[ActiveRows, int]]:
        """Fill `responses`. Yields after each forward pass, before finished responses are removed:
        the rows, and the first of those that have a new token."""
        group, limit = self.gconfig.responses_per_prompt, self.gconfig.max_new_tokens
        if len(seeds) != len(prompts) * group:
            raise ValueError(
                f"{len(prompts)} prompts need {len(prompts) * group} seeds, {len(seeds)} given"
            )
        total = len(seeds)
        if not total:
            return
        work = Headway(total, "responses")
        decoding = self.decoding(total, max(len(p) for p in prompts) + limit)
        for number, seed in enumerate(seeds):
            decoding.submit(Begun(number, prompts[number // group], seed))
        with compute_in(self.dtype, self.device):
            while decoding.is_busy:
                yield decoding.rows, decoding.advance()
                for begun, by_itself in decoding.collect():
                    begun.store(responses, by_itself)
                    work.advance()

    def _unfinished(self, responses: int) -> GeneratedResponses:
        nothing = torch.zeros(0)
        no_routes = self.choices.no_tokens if self.choices is not None else None
        return GeneratedResponses(
            [nothing.to(torch.int64)] * responses,
            [nothing] * responses,
            torch.zeros(responses, dtype=torch.bool),
            None if no_routes is None else [no_routes] * responses,
        )

    def decoding(self, total: int, longest: int) -> Decoding:
        """Room for responses of at most `longest` tokens, including their prompts, with at most
        `total` of them in progress at once. Raises ValueError if the cache has no room for one."""
        slots = concurrent_responses(
            total, longest, self.gconfig.max_concurrent_responses, self.cache_tokens
        )
        if not slots:
            raise ValueError(
                f"a KV cache of {self.cache_tokens} tokens has no room for a response of {longest}"
            )
        return Decoding(self, slots, longest)

    def prefill(self, cache: SlotCache, rows: ActiveRows, batch: Sequence[Begun]) -> None:
        """Read the responses' texts so far, each distinct text once, and draw their next tokens."""
        texts = DistinctTexts([begun.text for begun in batch])
        new_rows = rows.add(batch)
        lengths = torch.tensor(texts.lengths_of_responses)
        source = texts.places().to(self.device)
        row_of_token = new_rows.repeat_interleave(lengths).to(self.device)
        columns = positions(texts.lengths_of_responses, self.device)
        cache.write_prompts(source, row_of_token, columns)
        hidden, routes = self._forward(
            texts.packed.to(self.device)[None],
            positions(texts.lengths, self.device)[None],
            cache,
            self._pack(tuple(texts.lengths), self.device),
        )
        if routes is not None:
            rows.write_routes(row_of_token, columns, routes[source])
        last_tokens = source[(lengths.cumsum(0) - 1).to(self.device)]
        self._sample(rows, hidden[0, last_tokens], new_rows.to(self.device))

    def passes(self, cache: SlotCache, rows: ActiveRows) -> Passes:
        """Passes that draw one more token for every active row."""
        # cheaper per operation; what outlives a pass was allocated before it
        without_gradients = torch.inference_mode if self.device.type == "cpu" else torch.no_grad
        next_tokens = without_gradients()(partial(self._next_tokens, cache, rows))
        if not self._captures:
            return Passes(next_tokens)
        # casts that autocast remembers would be in a graph's memory
        context = partial(compute_in, self.dtype, self.device, remembers_casts=False)
        return CapturedPasses(next_tokens, PassSize(cache.slots, cache.length), context)

    def _next_tokens(self, cache: SlotCache, rows: ActiveRows, size: PassSize) -> None:
        """One more token for each row; tensors of fixed shapes, none of which the host reads."""
        which = torch.arange(size.rows, device=self.device)
        columns = rows.prompt_length[which] + rows.next_places(which) - 1
        cache.write_next(columns, size.columns)
        hidden, routes = self._forward(
            rows.last_token[which][:, None],
            columns[:, None],
            cache,
            CachedAttention(columns + 1, size.columns),
        )
        if routes is not None:
            rows.write_routes(which, columns, routes)
        self._sample(rows, hidden[:, 0], which)

    def _forward(
        self, tokens: torch.Tensor, places: torch.Tensor, cache: SlotCache, packing: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The hidden states of `tokens` [A, B], and the experts [A · B, L, k] that they are routed
        to, if these are recorded."""
        with self._recorded() as chosen:
            output = self.lm.base_model(
                input_ids=tokens,
                position_ids=places,
                attention_mask=None,
                use_cache=True,
                packing=packing,
                **{self._cache_argument: cache},
            )
        routes = self.choices.stacked(chosen) if self.choices is not None else None
        return output.last_hidden_state, routes

    def _recorded(self) -> AbstractContextManager[list[torch.Tensor]]:
        return self.choices.recorded() if self.choices is not None else nullcontext([])

    def _sample(self, rows: ActiveRows, hidden: torch.Tensor, which: torch.Tensor) -> None:
        logits = self.head.whole_logits(hidden, self.dtype)
        drawn = rows.next_places(which)
        tokens, logprobs = self.sampler.next(logits, drawn, rows.uniform[which, drawn])
        rows.tokens[which, drawn] = tokens
        rows.logprobs[which, drawn] = logprobs
        rows.drawn[which] = drawn + 1
        rows.last_token[which] = tokens


class Decoding:
    """Responses in progress: those that have a slot in the cache, and those that wait for one."""

    def __init__(self, decoder: BatchDecoder, slots: int, longest: int):
        self._decoder = decoder
        self._slots = slots
        self._limit = decoder.gconfig.max_new_tokens
        self._cache = SlotCache(slots, longest, decoder.dtype)
        self._waiting: deque[Begun] = deque()
        self._known: dict[int, Begun] = {}
        """Responses with a slot, by number, as they were when they got it."""
        self.rows = ActiveRows(slots, self._limit, decoder.device)
        self._passes = decoder.passes(self._cache, self.rows)
        if decoder.choices is not None:
            self.rows.make_room_for_routes(longest, decoder.choices.no_tokens)

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self.rows.active)

    def submit(self, response: Begun) -> None:
        self._waiting.append(response)

    def continue_with(self, decoder: BatchDecoder) -> None:
        """Use another decoder, with new weights. No response may have a slot."""
        self._decoder = decoder
        self._passes = decoder.passes(self._cache, self.rows)

    def advance(self) -> int:
        """One forward pass, after which the rows from the returned one on have a new token."""
        first = 0
        if self._waiting and self.rows.active < self._slots:
            first = self.rows.active  # the others do not advance
            free = min(self._slots - first, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(free)]
            self._known |= {begun.number: begun for begun in batch}
            self._decoder.prefill(self._cache, self.rows, batch)
        else:
            self._passes.run(PassSize(self.rows.active, self.rows.longest))
            self.rows.passes += 1
        return first

    def collect(self) -> list[tuple[Begun, bool]]:
        """Responses that have just finished, and whether by themselves;
        they make room for others."""
        finished = [
            (replace(self._known.pop(number), **contents), by_itself)
            for number, contents, by_itself in self.rows.collect(
                self._decoder.sampler.end_ids, self._limit
            )
        ]
        self.rows.compact(self._cache)
        return finished

    def retract(self) -> list[Begun]:
        """Make all responses in progress wait for a slot again, the oldest first; returns them.
        Empties the cache."""
        begun = [
            replace(self._known.pop(number), **contents) for number, contents in self.rows.retract()
        ]
        self._waiting.extendleft(sorted(begun, key=lambda response: -response.number))
        return list(self._waiting)

    def clear(self) -> None:
        self._waiting.clear()
