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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.model import GeneratedResponses
from rlcli.ops.attention import CachedAttention, packed_attention
from rlcli.ops.packing import positions

from ._memory import concurrent_responses
from ._transformers import Pack, compute_in, head_of

if TYPE_CHECKING:
    from ._routing_replay import RouterChoices


BLOCK = 256
"""Tokens of the vocabulary whose probabilities are added up before one of them is drawn."""


class SlotCache(Cache):
    """Keys and values of up to S sequences of up to L tokens, [S, L, H_kv, D] per layer."""

    def __init__(self, slots: int, length: int):
        super().__init__(layers=[])
        self.slots, self.length = slots, length
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.places = torch.zeros(0, dtype=torch.int64)
        """Where tokens of the next pass go: slot · L + column."""
        self.source: torch.Tensor | None = None
        self.window: tuple[int, int] | None = None

    def write_prompts(
        self, source: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> None:
        """Next pass: token `source[i]` of the pack goes to slot `rows[i]`, column `columns[i]`."""
        self.source, self.places, self.window = source, rows * self.length + columns, None

    def write_next(self, columns: torch.Tensor, longest: int) -> None:
        """Next pass: one token per active row, at `columns`;
        attention reads the first `longest` columns."""
        rows = torch.arange(len(columns), device=columns.device)
        self.source, self.places = None, rows * self.length + columns
        self.window = len(columns), longest

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx == len(self.keys):
            shape = (self.slots, self.length, key_states.shape[1])
            self.keys.append(key_states.new_zeros(*shape, key_states.shape[3]))
            self.values.append(value_states.new_zeros(*shape, value_states.shape[3]))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self.source is not None:
            self._write(keys, key_states[0].transpose(0, 1)[self.source])
            self._write(values, value_states[0].transpose(0, 1)[self.source])
            return key_states, value_states
        assert self.window is not None
        active, longest = self.window
        self._write(keys, key_states[:, :, 0])
        self._write(values, value_states[:, :, 0])
        seen = (keys[:active, :longest], values[:active, :longest])
        return seen[0].transpose(1, 2), seen[1].transpose(1, 2)

    def _write(self, cached: torch.Tensor, states: torch.Tensor) -> None:
        """Store `states` [n, H_kv, D] at the places of this pass."""
        cached.flatten(0, 1).index_copy_(0, self.places, states.to(cached.dtype))

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots `source` over slots `target`."""
        for tensor in (*self.keys, *self.values):
            tensor[target] = tensor[source]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class Sampler:
    """Samples next tokens from logits, as `gconfig` says."""

    def __init__(self, gconfig: GenerationHyperparameters, end_ids: torch.Tensor, vocabulary: int):
        self.gconfig = gconfig
        self.end_ids = end_ids
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
        allowed = logits
        if self.vocabulary < logits.shape[1]:
            allowed = allowed.clone()
            allowed[:, self.vocabulary :] = -torch.inf
        if self.gconfig.min_new_tokens > 0:
            early = drawn < self.gconfig.min_new_tokens
            allowed = allowed.clone()
            allowed[
                early[:, None]
                & torch.isin(torch.arange(logits.shape[1], device=logits.device), self.end_ids)
            ] = -torch.inf
        tokens = (
            allowed.argmax(-1)
            if self.gconfig.greedy
            else self._draw(self._truncate(allowed), uniform)
        )
        logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
        return tokens, logprobs

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
    def _draw(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """The first token whose cumulative probability exceeds the row's uniform number."""
        blocks = nn.functional.pad(logits.softmax(-1), (0, -logits.shape[1] % BLOCK))
        blocks = blocks.unflatten(1, (-1, BLOCK))
        sums = blocks.sum(-1, dtype=torch.float64)
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
    ) -> Iterator[tuple[_ActiveRows, int]]:
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
        decoding = self.decoding(total, max(len(p) for p in prompts) + limit)
        for number, seed in enumerate(seeds):
            decoding.submit(Begun(number, prompts[number // group], seed))
        with compute_in(self.dtype, self.device):
            while decoding.is_busy:
                yield decoding.rows, decoding.advance()
                for begun, by_itself in decoding.collect():
                    begun.store(responses, by_itself)

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

    def prefill(self, cache: SlotCache, rows: _ActiveRows, batch: Sequence[Begun]) -> None:
        """Read the responses' texts so far, each distinct text once, and draw their next tokens."""
        texts = [begun.text for begun in batch]
        distinct: dict[int, int] = {}
        for text in texts:
            distinct.setdefault(id(text), len(distinct))
        unique = list({id(text): text for text in texts}.values())
        lengths = [len(text) for text in unique]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        which = [distinct[id(text)] for text in texts]
        new_rows = rows.add(batch)

        source = torch.cat([torch.arange(starts[w], starts[w] + lengths[w]) for w in which]).to(
            self.device
        )
        at = torch.cat(
            [
                torch.full((lengths[w],), row)
                for w, row in zip(which, new_rows.tolist(), strict=True)
            ]
        )
        columns = positions([lengths[w] for w in which], self.device)
        cache.write_prompts(source, at.to(self.device), columns)
        packed = torch.cat(unique).to(self.device)
        hidden, routes = self._forward(
            packed[None],
            positions(lengths, self.device)[None],
            cache,
            self._pack(tuple(lengths), self.device),
        )
        if routes is not None:
            rows.write_routes(at.to(self.device), columns, routes[source])
        last = torch.tensor([starts[w] + lengths[w] - 1 for w in which], device=self.device)
        self._sample(rows, hidden[0, last], new_rows.to(self.device))

    def next_tokens(self, cache: SlotCache, rows: _ActiveRows) -> None:
        """One more token for every active row."""
        active = torch.arange(rows.active, device=self.device)
        columns = rows.prompt_length[active] + rows.drawn[active] - 1
        longest = int(columns.max()) + 1
        cache.write_next(columns, longest)
        hidden, routes = self._forward(
            rows.last_token[active][:, None],
            columns[:, None],
            cache,
            CachedAttention(columns + 1, longest),
        )
        if routes is not None:
            rows.write_routes(active, columns, routes)
        self._sample(rows, hidden[:, 0], active)

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

    def _sample(self, rows: _ActiveRows, hidden: torch.Tensor, which: torch.Tensor) -> None:
        logits = self.head.whole_logits(hidden, self.dtype)
        drawn = rows.drawn[which]
        tokens, logprobs = self.sampler.next(logits, drawn, rows.uniform[which, drawn])
        rows.tokens[which, drawn] = tokens
        rows.logprobs[which, drawn] = logprobs
        rows.drawn[which] = drawn + 1
        rows.last_token[which] = tokens


@dataclass(frozen=True)
class Begun:
    """A response in progress, with its tokens so far."""

    number: int
    prompt: torch.Tensor
    seed: int
    tokens: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    logprobs: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    routes: torch.Tensor | None = None
    """[tokens read so far, L, k]: the experts that they were routed to, if these are recorded."""

    @property
    def text(self) -> torch.Tensor:
        """Prompt and tokens so far; the prompt object itself if there are no tokens."""
        return (
            torch.cat([self.prompt, self.tokens.to(self.prompt)])
            if len(self.tokens)
            else self.prompt
        )

    def store(self, responses: GeneratedResponses, by_itself: bool) -> None:
        """Fill its place among the responses, now that it has ended, or was cut off."""
        responses.tokens[self.number] = self.tokens
        responses.logprobs[self.number] = self.logprobs
        responses.ended[self.number] = by_itself
        if responses.routed_experts is not None and self.routes is not None:
            responses.routed_experts[self.number] = self.routes


class Decoding:
    """Responses in progress: those that have a slot in the cache, and those that wait for one."""

    def __init__(self, decoder: BatchDecoder, slots: int, longest: int):
        self._decoder = decoder
        self._slots = slots
        self._limit = decoder.gconfig.max_new_tokens
        self._cache = SlotCache(slots, longest)
        self._waiting: deque[Begun] = deque()
        self._known: dict[int, Begun] = {}
        """Responses with a slot, by number, as they were when they got it."""
        self.rows = _ActiveRows(slots, self._limit, decoder.device)
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
            self._decoder.next_tokens(self._cache, self.rows)
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


class _ActiveRows:
    """The state of the responses being decoded: one row per cache slot, active rows first."""

    def __init__(self, slots: int, limit: int, device: torch.device):
        self.active = 0
        self.response: list[int] = []
        self.prompt_length = torch.zeros(slots, dtype=torch.int64, device=device)
        self.drawn = torch.zeros(slots, dtype=torch.int64, device=device)
        self.last_token = torch.zeros(slots, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(slots, limit, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(slots, limit, device=device)
        self.uniform = torch.zeros(slots, limit, dtype=torch.float64, device=device)
        self.routes: torch.Tensor | None = None
        """[slots, longest, L, k]: the experts of each token of prompt and response."""
        self._finished: list[int] = []

    def make_room_for_routes(self, longest: int, no_tokens: torch.Tensor) -> None:
        """For texts of up to `longest` tokens, each with experts like `no_tokens` [0, L, k]."""
        shape = (len(self.drawn), longest, *no_tokens.shape[1:])
        self.routes = no_tokens.new_zeros(shape, device=self.drawn.device)

    def write_routes(self, rows: torch.Tensor, columns: torch.Tensor, routes: torch.Tensor) -> None:
        """Store the experts [n, L, k] of n tokens, each of a row and a column of its text."""
        assert self.routes is not None
        self.routes[rows, columns] = routes

    def add(self, batch: Sequence[Begun]) -> torch.Tensor:
        rows = torch.arange(self.active, self.active + len(batch))
        limit, device = self.uniform.shape[1], self.uniform.device
        generators = [torch.Generator().manual_seed(begun.seed) for begun in batch]
        streams = [
            torch.rand(limit, dtype=torch.float64, generator=generator) for generator in generators
        ]
        self.prompt_length[rows] = torch.tensor(
            [len(begun.prompt) for begun in batch], device=device
        )
        self.drawn[rows] = torch.tensor([len(begun.tokens) for begun in batch], device=device)
        self.uniform[rows] = torch.stack(streams).to(device)
        for row, begun in zip(rows.tolist(), batch, strict=True):
            if len(begun.tokens):
                self.tokens[row, : len(begun.tokens)] = begun.tokens.to(device)
                self.logprobs[row, : len(begun.tokens)] = begun.logprobs.to(device)
        self.response.extend(begun.number for begun in batch)
        self.active += len(batch)
        return rows

    def collect(self, end_ids: torch.Tensor, limit: int) -> list[tuple[int, dict[str, Any], bool]]:
        """Responses that have just finished: (number, contents, ended by itself)."""
        stopped = torch.isin(self.last_token[: self.active], end_ids)
        over = stopped | (self.drawn[: self.active] >= limit)
        self._finished = over.nonzero()[:, 0].tolist()
        if not self._finished:
            return []
        numbers = [self.response[row] for row in self._finished]
        by_itself = stopped[self._finished].tolist()
        return list(zip(numbers, self._contents(self._finished), by_itself, strict=True))

    def retract(self) -> list[tuple[int, dict[str, Any]]]:
        """Empty all rows: (number, contents) of each."""
        contents = self._contents(list(range(self.active)))
        begun = list(zip(self.response, contents, strict=True))
        self.active = 0
        self.response.clear()
        return begun

    def _contents(self, rows: list[int]) -> list[dict[str, Any]]:
        """The fields of `Begun` that grow, for each of these rows: copies on the host."""
        if not rows:
            return []
        drawn = self.drawn[rows].tolist()
        tokens, logprobs = self.tokens[rows].cpu(), self.logprobs[rows].cpu()
        contents = [
            {"tokens": tokens[i, :count].clone(), "logprobs": logprobs[i, :count].clone()}
            for i, count in enumerate(drawn)
        ]
        if self.routes is not None:
            read = (self.prompt_length[rows] + self.drawn[rows] - 1).tolist()
            routes = self.routes[rows].cpu()
            for i, count in enumerate(read):
                contents[i]["routes"] = routes[i, :count].clone()
        return contents

    def compact(self, cache: SlotCache) -> None:
        """Close the gaps that finished rows leave, by moving the last rows into them."""
        if not self._finished:
            return
        gone = set(self._finished)
        self.active -= len(gone)
        gaps = [row for row in self._finished if row < self.active]
        movers = [row for row in range(self.active, self.active + len(gone)) if row not in gone]
        if movers:
            device = self.drawn.device
            source, target = torch.tensor(movers, device=device), torch.tensor(gaps, device=device)
            for state in (
                self.prompt_length,
                self.drawn,
                self.last_token,
                self.tokens,
                self.logprobs,
                self.uniform,
                *([self.routes] if self.routes is not None else []),
            ):
                state[target] = state[source]
            cache.move(source, target)
            for gap, mover in zip(gaps, movers, strict=True):
                self.response[gap] = self.response[mover]
        del self.response[self.active :]
        self._finished = []
