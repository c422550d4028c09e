"""A head whose matrix is sharded over ranks by rows of the vocabulary:
softmax without gathering the logits.

Ranks only exchange scalars per token: the largest normalizer, then its sum with the logit of the
token and the expected logit. The scheme is that of Megatron-LM,
https://arxiv.org/abs/1909.08053, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class VocabularyShard:
    """The rows [first, first + rows of the head's weight) that this rank of a group holds. Parts
    may differ in size."""

    group: dist.ProcessGroup
    first: int
    """The token of the first row."""
    size: int
    """Tokens of the whole vocabulary."""

    @property
    def typical_rows(self) -> int:
        """A typical rank's number of rows, the same on all ranks however unevenly the vocabulary is
        divided."""
        return -(-self.size // self.group.size())

    def select(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[n]: the logits of `tokens` from this rank's `logits` [n, rows];
        0 if another rank holds the token."""
        if not logits.shape[1]:
            return logits.new_zeros(len(logits))
        rows, is_ours = self._rows(tokens, logits.shape[1])
        return logits.gather(1, rows[:, None])[:, 0] * is_ours

    def add_at(self, grad: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> None:
        """Add `values` [n] to this rank's `grad` [n, rows] at those `tokens` that it holds."""
        if grad.shape[1]:
            rows, is_ours = self._rows(tokens, grad.shape[1])
            grad.scatter_add_(1, rows[:, None], (values * is_ours)[:, None].to(grad.dtype))

    def combine(
        self, normalizers: torch.Tensor, targets: torch.Tensor, expected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log Σ exp, target logit and Σ p · logit over the vocabulary,
        from those of each rank's part; all [n]."""
        largest = normalizers.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        share = (normalizers - largest).exp()
        sums = torch.stack([share, targets, share * expected])
        dist.all_reduce(sums, group=self.group)
        return largest + sums[0].log(), sums[1], sums[2] / sums[0]

    def summed(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, computed in float32."""
        total = partial.float()
        dist.all_reduce(total, group=self.group)
        return total.to(partial.dtype)

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, size], bit for bit the same on all ranks, from each rank's part. For few rows, as
        when drawing tokens."""
        counts = torch.zeros(self.group.size(), dtype=torch.int64, device=logits.device)
        counts[self.group.rank()] = logits.shape[1]
        dist.all_reduce(counts, group=self.group)
        widths = counts.tolist()
        padded = torch.nn.functional.pad(logits, (0, max(widths) - logits.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat(
            [shard[:, :width] for shard, width in zip(parts, widths, strict=True)], dim=1
        )

    def _rows(self, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The row of each token, 0 for those of other ranks; and which ones this rank holds."""
        is_ours = (tokens >= self.first) & (tokens < self.first + count)
        return torch.where(is_ours, tokens - self.first, 0), is_ours
