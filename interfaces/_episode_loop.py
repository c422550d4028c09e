"""Plays many episodes at once, and counts those that have to be left out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlcli.api.headway import Headway
from rlcli.api.model import GenerationEngine, ResponseStream
from rlcli.errors import WorkerError, escape_control

from ._environment_pool import EnvironmentCalls
from ._episode import Episode
from ._episode_rules import EnvironmentCall, Move, PolicyTurn

log = logging.getLogger(__name__)


@dataclass
class Discards:
    """Episodes of a call that are left out."""

    most: int
    """How many there may be."""
    episodes: int
    """Of how many."""
    noted: list[Episode] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._work = Headway(self.episodes, "episodes")

    def note(self, episode: Episode) -> None:
        """An episode is over. Raises WorkerError if too many are left out."""
        self._work.advance()
        if episode.is_discarded:
            self.noted.append(episode)
        if len(self.noted) > self.most:
            hint = "max_error_fraction of the episodes is how many may fail"
            raise WorkerError(self._words(), hint=hint, code="F52")

    def report(self) -> None:
        if self.noted:
            log.warning("%s", escape_control(self._words()))

    def _words(self) -> str:
        first = self.noted[0]
        return (
            f"the environment {first.rules.name} failed in {len(self.noted)} of {self.episodes} "
            f"episodes; first, {first.beginning.label}: {first.failures[-1]}"
        )


def begin(
    episodes: Sequence[Episode], calls: EnvironmentCalls[Episode]
) -> list[tuple[Episode, Move | None]]:
    """Reset the environments of all episodes; returns their first turns."""
    turns: dict[Episode, Move | None] = {}
    moves = [(episode, episode.advance()) for episode in episodes]
    while moves or calls.are_running:
        for episode, move in moves:
            if isinstance(move, EnvironmentCall):
                calls.ask(episode, move.request)
            else:
                turns[episode] = move
        moves = [(episode, episode.advance(reply)) for episode, reply in calls.take(wait=True)]
    return [(episode, turns[episode]) for episode in episodes]


def play(
    engine: GenerationEngine,
    stream: ResponseStream,
    turns: Sequence[tuple[Episode, Move | None]],
    calls: EnvironmentCalls[Episode],
    discards: Discards,
    in_step: bool,
) -> None:
    """Play episodes to their ends, from their first turns on. Each turn is requested as soon as its
    episode has got so far: no episode waits for another, unless all have to stay `in_step`. What
    was sampled is kept as it is; only messages that follow it are tokenized."""
    moves, sampling = list(turns), dict[int, Episode]()
    while moves or sampling or calls.are_running:
        for episode, move in moves:
            if isinstance(move, PolicyTurn):
                sampling[stream.submit(move.text, move.seed)] = episode
            elif move is not None:
                calls.ask(episode, move.request)
            else:
                discards.note(episode)
        with engine.unused():
            answers = calls.take(wait=not sampling, wait_for_all=in_step)
        moves = [(episode, episode.advance(reply)) for episode, reply in answers]
        if sampling and not moves:
            for response in stream.collect(until=calls.have_answered):
                episode = sampling.pop(response.number)
                moves.append((episode, episode.advance((response, stream.spans(response)))))
