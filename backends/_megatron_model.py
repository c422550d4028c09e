"""A pipeline stage of Megatron-Core's GPTModel, and its output for losses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn import functional

from rlcli.api.family import ModelConfig
from rlcli.api.operations import OperationCount
from rlcli.errors import ModelError
from rlcli.ops.attention import Scoring
from rlcli.ops.logprobs import OutputHead
from rlcli.ops.vocabulary import VocabularyShard

from ._megatron_experts import StageRouters, routed_mlp
from ._megatron_groups import RoleGroups
from ._megatron_layout import Place, rows_per_rank
from ._transformers import PackedOutput
from .megatron import Megatron

if TYPE_CHECKING:
    from ._transformers import Packing

_ACTIVATIONS = {"silu": functional.silu, "gelu": functional.gelu}
_ROPES = ("default", "linear", "llama3")


def check_model(role: str, config: ModelConfig, position: Place) -> None:
    """Raise ModelError if Megatron's model cannot be such a model,
    or cannot be divided like this."""
    scaling = config.rope.scaling.get("rope_type", "default") if config.rope is not None else None
    biases = (config.qkv_bias, config.output_bias, config.mlp_bias)
    reason = None
    if config.family not in Megatron.FAMILIES:
        reason = f"its family is {config.family}, not one of {', '.join(Megatron.FAMILIES)}"
    elif config.activation not in _ACTIVATIONS:
        reason = f"its activation is {config.activation}"
    elif scaling not in _ROPES:
        reason = f"its rotary positions are of type {scaling}"
    elif biases not in ((False,) * 3, (True, False, False), (True,) * 3):
        reason = "some of its linear layers have biases and others have none"
    if reason is not None:
        hint = f"set models.{role}.backend.type=fsdp"
        raise ModelError(
            f"the megatron backend cannot run the model of role {role}: {reason}", hint=hint
        )
    _check_division(role, config, position)


def _check_division(role: str, config: ModelConfig, position: Place) -> None:
    counts = {
        "attention heads": config.heads,
        "key-value heads": config.kv_heads,
        "MLP columns": config.mlp,
    }
    if config.experts is not None:
        counts["columns of an expert"] = config.experts.width
        counts["columns of the shared expert"] = config.experts.shared
    for quantity, count in counts.items():
        if count % position.tp_size:
            raise _cannot_divide(role, f"{count} {quantity}", "tp", position.tp_size)
    experts = config.experts.count if config.experts is not None else 0
    if position.ep_size > 1 and (not experts or experts % position.ep_size):
        raise _cannot_divide(role, f"{experts} experts", "ep", position.ep_size)
    if config.layers % position.pp_size:
        raise _cannot_divide(role, f"{config.layers} layers", "pp", position.pp_size)
    if position.chunks > 1 and position.pp_size == 1:
        raise ModelError(
            f"virtual_stages of role {role} is {position.chunks}, but its pipeline has one stage",
            hint=f"set models.{role}.mesh.pp=2, or leave out virtual_stages",
        )
    each = config.layers // position.pp_size
    if each % position.chunks:
        raise ModelError(
            f"each of the {position.pp_size} stages of role {role} has {each} layers, which "
            f"virtual_stages={position.chunks} does not divide",
            hint=f"set models.{role}.backend.args.virtual_stages to a divisor",
        )


def _cannot_divide(role: str, quantity: str, dimension: str, size: int) -> ModelError:
    return ModelError(
        f"the model of role {role} has {quantity}, which {dimension}={size} does not divide",
        hint=f"choose another models.{role}.mesh.{dimension}",
    )


def transformer_config(
    config: ModelConfig, position: Place, dtype: torch.dtype, settings: Megatron
) -> TransformerConfig:
    """Megatron's own description of the model and of how it is divided."""
    return TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.hidden,
        ffn_hidden_size=config.mlp,
        num_attention_heads=config.heads,
        num_query_groups=config.kv_heads,
        kv_channels=config.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_eps,
        qk_layernorm=config.qk_norm,
        gated_linear_unit=True,
        activation_func=_ACTIVATIONS[config.activation],
        add_bias_linear=config.mlp_bias,
        add_qkv_bias=config.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=position.tp_size,
        pipeline_model_parallel_size=position.pp_size,
        virtual_pipeline_model_parallel_size=position.chunks if position.chunks > 1 else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        variable_seq_lengths=True,
        cuda_graph_scope=[],
        # there are no experts; the default rejects varying lengths
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=True,
        # the only setting without averaging: losses are already divided
        calculate_per_token_loss=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        **_recomputation(settings),
    )


def _recomputation(settings: Megatron) -> dict[str, Any]:
    if not settings.gradient_checkpointing:
        return {}
    if settings.recompute == "selective":
        modules = ["core_attn", "mlp"]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


