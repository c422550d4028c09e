"""The sections of a recipe, with documentation for every key. Unknown keys are refused,
types are strict."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, create_model, model_validator

from rlcli.api.config import DatasetAbstraction, GenerationHyperparameters
from rlcli.api.dataflow import Transfer
from rlcli.recipe.mesh import MAX_DEVICES_PER_NODE, MAX_NODES
from rlcli.recipe.sections.base import Name, NotNegative, Positive, Section
from rlcli.recipe.sections.checkpoint import Checkpoint
from rlcli.recipe.sections.launch import LaunchSection
from rlcli.recipe.sections.log import Log

LABEL_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
"""No dots, because they separate the keys of `models.actor.path`."""
KEY_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$"

Label = Annotated[str, StringConstraints(pattern=LABEL_PATTERN)]
Key = Annotated[str, StringConstraints(pattern=KEY_PATTERN)]
MAX_PROMPTS = 10**7
"""Prompts of a step."""
MAX_STALENESS = 1000
"""Maximum age of a sample in versions; long before that, it says nothing about the policy."""
Keys = Annotated[list[Key], Field(max_length=256)]


class Component(Section):
    """A component by name, with its arguments; a plain string names the type."""

    type: str
    """Name of the component; `rlcli ls` lists them."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Fields of the component's class; `rlcli show <name>` lists them."""


NO_BACKEND = Component(type="")
"""What stands for the backend of a role that has none, because of a mistake in the recipe."""


class MeshSection(Section):
    """How a role's devices share the work, in this order."""

    dp: Positive | None = None
    """Data-parallel size; null: the number of the role's devices, divided by the other sizes."""
    tp: Positive = 1
    """Tensor-parallel size."""
    pp: Positive = 1
    """Pipeline stages."""
    cp: Positive = 1
    """Context-parallel size (one sequence over several devices)."""
    ep: Positive = 1
    """Expert-parallel size: number of neighbouring data-parallel ranks that divide the experts of a
    mixture; a divisor of dp x cp."""


class Rollout(Section):
    """A copy of a role that generates for it, and receives its weights after each of its training
    steps."""

    backend: Component | None = None
    """Backend that runs it; null: inference."""
    mesh: MeshSection = MeshSection()
    """How its devices share the work."""
    devices: str | None = None
    """Ranks that hold it, such as `4-7`; null: those of the role. Roles without devices of their
    own get the rest."""
    transfer: Transfer = "full"
    """What is sent to it between ranks after a training step: `full`, all weights; `delta`, only
    what has changed since the last step, compressed. The resulting weights are the same."""


WEIGHTS = ("path", "init", "scratch")
"""The keys of a role that say where its weights come from: one of these."""


class Role(Section):
    """A model: its backend, and its weights from exactly one of path,
    init and scratch (or none at all)."""

    path: str | None = None
    """A folder, the id of a model on the Hub (`owner/name`), or `recipe:<name or path>#<role>`: the
    result of another recipe, which is run first if it has no result yet."""
    init: str | None = None
    """Name of another role whose initial weights this one shares."""
    scratch: dict[str, Any] | None = None
    """A transformers config with its `model_type`: random initial weights. Needs a tokenizer."""
    tokenizer: str | None = None
    """A folder, a Hub id or `builtin:<name>`; null: the one that comes with the weights."""
    head: Literal["lm", "value"] = "lm"
    """What the model predicts: the next token, or one value per token (a critic)."""
    backend: Component | None = None
    """Backend that runs the model; null: fsdp if a call trains it, inference if not,
    `null` without weights."""
    mesh: MeshSection = MeshSection()
    """How its devices share the work."""
    devices: str | None = None
    """Ranks that hold the role, such as `0-3,5`; null: all in the cluster that are not reserved for
    a rollout."""
    rollout: Rollout | None = None
    """Generate with a copy of the role, on its own devices and backend; the copy is the role
    `<role>_rollout`."""

    @property
    def engine(self) -> Component:
        """Its backend. Every role of a checked recipe has one."""
        return self.backend or NO_BACKEND

    @property
    def has_weights(self) -> bool:
        """Whether there is a model to load at all."""
        return any(getattr(self, key) is not None for key in WEIGHTS)

    @property
    def warm_start(self) -> tuple[str, str] | None:
        """(recipe, its role) if the weights are the result of another recipe."""
        if self.path is None or not self.path.startswith("recipe:"):
            return None
        recipe, _, role = self.path.removeprefix("recipe:").partition("#")
        return recipe, role


