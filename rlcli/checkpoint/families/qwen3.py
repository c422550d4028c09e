"""Qwen3: queries and keys normalised per head, biases where `attention_bias` says so."""

from collections.abc import Mapping
from typing import Any, ClassVar

from rlcli.api.family import register_hf_family

from .qwen2 import QWEN, WindowedDecoder


@register_hf_family("qwen3")
class Qwen3(WindowedDecoder):
    """The head size is independent of hidden / heads."""

    architecture = "Qwen3ForCausalLM"
    qk_norm = True
    defaults: ClassVar[Mapping[str, Any]] = {**QWEN, "head_dim": 128, "attention_bias": False}
