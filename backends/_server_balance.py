"""Which server a request goes to, and which responses are taken from a slow one.

No threads and no clock: the client and its simulation (`tests/bench/bound.py`) follow the same
rules.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SLOW = 3.0
"""A server is slow if a token takes it this many times as long as the median of the others."""
RECENT = 4
"""Answers of a server used to compute its speed."""
REQUEST = 64
"""Tokens that count as the work of a request, in addition to those of its response: the prompt is
read, and may have to wait."""
SHORTEST_S = 2.0
"""Recent answers of a server that took less time than this together do not make it slow."""
SILENCE = 10.0
"""A server is silent if it has not answered for this many times as long as the answers of others
usually take."""
FIRST_REST_S, LONGEST_REST_S = 10.0, 300.0
"""Time for which a slow server gets no request after an answer: it doubles with each slow one, as
the first may have been an accident."""
AHEAD = 8
"""How many more requests than the least busy server the one may have that holds a prefix."""
BLOCK = 32
"""Tokens of a prefix that are compared at once."""
HELD = 100_000
"""Blocks whose server is remembered."""


@dataclass
class Flight:
    """A request in flight."""

    server: int
    id: str
    began: float
    can_move: bool
    """False once its response has been taken from a server, until the next update."""
    is_taken: bool = False
    """Whether it is being taken from this one."""
    paused: float = 0.0
    """Seconds for which it was paused."""


@dataclass
class Load:
    """The current and the recent work of a server."""

    in_flight: dict[str, Flight] = field(default_factory=dict)
    answers: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """(tokens, seconds)."""
    last_answer: float = 0.0
    slow_answers: int = 0
    """That came one after another and showed that it is slow."""

    pace: float = 0.0
    """Seconds per token, of these answers."""

    @property
    def oldest(self) -> Flight:
        return next(iter(self.in_flight.values()))

    def add(self, tokens: int, seconds: float, now: float) -> None:
        """Note an answer."""
        self.answers.append((tokens, seconds))
        self.last_answer = now
        self.pace = self.seconds / sum(REQUEST + tokens for tokens, _ in self.answers)

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.answers)

    def take(self, most: int | None = None) -> list[Flight]:
        """The oldest of what may be taken from it, which it may only once."""
        flights = [
            flight for flight in self.in_flight.values() if flight.can_move and not flight.is_taken
        ]
        for flight in flights[:most]:
            flight.is_taken = True
        return flights[:most]


class Balance:
    """The requests in flight on servers, which are numbered from 0. Times are in seconds.

    What a slow server has in flight when that turns out is taken from it, each response at most
    once per update. From then on it gets a single request now and then, until its answer shows that
    it is slow no longer. A silent one has its oldest response taken, which shows how fast it is.
    """

    def __init__(self, servers: int):
        self._loads = [Load() for _ in range(servers)]
        self._slow: set[int] = set()
        """As their last answers showed."""
        self._prefixes = Prefixes()

    @property
    def in_flight(self) -> int:
        return sum(len(load.in_flight) for load in self._loads)

    def count(self, server: int) -> int:
        return len(self._loads[server].in_flight)

    def choose(
        self, ready: Iterable[int], now: float, prompt: Sequence[int] = (), can_move: bool = True
    ) -> int | None:
        """The server for a request: the one that holds the prompt's prefix, unless it is busier
        than others, or the least busy. None: all have to finish something first."""
        counts = {
            server: self.count(server)
            for server in ready
            if server not in self._slow or (can_move and self._is_rested(server, now))
        }
        if not counts:
            return None
        least = min(counts, key=counts.__getitem__)
        holder = self._prefixes.holder(prompt)
        if holder in counts and counts[holder] < counts[least] + AHEAD:
            return holder
        return least

    def begin(
        self, server: int, id_: str, now: float, prompt: Sequence[int] = (), can_move: bool = True
    ) -> Flight:
        flight = Flight(server, id_, now, can_move)
        self._loads[server].in_flight[id_] = flight
        self._prefixes.note(prompt, server)
        return flight

    def end(
        self, flight: Flight, now: float, text: Sequence[int] = (), tokens: int | None = None
    ) -> list[Flight]:
        """Note the end of a request, with the number of tokens if it was answered; `text`: prompt
        and response. Returns the requests to take from the server."""
        load = self._loads[flight.server]
        del load.in_flight[flight.id]
        if tokens is None:
            return []
        load.add(tokens, now - flight.began - flight.paused, now)
        self._prefixes.note(text, flight.server)
        if not self._is_slow(flight.server):
            self._forget_slowness(flight.server)
            return []
        self._slow.add(flight.server)
        load.slow_answers += 1
        load.answers.clear()  # the next one decides alone
        return load.take()

    def overdue(self, now: float, slow_only: bool = False) -> list[Flight]:
        """The requests to take from silent servers; `slow_only`: only from those known to be
        slow."""
        suspects = self._slow if slow_only else range(len(self._loads))
        silent = [self._loads[server] for server in suspects if self._is_silent(server, now)]
        return [flight for load in silent for flight in load.take(1)]

    def weights_changed(self) -> None:
        """Note that servers have new weights, and so hold no prefixes any more."""
        self._prefixes = Prefixes()
        for load in self._loads:
            for flight in load.in_flight.values():
                flight.can_move = True

    def resumed(self, seconds: float) -> None:
        """Note that all servers were paused for so long: this says nothing about any of them."""
        for load in self._loads:
            load.last_answer += seconds
            for flight in load.in_flight.values():
                flight.paused += seconds

    def started(self, server: int) -> None:
        """Note that a server was started again: what it did before says nothing about it now."""
        self._loads[server].answers.clear()
        self._forget_slowness(server)
        self._prefixes.forget(server)

    def _forget_slowness(self, server: int) -> None:
        self._slow.discard(server)
        self._loads[server].slow_answers = 0

    def _is_rested(self, server: int, now: float) -> bool:
        load = self._loads[server]
        rest = min(LONGEST_REST_S, FIRST_REST_S * 2 ** (load.slow_answers - 1))
        return not load.in_flight and now >= load.last_answer + rest

    def _is_slow(self, server: int) -> bool:
        load = self._loads[server]
        paces = [other.pace for other in self._others(server)]
        if not paces or load.seconds < SHORTEST_S:
            return False
        return load.pace > SLOW * statistics.median(paces)

    def _is_silent(self, server: int, now: float) -> bool:
        load = self._loads[server]
        if not load.in_flight or any(flight.is_taken for flight in load.in_flight.values()):
            return False
        silence = now - max(load.oldest.began + load.oldest.paused, load.last_answer)
        if silence <= SHORTEST_S:
            return False
        answers = [seconds for other in self._others(server) for _, seconds in other.answers]
        return bool(answers) and silence > SILENCE * statistics.median(answers)

    def _others(self, server: int) -> list[Load]:
        """Other servers that have answered."""
        return [
            load for number, load in enumerate(self._loads) if number != server and load.answers
        ]


class Prefixes:
    """The server that was last given a text which begins with the same tokens."""

    def __init__(self) -> None:
        self._holders: OrderedDict[int, int] = OrderedDict()

    def holder(self, text: Sequence[int]) -> int | None:
        """The server that holds the longest prefix of a text, if that is half of it or more."""
        keys = keys_of(text)
        longest_first = reversed(keys[(len(keys) - 1) // 2 :])
        return next((self._holders[key] for key in longest_first if key in self._holders), None)

    def note(self, text: Sequence[int], server: int) -> None:
        for key in keys_of(text):
            self._holders[key] = server
            self._holders.move_to_end(key)
        while len(self._holders) > HELD:
            self._holders.popitem(last=False)

    def forget(self, server: int) -> None:
        lost = [key for key, holder in self._holders.items() if holder == server]
        for key in lost:
            del self._holders[key]


def keys_of(text: Sequence[int]) -> list[int]:
    """A key of each prefix of a text that ends with a block, and of the whole."""
    keys, key = [], 0
    for start in range(0, len(text), BLOCK):
        key = hash((key, *text[start : start + BLOCK]))
        keys.append(key)
    return keys
