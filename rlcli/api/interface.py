"""The contract of interfaces. Nothing here imports torch, so a rule that does not need it can be
tested without it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from rlcli.api.component import register_interface
from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration, DeclaredKeys, declared_keys, inherited
from rlcli.api.limits import check_arguments
from rlcli.api.metrics import Metrics

if TYPE_CHECKING:
    from rlcli.api.model import Model

__all__ = ["EvalLoader", "ModelInterface", "register_interface"]

EvalLoader = Sequence[SequenceSample]
"""Batches for `evaluate`."""

ANSWER_FORMS = ("#### {answer}", "\\boxed{{answer}}", "The answer is {answer}.", "{answer}")
"""Ways in which a response may give its final answer; rewards are tested with each of them."""

RETURN_NUMBERS = ("train_step", "evaluate")
"""Methods that add nothing to the batch."""

CutName = Literal["sample", "sequence"]
HeadName = Literal["lm", "value"]
Generates = Mapping[str, Mapping[Literal["prompt", "response"], Sequence[str | int]]]
ExampleKey = Literal["row", "right", "wrong", "rewards"]
EXAMPLE_KEYS: tuple[ExampleKey, ...] = get_args(ExampleKey)
_SHOWN = ({"row", "right", "wrong"}, {"row", "rewards"})
Example = Mapping[ExampleKey, Any]
"""Fields of a row, and texts: a right response to it and a wrong one."""


def example_problem(examples: Any) -> str | None:
    """What is wrong with the `EXAMPLES` of a reward; None if nothing is."""
    if not isinstance(examples, tuple | list):
        return f"is {reprlib.repr(examples)}; it must be a tuple of dictionaries"
    return next(filter(None, map(_problem_of_example, examples)), None)


def _problem_of_example(example: Any) -> str | None:
    keys = set(example) if isinstance(example, Mapping) else set()
    if not keys <= {*EXAMPLE_KEYS} or not any(map(keys.issuperset, _SHOWN)):
        return f'has {reprlib.repr(example)}; it needs "row", and "right" and "wrong" or "rewards"'
    row, rewards = example["row"], example.get("rewards", {})
    if not isinstance(row, Mapping):
        return f"has the row {reprlib.repr(row)}; it must be a dictionary of fields"
    if not isinstance(rewards, Mapping) or not all(map(_is_number, rewards.values())):
        return f"has the rewards {reprlib.repr(rewards)}; they must give each text a number"
    texts = (*rewards, example.get("right", ""), example.get("wrong", ""))
    others = [text for text in texts if not isinstance(text, str)]
    return f"has the response {others[0]!r:.40}; it must be a text" if others else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def cut_of(declared: Any, call: str) -> Any:
    """An interface's `CUT` for a method, by default "sample"."""
    return (declared.get(call) if isinstance(declared, Mapping) else declared) or "sample"


