"""The contracts of interfaces, backends and engines.

An **interface** knows the algorithm and no parallelism; an **engine** knows parallelism and no algorithm.
They meet in `train_batch(input_, loss_fn, loss_weight_fn, …)`: the loss is a pure function that returns a
**sum** over the tokens of one micro-batch, and the engine divides it by the weight summed over all
micro-batches and all ranks. So loss, gradient and update do not depend on how the batch was cut.
"""

from __future__ import annotations

import abc
import inspect
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
from rlcli.api.generation import FinishedResponse, GeneratedResponses, GenerationEngine, ResponseStream, Segment
from rlcli.api.interface import EvalLoader, ModelInterface
from rlcli.api.loss_stats import Stats
from rlcli.api.model_source import ModelSource

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
    """A role at work: its engine (in `module`, once a backend has initialised it), tokenizer and version."""

    name: str
    module: Any
    """An engine after `ModelBackend.initialize`; None before that, and for a role without weights."""
    tokenizer: PreTrainedTokenizerBase | None
    device: torch.device
    dtype: torch.dtype = torch.float32
    version: ModelVersion = field(default_factory=ModelVersion)
    ft_spec: FinetuneSpec | None = None
    seed: int = 0
    """Root of every random draw of this role."""
    source: ModelSource | None = None
    """Where the weights come from, of which the backend takes what its rank keeps; None for a role without weights."""
    family: HFFamily | None = None
    """How configuration and parameters translate to names that all families share; None if nobody wrote the family."""
    save_dtype: torch.dtype | None = None
    """Of the model that `save_to_hf` writes; None: that of the source."""
    device_mesh: Any = None
    """The role's torch `DeviceMesh` (dimensions dp, tp, … by name), or None on a single rank."""
    server_folders: tuple[Path, ...] = ()
    """Of the servers that the run starts for this rank, each with an agent (see `rlcli.server_slot`)."""
    data_tokenizer: PreTrainedTokenizerBase | None = None
    """Of the sequences in a batch: that of the role which the prompts are read for. This role may have another one."""

    def __post_init__(self) -> None:
        if self.data_tokenizer is None:
            self.data_tokenizer = self.tokenizer

    def inc_version(self) -> None:
        """Count one training step."""
        self.version.global_step += 1
        self.version.epoch_step += 1
        if self.ft_spec and self.version.epoch_step == self.ft_spec.steps_per_epoch:
            self.version.epoch += 1
            self.version.epoch_step = 0


def call_interface(
    interface: ModelInterface,
    call: str,
    model: Model,
    data: SequenceSample | Sequence[SequenceSample],
    mb_spec: MicroBatchSpec | None = None,
) -> Any:
    """One call of an interface, with what every interface would otherwise do itself.

    The engine is put into the mode of the call, and `data` (batches, for `evaluate`) on its device. During `train_step`
    the engine knows the number of the training step, which gives the learning rate; afterwards the role's version is
    one more, whether or not the interface counted as well. Returns what the interface returns.
    """
    engine = model.module
    if isinstance(engine, ForwardEngine):
        engine.train(call == "train_step")
    if isinstance(engine, HoldsWeights):
        device = engine.device
        data = data.to(device) if isinstance(data, SequenceSample) else [batch.to(device) for batch in data]
    if call == "evaluate":
        return interface.evaluate(model, data)  # type: ignore[arg-type]
    if call != "train_step":
        method = getattr(interface, call)
        takes_spec = len(inspect.signature(method).parameters) != 2  # those of ReaLHF's documents take none
        return method(model, data, *([mb_spec or MicroBatchSpec()] if takes_spec else []))
    before = replace(model.version)
    if isinstance(engine, TrainEngine):
        engine.training_step = before.global_step
    stats = interface.train_step(model, data, mb_spec or MicroBatchSpec())  # type: ignore[arg-type]
    model.version = before
    model.inc_version()
    return stats


class ModelBackend(abc.ABC):
    """How a model runs. A dataclass: its fields are the recipe's `args:`.

    What its engines can do stands in its class, read without importing it, so that a recipe which asks for more is
    refused before anything starts.
    """

    REQUIRES: ClassVar[tuple[str, ...]] = ()
    """Distributions that it needs beyond those of rlcli, as pip knows them; a run without them does not start."""
    TRAINS: ClassVar[bool] = True
    """Its engines are `TrainEngine`s."""
    SCORES: ClassVar[bool] = True
    """Its engines are `ForwardEngine`s."""
    GENERATES: ClassVar[bool] = True
    """Its engines are `GenerationEngine`s."""
    REPRODUCIBLE: ClassVar[bool] = True
    """A response depends on its prompt, the weights and its seed alone."""
    DIMENSIONS: ClassVar[tuple[str, ...]] = ("dp",)
    """The dimensions of a mesh that its engines know."""
    DEVICES: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    """The kinds of devices that its engines run on."""
    FAMILIES: ClassVar[tuple[str, ...]] = ()
    """The `model_type`s that its engines run; empty: any that transformers knows."""
    MEMORY: ClassVar[str | None] = None
    """Where its memory model is, which `rlcli plan` asks; see `rlcli.api.memory`."""
    SERVERS: ClassVar[str | None] = None
    """A function next to it, `_my_file.my_function`: from its arguments to how many servers each rank has started."""
    FILES: ClassVar[tuple[str, ...]] = ()
    """Arguments that name files or folders which must be there: they are looked for when a recipe is read, next to the
    layer that names them too. A name without a slash is a command, and looked for where it is run."""
    ON_RESUME: ClassVar[dict[str, str]] = {}
    """Argument → what another value means for a run that is resumed: safe, if the steps that are left compute the same;
    forbidden, if what was saved does not belong to it. Any other argument alters the run, which must be accepted."""
    FOLLOWS_LENGTH: ClassVar[dict[str, Any]] = {}
    """Argument → the one value of it with which steps do not depend on how long the run is."""
    POOLED: ClassVar[bool] = False
    """The calls of its roles, which have no weights, run in processes next to the ranks, one for each; it has their
    limits as `cpu_s`, seconds of processor time for a call, and `memory_gib`."""
    RUNS_MODEL: ClassVar[bool] = True
    """It makes an engine; False if it leaves the role without weights."""
    READS_SOURCE: ClassVar[bool] = True
    """Its engines begin with the weights of the role's source; False: `Model.source` is None, they have their own."""

    def initialize(self, model: Model, spec: FinetuneSpec | None) -> Model:
        """Make the model's engine; the model knows how long the run is from here on."""
        model.ft_spec = spec
        return self._initialize(model)

    @abc.abstractmethod
    def _initialize(self, model: Model) -> Model:
        """Put an engine in `model.module`."""

    def destroy(self, model: Model) -> None:  # noqa: B027 - most backends hold nothing to give back
        """Give back what `_initialize` took."""
