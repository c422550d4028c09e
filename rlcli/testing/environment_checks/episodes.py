"""Checks of episodes: that they depend on their row, seed and actions alone, end, and are rewarded
as declared."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterable, Sequence
from dataclasses import replace
from threading import Barrier, Thread
from typing import Any

import pytest

from rlcli.api.environment import Environment, Observation, has_score
from rlcli.api.limits import needs_of
from rlcli.errors import RlcliError
from rlcli.testing.arguments import (
    Changes,
    VariedArgument,
    arguments_of,
    silent_arguments,
    values_like,
)
from rlcli.testing.class_source import attributes_read
from rlcli.testing.contract import Contract, Note, skip_if, skip_unless
from rlcli.testing.effects import Effects, demand_effects
from rlcli.testing.environment_checks.elsewhere import HASH_SEED, traces_elsewhere
from rlcli.testing.environment_checks.plays import (
    CallResult,
    Play,
    Script,
    Trace,
    attempt,
    difference,
)
from rlcli.testing.environment_checks.trial import (
    EnvironmentTrial,
    shared_values,
)

SEEDS = range(2, 14)
AT_ONCE = 4
"""Threads that play at the same time."""
DRAWING = {"random", "Random", "default_rng", "RandomState"}
OWN_STATE = "keep the state of an episode in self, which reset() begins anew"
BY_SEED = "draw everything from random.Random(seed) in reset(), and nothing from clocks or hash()"


class EpisodeChecks(Contract):
    def test_reset_is_deterministic(self, trial: EnvironmentTrial) -> None:
        """a row and a seed always begin the same episode"""
        for play in trial.plays:
            again = trial.play(replace(play.script, turns=()))
            change = difference(play.trace[:1], again.trace[:1])
            trial.demand(not change, f"with the same row and seed, {change}", BY_SEED, "reset")

    def test_seeds_matter(self, trial: EnvironmentTrial) -> None:
        """another seed is another episode, if it draws anything"""
        skip_unless(_names(trial.cls) & DRAWING, "draws nothing at random")
        differ = any(
            trial.play(replace(play.script, seed=seed)).trace != play.trace
            for play in trial.plays
            for seed in SEEDS
        )
        finding = f"it draws at random, but its episodes are the same for {len(SEEDS) + 1} seeds"
        trial.demand(differ, finding, "seed random.Random with the seed of reset()", "reset")

    def test_repeats(self, trial: EnvironmentTrial) -> None:
        """an episode depends on its row, seed and actions alone, if it is REPRODUCIBLE"""
        skip_unless(trial.cls.REPRODUCIBLE, "is not REPRODUCIBLE")
        trial.demand(not trial.repeats, f"played again, {trial.repeats}", BY_SEED)
        traces = traces_elsewhere(trial.name, trial.args, trial.scripts)
        for play, trace in zip(trial.plays, traces, strict=True):
            change = play.change_in(trace)
            where = f"in a process with PYTHONHASHSEED={HASH_SEED} and another time"
            trial.demand(not change, f"{where}, {change}", BY_SEED)

    def test_episodes_share_nothing(self, trial: EnvironmentTrial) -> None:
        """episodes that take turns are as when played alone"""
        _need_repeats(trial)
        change = _shared(trial)
        trial.demand(not change, f"next to another episode, {change}", OWN_STATE)

    def test_nothing_is_global(self, trial: EnvironmentTrial) -> None:
        """class attributes and globals of the module stay as they are"""
        assert trial.plays is not None  # played since the values were recorded
        for name, text in shared_values(trial.cls):
            before = trial.shared_values.get(name, "missing")
            change = f"{before:.60} → {text:.60}"
            trial.demand(
                before == text,
                f"an episode changes {name}, which others share: {change}",
                OWN_STATE,
            )

    def test_threads(self, trial: EnvironmentTrial) -> None:
        """episodes can be played in several threads at once"""
        _need_repeats(trial)
        skip_if(_shared(trial), "not tried: its episodes share state")
        with trial.watched():
            results = _played_at_once(trial)
        cause = "share nothing, and use nothing that works in the main thread only"
        for result in results:
            trial.demand(result.error is None, f"in a thread, it raises {result}", cause)
            for play, trace in zip(trial.plays, result.value, strict=True):
                change = play.change_in(trace)
                trial.demand(not change, f"in a thread, {change}", cause)

    def test_ends(self, trial: EnvironmentTrial) -> None:
        """a game ends, if it ENDS"""
        skip_unless(trial.is_game, "is not a game")
        if trial.cls.ENDS is None:
            pytest.skip("its arguments say whether it ends")
        ends = any(
            getattr(step.value, "done", False) for play in trial.plays for step in play.steps
        )
        if trial.cls.ENDS:
            finding = f"none of {len(trial.plays)} episodes is done"
            cause = "return done=True; show turns that end it in EXAMPLES; or declare ENDS = False"
            trial.demand(ends, finding, cause, "step")
        else:
            finding = "it is done at last, though ENDS is False"
            trial.demand(not ends, finding, "remove ENDS", "step")

    def test_observations_are_typed(self, trial: EnvironmentTrial) -> None:
        """step() returns an Observation of a text, a number and a flag"""
        skip_unless(trial.is_game, "is not a game")
        results = [step for play in trial.plays for step in play.steps if step.error is None]
        for result in results:
            problem = _mistyped(result.value)
            cause = "return Observation(text, reward, done)"
            trial.demand(not problem, f"step() returns {problem}", cause, "step")

    def test_rewards_are_numbers(self, trial: EnvironmentTrial) -> None:
        """rewards are finite numbers"""
        for play in (*trial.plays, *trial.wanderings):
            for source, reward in play.rewards:
                is_number = isinstance(reward, bool | int | float) and math.isfinite(reward)
                cause = "a reward is a finite int or float; convert numbers of other libraries"
                trial.demand(is_number, f"{source} gives the reward {reward!r}", cause, source[:-2])

    def test_range_of_rewards(self, trial: EnvironmentTrial) -> None:
        """the reward of an episode, cut off anywhere, is within REWARDS"""
        if trial.cls.REWARDS is None:
            pytest.skip("declares no REWARDS")
        for script in trial.scripts:
            for turns in range(1, len(script.turns) + 1):
                play = trial.play(replace(script, turns=script.turns[:turns]))
                _demand_in_range(trial, play.reward, f"after {play.turn} turns")
        for play in trial.wanderings:
            _demand_in_range(trial, play.reward, "with turns of EXAMPLES in another order")

    def test_score_is_pure(self, trial: EnvironmentTrial) -> None:
        """score() is the same when it is asked again"""
        skip_unless(has_score(trial.cls), "does not score")
        for script in trial.scripts:
            with trial.watched():
                play = Play(trial.make(), script)
                while play.advance():
                    pass
                answers = (play.answer, "", play.answer)
                first, _, again = (attempt(play.environment.score, answer) for answer in answers)
                play.end()
            finding = f"score({play.answer!r}) is {first}, and {again} when it is asked again"
            cause = "compute it from the state of the episode, and leave that as it is"
            trial.demand(str(first) == str(again), finding, cause, "score")

    def test_fields_matter(self, trial: EnvironmentTrial) -> None:
        """every field of the rows in EXAMPLES changes an episode"""
        names = dict.fromkeys(name for script in trial.scripts[:-1] for name in script.row)
        names.pop("prompt", None)
        skip_unless(names, "shows no fields of rows")
        _need_repeats(trial)
        for name in names:
            changed = ((script, play) for play in trial.plays for script in _changed(play, name))
            are_same = (trial.play(script).trace == play.trace for script, play in changed)
            is_unused = next(are_same, False) and all(are_same)
            finding = f"episodes are the same whatever is in the field {name} of their rows"
            trial.demand(not is_unused, finding, f"use {name}, or take it out of EXAMPLES", "reset")

    def test_arguments_matter(self, trial: EnvironmentTrial, record_property: Note) -> None:
        """every argument changes an episode, unless NO_EFFECT_ON_NUMBERS names it"""
        _need_repeats(trial)
        arguments = arguments_of(trial.make())
        skip_unless(
            any(argument.others for argument in arguments),
            "has no argument whose other values are known",
        )
        effects = Effects(
            arguments,
            needs_of(trial.cls),
            lambda changes: _is_accepted(trial, changes),
            lambda changes: _traces(trial, changes),
            lambda first, second: first != second,
        )
        silent = silent_arguments(trial.cls)
        unreached = _numbers_used(trial.cls, effects.without(silent))
        if unreached:
            record_property("note", f"no episode of EXAMPLES depends on {', '.join(unreached)}")
        demand_effects(effects, trial.cls, [*silent, *unreached])


def _numbers_used(
    cls: type, without_effect: Iterable[tuple[VariedArgument, Sequence[Any]]]
) -> list[str]:
    """The arguments among those without an effect that are numbers, such as a tolerance, and are
    read: whether an episode meets them is a matter of EXAMPLES."""
    read = attributes_read(cls) or set()
    names = [argument.name for argument, _ in without_effect if _is_number(argument.default)]
    return [name for name in names if name in read]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _demand_in_range(trial: EnvironmentTrial, reward: float, when: str) -> None:
    lowest, highest = trial.cls.REWARDS
    trial.demand(
        not reward < lowest and not reward > highest,
        f"{when} the reward is {reward:g}",
        f"REWARDS is ({lowest:g}, {highest:g}), and an episode may be cut off anywhere",
    )


def _played_at_once(trial: EnvironmentTrial) -> list[CallResult]:
    """The traces of all episodes from each of several threads, which take turns as often as
    possible."""
    barrier, interval = Barrier(AT_ONCE), sys.getswitchinterval()
    results: list[CallResult] = []

    def play_all() -> list[Trace]:
        barrier.wait()
        return [Play(trial.make(), script).end().trace for script in trial.scripts]

    def run() -> None:
        results.append(attempt(play_all))

    threads = [Thread(target=run, daemon=True) for _ in range(AT_ONCE)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return results


def _need_repeats(trial: EnvironmentTrial) -> None:
    skip_if(trial.repeats, "not tried: its episodes differ whenever they are played")


def _names(cls: type) -> set[str]:
    """The names that the methods of an environment use."""
    classes = cls.__mro__[: cls.__mro__.index(Environment)]
    functions = [
        value for each in classes for value in vars(each).values() if hasattr(value, "__code__")
    ]
    return {name for function in functions for name in _names_in(function.__code__)}


def _names_in(code: types.CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return {*code.co_names}.union(*map(_names_in, inner))


def _take_turns(*plays: Play) -> list[Trace]:
    """Play episodes at the same time, a turn of each after the other."""
    waiting = list(plays)
    while waiting:
        waiting = [play for play in waiting if play.advance()]
    return [play.end().trace for play in plays]


def _shared(trial: EnvironmentTrial) -> str:
    """How episodes differ when they take turns with another one; empty if they do not."""
    for play in trial.plays:
        neighbour = replace(play.script, seed=2)
        alone = trial.play(neighbour)
        with trial.watched():
            mixed = _take_turns(*(Play(trial.make(), s) for s in (play.script, neighbour)))
        for expected, trace in zip((play, alone), mixed, strict=True):
            if change := expected.change_in(trace):
                return change
    return ""


def _mistyped(value: Any) -> str:
    """What is wrong with the types of an observation; empty if nothing is."""
    if not isinstance(value, Observation):
        return f"a {type(value).__name__}"
    fields = {"text": (str, value.text), "done": (bool, value.done)}
    for name, (expected, field) in fields.items():
        if not isinstance(field, expected):
            return f"{name} = {field!r:.60}"
    return ""


def _changed(play: Play, name: str) -> list[Script]:
    """Its script, with other values in a field of its row."""
    script = play.script
    values = values_like(script.row.get(name))
    return [replace(script, row={**script.row, name: value}) for value in values]


def _is_accepted(trial: EnvironmentTrial, changes: Changes) -> bool:
    try:
        trial.make(**changes)
    except (RlcliError, ValueError):
        return False
    return True


def _traces(trial: EnvironmentTrial, changes: Changes) -> list[Trace]:
    seeds = (1, 2, 3) if _names(trial.cls) & DRAWING else (1,)
    scripts = [replace(script, seed=seed) for script in trial.scripts for seed in seeds]
    return [trial.play(script, **changes).trace for script in scripts]
