"""How context-parallel ranks attend to each other's tokens, chosen by sizes. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal

Method = Literal["ulysses", "ring"]
Choice = Literal["auto", "ulysses", "ring"]

PRODUCTS_PER_BYTE = 4000
"""Floating-point operations that a GPU computes while it sends a byte: 400 TFLOP/s and 100 GB/s. An
estimate, not a measurement."""


@dataclass(frozen=True)
class AttentionSizes:
    """A layer's attention on a group of context-parallel ranks."""

    heads: int
    """Heads of this rank; with tensor parallelism, a part of the layer's."""
    key_heads: int
    ranks: int
    tokens: int
    """Slots of a rank."""
    has_window: bool = False

    @property
    def is_divisible(self) -> bool:
        """Whether every rank can take equally many heads."""
        return self.heads % self.ranks == 0

    @property
    def sent_by_ulysses(self) -> int:
        """Vectors of a head's size that a rank sends in a forward pass: queries and results, keys
        and values, the latter repeated if there are fewer heads of them than ranks."""
        vectors = 2 * self.heads + 2 * lcm(self.key_heads, self.ranks)
        return vectors * self.tokens * (self.ranks - 1) // self.ranks

    @property
    def sent_by_ring(self) -> int:
        """Likewise: keys and values, to the next rank in each round."""
        return 2 * self.key_heads * self.tokens * (self.ranks - 1)

    @property
    def hides_messages(self) -> bool:
        """Whether the products of a ring's round take longer than its message: 2 · S² · H · D
        operations, causality halves them, for 4 · S · H_kv · D bytes in 16 bits."""
        return self.tokens * self.heads >= 2 * PRODUCTS_PER_BYTE * self.key_heads

    @property
    def method(self) -> Method:
        """Ulysses where the heads can be divided, because it uses the kernels of whole sequences
        and sums in their order; unless a ring sends less and hides that behind its products. Its
        blocks have no kernel for windows."""
        if not self.is_divisible:
            return "ring"
        is_cheaper = self.sent_by_ring < self.sent_by_ulysses and self.hides_messages
        return "ring" if is_cheaper and not self.has_window else "ulysses"

    def sent_by(self, method: Method) -> int:
        """Vectors of a head's size that a rank sends in a layer's forward pass."""
        return self.sent_by_ulysses if method == "ulysses" else self.sent_by_ring
