"""Episodes that one model in this process plays with an environment, shown as they go."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli import registry
from rlcli.api.chat_template import shared_length
from rlcli.api.config import (
    GenerationHyperparameters,
    MicroBatchSpec,
    ModelInterfaceAbstraction,
)
from rlcli.api.key_meaning import DENSE_REWARDS, MESSAGES, PROMPT_MASK, PROMPTS, REWARDS
from rlcli.api.run_folder import RESOLVED_RECIPE
from rlcli.errors import RlcliError
from rlcli.inspect.rows import OpenDataset, open_dataset
from rlcli.launch.answering import Answerer
from rlcli.launch.components import Component, read_component
from rlcli.launch.working_folder import in_its_folder
from rlcli.observe.run_comparison import recorded_recipe
from rlcli.project import check_run_not_planted
from rlcli.recipe.components import declared, signature_of
from rlcli.recipe.named_files import for_any_folder
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.schema import Recipe

if TYPE_CHECKING:
    import torch

    from rlcli.api.data import SequenceSample
    from rlcli.api.model import Model
    from rlcli.recipe.prompt_format import PromptFormat

log = logging.getLogger(__name__)

Show = Callable[[str, str], None]
"""Takes a part of an episode: its label, such as `turn 1`, and its text."""
CONSTANT = "ENVIRONMENT"
TURNS = 4
"""There is room for this many of the longest turns, where nothing else is said."""


def played_by(recipe: Recipe) -> Component | None:
    """The interface with which a recipe's policy plays episodes, as its evaluation does if it has
    one; None: it answers each prompt once."""
    for call in (*recipe.train.eval.graph.values(), *recipe.graph.values()):
        if declared("interfaces", call.interface.type, CONSTANT):
            return call.interface.model_dump()
    return None


def played_in(run: Path, verb: str) -> Component | None:
    """The same for a run, which `verb` uses. Raises RlcliError; ProjectError if another user may
    have planted the run, whose recipe decides which code is executed."""
    interface = played_by(Recipe.model_validate(recorded_recipe(run)))
    if interface is not None:
        check_run_not_planted(run, verb)
    return interface


def argument_for_scores(interface: Component) -> str:
    """The argument of an interface of episodes that says whether the environment scores
    (`ModelInterface.ENVIRONMENT`)."""
    return str(declared("interfaces", interface["type"], CONSTANT)["scored"])


def playing_with(environment: Component) -> Component:
    """The interface that plays with an environment, with its defaults. Raises UnknownComponent."""
    signature_of("environments", environment["type"])
    interfaces = registry.names("interfaces")
    interface = next(name for name in interfaces if declared("interfaces", name, CONSTANT))
    arguments = declared("interfaces", interface, CONSTANT)
    args = {
        arguments["name"]: environment["type"],
        arguments["args"]: environment.get("args") or {},
    }
    return {"type": interface, "args": args}


def chosen_interface(run: Path | None, environment: str | None, verb: str) -> Component | None:
    """The interface that plays with the named environment, else that of a run; None if its policy
    plays no episodes. Raises RlcliError; ProjectError if another user may have planted the run."""
    if environment is not None:
        return playing_with(read_component(environment, "--environment"))
    return None if run is None else played_in(run, verb)


@dataclass(frozen=True)
class EpisodeRow:
    """A row that an episode begins with."""

    tokens: Sequence[int]
    """Of the prompt."""
    metadata: Mapping[str, Any]
    is_of_dataset: bool = False
    """Whether it has what the environment may need to score an episode."""

    @property
    def answer(self) -> Any:
        return self.metadata.get("answer")


@dataclass
class RowsToPlay:
    """The rows of a dataset, one after the other."""

    dataset: OpenDataset
    _next: int = 0

    @property
    def name(self) -> str:
        return self.dataset.name

    def next_row(self) -> EpisodeRow:
        """Raises DataError."""
        preview = self.dataset.preview(self._next % len(self.dataset))
        self._next += 1
        (tokens,) = preview.sequences
        return EpisodeRow(tokens, preview.metadata, is_of_dataset=True)


def rows_to_play(run: Path) -> RowsToPlay | None:
    """The rows on which a run whose policy plays episodes evaluates it, or trains it; None if they
    are gone. Their paths are those of the folder that the run was started in."""
    file = str((run / RESOLVED_RECIPE).absolute())
    try:
        with in_its_folder(run, "chat", log.debug):
            started = load_recipe(file)
            resolved = replace(started, recipe=for_any_folder(started.recipe))
            train = resolved.recipe.train
            dataset = open_dataset(resolved, train.eval.dataset or train.dataset)
    except RlcliError:
        return None
    return RowsToPlay(dataset) if len(dataset) else None


@dataclass(frozen=True)
class Played:
    """What an episode has come to."""

    reward: float | None
    """None: the environment does not reward it."""
    turn_rewards: Sequence[float]
    """Of each turn, if it is a game."""
    numbers: Mapping[str, float]
    """What the interface counts, by its name in the metrics."""


class Player:
    """Plays episodes of an interface with one model."""

    def __init__(
        self, answerer: Answerer, interface: Component, settings: GenerationHyperparameters
    ):
        """`settings`: how turns are sampled. What the interface says of the length of episodes and
        turns holds too."""
        self._answerer = answerer
        self._settings = replace(settings, responses_per_prompt=1)
        self._arguments = declared("interfaces", interface["type"], CONSTANT)
        self._type, self._args = interface["type"], interface["args"]
        self.environment = str(interface["args"][self._arguments["name"]])
        methods = signature_of("environments", self.environment).methods
        self.is_game = "step" in methods
        self._scores = "score" in methods

    def asked(self, question: str, style: PromptFormat) -> EpisodeRow:
        """The row of a question that a user asks. Raises ModelError."""
        tokens, metadata = self._answerer.tokens_of_prompt(question, style), {}
        if self._answerer.chats:
            system = [] if style.system is None else [{"role": "system", "content": style.system}]
            message = {"role": "user", "content": style.prompt(question)}
            metadata = {MESSAGES: [*system, message]}
        return EpisodeRow(tokens, metadata)

    def play(self, row: EpisodeRow, number: int, show: Show) -> Played:
        """Play an episode; `show` is called with its beginning, and with each turn and what is
        observed after it, as soon as they are there. Raises RlcliError."""
        model = copy.copy(self._answerer.model)
        model.module = _Watched(model, show)
        output = self._interface(row).generate(model, _batch(row, number), MicroBatchSpec())
        metrics = declared("interfaces", self._type, "METRICS") or {}
        counted = [name for name in metrics if name in output.metadata]
        numbers = {name: output.metadata[name][0][0] for name in counted}
        reward = float(output.data[REWARDS]) if REWARDS in output.keys else None
        turn_rewards = _rewards_of_turns(output) if self.is_game else ()
        return Played(reward, turn_rewards, numbers)

    def _interface(self, row: EpisodeRow) -> Any:
        scored = self.is_game or (self._scores and row.is_of_dataset)
        rewards = {self._arguments["scored"]: scored, self._arguments["turn_rewards"]: self.is_game}
        args = self._args | rewards | self._lengths(len(row.tokens))
        return registry.make_interface(ModelInterfaceAbstraction(self._type, args))

    def _lengths(self, prompt: int) -> dict[str, Any]:
        """How an episode after a prompt of this many tokens is sampled. Where the interface leaves
        that open, a turn is as long as the settings say, and there is room for four of them, as far
        as the model has positions; templates need some of these for the tools."""
        turn, of_turn = self._settings.max_new_tokens, self._arguments["turn_tokens"]
        limits = self._args.get("generation")
        if limits is not None:
            longest = min(int(limits["max_new_tokens"]), turn)
            return {"generation": asdict(replace(self._settings, max_new_tokens=longest))}
        positions = self._answerer.positions
        room = TURNS * turn if positions is None else max(2, positions - prompt)
        longest = min(TURNS * turn, room // 2 if self._answerer.chats else room)
        sampling = asdict(replace(self._settings, max_new_tokens=longest))
        return {"generation": sampling, of_turn: max(1, min(turn, longest // 2))}


def _batch(row: EpisodeRow, number: int) -> SequenceSample:
    import torch

    from rlcli.api.data import SequenceSample

    return SequenceSample.from_default(
        ids=[number],
        seqlens=[len(row.tokens)],
        data={PROMPTS: torch.tensor(row.tokens, dtype=torch.int64)},
        metadata={name: [value] for name, value in row.metadata.items()},
    )


def _rewards_of_turns(output: SequenceSample) -> list[float]:
    """The rewards at the ends of turns: of the sampled tokens that none follows."""
    sampled = ~output.data[PROMPT_MASK]
    ends = sampled.clone()
    ends[:-1] &= ~sampled[1:]
    rewards: list[float] = output.data[DENSE_REWARDS][ends].tolist()
    return rewards


class _Watched:
    """An engine whose streams show what is sampled with them."""

    def __init__(self, model: Model, show: Show):
        self._engine: Any = model.module
        self._model = model
        self._show = show

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def open(self, *arguments: Any) -> _WatchedStream:
        return _WatchedStream(self._engine.open(*arguments), self._model.tokenizer, self._show)


class _WatchedStream:
    """The stream of a single episode."""

    def __init__(self, stream: Any, tokenizer: Any, show: Show):
        self._stream = stream
        self._tokenizer = tokenizer
        self._show = show
        self._ids: list[int] = []
        """The tokens that were shown, of what the policy continues."""
        self._turns = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> _WatchedStream:
        self._stream.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)

    def submit(self, prompt: torch.Tensor, seed: int) -> int:
        ids = prompt.tolist()
        shared = shared_length(self._ids, ids)
        label = "prompt"
        if self._ids:
            label = "observed" if shared == len(self._ids) else "rewritten"
        del self._ids[shared:]
        self._add(label, ids[shared:])
        return int(self._stream.submit(prompt, seed))

    def collect(self, until: Callable[[], bool] = lambda: False) -> Iterable[Any]:
        responses: list[Any] = self._stream.collect(until)
        for response in responses:
            self._turns += 1
            self._add(f"turn {self._turns}", response.tokens.tolist())
        return responses

    def _add(self, label: str, ids: list[int]) -> None:
        self._ids += ids
        self._show(label, str(self._tokenizer.decode(ids, skip_special_tokens=True)))
