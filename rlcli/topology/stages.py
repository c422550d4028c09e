"""Which calls of training a sample goes through before a step takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli.api.dataflow import CallGraph, MFCDef, ModelInterfaceType, calls_ahead
from rlcli.recipe.graph import train_graph

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe


@dataclass(frozen=True)
class Stages:
    """The calls of training: those that samples go through before a step takes them, and those of
    the step."""

    graph: list[MFCDef]
    before: list[MFCDef]
    is_ahead: bool
    """Whether samples are made ahead of all steps."""

    @classmethod
    def of(cls, recipe: Recipe) -> Stages:
        """If generation may be stale, the calls that may run ahead of all steps come first;
        otherwise, if calls may drop samples, those that choose a batch. The others need the whole
        batch, or wait for calls that do."""
        graph = train_graph(recipe)
        if recipe.train.max_staleness and (ahead := calls_ahead(graph)):
            return cls(graph, ahead, is_ahead=True)
        if not any(mfc.drops for mfc in graph):
            return cls(graph, [], is_ahead=False)
        linked, of_step = CallGraph(graph), {mfc.name for mfc in graph if mfc.needs_batch}
        late = of_step.union(*(linked.after(name) for name in of_step))
        return cls(graph, [mfc for mfc in graph if mfc.name not in late], is_ahead=False)

    @property
    def of_step(self) -> list[MFCDef]:
        """The calls that a batch goes through."""
        return [mfc for mfc in self.graph if mfc not in self.before]

    @property
    def sampling_roles(self) -> set[str]:
        """Roles whose weights generate samples before training."""
        return {
            mfc.model_name
            for mfc in self.before
            if mfc.interface_type is ModelInterfaceType.GENERATE
        }
