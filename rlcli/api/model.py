"""The contracts of interfaces, backends and engines.

An **interface** implements an algorithm and no parallelism; an **engine** implements parallelism
and no algorithm. They are connected by `train_batch(input_, loss_fn, loss_weight_fn, …)`: the loss
is a pure function that returns a **sum** over the tokens of one micro-batch, and the engine divides
it by the weight summed over all micro-batches and all ranks. So loss, gradient and update do not
depend on how the batch is cut.
"""

from __future__ import annotations

import abc
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rlcli.api.component import make_backend, make_interface, register_backend, register_interface
from rlcli.api.config import (
    FinetuneSpec,
    GenerationHyperparameters,
    MicroBatchSpec,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
    ModelVersion,
    stable_seed,
)
from rlcli.api.data import SequenceSample
from rlcli.api.engine import (
    EngineState,
    ForwardEngine,
    GivesParameters,
    HoldsWeights,
    LossFn,
    ModelOutput,
    PipelinableEngine,
    TrainEngine,
)
from rlcli.api.family import HFFamily, register_hf_family
from rlcli.api.generation import (
    FinishedResponse,
    GeneratedResponses,
    GenerationEngine,
    ResponseStream,
    Segment,
)
from rlcli.api.interface import EvalLoader, ModelInterface
from rlcli.api.limits import Alternatives, alternatives_problem
from rlcli.api.loss_stats import Stats
from rlcli.api.model_source import ModelSource
from rlcli.errors import ModelError, ProjectError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "EngineState",
    "EvalLoader",
    "FinetuneSpec",
    "FinishedResponse",
    "ForwardEngine",
    "GeneratedResponses",
    "GenerationEngine",
    "GenerationHyperparameters",
    "GivesParameters",
    "HFFamily",
    "HoldsWeights",
    "LossFn",
    "MicroBatchSpec",
    "Model",
    "ModelBackend",
    "ModelBackendAbstraction",
    "ModelInterface",
    "ModelInterfaceAbstraction",
    "ModelOutput",
    "ModelSource",
    "ModelVersion",
    "PipelinableEngine",
    "ResponseStream",
    "Segment",
    "Stats",
    "TrainEngine",
    "call_interface",
    "make_backend",
    "make_interface",
    "register_backend",
    "register_hf_family",
    "register_interface",
]


@dataclass
class Model:
    """A role at run time: its engine (in `module`, once a backend has initialised it),
    tokenizer and version."""

    name: str
    module: Any
    """An engine after `ModelBackend.initialize`; None before that,
    and for a role without weights."""
    tokenizer: PreTrainedTokenizerBase | None
    device: torch.device
    dtype: torch.dtype = torch.float32
    version: ModelVersion = field(default_factory=ModelVersion)
    ft_spec: FinetuneSpec | None = None
    seed: int = 0
    """The run's seed. Responses depend on no other property of the role, so a separate role that
    generates for another one samples the same responses, on any devices."""
    source: ModelSource | None = None
    """Where the weights come from; the backend reads the part that its rank keeps. None for a role
    without weights."""
    family: HFFamily | None = None
    """How configuration and parameters translate to names that all families share; None if rlcli
    lacks the family."""
    save_dtype: torch.dtype | None = None
    """dtype of the model that `save_to_hf` writes; None: that of the source."""
    device_mesh: Any = None
    """The role's torch `DeviceMesh` (dimensions dp, tp, … by name), or None on a single rank."""
    expert_ranks: int = 1
    """Neighbouring data-parallel ranks that share one copy of the experts (the mesh's ep)."""
    server_folders: tuple[Path, ...] = ()
    """Folders of the servers that the run starts for this rank, each with an agent (see
    `rlcli.server_slot`). A server over several nodes has one for each of them, in order."""
    data_tokenizer: PreTrainedTokenizerBase | None = None
    """Tokenizer of the sequences in a batch: that of the role the prompts are read for.
    This role's may differ."""
    call_deadline: float = math.inf
    """Seconds after which an unfinished call ends the run."""

    def __post_init__(self) -> None:
        if self.data_tokenizer is None:
            self.data_tokenizer = self.tokenizer

    @property
    def required_source(self) -> ModelSource:
        """The source. Raises ModelError if the role has no weights."""
        if self.source is None:
            raise ModelError(
                f"role {self.name} has no weights to run", hint="use backend: null for such a role"
            )
        return self.source

    @property
    def role_seed(self) -> int:
        """Seed of the role's own random draws, such as the order of its minibatches."""
        return stable_seed(self.seed, self.name)

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over the role's ranks; a role without an engine has only one."""
        if self.module is None:
            return value
        total: torch.Tensor = self.module.all_reduce(value.to(self.module.device), "sum")
        return total.to(value.device)

    @property
    def updates_per_step(self) -> int:
        """By how much the version grows in a training step."""
        return self.ft_spec.updates_per_step if self.ft_spec else 1

    def inc_version(self) -> None:
        """Count one call that trains."""
        self.version.global_step += 1
        self.version.epoch_step += 1
        if self.ft_spec and self.version.epoch_step == (
            self.ft_spec.steps_per_epoch * self.updates_per_step
        ):
            self.version.epoch += 1
            self.version.epoch_step = 0


