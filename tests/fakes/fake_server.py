"""An inference server for tests, over a model small enough for them: what the fakes of all kinds
of servers share.

It samples from real distributions, caches prefixes until told to flush them, mixes weights within a
response if paused meanwhile, and fails in every requested way.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from faulty_http import Handler, QuietServer, Refused, Text


@dataclass(frozen=True)
class Wish:
    """A response that is requested from the fake."""

    id: str
    prompt: tuple[int, ...]
    tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stops: tuple[int, ...] = ()
    compared: tuple[int, ...] = ()
    """Ids whose log-probs are requested at each position."""


@dataclass(frozen=True)
class Sampled:
    """What it has sampled."""

    tokens: list[int]
    logprobs: list[float]
    compared: list[list[float]]
    versions: list[str]
    finish: str
    """stop, length or abort."""


class FakeModel(Protocol):
    """A language model whose weights can be replaced."""

    vocabulary: int

    def logits(self, tokens: tuple[int, ...]) -> list[float]:
        """Logits of the token after these."""
        ...

    def experts(self, tokens: tuple[int, ...]) -> list[list[list[int]]] | None:
        """[T, layers, k]: those that each token is routed to, 0 in layers without any; None for a
        dense model."""
        ...

    def load(self, folder: Path) -> None: ...
    def join(self, address: str, port: int, rank: int, size: int, group: str) -> None: ...
    def leave(self, group: str) -> None: ...
    def receive(
        self, group: str, names: list[str], dtypes: list[str], shapes: list[list[int]]
    ) -> None: ...
    def take_received(self) -> None:
        """All weights have been received."""
        ...

    def digest(self) -> str: ...


class HashModel:
    """Distributions derived from the bytes of the weight files; it needs no library,
    so it starts at once."""

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary
        self._weights = "dummy"

    def logits(self, tokens: tuple[int, ...]) -> list[float]:
        drawn = random.Random(f"{self._weights} {tokens}")
        return [drawn.gauss(0, 2) for _ in range(self.vocabulary)]

    def experts(self, tokens: tuple[int, ...]) -> None:
        return None

    def load(self, folder: Path) -> None:
        import hashlib

        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"no weights in {folder}")
        self._weights = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

    def join(self, address: str, port: int, rank: int, size: int, group: str) -> None:
        raise ValueError("this one reads its weights from disk")

    def leave(self, group: str) -> None:
        raise ValueError("this one reads its weights from disk")

    def receive(
        self, group: str, names: list[str], dtypes: list[str], shapes: list[list[int]]
    ) -> None:
        raise ValueError("this one reads its weights from disk")

    def take_received(self) -> None:
        raise ValueError("this one reads its weights from disk")

    def digest(self) -> str:
        return self._weights


class FakeServer:
    """The server; `with FakeSGLang(model) as server:` serves at `server.url`."""

    def __init__(
        self, model: FakeModel, port: int = 0, key: str | None = None, token_s: float = 0.0
    ):
        """`token_s`: seconds per token."""
        self.model = model
        self.key = key
        self.token_s = token_s
        self.label = "default"
        self.calls: list[tuple[str, Any]] = []
        """(path, body) of every request."""
        self.most_at_once = 0
        """Maximum number of responses in progress at once."""
        self.faults: dict[str, deque[str]] = {}
        """Path → faults of the next requests: a name in `Handler.FAULTS`, or `refuse`."""
        self.spoil: Callable[[dict[str, Any]], Any] | None = None
        """Replaces a reply to /generate."""
        self.tokenizer: Any = None
        """Tokenizer for requests to tokenize texts; None: the server was started without one."""
        self.info: dict[str, Any] = {}
        """Further information that it reports about itself."""
        self.scales = True
        """True: its log-probs are of the distribution at the temperature; false:
        of the unscaled one."""
        self.returns_experts = True
        """Whether it was started with --enable-return-routed-experts."""
        self.preemptions = 0
        """How often it says that it has interrupted a response."""
        self.prompt_tokens, self.cached_tokens = 0, 0
        """Tokens of prompts, and those of them that it had in its cache."""
        self._prompts: set[tuple[int, ...]] = set()
        """Those in its cache."""
        self._prefixes: dict[tuple[int, ...], list[float]] = {}
        self._lock = threading.Lock()
        self._state = threading.Condition()
        self._paused = False
        self.in_memory = {"weights", "kv_cache"}
        self._running: dict[str, bool] = {}
        """Request → whether it should end now."""
        handler = type("BoundHandler", (Handler,), {"fake": self})
        self._http = QuietServer(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def experts_of(self, tokens: tuple[int, ...]) -> list[list[list[int]]] | None:
        """[T - 1, layers, k]: those of all tokens but the last; None if it does not report any."""
        return self.model.experts(tokens[:-1]) if self.returns_experts else None

    def serve(self) -> None:
        self._http.serve_forever()

    def fail(self, path: str, *faults: str) -> None:
        self.faults.setdefault(path, deque()).extend(faults)

    def count(self, path: str) -> int:
        return sum(called == path for called, _ in self.calls)

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    # -- answers -----------------------------------------------------------------------------------

    def handlers(self) -> Mapping[str, Callable[[Any], Any]]:
        """Path → what answers a request, from its body and its query."""
        raise NotImplementedError

    def answer(self, path: str, body: Any) -> Any:
        """Raises Refused."""
        handlers = self.handlers()
        if path not in handlers:
            raise Refused(f"no {path}")
        return handlers[path](body)

    metric_names: Mapping[str, str]
    """Its names of numbers of its load."""

    def metrics(self) -> Text:
        numbers = {
            "running": len(self._running),
            "queued": 0,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
        }
        lines = ["# HELP some text", 'python_info{version="3"} 1.0']
        lines += [
            f'{theirs}{{model_name="a {{b}} \\" c"}} {numbers[ours]:.1f}'
            for ours, theirs in self.metric_names.items()
        ]
        return Text("\n".join(lines) + "\n")

    def respond(self, wish: Wish, answered: Callable[[Sampled], dict[str, Any]]) -> Any:
        """The answer to a request for a response; `answered` writes it in the server's protocol."""
        with self._state:
            if self.in_memory != {"weights", "kv_cache"}:
                raise Refused(f"memory is given back; it has {sorted(self.in_memory)}")
            if wish.id in self._running:
                raise Refused(f"Duplicate request ID detected: {wish.id}")
            self._running[wish.id] = False
            self.most_at_once = max(self.most_at_once, len(self._running))
            self.prompt_tokens += len(wish.prompt)
            self.cached_tokens += len(wish.prompt) if wish.prompt in self._prompts else 0
            self._prompts.add(wish.prompt)
        try:
            answer = answered(self._sample(wish))
        finally:
            with self._state:
                del self._running[wish.id]
                self._state.notify_all()
        return self.spoil(answer) if self.spoil is not None else answer

    def check_ids(self, ids: Mapping[str, Any]) -> None:
        """Refuse biases for ids that do not exist."""
        if any(int(id_) >= self.model.vocabulary for id_ in ids):
            raise Refused(f"logit_bias must has keys in [0, {self.model.vocabulary - 1}]")

    def _sample(self, wish: Wish) -> Sampled:
        drawn = random.Random(wish.seed)
        sampled = Sampled([], [], [], [], "length")
        while len(sampled.tokens) < wish.tokens:
            time.sleep(self.token_s)
            with self._state:
                while self._paused and not self._running[wish.id]:
                    self._state.wait()
                if self._running[wish.id]:
                    return replace(sampled, finish="abort")
                logits, label = self._logits((*wish.prompt, *sampled.tokens)), self.label
            token = draw([logit / wish.temperature for logit in logits], wish, drawn)
            scale = wish.temperature if self.scales else 1.0
            logprobs = log_softmax([logit / scale for logit in logits])
            sampled.tokens.append(token)
            sampled.logprobs.append(logprobs[token])
            sampled.compared.append([logprobs[id_] for id_ in wish.compared])
            sampled.versions.append(label)
            if token in wish.stops:
                return replace(sampled, finish="stop")
        return sampled

    def _logits(self, tokens: tuple[int, ...]) -> list[float]:
        with self._lock:
            if tokens not in self._prefixes:
                self._prefixes[tokens] = self.model.logits(tokens)
            return self._prefixes[tokens]

    # -- weights, pauses and memory ----------------------------------------------------------------

    def load(self, folder: Path) -> None:
        """Raises Refused."""
        if "weights" not in self.in_memory:
            raise Refused("the memory of the weights is given back")
        try:
            with self._lock:
                self.model.load(folder)
        except (OSError, ValueError, KeyError) as problem:
            raise Refused(str(problem)) from None

    def flush(self) -> None:
        with self._lock:
            self._prefixes.clear()
            self._prompts.clear()

    def pause(self, aborts: bool) -> None:
        with self._state:
            self._paused = True
            if aborts:
                self._end_running()

    def resume(self) -> None:
        with self._state:
            self._paused = False
            self._state.notify_all()

    def abort(self, ids: Sequence[str] | None = None) -> None:
        """End some responses, or all."""
        with self._state:
            self._end_running(ids)

    def _end_running(self, ids: Sequence[str] | None = None) -> None:
        for id_ in self._running:
            self._running[id_] |= ids is None or id_ in ids
        self._state.notify_all()

    def release(self, contents: set[str]) -> None:
        """Raises Refused while requests are running, and for memory that is not held."""
        self._move_memory(contents, contents <= self.in_memory, self.in_memory - contents)
        if "weights" in contents:
            self.label = "lost"

    def regain(self, contents: set[str]) -> None:
        self._move_memory(contents, contents.isdisjoint(self.in_memory), self.in_memory | contents)

    def _move_memory(self, contents: set[str], is_possible: bool, left: set[str]) -> None:
        with self._state:
            if self._running:
                raise Refused("requests are running")
            if not is_possible:
                raise Refused(f"{sorted(contents)}, but it has {sorted(self.in_memory)}")
            self.in_memory = left


def log_softmax(logits: list[float]) -> list[float]:
    highest = max(logits)
    total = highest + math.log(sum(math.exp(logit - highest) for logit in logits))
    return [logit - total for logit in logits]


def draw(logits: list[float], wish: Wish, drawn: random.Random) -> int:
    """Draw a token."""
    logprobs = log_softmax(logits)
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if wish.top_k > 0:
        order = order[: wish.top_k]
    candidates, sum_ = [], 0.0
    for token in order:
        candidates.append(token)
        sum_ += math.exp(logprobs[token])
        if sum_ >= wish.top_p:
            break
    target = drawn.random() * sum(math.exp(logprobs[token]) for token in candidates)
    for token in candidates:
        target -= math.exp(logprobs[token])
        if target <= 0:
            break
    return token


def spans(versions: list[str]) -> list[dict[str, Any]]:
    spans_of_versions: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if not spans_of_versions or spans_of_versions[-1]["version"] != version:
            spans_of_versions.append({"version": version, "start": position, "end": position})
        spans_of_versions[-1]["end"] = position + 1
    return spans_of_versions
