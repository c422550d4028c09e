"""Unmodified `transformers` models on packed batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from rlcli.api.model_source import parameter_places
from rlcli.api.operations import OperationCount, Products
from rlcli.api.value_model import value_head
from rlcli.errors import ModelError
from rlcli.ops.attention import Kernels, PackedAttention, Scoring, packed_attention
from rlcli.ops.logprobs import OutputHead, token_scores
from rlcli.ops.packing import positions

from ._packable import cannot_be_packed, is_norm, refuse_unpackable
from ._tensor_parallel import local, vocabulary_shard

if TYPE_CHECKING:
    from rlcli.ops.context_attention import ContextAttention
    from rlcli.ops.flash_attention import FlashAttention
    from rlcli.ops.prefix_attention import PrefixAttention

    Packing = PackedAttention | ContextAttention | PrefixAttention

T = TypeVar("T")
Pack = Callable[[tuple[int, ...], torch.device], "Packing"]
"""The layout of a pack of sequences of some lengths."""
Share = Callable[[torch.Tensor, tuple[int, ...]], "PrefixAttention | None"]
"""(tokens [T] of a pack, lengths) → a layout that computes common prefixes once, if that pays."""

ATTENTION = "rlcli_packed"
"""Name of our attention in transformers' registry."""


_NOT_OFFERED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "position biases",
    "indices": "keys that it chooses",
    "block_indices": "keys that it chooses",
}
"""Arguments that some layers pass to their attention → what they stand for."""


