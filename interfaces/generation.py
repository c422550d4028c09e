"""Batch inference and evaluation: a role answers prompts; nothing is trained."""

from __future__ import annotations

from dataclasses import dataclass

from rlcli.api.model import register_interface

from ._generating import Generating


@dataclass(kw_only=True)
class GenerationInterface(Generating):
    """Samples responses. A run whose graph trains nothing writes them to samples.jsonl, one per line."""


register_interface("generation", GenerationInterface)
