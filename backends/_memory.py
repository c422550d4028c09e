"""The memory of transformers models under `_engine.TransformersEngine`:
formulas that follow its code.

Weights are float32, but for matrices that `inference` holds in bfloat16; matrix products run in
`width` bytes per number. Activations are counted as transformers' modules save them per token for
the backward pass; tests compare the counts with it, and peaks with the memory of a real process. No
torch here: `rlcli plan` imports this file.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import ClassVar

from rlcli.api.architecture import Architecture, TransformerBlock
from rlcli.api.memory import Generation, Kept, MemoryModel, Parts, PlacedRole, UnknownMemory
from rlcli.ops.context_choice import AttentionSizes, Method

CHUNK_ELEMENTS = 1 << 24
"""Logits that the head holds at once: `rlcli.ops.logprobs.CHUNK_ELEMENTS`,
which needs torch to be imported."""


def concurrent_responses(total: int, longest: int, most: int, cache_tokens: int | None) -> int:
    """How many of `total` responses are decoded at once: at most `most`, and no more than fit in
    the cache if each takes `longest` tokens, including its prompt."""
    return min(total, most, total if cache_tokens is None else cache_tokens // longest)


def packing_pays(responses: int, new_tokens: int, width: int) -> bool:
    """Whether weights with numbers of `width` bytes are packed for a call on a CPU. A pass over two
    rows or more saves an eighth or more of what packing costs; one over a single row saves a tenth
    in 16 bits, and next to nothing in 32."""
    if responses > 1:
        return new_tokens >= 8
    return responses == 1 and width == 2 and new_tokens >= 32


class SharedTokens(MemoryModel):
    """A model whose context-parallel ranks share the tokens of a micro-batch."""

    sizes: Architecture
    """Sizes of the part that this rank computes with."""
    context: int
    """Ranks that share the tokens of a micro-batch, and the prompts of a call."""
    width: int
    """Bytes of a number in matrix products; `auto` is treated as bfloat16."""

    def slots(self, tokens: int) -> int:
        """A rank's share of the tokens of a micro-batch."""
        return -(-tokens // self.context)

    def attention_of(self, tokens: int) -> AttentionSizes:
        sizes = self.sizes
        return AttentionSizes(sizes.heads, sizes.kv_heads, self.context, self.slots(tokens))

    def method(self, tokens: int) -> Method:
        """How ranks attend to each other's tokens in a micro-batch."""
        chosen = self.role.arguments.get("context_parallel", "auto")
        return self.attention_of(tokens).method if chosen == "auto" else chosen

    def exchanged(self, tokens: int) -> int:
        """Bytes of messages and of what is computed from them, in one block: for Ulysses queries,
        keys and values of all tokens, and a message on its way; for a ring, keys and values and
        their float32 gradients, each received and sent, and float32 results."""
        if self.context == 1:
            return 0
        sizes, attention = self.sizes, self.attention_of(tokens)
        if self.method(tokens) == "ulysses":
            keys = lcm(sizes.kv_heads, self.context)
            vectors = self.width * (3 * sizes.heads + 2 * keys)
        else:
            vectors = (3 * self.width + 12) * 2 * sizes.kv_heads + 8 * sizes.heads
        return vectors * sizes.head_dim * attention.tokens


class InferenceMemory(SharedTokens):
    """A whole copy of the model on every data-parallel and context-parallel rank; forward passes
    and generation."""

    dimensions: ClassVar[tuple[str, ...]] = ("dp", "tp", "cp")
    """Dimensions of the meshes that it can estimate."""
    keeps_casts: bool = False
    """Whether autocast keeps its copies of trainable weights until the end of a forward pass;
    others are cast again at every use. A call that generates makes its own copies."""
    holds_casts: ClassVar[bool] = True
    """Whether `dtype: bfloat16` holds the matrices of linear layers as autocast casts them."""

    def __init__(self, role: PlacedRole):
        super().__init__(role)
        others = {
            name: size
            for name, size in role.mesh.items()
            if size > 1 and name not in self.dimensions
        }
        if others:
            named = " ".join(f"{name}{size}" for name, size in others.items())
            raise UnknownMemory(f"the memory of a mesh with {named} cannot be estimated yet")
        self.sizes = part_of(role.architecture, role.mesh.get("tp", 1))
        self.context = role.mesh.get("cp", 1)
        self.has_lm_head = role.head == "lm"
        self.width = 4 if role.arguments.get("dtype") == "float32" else 2
        self.in_attention = 4 if role.device == "cpu" else self.width
        """Bytes of a number in attention; a CPU with AMX needs no more."""
        is_narrow = self.holds_casts and role.arguments.get("dtype") == "bfloat16"
        self.narrow = self.linear_parameters if is_narrow else 0
        """Parameters that are held in bfloat16."""

    @property
    def linear_parameters(self) -> int:
        """Parameters in the matrices of linear layers; gpt2 has none."""
        sizes = self.sizes
        separate_head = (
            sizes.vocabulary * sizes.hidden if self.has_lm_head and not sizes.tied else 0
        )
        return 0 if sizes.position_rows else sizes.cast + separate_head

    @property
    def parameters(self) -> int:
        """Number of parameters in this rank's part, if it were not sharded over data-parallel
        ranks."""
        return self.sizes.parameters(self.role.head)

    def resident(self) -> Kept:
        return Kept(4 * self.parameters - 2 * self.narrow)

    def load(self) -> Parts:
        return Parts()

    def remarks(self) -> list[str]:
        remarks: list[str] = []
        is_capped = self.role.architecture.model_type == "gemma2"
        if is_capped and self.role.arguments.get("attention") != "flash":
            remarks.append(
                "its attention caps scores, so it is quadratic in memory: it holds the scores of a "
                "sequence's tokens with each other, which are not counted here"
            )
        return remarks

    # -- inference ---------------------------------------------------------------------------------

    def inference(self, tokens: int) -> Parts:
        exchanged, tokens = self.exchanged(tokens), self.slots(tokens)
        logits = 0
        if self.has_lm_head:
            at_once = logits_at_once(tokens, self.sizes.vocabulary)
            earlier = 2 if tokens * self.sizes.vocabulary > at_once else 0  # of the last chunk
            logits = (8 + earlier) * at_once + self.head_cast()
        at_head = Parts(
            gathered=self.gathered_at_head(),
            activations=4 * self.sizes.hidden * tokens,
            logits=logits,
        )
        in_block = Parts(
            gathered=self.gathered_in_block() + self.casts(self.keeps_casts),
            activations=tokens * self.passing_per_token() + exchanged,
        )
        return max((at_head, in_block), key=lambda parts: parts.total)

    def gathered_at_head(self) -> int:
        """Bytes of other ranks' parameters while the head computes."""
        return 0

    def gathered_in_block(self) -> int:
        """The same while a block computes."""
        return 0

    def casts(self, are_kept: bool) -> int:
        """Copies of weights in the precision of the matrix products, while blocks compute: all,
        or the largest."""
        if self.width == 4 or self.narrow:
            return 0
        widest = max(self.sizes.mlp, self.sizes.heads * self.sizes.head_dim)
        return 2 * (self.sizes.cast if are_kept else self.sizes.hidden * widest)

    def head_cast(self) -> int:
        """The same for the head's matrix."""
        is_cast = self.width == 2 and not (self.narrow and not self.sizes.tied)
        return 2 * self.sizes.vocabulary * self.sizes.hidden if is_cast else 0

    def passing_per_token(self) -> int:
        """Bytes per token that one block needs at once when nothing is saved."""
        sizes, width = self.sizes, self.width
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        mlp = 16 * sizes.hidden + width * sizes.hidden + 3 * width * sizes.mlp
        if sizes.experts_per_token:
            mlp = 12 * sizes.hidden + sizes.experts_per_token * (8 * sizes.hidden + 16 * sizes.mlp)
        attention = 8 * sizes.hidden + (width + 4) * (queries + 2 * keys) + 3 * 4 * queries
        return max(mlp, attention)

    # -- generation --------------------------------------------------------------------------------

    def generate(self, asked: Generation) -> Parts:
        sizes, prompt = self.sizes, asked.prompt_tokens
        longest = prompt + asked.new_tokens
        prompts = -(-asked.prompts // self.context)
        responses = prompts * asked.responses
        room = self.role.arguments.get("kv_cache_tokens")
        slots = max(1, concurrent_responses(responses, longest, asked.at_once, room))
        read_at_once = min(prompts, -(-slots // asked.responses))
        keys = sizes.kv_heads * sizes.head_dim
        cache = slots * longest * keys * len(sizes.layers) * 2 * self.width
        reading = read_at_once * prompt * self.passing_per_token() + slots * prompt * keys * 4
        decoding = slots * longest * self.attended_per_token()
        # of all ranks, to sample from
        logits = slots * self.role.architecture.vocabulary * (20 + self.width)
        gathered = self.gathered_to_generate()
        if self.can_pack and packing_pays(responses, asked.new_tokens, self.width):
            gathered += self.packed_to_generate()
        phases = (
            Parts(0, gathered, reading, cache),
            Parts(0, gathered, decoding, cache),
            Parts(0, gathered, 0, cache, logits),
        )
        return max(phases, key=lambda parts: parts.total)

    def gathered_to_generate(self) -> int:
        """Other ranks' parameters, and casts of weights, while responses are generated."""
        return self.casts(are_kept=True) + self.head_cast()

    @property
    def can_pack(self) -> bool:
        """Whether calls that generate can pack weights."""
        return self.role.device == "cpu" and self.role.mesh.get("tp", 1) == 1

    @property
    def copies_to_generate(self) -> bool:
        """Whether a call generates with a whole copy of the model in any case."""
        return False

    def packed_to_generate(self) -> int:
        """Packed weights that do not take the place of the copies in `gathered_to_generate`."""
        sizes = self.sizes
        linear = 0 if self.copies_to_generate else self.linear_parameters
        if self.width == 4:
            return 4 * (linear + (sizes.vocabulary * sizes.hidden if sizes.tied else 0))
        return 2 * min(linear, self.narrow)

    def attended_per_token(self) -> int:
        """Bytes per token of the cache that attention copies in one block:
        keys and values spread over all heads."""
        sizes = self.sizes
        keys, queries = sizes.kv_heads * sizes.head_dim, sizes.heads * sizes.head_dim
        return 2 * self.width * queries if queries != keys else 0


def head_backward(tokens: int, vocabulary: int, matrix: int, width: int) -> int:
    """Bytes of the head's backward pass: logits, which are kept of the last chunk, their gradient,
    and the gradient of a head with `matrix` numbers, whose products have `width` bytes each."""
    elements = logits_at_once(tokens, vocabulary)
    has_several = tokens * vocabulary > elements
    gradient = (16 if has_several else 12) * elements
    product = (4 + width) * elements + (4 if width == 4 else 6) * matrix
    return max(gradient, product) + (4 * matrix if has_several else 0)


def logits_at_once(tokens: int, vocabulary: int) -> int:
    """Elements of the largest chunk of logits."""
    return min(tokens, max(1, CHUNK_ELEMENTS // vocabulary)) * vocabulary


def part_of(sizes: Architecture, ranks: int) -> Architecture:
    """The part of a model that one of `ranks` tensor-parallel ranks has: its heads, columns and
    rows of the vocabulary. Hidden states and norms are whole on every rank."""
    if ranks == 1:
        return sizes
    layers = tuple(
        replace(
            layer,
            attention=layer.attention // ranks,
            mlp=layer.mlp // ranks,
            experts=layer.experts // ranks,
            shared=layer.shared // ranks,
        )
        for layer in sizes.layers
    )
    return replace(
        sizes,
        heads=sizes.heads // ranks,
        kv_heads=max(1, sizes.kv_heads // ranks),
        mlp=sizes.mlp // ranks,
        vocabulary=-(-sizes.vocabulary // ranks),
        layers=layers,
    )


def saved_by_layer(
    sizes: Architecture, layer: TransformerBlock, width: int, in_attention: int
) -> int:
    """Bytes per token that the backward pass of one block needs; a number of its attention has
    `in_attention` bytes."""
    hidden, experts = sizes.hidden, sizes.experts_per_token
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    attention = in_attention * 2 * (queries + keys) + width * queries + 4 * sizes.heads
    # gpt2: layer norms, one matrix for queries, keys and values, a gelu written out
    if sizes.position_rows:
        return 8 * hidden + 2 * width * hidden + attention + 16 + 5 * width * sizes.mlp
    norms = 8 * hidden * (layer.norms // hidden) + 8
    if sizes.qk_norm:
        norms += (width + 4) * (queries + keys) + 4 * (sizes.heads + sizes.kv_heads)
    is_sparse = layer.experts > 0
    inputs = 2 * width * hidden if width == 4 else width * hidden * (4 if is_sparse else 5)
    if is_sparse:
        mlp = experts * (8 * hidden + 16 * sizes.mlp + 44) + 4 * layer.mlp // hidden
    else:
        mlp = 4 * width * dense_width(sizes, layer)
    return norms + inputs + attention + mlp + _saved_by_shared_expert(sizes, layer, width)


def results_of_layer(
    sizes: Architecture, layer: TransformerBlock, width: int, in_attention: int
) -> int:
    """Bytes per token for the results of a block's products with weights, and of its attention."""
    hidden = sizes.hidden
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    attention = width * (queries + 2 * keys + hidden) + in_attention * queries + 4 * sizes.heads
    if sizes.position_rows:
        return attention + width * (sizes.mlp + hidden)
    if not layer.experts:
        return attention + width * (2 * dense_width(sizes, layer) + hidden)
    experts = sizes.experts_per_token * width * (2 * sizes.mlp + hidden)
    shared = width * (2 * (layer.shared // (3 * hidden)) + hidden + 1) if layer.shared else 0
    return attention + experts + shared


def _saved_by_shared_expert(sizes: Architecture, layer: TransformerBlock, width: int) -> int:
    """The same for an expert that all tokens share: a gated MLP whose output is scaled."""
    if not layer.shared:
        return 0
    narrow_inputs = 0 if width == 4 else 3 * width * sizes.hidden
    inner = 4 * width * (layer.shared // (3 * sizes.hidden))
    return narrow_inputs + inner + width * (sizes.hidden + 1)


def dense_width(sizes: Architecture, layer: TransformerBlock) -> int:
    """The width of a gated MLP from its parameters: a model with experts may have dense blocks of
    another width."""
    return sizes.mlp if not sizes.experts_per_token else layer.mlp // (3 * sizes.hidden)