def use_packed_attention(lm: nn.Module) -> None:
    """Make the model attend by the layout that each forward pass receives as `packing=`.

    Raises ModelError for a model with layers in which packed sequences would see each other, or
    with another head than one matrix.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _window_alone)
    refuse_unpackable(lm)
    lm.set_attn_implementation(ATTENTION)  # type: ignore[operator]


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: int | torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packing: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """`attention_mask`, which some families pass by name, is what `_window_alone` returned."""
    for name, reason in _NOT_OFFERED.items():
        if others.get(name) is not None:
            raise cannot_be_packed(type(module).__name__, reason)
    if isinstance(attention_mask, torch.Tensor):
        raise cannot_be_packed(type(module).__name__, "masks that it makes itself")
    if packing is None:
        raise cannot_be_packed(type(module).__name__, "no way to know which tokens belong together")
    window = attention_mask if sliding_window is None else sliding_window
    scoring = Scoring(scaling, window, softcap)
    # keys that were rotated in float32, and values that were not; cached ones are narrow already
    dtype = torch.promote_types(key.dtype, value.dtype)
    return packing.attend(query.to(dtype), key.to(dtype), value.to(dtype), scoring), None


def _window_alone(*args: Any, local_size: int | None = None, **others: Any) -> _Window | None:
    """Passed in place of a mask, with what the layout does not say: the window of layers that have
    one.

    Most families also pass it to their attention; with some, only the mask shows it.
    """
    return None if local_size is None else _Window(local_size)


class _Window(int):
    """A window, and so is any part of it: Gemma 4 takes that of all queries. Whoever computes with
    it as with a mask is refused."""

    def __getitem__(self, index: Any) -> _Window:
        return self

    def __getattr__(self, name: str) -> Any:
        raise cannot_be_packed("this model", "masks that it makes itself")


class PackedOutput:
    """A `ModelOutput` over hidden states [T, H], or over those of this rank's tokens: whole
    batches of scores are gathered from them. See the protocol for shapes."""

    def __init__(
        self,
        lm: nn.Module,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        packing: Packing,
        dtype: torch.dtype,
        count: OperationCount | None = None,
    ):
        self.temperature = 1.0
        self.actions: torch.Tensor | None = None
        self._lm = lm
        self._hidden = hidden
        self._tokens = tokens
        self._packing = packing
        self._dtype = dtype
        self._count = count
        self._with_entropy: tuple[torch.Tensor, torch.Tensor] | None = None

    @cached_property
    def logprobs(self) -> torch.Tensor:
        if self._with_entropy is not None:
            return self._with_entropy[0]
        return self._scores(entropy=False)[0]

    @cached_property
    def entropy(self) -> torch.Tensor:
        """If requested before `logprobs`, one pass over the vocabulary serves both."""
        logprobs, entropies = self._scores(entropy=True)
        assert entropies is not None
        self._with_entropy = logprobs, entropies
        return entropies

    @cached_property
    def values(self) -> torch.Tensor:
        head = self._value_head()
        if head is None:
            raise ModelError("this model has no value head", hint="set head: value for the role")
        return self._packing.gathered(head(self._hidden)[:, 0].float())

    @cached_property
    def logits(self) -> torch.Tensor:
        head = self._head()
        if head.shard is not None:
            raise ModelError(
                "logits are not available where tensor parallelism shards the vocabulary",
                hint="use output.logprobs and output.entropy, or set the role's mesh.tp=1",
            )
        return self._packing.gathered(head.logits(self._hidden, self._dtype))

    @property
    def zero(self) -> torch.Tensor:
        """0, computed as a loss would be: DeepSpeed requires all ranks to call the same modules."""
        scored = self.logprobs if self._value_head() is None else self.values
        return scored.sum() * 0.0

    def _value_head(self) -> nn.Module | None:
        return value_head(self._lm)

    def _head(self) -> OutputHead:
        return head_of(self._lm, self.temperature)

    def _scores(self, entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, targets = self._packing.scored(self._hidden, self._tokens)
        read = None
        if self.actions is not None:
            read = self._packing.read_by(self.actions.to(hidden.device))
            rows = read.nonzero()[:, 0]
            hidden, targets = hidden.index_select(0, rows), targets[rows]
        if self._count is not None:
            self._count.add(scores=len(hidden), trains=torch.is_grad_enabled())
        logprobs, entropies = token_scores(
            hidden, self._head(), targets, entropy=entropy, dtype=self._dtype
        )
        return self._of_actions(logprobs, read), (
            self._of_actions(entropies, read) if entropies is not None else None
        )

    def _of_actions(self, scores: torch.Tensor, read: torch.Tensor | None) -> torch.Tensor:
        """[T - N] from scores of all rows that are `scored`, or of those that are `read`; 0 for
        actions that were not requested."""
        if read is not None:
            scores = scores.new_zeros(len(read)).masked_scatter(read, scores)
        return self._packing.of_actions(scores)


def dimensions_in(
    lm: nn.Module, stored: Callable[[nn.Parameter], int] = nn.Parameter.dim
) -> Callable[[nn.Parameter], int]:
    """Returns the number of dimensions of a parameter: that which is `stored`, but 1 for those of
    norms, which are vectors also where they have a row for each head, as in Cohere."""
    norms = {p for m in lm.modules() if is_norm(m) for p in m.parameters(recurse=False)}
    return lambda parameter: 1 if parameter in norms else stored(parameter)


def hidden_matrices(lm: Any) -> list[nn.Parameter]:
    """Matrices [m, n] between an embedding and a head, and stacks [E, m, n] of those of experts."""
    return [
        weight
        for module in lm.base_model.modules()
        if not isinstance(module, nn.Embedding) and not is_norm(module)
        for weight in module.parameters(recurse=False)
        if weight.dim() > 1
    ]


def layers_of(config: Any) -> Sequence[Any]:
    """The configuration of each layer, whose sizes may differ, as in Gemma 4."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def head_dim(layer: Any) -> int:
    return getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads


