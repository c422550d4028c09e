"""A server that speaks the part of SGLang's protocol that rlcli uses,
over a model small enough for tests.

It samples from real distributions, caches prefixes until told to flush them, mixes weights within a
response if paused meanwhile, and fails in every requested way. Run as a script it replaces
`sglang.launch_server`.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rlcli.testing.faulty_http import Handler, QuietServer, Refused

DEFAULTS: dict[str, Any] = {"top_p": 1.0, "top_k": -1, "stop_token_ids": (), "sampling_seed": 0}


class FakeModel(Protocol):
    """A language model whose weights can be replaced."""

    vocabulary: int

    def logits(self, tokens: tuple[int, ...]) -> list[float]:
        """Logits of the token after these."""
        ...

    def load(self, folder: Path) -> None: ...
    def join(self, address: str, port: int, rank: int, size: int, group: str) -> None: ...
    def leave(self, group: str) -> None: ...
    def receive(
        self, group: str, names: list[str], dtypes: list[str], shapes: list[list[int]]
    ) -> None: ...
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

    def digest(self) -> str:
        return self._weights


class FakeSGLang:
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
        self.info: dict[str, Any] = {"version": "0.5.23", "tp_size": 1}
        """The server information that it reports."""
        self.preferred: dict[str, Any] | None = None
        """Its own preferred sampling settings."""
        self.scales = True
        """True: its log-probs are of the distribution at the temperature; false:
        of the unscaled one."""
        self._prefixes: dict[tuple[int, ...], list[float]] = {}
        self._lock = threading.Lock()
        self._state = threading.Condition()
        self._paused: str | None = None
        self._open = False
        self._held = {"weights", "kv_cache"}
        self._running: dict[str, bool] = {}
        """Request → whether it should end now."""
        handler = type("BoundHandler", (Handler,), {"fake": self})
        self._http = QuietServer(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FakeSGLang:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def serve(self) -> None:
        self._http.serve_forever()

    def fail(self, path: str, *faults: str) -> None:
        self.faults.setdefault(path, deque()).extend(faults)

    def count(self, path: str) -> int:
        return sum(called == path for called, _ in self.calls)

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    # -- answers -----------------------------------------------------------------------------------

    def answer(self, path: str, body: Any) -> Any:
        """Raises Refused."""
        handlers: Mapping[str, Callable[[Any], Any]] = {
            "/ready": lambda _: {},
            "/health_generate": lambda _: {},
            "/generate": self._generate,
            "/model_info": lambda _: {
                "weight_version": self.label,
                "preferred_sampling_params": self.preferred,
            },
            "/server_info": lambda _: {"skip_tokenizer_init": self.tokenizer is None, **self.info},
            "/tokenize": lambda body: {
                "tokens": self.tokenizer(body["prompt"], add_special_tokens=False).input_ids
            },
            "/update_weights_from_disk": self._from_disk,
            "/init_weights_update_group": self._join,
            "/begin_weight_update": lambda _: self._session(True),
            "/end_weight_update": lambda _: self._session(False),
            "/update_weights_from_distributed": self._distributed,
            "/destroy_weights_update_group": self._leave,
            "/weights_checker": lambda _: {
                "success": True,
                "per_engine_checksum": self.model.digest(),
            },
            "/pause_generation": self._pause,
            "/continue_generation": lambda _: self._continue(),
            "/abort_request": lambda _: self._abort(),
            "/flush_cache": lambda _: self._flush(),
            "/release_memory_occupation": lambda body: self._memory(body, released=True),
            "/resume_memory_occupation": lambda body: self._memory(body, released=False),
        }
        if path not in handlers:
            raise Refused(f"no {path}")
        return handlers[path](body)

    def _generate(self, body: dict[str, Any]) -> Any:
        if any(
            int(id_) >= self.model.vocabulary
            for id_ in body["sampling_params"].get("logit_bias", ())
        ):
            raise Refused(f"logit_bias must has keys in [0, {self.model.vocabulary - 1}]")
        with self._state:
            if self._held != {"weights", "kv_cache"}:
                raise Refused(f"memory is given back; it has {sorted(self._held)}")
            self._running[body["rid"]] = False
            self.most_at_once = max(self.most_at_once, len(self._running))
        try:
            answer = self._sample(body)
        finally:
            with self._state:
                del self._running[body["rid"]]
                self._state.notify_all()
        return self.spoil(answer) if self.spoil is not None else answer

    def _sample(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling, prompt = {**DEFAULTS, **body["sampling_params"]}, tuple(body["input_ids"])
        drawn = random.Random(sampling["sampling_seed"])
        tokens: list[int] = []
        scores: list[list[Any]] = []
        others: list[list[list[Any]]] = []
        versions: list[str] = []
        reason: dict[str, Any] = {"type": "length", "length": sampling["max_new_tokens"]}
        while len(tokens) < sampling["max_new_tokens"]:
            time.sleep(self.token_s)
            with self._state:
                while self._paused is not None and not self._running[body["rid"]]:
                    self._state.wait()
                if self._running[body["rid"]]:
                    reason = {"type": "abort"}
                    break
                logits, label = self._logits((*prompt, *tokens)), self.label
            token = draw([logit / sampling["temperature"] for logit in logits], sampling, drawn)
            logprobs = log_softmax(
                [logit / (sampling["temperature"] if self.scales else 1.0) for logit in logits]
            )
            tokens.append(token)
            scores.append([logprobs[token], token, None])
            others.append([[logprobs[id_], id_, None] for id_ in body.get("token_ids_logprob", ())])
            versions.append(label)
            if token in sampling["stop_token_ids"]:
                reason = {"type": "stop", "matched": token}
                break
        meta = {
            "id": body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "output_token_logprobs": scores,
            "output_token_ids_logprobs": others,
            "weight_version": self.label,
            "weight_versions": spans(versions),
        }
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    def _logits(self, tokens: tuple[int, ...]) -> list[float]:
        with self._lock:
            if tokens not in self._prefixes:
                self._prefixes[tokens] = self.model.logits(tokens)
            return self._prefixes[tokens]

    # -- weights and memory ------------------------------------------------------------------------

    def _from_disk(self, body: dict[str, Any]) -> Any:
        # with the weights the server was started with
        if body.get("load_format", "dummy") == "dummy":
            raise Refused("Failed to get model loader")
        try:
            with self._lock:
                self.model.load(Path(body["model_path"]))
        except (OSError, ValueError, KeyError) as problem:
            raise Refused(str(problem)) from None
        return self._updated(body)

    def _join(self, body: dict[str, Any]) -> Any:
        self.model.join(
            body["master_address"],
            body["master_port"],
            body["rank_offset"],
            body["world_size"],
            body["group_name"],
        )
        return {"success": True}

    def _leave(self, body: dict[str, Any]) -> Any:
        self.model.leave(body["group_name"])
        return {"success": True}

    def _session(self, begins: bool) -> Any:
        if self._open == begins:
            raise Refused("already open" if begins else "not open")
        self._open = begins
        return {"success": True}

    def _distributed(self, body: dict[str, Any]) -> Any:
        if not self._open:
            raise Refused("call begin_weight_update first")
        with self._lock:
            self.model.receive(body["group_name"], body["names"], body["dtypes"], body["shapes"])
        return self._updated(body)

    def _updated(self, body: dict[str, Any]) -> Any:
        if "weights" not in self._held:
            raise Refused("the memory of the weights is given back")
        self.label = body.get("weight_version") or self.label
        if body.get("flush_cache", True):
            self._flush()
        return {"success": True}

    def _flush(self) -> Any:
        with self._lock:
            self._prefixes.clear()

    def _pause(self, body: dict[str, Any]) -> Any:
        with self._state:
            self._paused = body["mode"]
            if self._paused == "abort":
                self._end_running()
        return {"status": "ok"}

    def _continue(self) -> Any:
        with self._state:
            self._paused = None
            self._state.notify_all()
        return {"status": "ok"}

    def _abort(self) -> Any:
        with self._state:
            self._end_running()

    def _end_running(self) -> None:
        self._running = dict.fromkeys(self._running, True)
        self._state.notify_all()

    def _memory(self, body: dict[str, Any], released: bool) -> Any:
        tags = set(body["tags"])
        with self._state:
            if self._running:
                raise Refused("requests are running")
            if not (tags <= self._held if released else tags.isdisjoint(self._held)):
                raise Refused(f"{sorted(tags)}, but it has {sorted(self._held)}")
            self._held = self._held - tags if released else self._held | tags
            if released and "weights" in tags:
                self.label = "lost"


def log_softmax(logits: list[float]) -> list[float]:
    highest = max(logits)
    total = highest + math.log(sum(math.exp(logit - highest) for logit in logits))
    return [logit - total for logit in logits]


def draw(logits: list[float], sampling: Mapping[str, Any], drawn: random.Random) -> int:
    """Draw a token."""
    logprobs = log_softmax(logits)
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if sampling["top_k"] > 0:
        order = order[: sampling["top_k"]]
    candidates, sum_ = [], 0.0
    for token in order:
        candidates.append(token)
        sum_ += math.exp(logprobs[token])
        if sum_ >= sampling["top_p"]:
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


def _meet(settings: Mapping[str, Any]) -> list[socket.socket]:
    """Connect with the server's processes on other nodes. Those without an endpoint stay here for
    as long as they run.

    No process notices that another one has died, as if it waited in a collective operation.
    """
    host, _, port = settings["dist-init-addr"].partition(":")
    if settings["node-rank"] == 0:
        with socket.create_server((host, int(port))) as meeting:
            return [meeting.accept()[0] for _ in range(settings["nnodes"] - 1)]
    while True:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection((host, int(port))),
        ):
            threading.Event().wait()
        time.sleep(0.05)


def main() -> None:
    """Parses `--config FILE --port PORT`, like `sglang.launch_server`."""
    import yaml

    _, file, _, port = sys.argv[1:]
    settings = yaml.safe_load(Path(file).read_text())
    peers = _meet(settings) if settings.get("nnodes", 1) > 1 else []
    model = HashModel(
        json.loads(Path(settings["model-path"], "config.json").read_text())["vocab_size"]
    )
    FakeSGLang(model, int(port), settings["api-key"], settings.get("token-s", 0.0)).serve()
    for peer in peers:
        peer.close()


if __name__ == "__main__":
    main()
