"""The interfaces of a worker's calls."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy
import torch

from rlcli import registry
from rlcli.api.config import ModelInterfaceAbstraction, stable_seed
from rlcli.api.dataflow import MFCDef
from rlcli.api.model import ModelInterface


class Interfaces:
    """One per role, type and arguments, so that calls of one role share its state. Calls of a step that share state
    have the same arguments; an evaluation call may have others, and gets the current state."""

    def __init__(self, training: Sequence[MFCDef], evaluating: Sequence[MFCDef]):
        self._training = training
        self._evaluating = {mfc.name for mfc in evaluating}
        self._made: dict[str, ModelInterface] = {}

    def of(self, mfc: MFCDef) -> ModelInterface:
        """The interface of a call."""
        described = ModelInterfaceAbstraction(mfc.interface_impl.type_, mfc.interface_impl.args)
        name = f"{mfc.model_name}/{described.type_}/{described.args!r}"
        if name not in self._made:
            self._made[name] = registry.make_interface(described)
        interface, stateful = self._made[name], self._stateful(mfc)
        if stateful is not None and stateful is not interface:
            interface.load_state_dict(stateful.state_dict())
        return interface

    def clear(self) -> None:
        self._made.clear()

    def _stateful(self, mfc: MFCDef) -> ModelInterface | None:
        """The training interface of the same role and type, for an evaluation call."""
        if mfc.name not in self._evaluating:
            return None
        kind = mfc.model_name, mfc.interface_impl.type_
        alike = (other for other in self._training if (other.model_name, other.interface_impl.type_) == kind)
        trained = next(alike, None)
        return self.of(trained) if trained is not None else None


def seed_global_streams(seed: int, call: str, step: int, rank: int) -> None:
    """Seed the global random streams, which rlcli itself never uses, so that a component that does draws the same
    numbers in every run."""
    drawn = stable_seed(seed, call, step, rank)
    torch.manual_seed(drawn % 2**63)
    numpy.random.seed(drawn % 2**32)
    random.seed(drawn)