def call_interface(
    interface: ModelInterface,
    call: str,
    model: Model,
    data: SequenceSample | Sequence[SequenceSample],
    mb_spec: MicroBatchSpec | None = None,
) -> Any:
    """Call an interface, and do what every interface would otherwise have to do itself.

    Sets the engine's mode for the call and moves `data` (batches, for `evaluate`) to its device.
    During `train_step` the engine knows the number of the training step, which determines the
    learning rate; afterwards the role's version has gone up by one, whether or not the interface
    counted as well. Returns what the interface returns.
    """
    engine = model.module
    if isinstance(engine, ForwardEngine):
        engine.train(call == "train_step")
    if isinstance(engine, HoldsWeights):
        device = engine.device
        data = (
            data.to(device)
            if isinstance(data, SequenceSample)
            else [batch.to(device) for batch in data]
        )
    if call == "evaluate":
        return interface.evaluate(model, data)  # type: ignore[arg-type]
    if call != "train_step":
        method = getattr(interface, call)
        # those in ReaLHF's documentation take none
        takes_spec = len(inspect.signature(method).parameters) != 2
        return method(model, data, *([mb_spec or MicroBatchSpec()] if takes_spec else []))
    before = replace(model.version)
    if isinstance(engine, TrainEngine):
        engine.training_step = before.global_step // model.updates_per_step
    stats = interface.train_step(model, data, mb_spec or MicroBatchSpec())  # type: ignore[arg-type]
    model.version = before
    model.inc_version()
    return stats


class _NoEngineYet:
    """Replaces the engine of a role with weights until its backend has made one: frameworks in
    which a backend wraps a model that has been loaded already keep that model here."""

    def __init__(self, role: str):
        self._role = role

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling look for methods
            raise AttributeError(name)
        raise ProjectError(
            (
                f"role {self._role} has no weights in model.module; its backend makes the "
                "engine that belongs there"
            ),
            hint=(
                "model.source.load(model.device) loads the whole model; "
                "model.source.read reads parts of it"
            ),
        )