class ModelInterface:
    """What a role does. A dataclass: its fields are the recipe's `args:`.

    A training interface implements `train_step`, an inference one `inference`, a generation one
    `generate`. They are called by `rlcli.api.model.call_interface`: the engine is in the right mode
    (`train()`, `eval()`), `data` is on its device, and the role's version goes up by one after a
    training step. An interface may do any of this itself.

    `data` holds this rank's samples with the call's input keys; outputs carry the same ids in the
    same order. Numbers must be finite as float32, and well-known keys must hold what
    `rlcli.api.key_meaning` says: otherwise the run ends before anything is trained on them. Its
    class may declare the following in literals; recipes and `rlcli test` enforce them:

        READS: ClassVar[Declaration] = {"train_step": ("packed_input_ids", "solved if given")}
        WRITES: ClassVar[Declaration] = {"inference": ("values",)}
        # it compares two or more responses to a prompt
        NEEDS_GROUP: ClassVar[Declaration] = {"train_step": ("2",)}
        # why it drops samples
        DROPS: ClassVar[Declaration] = {"inference": ("too_long", "unsolved if only_solved")}
        # it compares the samples of a step
        TAKES_BATCH: ClassVar[tuple[str, ...]] = ("inference",)
        # its loss compares no responses: a group may be spread over micro-batches
        CUT: ClassVar[str] = "sequence"
        # the same for one method only
        CUT: ClassVar[Mapping[str, str]] = {"inference": "sequence"}
        GENERATES: ClassVar[Generates] = {"inference": {"prompt": (300,), "response": ("tokens",)}}
        # it needs a model with this head
        HEAD: ClassVar[Declaration] = {"inference": ("value",)}
        METRICS: ClassVar[Metrics] = {"kl": ("nats per token", "KL from the reference")}

    A class inherits the declarations of its bases for the methods that its own do not name, and
    adds to those whose entries begin with `...`.
    """

    READS: ClassVar[Declaration] = {}
    """Method → the keys that it reads; see `rlcli.api.declared_keys` for keys that it reads only
    sometimes."""

    WRITES: ClassVar[Declaration] = {}
    """Method → the keys that it returns."""

    DROPS: ClassVar[Declaration] = {}
    """Method → the reasons for which it drops samples, by `metadata={"dropped": [None, "too_long",
    …]}`, one entry per sample. It still returns all samples; a dropped one reaches no later call
    and is not trained on, and another is drawn in its place. An evaluation drops nothing. Whether a
    sample is dropped depends only on that sample."""

    CUT: ClassVar[CutName | Mapping[str, CutName]] = "sample"
    """What its engine calls keep in one micro-batch (their `cut`): a sample with its group, or a
    single sequence; for all methods, or by method. `rlcli plan` relies on it."""

    GENERATES: ClassVar[Generates] = {}
    """Methods other than `generate` whose engine generates, once for each sequence of the batch.
    "prompt": the tokens around the sequence in the model's input; "response": the most tokens that
    it writes. Each is a sum of numbers and arguments. `rlcli plan` includes the memory for it."""

    NEEDS_GROUP: ClassVar[Declaration] = {}
    """Method → the number of responses to each prompt that it needs at least, with conditions as in
    READS: `{"train_step": ("2 if baseline=group", "above best")}`."""

    COUNTS_LEFT_OUT: ClassVar[Declaration] = {}
    """Method → "sequences" where the divisor of its loss counts those of which nothing is trained
    on, with conditions as in READS. `rlcli test` demands that what `loss_mask` leaves out does not
    count elsewhere."""

    HEAD: ClassVar[Declaration] = {}
    """Method → the head, `lm` or `value`, of the model that it needs, with conditions as in READS.
    A method that is not named may do without a model;
    `generate` needs the head `lm` in any case."""

    TAKES_BATCH: ClassVar[tuple[str, ...]] = ()
    """Methods that take all samples of a step at once, as training does, because a sample's result
    depends on the others. Samples then have the metadata `rlcli.api.key_meaning.PLACE` and `AGE`.
    Sums over the ranks of the role are `model.all_reduce`."""

    PREPARED_BY: ClassVar[Mapping[str, str]] = {}
    """Method → the interface of a call that computes what it reads. A graph without such a call
    gets one, with the arguments of that interface that were given to this one's call."""

    REPLACES: ClassVar[Mapping[str, Any]] = {}
    """Interface of an older format that this one replaces → `prepared_by`, the interface of the
    call that now prepares its batches, and `args`, the arguments that reproduce its defaults.
    `rlcli migrate` rewrites recipes accordingly."""

    CHANGED: ClassVar[Mapping[str, str]] = {}
    """Argument of an older format that has another name and meaning now → what to write instead,
    which `rlcli migrate` leaves to the user."""

    STALE_NEEDS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Argument → arguments of which the interface needs one to be set too, where
    `train.max_staleness` lets samples be older than their step."""

    NO_EFFECT_WITHOUT: ClassVar[Mapping[str, str]] = {}
    """Argument → the key, one that its calls read if given, without which the argument has no
    effect. A recipe that sets it where no call makes the key is refused."""

    NO_EFFECT_ON_NUMBERS: ClassVar[tuple[str, ...]] = ()
    """Arguments that change no number, but how fast, how patiently or where it is computed. `rlcli
    test` demands that every other argument changes some result, and that these change none; of a
    text it tries an empty folder."""

    ENVIRONMENT: ClassVar[Mapping[str, str]] = {}
    """Of an interface that plays with an environment, its arguments: "name" of the environment,
    "args" of it, "scored", whether it rewards its episodes, "turn_rewards", whether it rewards each
    turn, and "turn_tokens", the limit of a turn. `rlcli validate` checks them."""

    METRICS: ClassVar[Metrics] = {}
    """Name of a number that it reports → (unit, meaning): the stats of `train_step` and `evaluate`,
    and the numbers in the metadata of its outputs. Those of engines and of runs are in
    `rlcli.api.metrics`."""

    EXAMPLES: ClassVar[tuple[Example, ...]] = ()
    """Of a reward whose rows have no short `answer`: rows and responses on which `rlcli test` tries
    it. With all arguments at their defaults, and wherever an empty response earns less, the right
    one earns more than the wrong one: `{"row": {"tests": ["assert f(1) == 2"]}, "right": "…",
    "wrong": "…"}`. Instead or besides, `"rewards": {"…": 0.5}` states what responses earn with the
    defaults."""

    TRIED: ClassVar[bool] = True
    """Whether `rlcli check` may call `inference` of a reward without weights on a few rows; False
    for one that asks a server, which may cost something, or loads a model of its own."""

    FILES: ClassVar[tuple[str, ...]] = ()
    """Arguments that name files: they are looked up when a recipe is read, also next to the layer
    that names them."""

    VARIABLES: ClassVar[tuple[str, ...]] = ()
    """Arguments that name variables of the environment,
    which must be set before anything starts."""

    def __post_init__(self) -> None:
        """Check numbers and choices against the class's declarations (`rlcli.api.limits`).
        Raises ValueError."""
        check_arguments(self)

    def check_ready(self) -> None:
        """Raise any error that would end the first call whatever its data, such as a user's file
        that cannot be loaded. Called on the machine that starts a run, before anything else is
        started, without a model."""

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """Train on one batch; returns stats that are already reduced over ranks."""
        raise NotImplementedError(f"{type(self).__name__} does not train")

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample | None:
        """Compute output keys from input keys."""
        raise NotImplementedError(f"{type(self).__name__} has no inference")

    def generate(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample | None:
        """Sample responses."""
        raise NotImplementedError(f"{type(self).__name__} does not generate")

    def evaluate(self, model: Model, eval_dataloader: EvalLoader) -> dict[str, float]:
        """Numbers on held-out data, reduced over ranks."""
        raise NotImplementedError(f"{type(self).__name__} does not evaluate")

    def save(self, model: Model, save_dir: str) -> None:
        """Write the model as a folder that `transformers` reads.
        Every rank of the role calls it."""
        model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=save_dir)

    def score_texts(self, responses: Sequence[str], answers: Sequence[Any]) -> list[float | None]:
        """The reward of each text as a response to a row with that `answer`;
        None if it cannot be computed.

        A reward that reads texts may implement this, without a model and without torch: `rlcli
        check` then tests the answers of the rows before any training.
        """
        raise NotImplementedError(f"{type(self).__name__} does not score texts")

    def mock(self, interface_type: str, model: Model, data: SequenceSample) -> SequenceSample:
        """Plausible outputs of the call `interface_type`, made without running the model, so that a
        graph can be tested in pieces: with the same keys, lengths and dtypes, and the same numbers
        for the same ids.

        A call that trains or evaluates adds nothing; inference adds the keys that it declares, if
        they are well known.
        """
        if interface_type in RETURN_NUMBERS:
            return SequenceSample(ids=list(data.ids), seqlens={})
        declared = self.writes(interface_type)
        if declared is None or interface_type != "inference":
            raise NotImplementedError(f"{type(self).__name__} has no mock of {interface_type}")
        from rlcli.api.mocks import mock_keys

        return mock_keys(model, data, declared.needed)

    def reads(self, call: str) -> DeclaredKeys | None:
        """The keys that a method reads with these arguments; None if the class does not say."""
        return self._declared("READS", call)

    def writes(self, call: str) -> DeclaredKeys | None:
        """The keys that a method returns with these arguments; None if the class does not say."""
        return self._declared("WRITES", call)

    def drops(self, call: str) -> tuple[str, ...]:
        """The reasons for which a method may drop samples with these arguments."""
        declared = self._declared("DROPS", call)
        return declared.needed if declared is not None else ()

    def heads(self, call: str) -> DeclaredKeys | None:
        """The head of the model that a method needs with these arguments;
        None if the class does not say."""
        return self._declared("HEAD", call)

    def group_sizes(self, call: str) -> DeclaredKeys | None:
        """The numbers of responses to each prompt that a method needs at least;
        None if the class does not say."""
        return self._declared("NEEDS_GROUP", call)

    def counts_left_out(self, call: str) -> bool:
        """Whether the divisor of a method's loss counts sequences of which nothing is trained
        on."""
        declared = self._declared("COUNTS_LEFT_OUT", call)
        return declared is not None and bool(declared.needed)

    def _declared(self, constant: str, call: str) -> DeclaredKeys | None:
        entries = inherited(
            [vars(cls).get(constant, {}) for cls in reversed(type(self).__mro__)]
        ).get(call)
        return None if entries is None else declared_keys(entries, self._argument)

    def _argument(self, name: str) -> Any:
        if not hasattr(self, name):
            raise ValueError(
                f"{type(self).__name__} declares keys by the argument {name}, "
                "which it does not have"
            )
        return getattr(self, name)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state in addition to the weights, the same on all ranks: KL controllers,
        value normalisers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, yet was given {sorted(state)}")
