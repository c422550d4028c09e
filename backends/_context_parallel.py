"""Context parallelism: ranks share the tokens of every micro-batch, and of every batch of prompts.

A forward pass computes with this rank's tokens alone; log-probs, entropies and values are gathered,
so that a loss sees the whole micro-batch, as it does on tensor-parallel ranks. Parameters are those
of data parallelism: gradients are summed over both kinds of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlcli.api.model import GeneratedResponses
from rlcli.errors import ModelError
from rlcli.ops.context_attention import ContextAttention
from rlcli.ops.context_choice import Choice

if TYPE_CHECKING:
    from rlcli.ops.flash_attention import FlashAttention

Pack = Callable[[tuple[int, ...], torch.device], ContextAttention]
Generate = Callable[[list[torch.Tensor], list[int]], GeneratedResponses]
"""(prompts, seeds) → responses."""


def pack_over_ranks(
    lm: Any,
    group: dist.ProcessGroup,
    choice: Choice,
    tensor_parallel: int,
    role: str,
    flash: FlashAttention | None = None,
) -> Pack:
    """What makes this rank's share of a pack of sequences. Raises ModelError for a model whose
    tokens cannot be spread over the ranks."""
    config, ranks = lm.config.get_text_config(), group.size()
    heads = config.num_attention_heads // tensor_parallel
    if choice == "ulysses" and heads % ranks:
        raise ModelError(
            f"the {heads} attention heads of role {role}"
            f"{' on a tensor-parallel rank' if tensor_parallel > 1 else ''} cannot be divided "
            f"among {ranks} context-parallel ranks, as ulysses does",
            hint=f"set models.{role}.backend.args.context_parallel=ring, or another size of cp",
        )
    return partial(_share, group=group, choice=choice, flash=flash)


def _share(
    lengths: tuple[int, ...],
    device: torch.device,
    group: dist.ProcessGroup,
    choice: Choice,
    flash: FlashAttention | None,
) -> ContextAttention:
    return ContextAttention(tuple(lengths), device, group, choice, flash)


# -- generation ------------------------------------------------------------------------------------


def generate_over_ranks(
    generate: Generate,
    prompts: Sequence[torch.Tensor],
    seeds: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
    no_routes: torch.Tensor | None = None,
) -> GeneratedResponses:
    """The responses to all prompts, on every rank: each generates those to its own prompts, as a
    data-parallel rank would. Messages are sent from `device` to `device`. `no_routes` [0, L, k]:
    what `routed_experts` are like, if responses have them."""
    if not prompts:
        return generate([], [])
    each = len(seeds) // len(prompts)
    mine = _own(generate, prompts, seeds, group)
    exchange = Exchange(len(prompts), each, group, device)
    lengths = exchange(torch.tensor([len(row) for row in mine.tokens], dtype=torch.int64)).tolist()
    responses = GeneratedResponses(
        exchange.rows(mine.tokens, lengths, torch.zeros(0, dtype=torch.int64)),
        exchange.rows(mine.logprobs, lengths, torch.zeros(0)),
        exchange(mine.ended),
    )
    if no_routes is not None:
        of_prompts = [len(prompt) for prompt in prompts for _ in range(each)]
        read = [sum(pair) - 1 for pair in zip(of_prompts, lengths, strict=True)]
        responses.routed_experts = exchange.rows(mine.routed_experts or [], read, no_routes)
    return responses


def _own(
    generate: Generate,
    prompts: Sequence[torch.Tensor],
    seeds: Sequence[int],
    group: dist.ProcessGroup,
) -> GeneratedResponses:
    """The responses to this rank's prompts."""
    each = len(seeds) // len(prompts)
    numbers = range(group.rank(), len(prompts), group.size())
    own_seeds = [seed for number in numbers for seed in seeds[number * each : (number + 1) * each]]
    return generate([prompts[number] for number in numbers], own_seeds)


@dataclass(frozen=True)
class Exchange:
    """Gives every rank the rows that each rank has for its own prompts: `each` rows for each of
    `count` prompts."""

    count: int
    each: int
    group: dist.ProcessGroup
    device: torch.device

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all prompts, from the rows [n, ...] that this rank has for its own."""
        room = -(-self.count // self.group.size())
        sent = torch.zeros(room * self.each, *rows.shape[1:], dtype=rows.dtype, device=self.device)
        sent[: len(rows)] = rows.to(self.device)
        parts = [torch.empty_like(sent) for _ in range(self.group.size())]
        dist.all_gather(parts, sent, group=self.group)
        by_prompt = torch.stack([part.unflatten(0, (room, self.each)) for part in parts], dim=1)
        return by_prompt.flatten(0, 2)[: self.count * self.each].cpu()

    def rows(
        self, rows: Sequence[torch.Tensor], lengths: Sequence[int], empty: torch.Tensor
    ) -> list[torch.Tensor]:
        """The same for rows of different lengths; `lengths` are those of all prompts, `empty` [0,
        ...] has the form of a row."""
        table = empty.new_zeros(len(rows), max(lengths), *empty.shape[1:])
        for padded, row in zip(table, rows, strict=True):
            padded[: len(row)] = row
        if empty.dtype is torch.int16:  # which NCCL does not send
            table = self(table.view(torch.uint8)).view(torch.int16)
        else:
            table = self(table)
        return [row[:length] for row, length in zip(table, lengths, strict=True)]
