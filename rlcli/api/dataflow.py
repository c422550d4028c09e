"""The dataflow graph: model function calls, linked by the keys they produce and consume. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from rlcli.api.config import MicroBatchSpec, ModelInterfaceAbstraction

if TYPE_CHECKING:
    import networkx


class ModelInterfaceType(StrEnum):
    """Which method of its interface a call runs."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"
    EVALUATE = "evaluate"


@dataclass(frozen=True, kw_only=True)
class ParamReallocHook:
    """Once the call is done, give `target` the parameters of the call's role.

    target ← eta · source + (1 − eta) · target: a copy at eta 1, below that an exponential moving average.
    """

    target: str
    eta: float = 1.0


@dataclass(frozen=True, kw_only=True)
class OffloadHook:
    """Once the call is done, keep its role's weights in host memory until the role's next call."""


Hook = ParamReallocHook | OffloadHook


@dataclass(frozen=True, kw_only=True)
class MFCDef:
    """One model function call of the graph: `model.call(inputs) -> outputs`."""

    name: str
    model_name: str
    """The role that runs the call."""
    interface_type: ModelInterfaceType
    interface_impl: ModelInterfaceAbstraction
    input_keys: tuple[str, ...] = ()
    output_keys: tuple[str, ...] = ()
    input_key_remap: Mapping[str, str] = field(default_factory=dict)
    """Name in the buffer → name the interface reads."""
    output_key_remap: Mapping[str, str] = field(default_factory=dict)
    """Name the interface writes → name in the buffer."""
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    post_hooks: tuple[Hook, ...] = ()
    """What happens to weights once the call is done, in this order."""
    drops: tuple[str, ...] = ()
    """The reasons for which it may drop samples."""

    @property
    def is_train(self) -> bool:
        return self.interface_type is ModelInterfaceType.TRAIN_STEP

    @property
    def written_roles(self) -> tuple[str, ...]:
        """The roles whose weights the call changes: its own if it trains, and those that it copies to."""
        own = (self.model_name,) if self.is_train else ()
        return own + tuple(hook.target for hook in self.post_hooks if isinstance(hook, ParamReallocHook))

    @property
    def produced_keys(self) -> tuple[str, ...]:
        """The keys that appear in the buffer once the call is done."""
        return tuple(self.output_key_remap.get(key, key) for key in self.output_keys)


@dataclass(frozen=True)
class VersionEdge:
    """At step k, `consumer` needs the weights of `role` that `producer` trained, or copied, at step k − 1."""

    producer: str
    consumer: str
    role: str


class GraphError(ValueError):
    """A graph that cannot run; `calls` and `key` say where, for the recipe's error message."""

    def __init__(self, what: str, *, calls: Sequence[str] = (), key: str | None = None):
        super().__init__(what)
        self.calls = tuple(calls)
        self.key = key


def build_graph(mfcs: Sequence[MFCDef], dataset_keys: Sequence[str] | None = None) -> networkx.DiGraph:
    """Link producers to consumers by key.

    Nodes are call names with attribute `mfc`; edges carry `keys`, the tuple of keys that flow along them.
    `graph.graph["version_edges"]` holds the parameter-version edges, `graph.graph["dataset_keys"]` the keys
    that the dataset must bring. Raises GraphError for a duplicate name, two producers of one key, a cycle,
    or (when `dataset_keys` is given) a key that nobody makes.
    """
    import networkx

    graph = networkx.DiGraph()
    producers: dict[str, str] = {}
    for mfc in mfcs:
        if mfc.name in graph:
            raise GraphError(f"two calls are named {mfc.name}", calls=[mfc.name])
        graph.add_node(mfc.name, mfc=mfc)
        for key in mfc.produced_keys:
            if key in producers:
                raise GraphError(
                    f"both {producers[key]} and {mfc.name} produce {key}", calls=[producers[key], mfc.name], key=key
                )
            producers[key] = mfc.name

    from_dataset: set[str] = set()
    for mfc in mfcs:
        for key in mfc.input_keys:
            if key in producers:
                keys = graph.get_edge_data(producers[key], mfc.name, {"keys": ()})["keys"]
                graph.add_edge(producers[key], mfc.name, keys=(*keys, key))
            elif dataset_keys is not None and key not in dataset_keys:
                raise GraphError(f"{mfc.name} reads {key}, which nobody produces", calls=[mfc.name], key=key)
            else:
                from_dataset.add(key)

    if not networkx.is_directed_acyclic_graph(graph):
        cycle = [edge[0] for edge in networkx.find_cycle(graph)]
        raise GraphError("the calls wait for each other: " + " → ".join([*cycle, cycle[0]]), calls=cycle)
    graph.graph["dataset_keys"] = tuple(sorted(from_dataset))
    graph.graph["version_edges"] = tuple(_version_edges(mfcs))
    return graph


def weight_writers(mfcs: Sequence[MFCDef]) -> dict[str, list[str]]:
    """Role → the calls after which it has the weights of the next version: they train it, or copy weights to it."""
    writers: dict[str, list[str]] = {}
    for mfc in mfcs:
        for role in mfc.written_roles:
            writers.setdefault(role, []).append(mfc.name)
    return writers


def calls_ahead(mfcs: Sequence[MFCDef]) -> list[MFCDef]:
    """The calls that may work on samples of later steps while weights are trained: generation, and calls of roles whose
    weights never change, as far as they wait for such calls alone. Empty where that is no generation, or nothing is
    trained."""
    writers = weight_writers(mfcs)
    bound = {
        mfc.name
        for mfc in mfcs
        if mfc.written_roles or (mfc.model_name in writers and mfc.interface_type is not ModelInterfaceType.GENERATE)
    }
    makers = {key: mfc.name for mfc in mfcs for key in mfc.produced_keys}
    while more := {mfc.name for mfc in mfcs if any(makers.get(key) in bound for key in mfc.input_keys)} - bound:
        bound |= more
    ahead = [mfc for mfc in mfcs if mfc.name not in bound]
    generates = any(mfc.interface_type is ModelInterfaceType.GENERATE for mfc in ahead)
    return ahead if bound and generates else []


def _version_edges(mfcs: Sequence[MFCDef]) -> list[VersionEdge]:
    """A call needs the newest weights of its role."""
    writers = weight_writers(mfcs)
    return [
        VersionEdge(producer=writer, consumer=mfc.name, role=mfc.model_name)
        for mfc in mfcs
        for writer in writers.get(mfc.model_name, ())
    ]