class Hooks(Section):
    """What happens to weights after a call."""

    copy_to: str | None = None
    """Role that receives the weights of the call's role,
    such as a reference that follows the actor."""
    eta: Annotated[float, Field(gt=0, le=1)] = 1.0
    """With `copy_to`: target = eta * source + (1 - eta) * target;
    below 1 an exponential moving average."""
    transfer: Transfer = "full"
    """With `copy_to`, what is sent between ranks: `full`, all elements; `delta`, only what has
    changed since the last copy, in the dtype of the target, compressed. The resulting weights are
    the same."""
    offload: bool = False
    """Keep the weights of the call's role in host memory until its next call, and its optimizer's
    state until its next training step, so that roles can take turns on a device."""


class Call(Section):
    """One call of the graph: `model.call(inputs) -> outputs`."""

    model: str
    """The role that runs the call."""
    call: Literal["generate", "inference", "train_step", "evaluate"]
    """The interface method to call."""
    interface: Component
    """What the role does in this call."""
    inputs: Keys = Field(default_factory=list)
    """Batch keys that it reads; default: those its interface declares (READS)
    that are available."""
    outputs: Keys = Field(default_factory=list)
    """Keys that it adds to the batch, under the interface's names; default:
    those it declares (WRITES)."""
    input_key_remap: dict[str, str] = Field(default_factory=dict)
    """Name in the batch → name that the interface reads."""
    output_key_remap: dict[str, str] = Field(default_factory=dict)
    """Name that the interface writes → name in the batch."""
    microbatches: Positive | None = None
    """Minimum number of micro-batches; null: `train.microbatches`."""
    max_tokens_per_microbatch: Positive | None = None
    """Maximum tokens per micro-batch; null: `train.max_tokens_per_microbatch`."""
    hooks: Hooks = Hooks()
    """What happens to weights after the call."""


