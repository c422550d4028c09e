"""A transformers model behind the fake server, with weights from disk or received over a process
group."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

distributed: Any = torch.distributed
"""Untyped, like a library's own stores and groups."""
PATIENCE = timedelta(seconds=30)
_LOADING = threading.Lock()
"""transformers replaces `tie_weights` of all models while it loads one: with two at a time, it
would stay replaced."""


class TransformersModel:
    """A model such as those of `rlcli.testing.tiny_models`. It starts with random weights."""

    def __init__(self, config: Any):
        from transformers import AutoModelForCausalLM

        self.lm: Any = AutoModelForCausalLM.from_config(config).float().eval()
        self.vocabulary = int(config.vocab_size)
        self._groups: dict[str, Any] = {}
        self._arrived: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def logits(self, tokens: tuple[int, ...]) -> list[float]:
        logits: list[float] = self.lm(input_ids=torch.tensor([tokens])).logits[0, -1].tolist()
        return logits

    @torch.no_grad()
    def experts(self, tokens: tuple[int, ...]) -> list[list[list[int]]] | None:
        per_token = getattr(self.lm.config, "num_experts_per_tok", None)
        if not tokens or per_token is None:
            return None
        layers = self.lm.base_model.layers
        settings = {"use_cache": False, "output_router_logits": True}
        logits = self.lm.base_model(input_ids=torch.tensor([tokens]), **settings).router_logits
        sparse = [layer for layer, module in enumerate(layers) if hasattr(module.mlp, "experts")]
        chosen = torch.zeros(len(tokens), len(layers), per_token, dtype=torch.int64)
        for layer, of_layer in zip(sparse, logits, strict=True):
            chosen[:, layer] = of_layer.topk(per_token, -1).indices
        experts: list[list[list[int]]] = chosen.tolist()
        return experts

    def load(self, folder: Path) -> None:
        from safetensors.torch import load_file

        weights: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= load_file(file)
        self._replace(weights)

    def _replace(self, weights: dict[str, torch.Tensor]) -> None:
        """Take all weights, by their names in files."""
        if weights.keys() <= self.lm.state_dict().keys():
            self._take(weights)
            return
        # files have each expert by itself
        settings = {"config": self.lm.config, "state_dict": weights, "dtype": torch.float32}
        with _LOADING:
            self.lm = type(self.lm).from_pretrained(None, **settings).eval()

    def join(self, address: str, port: int, rank: int, size: int, group: str) -> None:
        """Create a group as SGLang does, and in it the backend's group as torch does."""
        store: Any = distributed.TCPStore(address, port, is_master=False, timeout=PATIENCE)
        for prefix in (group, f"{group}/", "cpu/"):
            store = distributed.PrefixStore(prefix, store)
        self._groups[group] = distributed.ProcessGroupGloo(store, rank, size, PATIENCE)

    def leave(self, group: str) -> None:
        """Also ends the group's threads, one of which wakes up a hundred times a second."""
        self._groups.pop(group, None)

    def receive(
        self, group: str, names: list[str], dtypes: list[str], shapes: list[list[int]]
    ) -> None:
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self._groups[group].broadcast([tensor], distributed.BroadcastOptions()).wait()
            self._arrived[name] = tensor

    def take_received(self) -> None:
        self._replace(self._arrived)
        self._arrived = {}

    def digest(self) -> str:
        sums = {
            name: parameter.detach().double().sum().item()
            for name, parameter in self.lm.named_parameters()
        }
        return repr(sorted(sums.items()))

    def _take(self, weights: dict[str, torch.Tensor]) -> None:
        parameters = dict(self.lm.named_parameters())
        with torch.no_grad():
            for name, tensor in weights.items():
                parameters[name if name in parameters else f"transformer.{name}"].copy_(tensor)
