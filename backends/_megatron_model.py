"""A pipeline stage of Megatron-Core's GPTModel, and its output for losses."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn import functional

from rlcli.api.family import ModelConfig
from rlcli.errors import ModelError
from rlcli.ops.attention import packed_attention
from rlcli.ops.logprobs import OutputHead
from rlcli.ops.packing import positions
from rlcli.ops.vocabulary import VocabularyShard

from ._megatron_groups import RoleGroups
from ._megatron_layout import rows_per_rank
from ._transformers import PackedOutput
from .megatron import Megatron

_ACTIVATIONS = {"silu": functional.silu, "gelu": functional.gelu}
_ROPES = ("default", "linear", "llama3")


def check_model(role: str, config: ModelConfig, tp_size: int, pp_size: int) -> None:
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
    counts = {
        "attention heads": config.heads,
        "key-value heads": config.kv_heads,
        "MLP columns": config.mlp,
    }
    for quantity, count in counts.items():
        if count % tp_size:
            raise _cannot_divide(role, f"{count} {quantity}", "tp", tp_size)
    if config.layers % pp_size:
        raise _cannot_divide(role, f"{config.layers} layers", "pp", pp_size)


def _cannot_divide(role: str, quantity: str, dimension: str, size: int) -> ModelError:
    return ModelError(
        f"the model of role {role} has {quantity}, which {dimension}={size} does not divide",
        hint=f"choose another models.{role}.mesh.{dimension}",
    )


def transformer_config(
    config: ModelConfig, groups: RoleGroups, dtype: torch.dtype, recompute: bool
) -> TransformerConfig:
    """Megatron's own description of the model and of how it is divided."""
    windows = [window for window in config.windows if window is not None]
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
        window_size=(windows[0] - 1, 0) if windows else None,
        window_attn_skip_freq=[int(window is not None) for window in config.windows] or None,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=groups.tp.size(),
        pipeline_model_parallel_size=groups.pp.size(),
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
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


class StageModel(GPTModel):
    """The blocks of one stage, with the embedding on the first stage,
    and norm and head on the last."""

    def __init__(
        self,
        config: ModelConfig,
        rope: torch.Tensor,
        groups: RoleGroups,
        dtype: torch.dtype,
        recompute: bool,
    ):
        """`rope` [head_dim / 2]: the rotary frequencies. The parameters are not initialised yet."""
        # Megatron's attention requires its stream; there is no dropout
        if not get_cuda_rng_tracker().get_states():
            _make_random_streams(groups.tp.rank())
        size = groups.tp.size()
        super().__init__(
            config=transformer_config(config, groups, dtype, recompute),
            transformer_layer_spec=get_gpt_layer_local_spec(
                normalization="RMSNorm", qk_layernorm=config.qk_norm
            ),
            vocab_size=rows_per_rank(config.vocabulary, size) * size,
            max_sequence_length=config.positions,
            pre_process=groups.is_first_stage,
            post_process=groups.is_last_stage,
            share_embeddings_and_output_weights=config.tied and not config.value_head,
            position_embedding_type="rope",
            pg_collection=groups.collection(),
        )
        self.rotary_pos_emb.inv_freq = rope
        self.has_value_head = config.value_head
        self.vocabulary = config.vocabulary
        if config.value_head and groups.is_last_stage:
            self.output_layer = nn.Linear(config.hidden, 1, dtype=dtype)

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


def _make_random_streams(tp_rank: int) -> None:
    """Create Megatron's streams for dropout, without changing the random state that other code
    draws from."""
    before = torch.cuda.get_rng_state()
    model_parallel_cuda_manual_seed(0, tp_rank=tp_rank, ep_rank=0, etp_rank=0)
    torch.cuda.set_rng_state(before)


class StageOutput(PackedOutput):
    """A `ModelOutput` of the last stage."""

    def __init__(
        self,
        model: StageModel,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        lengths: tuple[int, ...],
        dtype: torch.dtype,
    ):
        super().__init__(model, hidden, tokens, packed_attention(lengths, tokens.device), dtype)
        self._model = model

    def _head(self) -> OutputHead:
        return self._model.head(self.temperature)

    def _value_head(self) -> nn.Module | None:
        return self._model.output_layer if self._model.has_value_head else None


@dataclasses.dataclass(frozen=True)
class PaddedBatch:
    """Packed sequences in rows of equal length."""

    tokens: torch.Tensor
    """[b, s] int64; 0 for padding."""
    positions: torch.Tensor
    """[b, s] int64."""
    mask: torch.Tensor
    """[1, 1, s, s] bool: what a token must not see. In a row, only padding follows the sequence,
    which does not see it either."""
    places: torch.Tensor
    """[T]: the index of each token of the packed batch among the b · s of [s, b]."""


def padded(tokens: torch.Tensor, lengths: tuple[int, ...]) -> PaddedBatch:
    """`tokens` [T] of sequences of `lengths` [N], as [b, s] with b = N and s the longest."""
    device, longest = tokens.device, max(lengths)
    columns = positions(lengths, device)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    padded_tokens = torch.zeros(len(lengths), longest, dtype=torch.int64, device=device)
    padded_tokens[rows, columns] = tokens
    steps = torch.arange(longest, device=device)
    mask = (steps[None, :] > steps[:, None])[None, None]
    return PaddedBatch(
        padded_tokens, steps.expand(len(lengths), -1), mask, columns * len(lengths) + rows
    )