def products_of(lm: Any) -> Products:
    """The products of a model, of whose parameters a rank may hold parts."""
    config = lm.config.get_text_config()
    per_token = getattr(config, "num_experts_per_tok", None) or 1
    weights = hidden_matrices(lm)
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    experts = sum(weight.numel() // len(weight) for weight in weights if weight.dim() == 3)
    columns = sum(layer.num_attention_heads * head_dim(layer) for layer in layers_of(config))
    head = lm.get_output_embeddings() if value_head(lm) is None else None
    return Products(
        of_token=2.0 * (matrices + per_token * experts),
        of_pair=4.0 * columns,
        of_score=2.0 * head.weight.numel() if head is not None else 0.0,
    )


MULTIPLIED_BY_SCALING = ("hyperclovax",)
"""Families whose `logits_scaling` is a factor of the logits; Granite and others divide by it."""


def head_of(lm: Any, temperature: float = 1.0) -> OutputHead:
    """The language-model head with everything that its family does to the logits."""
    linear = lm.get_output_embeddings()
    if linear is None:
        raise ModelError("this model has no language-model head", hint="set head: lm for the role")
    config = lm.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    if scaling := getattr(config, "logits_scaling", None):
        scale = scaling if config.model_type in MULTIPLIED_BY_SCALING else 1.0 / scaling
    softcap = getattr(config, "final_logit_softcapping", None)
    bias = getattr(linear, "bias", None)
    return OutputHead(
        local(linear.weight),
        None if bias is None else local(bias),
        softcap,
        scale,
        temperature,
        vocabulary_shard(linear.weight),
    )


def linear_matrices(lm: nn.Module) -> set[str]:
    """Names of the parameters that autocast casts wherever they are used: the matrices of linear
    layers. Not those of embeddings, even if tied to a head, whose rows are read as they are, nor of
    a value head, which it does not cover.
    """
    values = value_head(lm)
    return {
        name
        for name, places in parameter_places(lm).items()
        if all(
            isinstance(module, nn.Linear) and attribute == "weight" and module is not values
            for module, attribute in places
        )
    }


def _nothing(packing: Packing) -> None:
    pass


class PackedModel(nn.Module):
    """A transformers model whose forward pass takes a packed batch and a function of the result.

    The loss is computed inside `forward`, so hooks around it (FSDP's gathering of parameters)
    also cover the head.
    """

    def __init__(
        self,
        lm: nn.Module,
        compute_dtype: torch.dtype,
        pack: Pack = packed_attention,
        share: Share | None = None,
        count: OperationCount | None = None,
    ):
        super().__init__()
        use_packed_attention(lm)
        self.lm = lm
        self.compute_dtype = compute_dtype
        self._pack = pack
        self._share = share
        self._count = count

    def forward(
        self,
        tokens: torch.Tensor,
        lengths: tuple[int, ...],
        then: Callable[[PackedOutput], T],
        before: Callable[[Packing], None] = _nothing,
        may_share: bool = True,
    ) -> T:
        """`then(output)` for `tokens` [T], packed sequences of `lengths` [N], after `before`. With
        `may_share`, tokens with the same past may be computed once."""
        shared = self._share(tokens, lengths) if self._share is not None and may_share else None
        packing = shared or self._pack(lengths, tokens.device)
        before(packing)
        places = positions(lengths, tokens.device)
        hidden = self.hidden_states(packing.mine(tokens), packing.mine(places), packing)
        if self._count is not None:
            self._count.add(len(hidden), packing.pairs, trains=torch.is_grad_enabled())
        output = PackedOutput(self.lm, hidden, tokens, packing, self.compute_dtype, self._count)
        return then(output)

    def hidden_states(
        self, tokens: torch.Tensor, places: torch.Tensor, packing: Packing
    ) -> torch.Tensor:
        """[T, H] the hidden states of the last layer."""
        backbone: Any = self.lm.base_model
        with compute_in(self.compute_dtype, tokens.device):
            output = backbone(
                input_ids=tokens[None],
                position_ids=places[None],
                attention_mask=None,
                use_cache=False,
                packing=packing,
            )
        return output.last_hidden_state[0]


def flash_attention_of(
    lm: Any, kernels: Kernels, device: torch.device, dtype: torch.dtype, role: str
) -> FlashAttention | None:
    """The attention for a model's packs that replaces torch's kernel. Raises ModelError."""
    if kernels == "torch" or (kernels == "auto" and device.type != "cuda"):
        return None
    from rlcli.ops.flash_attention import flash_attention

    largest = max(head_dim(layer) for layer in layers_of(lm.config.get_text_config()))
    try:
        return flash_attention(kernels, device, dtype is not torch.float32, largest)
    except ValueError as error:
        raise ModelError(
            f"role {role} cannot have `attention: flash`: {error}",
            hint=f"rlcli doctor says how to install it; models.{role}.backend.args.attention=auto "
            "uses torch's kernels where it is missing",
        ) from error


def compute_in(
    dtype: torch.dtype, device: torch.device, remembers_casts: bool = True
) -> torch.autocast:
    """Matrix products in `dtype` over float32 parameters, whose casts may be used again."""
    is_narrow = dtype is torch.bfloat16
    return torch.autocast(
        device.type, dtype=torch.bfloat16, enabled=is_narrow, cache_enabled=remembers_casts
    )


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`, where nothing was measured, is bfloat16 on GPUs that multiply it, else float32."""
    if name == "auto":
        is_native = device.type == "cuda" and torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        return torch.bfloat16 if is_native else torch.float32
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise ValueError(f"dtype is {name!r}; it must be auto, float32 or bfloat16")
    return dtypes[name]
