"""The state of responses in progress: their rows, and the cache of their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache

from rlcli.api.model import GeneratedResponses


class SlotCache(Cache):
    """Keys and values of up to S sequences of up to L tokens, [S, H_kv, L, D] per layer."""

    def __init__(self, slots: int, length: int, dtype: torch.dtype):
        """`dtype`: that of attention, which would cast all of the cache in each pass otherwise."""
        super().__init__(layers=[])
        self.slots, self.length, self.dtype = slots, length, dtype
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.rows = self.columns = torch.zeros(0, dtype=torch.int64)
        """Where tokens of the next pass go."""
        self.source: torch.Tensor | None = None
        self.window: tuple[int, int] | None = None

    def write_prompts(
        self, source: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> None:
        """Next pass: token `source[i]` of the pack goes to slot `rows[i]`, column `columns[i]`."""
        self.source, self.rows, self.columns, self.window = source, rows, columns, None

    def write_next(self, columns: torch.Tensor, longest: int) -> None:
        """Next pass: one token per active row, at `columns`;
        attention reads the first `longest` columns."""
        self.source, self.columns = None, columns
        self.rows = torch.arange(len(columns), device=columns.device)
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
            self.keys.append(self._room_for(key_states))
            self.values.append(self._room_for(value_states))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self.window is None:
            self._write(keys, key_states[0].transpose(0, 1)[self.source])
            self._write(values, value_states[0].transpose(0, 1)[self.source])
            return key_states, value_states
        self._write(keys, key_states[:, :, 0])
        self._write(values, value_states[:, :, 0])
        return self._seen(keys), self._seen(values)

    def _seen(self, cached: torch.Tensor) -> torch.Tensor:
        """[active, H_kv, longest, D]: what the pass reads of a layer's keys or values."""
        assert self.window is not None
        active, longest = self.window
        return cached[:active, :, :longest]

    def _room_for(self, states: torch.Tensor) -> torch.Tensor:
        """[S, H_kv, L, D] for a layer with such keys or values [1, H_kv, n, D]."""
        _, heads, _, width = states.shape
        return states.new_zeros(self.slots, heads, self.length, width, dtype=self.dtype)

    def _write(self, cached: torch.Tensor, states: torch.Tensor) -> None:
        """Store `states` [n, H_kv, D] at the places of this pass."""
        cached.transpose(1, 2)[self.rows, self.columns] = states.to(cached.dtype)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots `source` over slots `target`."""
        for tensor in (*self.keys, *self.values):
            tensor[target] = tensor[source]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


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


class ActiveRows:
    """The state of the responses being decoded: one row per cache slot, active rows first."""

    def __init__(self, slots: int, limit: int, device: torch.device):
        self.active = 0
        self.response: list[int] = []
        self.passes = 0
        """Of all active rows, each of which adds one token to each of them."""
        self._lengths: list[int] = []
        """Tokens of each active row after its next pass, less the passes so far."""
        self.prompt_length = torch.ones(slots, dtype=torch.int64, device=device)
        self.drawn = torch.zeros(slots, dtype=torch.int64, device=device)
        self.last_token = torch.zeros(slots, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(slots, limit, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(slots, limit, device=device)
        self.uniform = torch.zeros(slots, limit, dtype=torch.float64, device=device)
        self.routes: torch.Tensor | None = None
        """[slots, longest, L, k]: the experts of each token of prompt and response."""
        self._finished: list[int] = []

    @property
    def longest(self) -> int:
        """Tokens of the longest active row after its next pass."""
        return self.passes + max(self._lengths)

    def next_places(self, which: torch.Tensor) -> torch.Tensor:
        """[n]: how many tokens each of these rows has drawn, and so the place of its next one;
        within bounds also for rows that are not active."""
        return self.drawn[which].clamp(max=self.tokens.shape[1] - 1)

    def make_room_for_routes(self, longest: int, no_tokens: torch.Tensor) -> None:
        """For texts of up to `longest` tokens, each with experts like `no_tokens` [0, L, k]."""
        shape = (len(self.drawn), longest, *no_tokens.shape[1:])
        self.routes = no_tokens.new_zeros(shape, device=self.drawn.device)

    def write_routes(self, rows: torch.Tensor, columns: torch.Tensor, routes: torch.Tensor) -> None:
        """Store the experts [n, L, k] of n tokens, each of a row and a column of its text."""
        assert self.routes is not None
        self.routes[rows, columns] = routes

    def add(self, batch: Sequence[Begun]) -> torch.Tensor:
        """[n] int64 on the host: the rows of these responses."""
        rows = torch.arange(self.active, self.active + len(batch))
        lengths = [len(begun.prompt) for begun in batch]
        drawn = [len(begun.tokens) for begun in batch]
        device = self.uniform.device
        self.prompt_length[rows] = torch.tensor(lengths, device=device)
        self.drawn[rows] = torch.tensor(drawn, device=device)
        self.uniform[rows] = _random_streams(batch, self.uniform.shape[1]).to(device)
        for row, begun in zip(rows.tolist(), batch, strict=True):
            self._restore(row, begun)
        self.response.extend(begun.number for begun in batch)
        texts = map(sum, zip(lengths, drawn, strict=True))
        self._lengths.extend(text + 1 - self.passes for text in texts)
        self.active += len(batch)
        return rows

    def _restore(self, row: int, begun: Begun) -> None:
        """Store what a response has drawn before."""
        count = len(begun.tokens)
        if count:
            self.tokens[row, :count] = begun.tokens.to(self.tokens.device)
            self.logprobs[row, :count] = begun.logprobs.to(self.logprobs.device)

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
        self._lengths.clear()
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
            self._move(movers, gaps, cache)
        del self.response[self.active :]
        del self._lengths[self.active :]
        self._finished = []

    def _move(self, movers: list[int], gaps: list[int], cache: SlotCache) -> None:
        source, target = (torch.tensor(rows, device=self.drawn.device) for rows in (movers, gaps))
        for state in self._states():
            state[target] = state[source]
        cache.move(source, target)
        for gap, mover in zip(gaps, movers, strict=True):
            self.response[gap] = self.response[mover]
            self._lengths[gap] = self._lengths[mover]

    def _states(self) -> list[torch.Tensor]:
        """What each row has a part of."""
        states = [self.prompt_length, self.drawn, self.last_token]
        states += [self.tokens, self.logprobs, self.uniform]
        return states if self.routes is None else [*states, self.routes]


def _random_streams(batch: Sequence[Begun], limit: int) -> torch.Tensor:
    """[n, limit] float64: the uniform numbers that each response draws with, of its own seed."""
    generators = [torch.Generator().manual_seed(begun.seed) for begun in batch]
    return torch.stack(
        [torch.rand(limit, dtype=torch.float64, generator=generator) for generator in generators]
    )


def uniforms(seed: int, count: int) -> torch.Tensor:
    """[count] float64: the numbers that the first tokens of a response of this seed draw with."""
    return _random_streams([Begun(0, torch.zeros(0), seed)], count)[0]