class PackedSequences(PackedSeqParams):
    """What Megatron's layers pass on to the attention: the micro-batch as a pack."""

    def __init__(self, packing: Packing, routes: torch.Tensor | None):
        """`routes` [S, L, k]: the experts that are prescribed to its routers, if it has any."""
        super().__init__()
        self.packing = packing
        self.routes = routes


class PackedCoreAttention(nn.Module):
    """Attention within packed sequences, in place of Megatron's, which would pad them and hold all
    scores, and has no context parallelism here."""

    def __init__(self, windows: tuple[int | None, ...], layer_number: int, **others: Any):
        """`layer_number` counts from 1, over all stages."""
        super().__init__()
        self._scoring = Scoring(window=windows[layer_number - 1] if windows else None)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        packed_seq_params: PackedSequences,
        **others: Any,
    ) -> torch.Tensor:
        """[S, 1, H · D] for queries [S, 1, H, D] of this rank's tokens."""
        q, k, v = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        attended = packed_seq_params.packing.attend(q, k, v, self._scoring)
        return attended.flatten(2).transpose(0, 1)


class StageModel(GPTModel):
    """A chunk of the blocks of one stage, with the embedding before the first block of the model,
    and norm and head after the last."""

    def __init__(
        self,
        config: ModelConfig,
        megatron: TransformerConfig,
        rope: torch.Tensor,
        groups: RoleGroups,
        position: Place,
        chunk: int,
        routers: StageRouters | None,
    ):
        """`rope` [head_dim / 2]: the rotary frequencies. The parameters are not initialised yet."""
        has_head = position.is_last(chunk)
        super().__init__(
            config=megatron,
            transformer_layer_spec=_block_specs(config, groups, position, chunk, routers),
            vocab_size=rows_per_rank(config.vocabulary, position.tp_size) * position.tp_size,
            max_sequence_length=config.positions,
            pre_process=position.is_first(chunk),
            post_process=has_head,
            share_embeddings_and_output_weights=config.tied and not config.value_head,
            position_embedding_type="none",
            pg_collection=groups.collection(),
            vp_stage=chunk if position.chunks > 1 else None,
        )
        self._rope = rope
        self.has_value_head = config.value_head
        self.vocabulary = config.vocabulary
        if config.value_head and has_head:
            self.output_layer = nn.Linear(config.hidden, 1, dtype=megatron.params_dtype)

    def _preprocess(
        self, position_ids: torch.Tensor, packed_seq_params: PackedSequences, **inputs: Any
    ) -> tuple[Any, ...]:
        """As Megatron's, with the rotary angles [S, 1, 1, head_dim] of positions [1, S], and with
        routes in the place of the mask of padding, which is all that reaches the MLP of a block."""
        embedded, _, *others, _ = super()._preprocess(position_ids=position_ids, **inputs)
        angles = position_ids[0].float()[:, None] * self._rope
        rotary = torch.cat((angles, angles), -1)[:, None, None]
        return embedded, rotary, *others, packed_seq_params.routes

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[s, b, hidden], even on the last stage: the head's output is only computed when a loss
        requests it."""
        return hidden_states

    def head(self, temperature: float) -> OutputHead:
        """The language-model head. Raises ModelError for a model without one."""
        if self.has_value_head:
            raise ModelError(
                "this model has no language-model head", hint="set head: lm for the role"
            )
        weight = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        group = self.tp_group
        first = min(self.vocabulary, group.rank() * weight.shape[0])
        rows = weight[: min(weight.shape[0], self.vocabulary - first)]
        shard = VocabularyShard(group, first, self.vocabulary) if group.size() > 1 else None
        return OutputHead(rows, temperature=temperature, shard=shard)


def _block_specs(
    config: ModelConfig,
    groups: RoleGroups,
    position: Place,
    chunk: int,
    routers: StageRouters | None,
) -> TransformerBlockSubmodules:
    """Blocks with Megatron's own modules, but for the attention to packed sequences, and for
    experts."""
    specs = []
    for number in position.blocks(config.layers, chunk):
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_norm)
        attention = partial(PackedCoreAttention, config.windows)
        spec.submodules.self_attention.submodules.core_attention = attention
        if config.experts is not None and number in config.experts.layers:
            assert routers is not None
            spec.submodules.mlp = routed_mlp(config.experts, groups, routers, number)
        specs.append(spec)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm)


class StageOutput(PackedOutput):
    """A `ModelOutput` of the last stage."""

    def __init__(
        self,
        model: StageModel,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        packing: Packing,
        count: OperationCount,
    ):
        super().__init__(model, hidden, tokens, packing, model.config.params_dtype, count)
        self._model = model

    def _head(self) -> OutputHead:
        return self._model.head(self.temperature)

    def _value_head(self) -> nn.Module | None:
        return self._model.output_layer if self._model.has_value_head else None
