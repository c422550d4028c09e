"""Folders in which transformers saves models, as the checks read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlcli.api.value_model import value_model_class


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Name → tensor of all safetensors files in a folder; empty if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def load_saved(folder: Path, head: str, **settings: Any) -> Any:
    """What transformers' `from_pretrained` returns for a folder with these settings; `head` is "lm"
    or "value"."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind: Any = (
        AutoModelForCausalLM
        if head == "lm"
        else value_model_class(AutoConfig.from_pretrained(folder))
    )
    return kind.from_pretrained(folder, **settings)
