"""What the engines keep on a device, in bytes: formulas over an architecture, after what the code really does.

Parameters, gradients and AdamW's two states are float32; matrix products run in `width` bytes per number. Numbers of
activations are those which the backward pass of transformers' modules saves per token; tests compare them with it,
and peaks with the memory of a real process.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcli.topology.architecture import Architecture, Layer

ERROR_PERCENT = 15
"""How far estimates of a call's peak have been from the memory measured (see tests/topology)."""

CHUNK_ELEMENTS = 1 << 24
"""Logits that the head holds at once: `rlcli.ops.logprobs.CHUNK_ELEMENTS`, which this file must not import."""


@dataclass(frozen=True)
class Parts:
    """What a call adds to the memory that is held all the time, where it is highest."""

    gradients: int = 0
    gathered: int = 0
    """Whole parameters of sharded blocks, and copies of weights in the precision of the matrix products."""
    activations: int = 0
    cache: int = 0
    """Keys and values."""
    logits: int = 0

    @property
    def total(self) -> int:
        return self.gradients + self.gathered + self.activations + self.cache + self.logits


@dataclass(frozen=True)
class EngineFootprint:
    """A role's model under the backend `fsdp` (trained) or `inference`."""

    sizes: Architecture
    head: str
    """lm or value"""
    trained: bool
    ranks: int
    """Data-parallel size."""
    width: int
    """Bytes of a number in matrix products: 4 or 2."""
    checkpointing: bool = False

    # -- held ------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> int:
        return self.sizes.parameters(self.head)

    @property
    def is_sharded(self) -> bool:
        return self.trained and self.ranks > 1

    @property
    def shards(self) -> int:
        return self.ranks if self.is_sharded else 1

    @property
    def weights(self) -> int:
        return 4 * self.parameters // self.shards

    @property
    def optimizer(self) -> int:
        return 8 * self.parameters // self.shards if self.trained else 0

    @property
    def whole_copy(self) -> int:
        """Of a sharded role that generates: whole parameters on every rank."""
        return 4 * self.parameters if self.is_sharded else 0

    @property
    def left_gathered(self) -> int:
        """Parameters outside the blocks: FSDP leaves them whole after an inference, until the next update."""
        blocks = sum(layer.parameters for layer in self.sizes.layers)
        return 4 * (self.parameters - blocks) if self.is_sharded else 0

    def load(self) -> Parts:
        """Weights arrive whole before they are sharded."""
        return Parts(gathered=4 * self.parameters - self.weights)

    # -- update ----------------------------------------------------------------------------------------------

    def update(self, tokens: int, micro_batches: int) -> Parts:
        """Forward and backward of a micro-batch of so many tokens, and the optimizer."""
        grads = 4 * self.parameters // self.shards
        earlier = grads if micro_batches > 1 else 0
        unsharded = self._unsharded()
        matrix = 4 * self.sizes.vocabulary * self.sizes.hidden
        at_head = Parts(
            earlier, unsharded + self._casts_at_head(), tokens * self._saved_at_head(), 0, self._head_update(tokens)
        )
        in_blocks = Parts(
            earlier + (matrix if self.head == "lm" else 0),
            unsharded + self._casts(),
            tokens * (self._saved_at_head() + self._backward_of_block()),
        )
        at_embedding = Parts(grads + matrix * (2 if self.sizes.tied and self.head == "lm" else 1), unsharded)
        at_optimizer = Parts(grads * (2 if self.is_sharded else 1))
        return max((at_head, in_blocks, at_embedding, at_optimizer), key=lambda parts: parts.total)

    def _saved_at_head(self) -> int:
        """Bytes per token that wait for the backward pass when it begins."""
        sizes, hidden = self.sizes, self.sizes.hidden
        last_norm = (8 if sizes.position_rows == 0 else 4) * hidden
        tail = last_norm + 8 * hidden + 8 * sizes.head_dim
        if self.checkpointing:
            return 4 * hidden * len(sizes.layers) + tail
        return sum(saved_by_layer(sizes, layer, self.width) for layer in sizes.layers) + tail

    def _backward_of_block(self) -> int:
        """Bytes per token for gradients inside one block and, where it is computed again, for what that saves."""
        sizes = self.sizes
        again = max(saved_by_layer(sizes, layer, self.width) for layer in sizes.layers) if self.checkpointing else 0
        return again + self.width * sizes.mlp * max(1, sizes.experts_per_token) + 8 * sizes.hidden

    def _casts(self) -> int:
        """bfloat16 copies of the blocks' matrices, which autocast keeps until they have been used."""
        return self.sizes.cast * 2 if self.width == 2 else 0

    def _casts_at_head(self) -> int:
        return 0 if self.checkpointing else self._casts()

    def _unsharded(self, blocks: int = 2) -> int:
        """Whole parameters under FSDP: embedding, head and last norm, and so many blocks at a time."""
        largest = max(layer.parameters for layer in self.sizes.layers)
        return self.left_gathered + blocks * 4 * largest if self.is_sharded else 0

    def _head_update(self, tokens: int) -> int:
        """Chunks of logits and their gradients, and the gradient of the head's matrix."""
        if self.head != "lm":
            return 8 * tokens
        matrix, elements = self.sizes.vocabulary * self.sizes.hidden, self._logits_at_once(tokens)
        cast = 0 if self.width == 4 else 2 * matrix
        product = 4 * matrix if self.width == 4 else 6 * matrix
        return max(20 * elements, (12 + self.width) * elements + product) + 4 * matrix + cast

    def _logits_at_once(self, tokens: int) -> int:
        vocabulary = self.sizes.vocabulary
        return min(tokens, max(1, CHUNK_ELEMENTS // vocabulary)) * vocabulary

    # -- inference -------------------------------------------------------------------------------------------

    def inference(self, tokens: int) -> Parts:
        """A forward pass over a micro-batch of so many tokens."""
        logits = 0
        if self.head == "lm":
            cast = 0 if self.width == 4 else 2 * self.sizes.vocabulary * self.sizes.hidden
            at_once = self._logits_at_once(tokens)
            earlier = 2 if tokens * self.sizes.vocabulary > at_once else 0  # of the last chunk
            logits = (8 + earlier) * at_once + cast
        passing = tokens * self._passing_per_token()
        at_head = Parts(0, self.left_gathered, 4 * self.sizes.hidden * tokens, 0, logits)
        casts = self._casts() if self.trained else self._largest_cast()
        in_block = Parts(0, self._unsharded(1) + casts, passing)
        return max((at_head, in_block), key=lambda parts: parts.total)

    def _largest_cast(self) -> int:
        """Autocast keeps its copies of weights that could be trained; others are cast anew at every use."""
        widest = max(self.sizes.mlp, self.sizes.heads * self.sizes.head_dim)
        return 0 if self.width == 4 else 2 * self.sizes.hidden * widest

    def _passing_per_token(self) -> int:
        """Bytes per token that one block needs at once when nothing is saved."""
        sizes, width = self.sizes, self.width
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        mlp = 16 * sizes.hidden + width * sizes.hidden + 3 * width * sizes.mlp
        if sizes.experts_per_token:
            mlp = 12 * sizes.hidden + sizes.experts_per_token * (8 * sizes.hidden + 16 * sizes.mlp)
        attention = 8 * sizes.hidden + (width + 4) * (queries + 2 * keys) + 3 * 4 * queries
        return max(mlp, attention)

    # -- generation ------------------------------------------------------------------------------------------

    def generate(self, slots: int, prompt: int, new: int, prompts: int) -> Parts:
        """Decoding in so many slots, `prompts` different prompts of so many tokens being read at once."""
        sizes = self.sizes
        keys = sizes.kv_heads * sizes.head_dim
        key_width = self.width if sizes.position_rows else 4  # rotary embeddings make keys float32
        cache = slots * (prompt + new) * keys * len(sizes.layers) * (key_width + self.width)
        reading = prompts * prompt * self._passing_per_token() + slots * prompt * keys * 4
        decoding = slots * (prompt + new) * self._attended_per_token()
        logits = slots * sizes.vocabulary * (20 + self.width)
        casts = self._casts() if self.trained and not self.is_sharded else self._largest_cast()
        casts += 0 if self.width == 4 else 2 * sizes.vocabulary * sizes.hidden
        phases = (
            Parts(0, casts, reading, cache, 0),
            Parts(0, casts, decoding, cache, 0),
            Parts(0, casts, 0, cache, logits),
        )
        return max(phases, key=lambda parts: parts.total)

    def _attended_per_token(self) -> int:
        """Bytes per token of the cache that attention copies in one block: keys and values spread over all heads."""
        sizes = self.sizes
        keys, queries = sizes.kv_heads * sizes.head_dim, sizes.heads * sizes.head_dim
        copies = 0 if self.width == 4 else (4 + 2 + 2) * keys
        return copies + (2 * self.width * queries if queries != keys else 0)


def saved_by_layer(sizes: Architecture, layer: Layer, width: int) -> int:
    """Bytes per token that the backward pass of one block needs."""
    hidden, experts = sizes.hidden, sizes.experts_per_token
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    attention = width * (3 * queries + 2 * keys) + 4 * sizes.heads
    if sizes.position_rows:  # gpt2: layer norms, one matrix for queries, keys and values, a gelu written out
        return 8 * hidden + 2 * width * hidden + attention + 16 + 5 * width * sizes.mlp
    norms = 8 * hidden * (layer.norms // hidden) + 8
    if sizes.qk_norm:
        norms += (width + 4) * (queries + keys) + 4 * (sizes.heads + sizes.kv_heads)
    is_sparse = layer.experts > 0
    inputs = 2 * width * hidden if width == 4 else width * hidden * (4 if is_sparse else 5)
    if is_sparse:
        mlp = experts * (8 * hidden + 16 * sizes.mlp + 44) + 4 * layer.mlp // hidden
    else:
        mlp = 4 * width * _dense_width(sizes, layer)
    return norms + inputs + attention + mlp


def _dense_width(sizes: Architecture, layer: Layer) -> int:
    """The width of a gated MLP from its parameters: a model with experts may have dense blocks of another width."""
    return sizes.mlp if not sizes.experts_per_token else layer.mlp // (3 * sizes.hidden)
