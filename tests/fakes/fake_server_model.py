"""A transformers model behind the fake server, with weights from disk or received over a process
group."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

distributed: Any = torch.distributed
"""Untyped, like a library's own stores and groups."""
PATIENCE = timedelta(seconds=30)


class TransformersModel:
    """A model such as those of `rlcli.testing.tiny_models`. It starts with random weights."""

    def __init__(self, config: Any):
        from transformers import AutoModelForCausalLM

        self.lm: Any = AutoModelForCausalLM.from_config(config).float().eval()
        self.vocabulary = int(config.vocab_size)
        self._groups: dict[str, Any] = {}

    @torch.no_grad()
    def logits(self, tokens: tuple[int, ...]) -> list[float]:
        logits: list[float] = self.lm(input_ids=torch.tensor([tokens])).logits[0, -1].tolist()
        return logits

    def load(self, folder: Path) -> None:
        from safetensors.torch import load_file

        for file in sorted(folder.glob("*.safetensors")):
            self._take(load_file(file))

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
        arrived = {}
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            arrived[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            self._groups[group].broadcast([arrived[name]], distributed.BroadcastOptions()).wait()
        self._take(arrived)

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
