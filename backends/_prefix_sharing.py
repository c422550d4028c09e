"""Common prefixes of the sequences of a micro-batch, computed once by models of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlcli.ops.prefix_attention import PrefixAttention
from rlcli.ops.shared_prefixes import SharedPrefixes, Work, shared_prefixes

if TYPE_CHECKING:
    from rlcli.ops.flash_attention import FlashAttention


@dataclass(frozen=True)
class PrefixSharing:
    """Finds them by the ids of tokens. What is shared follows from a batch alone."""

    work: Work
    device: torch.device
    flash: FlashAttention | None

    @classmethod
    def of(cls, lm: Any, device: torch.device, flash: FlashAttention | None) -> PrefixSharing:
        return cls(_work_of(lm, device), device, flash)

    def layout(self, tokens: torch.Tensor, lengths: tuple[int, ...]) -> PrefixAttention | None:
        prefixes = self._prefixes(tokens, lengths)
        return PrefixAttention(prefixes, self.device, self.flash) if prefixes is not None else None

    def counted(self, tokens: torch.Tensor, lengths: tuple[int, ...]) -> int:
        """Tokens of a group that need memory."""
        prefixes = self._prefixes(tokens, lengths)
        return prefixes.counted if prefixes is not None else sum(lengths)

    def _prefixes(self, tokens: torch.Tensor, lengths: tuple[int, ...]) -> SharedPrefixes | None:
        if len(lengths) == 1:
            return None
        return shared_prefixes(tokens.cpu(), lengths, self.work.pays)


def _work_of(lm: Any, device: torch.device) -> Work:
    """On average over the layers of a model."""
    config = lm.config.get_text_config()
    per_token = getattr(config, "num_experts_per_tok", None) or 1
    weights = [
        weight
        for module in lm.base_model.modules()
        if not isinstance(module, nn.Embedding)
        for weight in module.parameters(recurse=False)
    ]
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    experts = sum(weight.numel() // len(weight) for weight in weights if weight.dim() == 3)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Work(
        of_token=(matrices + per_token * experts) / config.num_hidden_layers,
        of_key=2 * config.num_attention_heads * head_dim,
        skips_hidden=device.type == "cuda",
    )
