"""The sizes of a transformer on which its parameters and memory depend. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransformerBlock:
    """Parameters of one transformer block."""

    attention: int
    """Matrices and biases of the attention, without the norms of queries and keys."""
    mlp: int
    """Matrices and biases of the dense MLP, or of the router if there are experts."""
    experts: int
    """Weights of all experts that tokens choose."""
    norms: int
    shared: int = 0
    """Matrices of an expert that all tokens share, with its router."""

    @property
    def parameters(self) -> int:
        return self.attention + self.mlp + self.experts + self.norms + self.shared


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder."""

    model_type: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Width of the MLP, or of one expert."""
    vocabulary: int
    """Rows of the embedding."""
    positions: int | None
    """Maximum sequence length, in tokens."""
    position_rows: int
    """Rows of a learnt position embedding; 0 with rotary embeddings."""
    tied: bool
    """Whether the head of a language model is its embedding."""
    qk_norm: bool
    gated: bool
    """Whether the MLP has a gate: three matrices instead of two."""
    experts_per_token: int
    """0 in a dense model."""
    layers: tuple[TransformerBlock, ...]
    final_norm: int
    experts: int = 0
    """Number of experts in a block that has experts, not counting a shared one."""
    stored_width: int = 4
    """Bytes per number of its weights, by the dtype in its configuration."""

    @property
    def embedding(self) -> int:
        return (self.vocabulary + self.position_rows) * self.hidden

    @property
    def head(self) -> int:
        """Parameters of the language-model head that it does not share with the embedding."""
        return 0 if self.tied else self.vocabulary * self.hidden

    @property
    def backbone(self) -> int:
        return self.embedding + sum(layer.parameters for layer in self.layers) + self.final_norm

    @property
    def cast(self) -> int:
        """Weights in the blocks' matrix products that autocast copies to a lower precision."""
        return sum(layer.attention + layer.mlp + layer.shared for layer in self.layers)

    def parameters(self, head: str = "lm") -> int:
        """Number of parameters, with the language-model head or ("value") with a head that gives a
        number per token."""
        return self.backbone + (self.head if head == "lm" else self.hidden + 1)
