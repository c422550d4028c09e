"""Common prefixes of the sequences of a micro-batch, computed once by models of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlcli.api.operations import Products
from rlcli.ops.prefix_attention import PrefixAttention
from rlcli.ops.shared_prefixes import Work, counted_tokens, shared_prefixes

if TYPE_CHECKING:
    from rlcli.ops.flash_attention import FlashAttention


@dataclass(frozen=True)
class PrefixSharing:
    """Finds them by the ids of tokens. What is shared follows from a batch alone."""

    work: Work
    device: torch.device
    flash: FlashAttention | None

    @classmethod
    def of(
        cls, products: Products, device: torch.device, flash: FlashAttention | None
    ) -> PrefixSharing:
        work = Work(products.of_token, products.of_pair, skips_hidden=device.type == "cuda")
        return cls(work, device, flash)

    def layout(self, tokens: torch.Tensor, lengths: tuple[int, ...]) -> PrefixAttention | None:
        if len(lengths) == 1:
            return None
        prefixes = shared_prefixes(tokens.cpu(), lengths, self.work.pays)
        return PrefixAttention(prefixes, self.device, self.flash) if prefixes is not None else None

    def counted(self, tokens: torch.Tensor, lengths: tuple[int, ...]) -> int:
        """Tokens of a group that need memory."""
        return counted_tokens(tokens.cpu(), lengths, self.work.pays)
