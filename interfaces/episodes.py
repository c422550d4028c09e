"""Episodes of several turns: a role plays with an environment, calls its tools, reads what they
return."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from rlcli.api.chat_template import name_of, template_of
from rlcli.api.config import EnvironmentAbstraction, GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.environment import schemas_of, states_tools
from rlcli.api.key_meaning import DROPPED, FORKS, MESSAGES, UNPLAYED, WEIGHT_VERSIONS
from rlcli.api.limits import ArgumentCheck, Limits
from rlcli.api.metrics import Metrics
from rlcli.api.model import (
    GenerationEngine,
    MicroBatchSpec,
    Model,
    ModelInterface,
    register_interface,
)
from rlcli.api.tool_formats import AUTO, tool_format, writes_tools
from rlcli.api.turns import OnRewrite
from rlcli.errors import UsageError, escape_control
from rlcli.registry import environment_maker, load

from ._argument_checks import check_episodes
from ._environment_pool import EnvironmentCalls, EnvironmentPool, EnvironmentSettings
from ._episode import Episode, check_environment
from ._episode_loop import Discards, begin, play
from ._episode_rules import Beginning, Move, Rules
from ._responses import (
    as_generation,
    imitate_responses,
    in_groups,
    packed_sequences,
    prompts_in,
    sample_seeds,
    seeds_of,
)
from .rewards._scores import most_errors

log = logging.getLogger(__name__)

Begun = tuple[EnvironmentCalls[Episode], Sequence[tuple[Episode, Move | None]]]
"""Episodes with their first turns, and the calls of their environments."""


@dataclass(kw_only=True)
class EpisodesInterface(ModelInterface):
    """Plays episodes of several turns with an environment. `generation.max_new_tokens` bounds all
    tokens after the prompt, those that are observed included; only sampled tokens are trained
    on."""

    ENVIRONMENT: ClassVar[Mapping[str, str]] = {
        "name": "environment",
        "args": "environment_args",
        "scored": "scored",
        "turn_rewards": "turn_rewards",
        "turn_tokens": "turn_tokens",
    }
    ARGUMENT_CHECK: ClassVar[ArgumentCheck] = "_argument_checks.check_episodes"
    READS: ClassVar[Declaration] = {"generate": ("packed_prompts",)}
    WRITES: ClassVar[Declaration] = {
        "generate": (
            "packed_input_ids",
            "prompt_mask",
            "packed_logprobs",
            "seq_no_eos_mask",
            "forks if on_rewrite=fork",
            "rewards if scored",
            "dense_rewards if turn_rewards",
        )
    }
    DROPS: ClassVar[Declaration] = {"generate": ("environment_failed",)}
    LIMITS: ClassVar[Limits] = {
        "max_turns": {"ge": 1},
        "turn_tokens": {"ge": 1},
        "max_seconds": {"gt": 0},
        "max_observation": {"ge": 1},
        "call_seconds": {"gt": 0, "le": 1_000_000},
        "memory_gib": {"gt": 0},
        "max_environments": {"ge": 1},
        "max_error_fraction": {"ge": 0, "le": 1},
    }
    METRICS: ClassVar[Metrics] = {
        "turns": ("turns", "mean number of turns of an episode"),
        "tool_calls": ("calls", "mean number of tool calls of an episode"),
        "tool_mistakes": ("calls", "mean number of those that failed"),
        "tool_timeouts": ("calls", "mean number of those that took longer than call_seconds"),
        "out_of_turns": ("share", "share of episodes that max_turns cut off"),
        "out_of_tokens": ("share", "share of episodes that generation.max_new_tokens cut off"),
        "out_of_time": ("share", "share of episodes that max_seconds cut off"),
        "forks": ("forks", "mean number of times that the template rewrote what was before"),
        "limited": ("share", "share of episodes that a limit of the environment cut off"),
        "replayed": ("share", "share of episodes that began again as their environment failed"),
        "discarded": ("share", "share of episodes left out as their environment failed twice"),
    }

    environment: str
    """What the episodes are played with: the name of an environment (`rlcli ls environments`)."""

    environment_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment."""

    generation: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    """How turns are sampled."""

    max_turns: int = 8
    """Maximum number of turns of an episode."""

    turn_tokens: int | None = None
    """Maximum number of tokens of a turn; null: `generation.max_new_tokens` divided by `max_turns`.
    A turn begins only if there is room for this many."""

    max_seconds: float | None = None
    """An episode begins no turn after this many seconds; null: no limit. Its end then depends on
    the clock, so runs are no longer repeated bit for bit."""

    max_observation: int = 4096
    """Maximum length of what a tool or a game returns, in characters; the middle is left out."""

    call_seconds: float = 60.0
    """Seconds of a call of the environment. A tool that takes longer is interrupted, which the
    policy reads; what cannot be interrupted is ended, and the episode with it."""

    memory_gib: float = 4.0
    """Address space of an environment, which is a process of its own."""

    max_environments: int = 512
    """Maximum number of environments of a rank at once. Where a call has more episodes, the others
    begin when these are over."""

    limit_reward: float = 0.0
    """Instead of `score()`, where the environment exceeded a limit and cannot be asked."""

    max_error_fraction: float = 0.01
    """Share of a call's episodes (rounded up to whole ones) that may be left out because their
    environment failed twice, which the policy cannot have caused. Others are drawn for the prompts
    of those left out; the run ends if there are more."""

    variables: list[str] = field(default_factory=list)
    """Environment variables of the run that environments see too, such as keys of a service."""

    tool_format: Literal["auto", "hermes", "xml", "glm", "mistral", "llama3", "json"] = "auto"
    """How the policy writes tool calls; auto: as the chat template writes them, and `json` without
    one."""

    on_rewrite: OnRewrite = "fork"
    """What to do where the chat template rewrites earlier turns, for example drops their reasoning.
    fork: the episode continues what the template writes now, as another row of its sequence, whose
    tokens count towards `generation.max_new_tokens`; each turn is trained on in the row in which it
    was sampled. refuse: the run ends."""

    scored: bool = False
    """Write the environment's reward of each episode to `rewards`. Otherwise a call of the graph
    scores it."""

    turn_rewards: bool = False
    """Also write `dense_rewards`, the reward of each turn at its last token, for advantages with
    `use_dense_reward: true` and `reward_delta: false`."""

    pool: EnvironmentPool = field(init=False, repr=False)
    _tools_checked: bool = field(init=False, default=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.generation = as_generation(self.generation)
        check_episodes(self)
        settings = EnvironmentSettings(
            environment=self.environment,
            args=self.environment_args,
            longest=self.max_observation,
            call_seconds=self.call_seconds,
            memory_bytes=int(self.memory_gib * 2**30),
        )
        self.pool = EnvironmentPool(settings, self.max_environments, tuple(self.variables))

    def check_ready(self) -> None:
        check_environment(load("environments", self.environment))
        environment_maker(EnvironmentAbstraction(self.environment, self.environment_args))

    def generate(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_prompts` → `packed_input_ids`, `prompt_mask`, `packed_logprobs`,
        `seq_no_eos_mask`, `forks`; `prompt_mask` is False exactly on the tokens that were sampled,
        `forks` [T] True where another row of an episode begins. With `scored` also `rewards` [N],
        with `turn_rewards` `dense_rewards` [T]."""
        self._check(model)
        rules = self._rules(model)
        episodes = self._episodes(model, data, rules)
        discards = Discards(most_errors(self.max_error_fraction, len(episodes)), len(episodes))
        settings = replace(self.generation, max_new_tokens=rules.turn_tokens)
        engine = model.module
        waiting = deque(episodes)
        room_for_turns = rules.max_tokens - rules.turn_tokens
        with engine.open(model.tokenizer, settings, 1 + room_for_turns) as stream:
            while waiting:
                with self._begun(engine, waiting) as (calls, turns):
                    longest = max(len(episode.prompt) for episode, _ in turns)
                    stream.make_room(longest + room_for_turns)
                    play(engine, stream, turns, calls, discards, in_step=rules.in_step)
        discards.report()
        return self._packed(data, episodes)

    @contextmanager
    def _begun(self, engine: GenerationEngine, waiting: deque[Episode]) -> Iterator[Begun]:
        """As many of the waiting episodes as there is room for, with environments that are ready;
        these are closed in the end."""
        with ExitStack() as begun:
            with engine.unused():
                room = begun.enter_context(self.pool.room(len(waiting)))
                calls = begun.enter_context(self.pool.calls())
                turns = begin([waiting.popleft() for _ in range(room)], calls)
            yield calls, turns

    def mock(self, interface_type: str, model: Model, data: SequenceSample) -> SequenceSample:
        """Episodes of a single turn, made of words from their prompts; rewards are 0."""
        if interface_type != "generate":
            return super().mock(interface_type, model, data)
        output = imitate_responses(model, data, self.generation)
        cut_off = output.data["seq_no_eos_mask"]
        of_tokens = torch.zeros(len(output.data["prompt_mask"]))
        zeros = {}
        if self.on_rewrite == "fork":
            zeros[FORKS] = of_tokens.bool()
        if self.scored:
            zeros["rewards"] = torch.zeros(len(cut_off))
        if self.turn_rewards:
            zeros["dense_rewards"] = of_tokens
        numbers = [{"turns": 1.0, "out_of_tokens": float(cut)} for cut in cut_off.tolist()]
        rewards = SequenceSample.from_default(
            ids=output.ids,
            seqlens=output.seqlens["packed_input_ids"],
            data=zeros,
            metadata={**_sums(numbers, self.generation.responses_per_prompt)},
        )
        output.update_(rewards)
        return output

    def _check(self, model: Model) -> None:
        """Ranks that share a model sample in lockstep, so each must see the same episodes. Raises
        UsageError."""
        sharing = _sharing(model)
        is_reproducible = load("environments", self.environment).REPRODUCIBLE  # type: ignore[attr-defined]
        if sharing and (self.max_seconds is not None or not is_reproducible):
            reason = "max_seconds is set" if is_reproducible else "it is not REPRODUCIBLE"
            raise UsageError(
                f"the environment {self.environment} cannot be played on ranks that share a model "
                f"({', '.join(sharing)}): {reason}"
            )

    def _rules(self, model: Model) -> Rules:
        environment: Any = load("environments", self.environment)
        if states_tools(environment):
            schemas = self.pool.tool_schemas()
        else:
            schemas = list(schemas_of(environment).values())
        if schemas:
            self._check_tools_are_written(model.tokenizer)
        writes = self.tool_format if schemas else "json"
        longest = self.generation.max_new_tokens
        share = max(1, self.generation.min_new_tokens, longest // self.max_turns)
        turn = share if self.turn_tokens is None else self.turn_tokens
        return Rules(
            name=self.environment,
            environment=environment,
            tokenizer=model.tokenizer,
            tool_format=tool_format(model.tokenizer, writes, schemas),
            on_rewrite=self.on_rewrite,
            max_turns=self.max_turns,
            max_tokens=longest,
            turn_tokens=min(turn, longest),
            max_seconds=self.max_seconds,
            is_scored=self.scored or self.turn_rewards,
            limit_reward=self.limit_reward,
            is_shared=bool(_sharing(model)),
        )

    def _check_tools_are_written(self, tokenizer: Any) -> None:
        """Warn once of a chat template that says nothing of tools."""
        if self._tools_checked or self.tool_format != AUTO or template_of(tokenizer) is None:
            return
        self._tools_checked = True
        if not writes_tools(tokenizer):
            log.warning(
                "the chat template of %s does not say which tools there are: describe those of the "
                "environment %s in the prompt, and set tool_format to how the policy calls them",
                escape_control(name_of(tokenizer)),
                self.environment,
            )

    def _episodes(self, model: Model, data: SequenceSample, rules: Rules) -> list[Episode]:
        """An episode for each response. Those of a group begin in the same state."""
        seeds, episodes = iter(seeds_of(model, data, self.generation)), []
        group = self.generation.responses_per_prompt
        rows = zip(data.ids, prompts_in(data), sample_seeds(model, data), strict=True)
        for number, (id_, prompt, seed) in enumerate(rows):
            row = _row(data, number, prompt, model.tokenizer)
            for ordinal in range(1, group + 1):
                label = f"sample {id_}" + (f", episode {ordinal} of {group}" if group > 1 else "")
                beginning = Beginning(label, row, prompt.tolist(), seed)
                episodes.append(Episode(rules, beginning, next(seeds)))
        return episodes

    def _packed(self, data: SequenceSample, episodes: Sequence[Episode]) -> SequenceSample:
        """The sequences of the episodes, and what they have come to."""
        group = self.generation.responses_per_prompt
        cut_off = [episode.stop != "finished" for episode in episodes]
        further = {"seq_no_eos_mask": torch.tensor(cut_off, dtype=torch.bool)}
        if self.on_rewrite == "fork":
            rows = [episode.forks() for episode in episodes]
            further[FORKS] = torch.cat([torch.zeros(0, dtype=torch.bool), *rows])
        if self.scored:
            rewards = [episode.reward for episode in episodes]
            further["rewards"] = torch.tensor(rewards, dtype=torch.float32)
        if self.turn_rewards:
            of_turns = [episode.turn_rewards() for episode in episodes]
            further["dense_rewards"] = torch.cat([torch.zeros(0), *of_turns])
        sequences = [episode.sequence() for episode in episodes]
        return packed_sequences(data, sequences, group, _metadata(episodes, group), further)


def _sharing(model: Model) -> list[str]:
    """How ranks share a model, if they do."""
    mesh = model.device_mesh
    sizes = {} if mesh is None else dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    return [name for name in ("tp", "pp", "cp") if sizes.get(name, 1) > 1]


def _row(data: SequenceSample, number: int, prompt: torch.Tensor, tokenizer: Any) -> dict[str, Any]:
    """What an environment learns about a row."""
    row = {name: values[number] for name, values in data.metadata.items()}
    messages = row.get(MESSAGES)
    if messages:
        return row | {"prompt": messages[-1]["content"]}
    return row | {"prompt": tokenizer.decode(prompt, skip_special_tokens=True)}


def _metadata(episodes: Sequence[Episode], group: int) -> dict[str, list[Any]]:
    """For each sample the numbers of its episodes, which versions sampled them, and why it is
    dropped, if any is."""
    sums = _sums([episode.numbers() for episode in episodes], group)
    metadata: dict[str, list[Any]] = {**sums}
    discarded = in_groups([episode.is_discarded for episode in episodes], group)
    if any(map(any, discarded)):
        metadata[DROPPED] = [UNPLAYED if any(of_group) else None for of_group in discarded]
    spans = [episode.spans() for episode in episodes]
    if None not in spans:
        metadata[WEIGHT_VERSIONS] = in_groups(spans, group)
    return metadata


def _sums(numbers: Sequence[Mapping[str, float]], group: int) -> dict[str, list[tuple[float, int]]]:
    """The numbers in `METRICS`, for each sample as a sum over its episodes and their count; one
    that an episode does not have is 0."""
    sums = {}
    for name in EpisodesInterface.METRICS:
        column = [of_episode.get(name, 0.0) for of_episode in numbers]
        sums[name] = [(math.fsum(of_group), group) for of_group in in_groups(column, group)]
    return sums


register_interface("episodes", EpisodesInterface)
