"""How many floating-point operations the matrix products of a model take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BACKWARD = 2
"""A backward pass has two products for each of the forward pass. What is computed a second time to
save memory is not counted: it is no progress (https://arxiv.org/abs/2204.02311, appendix B)."""


@dataclass(frozen=True)
class Products:
    """Floating-point operations of a forward pass: two for each number of a matrix that a vector
    is multiplied with."""

    of_token: float
    """Of a token with the matrices of all layers."""
    of_pair: float
    """Of a query with a key and its value, in all heads of all layers."""
    of_score: float
    """Of a hidden state with the head; 0 without a language-model head."""

    def of(self, tokens: float, pairs: float, scores: float) -> float:
        return tokens * self.of_token + pairs * self.of_pair + scores * self.of_score


class OperationCount:
    """Adds up what a rank's passes over a model compute.

    Every query counts with all keys of its sequence, as if nothing were hidden from it; tokens
    that sequences have in common count as often as they are computed.
    """

    def __init__(self, products: Products, dtype: str, parts: int = 1, cuts: int = 1):
        """`dtype`: that of the products. `parts`: ranks that divide the matrices (tensor parallel)
        and `cuts`: ranks that divide the tokens of a micro-batch (context parallel)."""
        self.dtype = dtype
        self._products, self._parts, self._cuts = products, parts, cuts
        self._total = 0.0

    def add(
        self, tokens: float = 0, pairs: float = 0, scores: float = 0, *, trains: bool = False
    ) -> None:
        """Count what this rank computes in a forward pass, and, if it `trains`, in the backward
        pass."""
        passes = 1 + BACKWARD if trains else 1
        self._total += passes * self._products.of(tokens, pairs, scores) / self._parts

    def drain(self) -> float:
        """The operations since this was last called."""
        total, self._total = self._total, 0.0
        return total

    def generated(self, responses: Iterable[tuple[int, Sequence[int]]]) -> float:
        """The operations of this rank to generate responses to prompts: for each prompt, its length
        and those of its responses, in tokens. A prompt is read once, the last token of a response
        is not read."""
        total = 0.0
        for prompt, lengths in responses:
            total += self._products.of(prompt, prompt**2, 0)
            for length in lengths:
                read = max(0, length - 1)
                pairs = read * prompt + read * (read + 1) / 2
                total += self._products.of(read, pairs, length)
        return total / (self._parts * self._cuts)