class Eval(Section):
    """Evaluation on held-out data."""

    dataset: str | None = None
    """Which of `datasets` to use; null: no evaluation."""
    every_steps: Positive | None = None
    """Evaluate after every this many steps; null: not during the run."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    graph: dict[Label, Call] = Field(default_factory=dict)
    """Calls, written as in the graph: `rewards` are reported as eval/reward, `solved` as
    eval/accuracy, and the stats of an `evaluate` call as eval/<stat>."""


class Train(Section):
    """How long to train, and how batches are formed. Exactly one of steps and epochs."""

    steps: Positive | None = None
    """Number of training steps."""
    epochs: Positive | None = None
    """Number of passes over the training dataset."""
    prompts_per_step: Annotated[int, Field(ge=1, le=MAX_PROMPTS)]
    """Rows of the training dataset per step."""
    dataset: str = "train"
    """Which of `datasets` to train on."""
    shuffle: bool = True
    """Shuffle the rows anew in each epoch, determined by the seed."""
    prompts_per_draw: Positive | None = None
    """If calls drop prompts: how many are drawn at a time until the step is complete; any surplus
    goes to the next step. null: as many as are missing. With max_staleness: how many are sampled at
    a time; null: as many as a step takes."""
    max_redraws: NotNegative = 10
    """If calls drop prompts: how often a step may draw replacements; if that is not enough, the run
    ends."""
    max_staleness: Annotated[int, Field(ge=0, le=MAX_STALENESS)] = 0
    """Number of training steps that generation may lag behind; 0 is synchronous. Expect samples to
    be that old: once generation is that far ahead, all of them are, unless `take_first` is
    freshest."""
    max_segments: Positive | None = None
    """With max_staleness, where generation has devices of its own: maximum number of versions of
    the weights that a response is sampled with. New weights wait for responses that have reached
    it; 1: for all. null: max_staleness + 1, the most that a response in a step can have."""
    take_first: Literal["oldest", "freshest"] = "oldest"
    """With max_staleness: which finished samples a step takes first. oldest: no sample is wasted.
    freshest: those of the newest weights; others that become too stale meanwhile are generated
    again, and counted as expired."""
    microbatches: Positive = 1
    """Minimum number of micro-batches per optimizer step and rank."""
    max_tokens_per_microbatch: Positive = 16384
    """Maximum tokens per micro-batch."""
    max_nonfinite_streak: Positive = 3
    """Stop after this many consecutive skipped non-finite updates."""
    eval: Eval = Eval()
    """Evaluation on held-out data."""


class Cluster(Section):
    """The machines and their devices."""

    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 1
    """Number of machines."""
    devices_per_node: Annotated[int, Field(ge=1, le=MAX_DEVICES_PER_NODE)] = 1
    """Devices (and worker processes) per machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type of the workers; auto: cuda if available."""


class _Generation(Section):
    """How responses are sampled."""

    documented_in: ClassVar[type | None] = GenerationHyperparameters

    if TYPE_CHECKING:
        responses_per_prompt: int = 1

    @model_validator(mode="after")
    def _is_consistent(self) -> _Generation:
        self.build()
        return self

    def build(self) -> GenerationHyperparameters:
        """The settings in the form that interfaces and engines take."""
        return GenerationHyperparameters(**self.model_dump())


def _generation_model() -> type[_Generation]:
    """The fields of GenerationHyperparameters as a section, so that they are defined only once."""
    lists = {"stop_token_ids": (Annotated[tuple[int, ...], Field(strict=False)])}
    types = {"int": int, "float": float, "bool": bool}
    fields: dict[str, Any] = {
        f.name: (lists.get(f.name) or types[str(f.type)], f.default)
        for f in dataclasses.fields(GenerationHyperparameters)
    }
    return create_model("Generation", __base__=_Generation, __module__=__name__, **fields)


if TYPE_CHECKING:
    Generation = _Generation
else:
    Generation = _generation_model()


FORMAT = 2
"""Version of the recipe language; `rlcli.recipe.authoring.migration` says what has changed."""


class Recipe(Section):
    """An experiment: models, datasets, the graph of calls, and how to run them."""

    format: Annotated[int, Field(ge=1, le=FORMAT)] = FORMAT
    """Version of the recipe language; `rlcli migrate` rewrites older recipes."""
    name: Name
    """Name of the run; default: the file's name."""
    seed: Annotated[int, Field(ge=0)] = 1
    """Root seed of all random draws."""
    datasets: dict[Label, Component]
    """Sources of rows."""
    models: dict[Label, Role]
    """The roles."""
    graph: dict[Label, Call]
    """The calls of one training step, linked by the keys they read and write."""
    train: Train
    """How long to train, and with which batches."""
    generation: Generation = Generation()
    """How responses are sampled."""
    cluster: Cluster = Cluster()
    """The machines."""
    launch: LaunchSection = LaunchSection()
    """How workers are started."""
    checkpoint: Checkpoint = Checkpoint()
    """What to save from the run."""
    log: Log = Log()
    """What is written during the run."""

    @property
    def used_datasets(self) -> tuple[str, ...]:
        """Datasets that a run takes rows from directly; the others are parts of these,
        or unused."""
        used = (self.train.dataset, self.train.eval.dataset)
        return tuple(dict.fromkeys(name for name in used if name is not None))

    @property
    def described_datasets(self) -> dict[str, DatasetAbstraction]:
        """All datasets, in the registry's form."""
        return {
            name: DatasetAbstraction(dataset.type, dataset.args)
            for name, dataset in self.datasets.items()
        }

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """Roles trained by some call, in graph order."""
        return tuple(
            dict.fromkeys(call.model for call in self.graph.values() if call.call == "train_step")
        )

    @property
    def takes_each_row_once(self) -> bool:
        """Whether the last step of an epoch uses only the rows that are left, because nothing is
        trained. A training run fills it with rows of the next epoch,
        so that all its steps weigh the same."""
        return self.train.epochs is not None and not self.trained_roles

    @property
    def changing_roles(self) -> tuple[str, ...]:
        """Roles whose weights change during a run: trained roles, and those that follow one."""
        followers = [
            call.hooks.copy_to for call in self.graph.values() if call.hooks.copy_to is not None
        ]
        return tuple(dict.fromkeys([*self.trained_roles, *followers]))

    @property
    def saved_roles(self) -> tuple[str, ...]:
        """Roles whose weights are written at the end."""
        if not self.checkpoint.save:
            return ()
        return self.trained_roles if self.checkpoint.roles is None else tuple(self.checkpoint.roles)


SECTIONS = tuple(Recipe.model_fields)
