"""Batch inference and evaluation: a role answers prompts, and nothing is learned from it."""

from __future__ import annotations

from dataclasses import dataclass

from rlcli.api.model import register_interface
from rlcli.interfaces._generating import Generating


@dataclass(kw_only=True)
class GenerationInterface(Generating):
    """Samples responses. A run whose graph trains nothing writes them to samples.jsonl, one line each."""


register_interface("generation", GenerationInterface)