class ModelBackend(abc.ABC):
    """How a model runs. A dataclass: its fields are the recipe's `args:`.

    Its class declares what its engines can do. This is read without importing it, so that a recipe
    that requires more is refused before anything starts.
    """

    REQUIRES: ClassVar[tuple[str, ...]] = ()
    """Distributions that it needs in addition to rlcli's, by their pip names; without them,
    a run does not start."""
    SERVER_REQUIRES: ClassVar[tuple[str, ...]] = ()
    """Likewise, what the servers that it starts need in the environment of their own Python."""
    TRAINS: ClassVar[bool] = True
    """Whether its engines are `TrainEngine`s."""
    SCORES: ClassVar[bool] = True
    """Whether its engines are `ForwardEngine`s."""
    GENERATES: ClassVar[bool] = True
    """Whether its engines are `GenerationEngine`s."""
    REPRODUCIBLE: ClassVar[bool] = True
    """Whether a response depends only on its prompt, the weights and its seed."""
    UNIFORMS: ClassVar[str | None] = None
    """A function in a file next to it, `_my_file.my_function`: a response's seed, and a count → the
    random numbers in [0, 1), [count] float64, with which its first tokens are drawn: each token has
    an interval of the length of its probability. None: drawn in another way."""
    DIMENSIONS: ClassVar[tuple[str, ...]] = ("dp",)
    """The mesh dimensions that its engines support."""
    DEVICES: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    """The kinds of devices that its engines run on."""
    STREAMS: ClassVar[bool] = False
    """Whether its engines generate on data-parallel ranks that need not wait for each other, and
    can be given new weights while responses are in progress (`GenerationEngine.open`)."""
    ROUTING_REPLAY: ClassVar[bool] = False
    """Whether its engines that generate report the experts of each token
    (`GenerationHyperparameters.routing_replay`), and those that score or train route the tokens of
    a batch with `routed_experts` to these experts."""
    FAMILIES: ClassVar[tuple[str, ...]] = ()
    """The `model_type`s that its engines run; empty: any that transformers supports."""
    LAYOUT: ClassVar[str | None] = None
    """Name of the function that reports the layouts that its engines do not support; see
    `rlcli.api.layout`."""
    WHOLE_SEQUENCES: ClassVar[str | None] = None
    """Name of the function that says why its engines compute every sequence of a layout as a whole,
    although others begin with the same tokens; see `rlcli.api.layout`. None: they always do."""
    MEMORY: ClassVar[str | None] = None
    """Name of its memory model, which `rlcli plan` uses; see `rlcli.api.memory`."""
    SERVERS: ClassVar[str | None] = None
    """A function in a file next to it, `_my_file.my_function`: its arguments → number of servers
    started per rank."""
    SERVER_DEVICES: ClassVar[str | None] = None
    """Likewise: its arguments, and the number of a rank's device on its node → the devices of each
    of its servers, on each node of that server."""
    SERVER_NODES: ClassVar[str | None] = None
    """Likewise: its arguments → the number of nodes of each of its servers, starting with its
    rank's."""
    FILES: ClassVar[tuple[str, ...]] = ()
    """Arguments that name files or folders that must exist: they are looked up when a recipe is
    read, also next to the layer that names them. A name without a slash is a command, looked up
    where it is run."""
    VARIABLES: ClassVar[tuple[str, ...]] = ()
    """Arguments that name variables of the environment,
    which must be set before anything starts."""
    PER_RANK: ClassVar[tuple[str, ...]] = ()
    """Arguments that, if they are given, have at least one entry for each rank of the role."""
    ON_RESUME: ClassVar[dict[str, str]] = {}
    """Argument → the effect of changing it on resume: safe, if the remaining steps compute the
    same; forbidden, if the saved state does not fit the new value. Changing any other argument
    alters the run, which must be accepted."""
    MEASURED: ClassVar[tuple[str, ...]] = ()
    """Arguments whose value `auto` is replaced, when a run first starts, by the one that `measure`
    finds fastest on the slowest rank of the role."""
    FOLLOWS_LENGTH: ClassVar[dict[str, Any]] = {}
    """Argument → its only value with which steps do not depend on the length of the run."""
    ROUNDS_WEIGHTS: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Argument → its values with which weights have too few bits for a moving average."""
    POOLED: ClassVar[bool] = False
    """Whether the calls of its roles, which have no weights, run in processes next to the ranks,
    one for each. Its arguments `cpu_s` (seconds of processor time per call)
    and `memory_gib` limit them."""
    RUNS_MODEL: ClassVar[bool] = True
    """Whether it makes an engine; False if it leaves the role without weights."""
    READS_SOURCE: ClassVar[bool] = True
    """Whether its engines start from the role's source; False: `Model.source` is None, they have
    their own weights."""

    def initialize(self, model: Model, spec: FinetuneSpec | None) -> Model:
        """Make the model's engine, and store the length of the run (`spec`) in the model. Raises
        UsageError unless exactly one argument of its `ONE_OF` is given."""
        alternatives: Alternatives = getattr(self, "ONE_OF", ())
        if problem := alternatives_problem(
            alternatives, {name: getattr(self, name) for name in alternatives}
        ):
            raise UsageError(f"the backend of role {model.name}: {problem}", code="R39")
        model.ft_spec = spec
        if model.source is not None:
            model.module = _NoEngineYet(model.name)
        return self._initialize(model)

    def measure(self, model: Model) -> dict[str, dict[str, float]]:
        """Argument among `MEASURED` that is `auto` → its values, the most exact one first → seconds
        that the same work takes with each on this rank; an argument that is left out stays `auto`.
        `model` has a source and a device, but no engine yet."""
        return {}

    @abc.abstractmethod
    def _initialize(self, model: Model) -> Model:
        """Put an engine in `model.module`."""

    def destroy(self, model: Model) -> None:  # noqa: B027 - most backends have nothing to release
        """Release what `_initialize` acquired."""
