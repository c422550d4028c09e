"""A server that speaks SGLang's protocol as far as rlcli uses it, over a model small enough for tests.

It samples from real distributions, remembers prefixes until it is told to flush them, mixes weights within a response
if it is paused meanwhile, and fails in every way that it is told to. Run as a script it takes the place of
`sglang.launch_server`.
"""

from __future__ import annotations

import json
import math
import random
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Protocol

MOST_BYTES = 64 << 20


class FakeModel(Protocol):
    """A language model whose weights can be replaced."""

    def logits(self, tokens: tuple[int, ...]) -> list[float]:
        """Of the token after these."""
        ...

    def load(self, folder: Path) -> None: ...
    def join(self, address: str, port: int, rank: int, size: int, group: str) -> None: ...
    def receive(self, group: str, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None: ...
    def digest(self) -> str: ...


class HashModel:
    """Its distributions follow from the bytes of its weights' files; it needs no library, so it starts at once."""

    def __init__(self, folder: Path):
        self.vocabulary = int(json.loads((folder / "config.json").read_text())["vocab_size"])
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

    def receive(self, group: str, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        raise ValueError("this one reads its weights from disk")

    def digest(self) -> str:
        return self._weights


class Refused(Exception):
    """Status 400."""


class FakeSGLang:
    """The server; `with FakeSGLang(model) as server:` serves at `server.url`."""

    def __init__(self, model: FakeModel, port: int = 0, key: str | None = None, token_s: float = 0.0):
        """`token_s`: seconds that every token takes."""
        self.model = model
        self.key = key
        self.token_s = token_s
        self.label = "default"
        self.calls: list[tuple[str, Any]] = []
        """(path, body) of every request."""
        self.most_at_once = 0
        """Most responses that were in the making together."""
        self.faults: dict[str, deque[str]] = {}
        """Path → what goes wrong with the next requests: a name of `Handler.FAULTS`, or `refuse`."""
        self.spoil: Callable[[dict[str, Any]], Any] | None = None
        """Makes another answer of one to /generate."""
        self._prefixes: dict[tuple[int, ...], list[float]] = {}
        self._lock = threading.Lock()
        self._state = threading.Condition()
        self._paused: str | None = None
        self._open = False
        self._held = {"weights", "kv_cache"}
        self._running: dict[str, bool] = {}
        """Request → whether it is to end now."""
        handler = type("BoundHandler", (Handler,), {"fake": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._http.daemon_threads = True
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

    # -- answers ---------------------------------------------------------------------------------------------

    def answer(self, path: str, body: Any) -> Any:
        """Raises Refused."""
        handlers: Mapping[str, Callable[[Any], Any]] = {
            "/ready": lambda _: {}, "/health_generate": lambda _: {}, "/generate": self._generate,
            "/model_info": lambda _: {"weight_version": self.label, "model_type": "fake"},
            "/update_weights_from_disk": self._from_disk, "/init_weights_update_group": self._join,
            "/begin_weight_update": lambda _: self._session(True), "/end_weight_update": lambda _: self._session(False),
            "/update_weights_from_distributed": self._distributed, "/destroy_weights_update_group": lambda _: {},
            "/weights_checker": lambda _: {"success": True, "per_engine_checksum": self.model.digest()},
            "/pause_generation": self._pause, "/continue_generation": lambda _: self._continue(),
            "/abort_request": lambda _: self._abort(), "/flush_cache": lambda _: self._flush(),
            "/release_memory_occupation": lambda body: self._memory(body, released=True),
            "/resume_memory_occupation": lambda body: self._memory(body, released=False),
        }  # fmt: skip
        if path not in handlers:
            raise Refused(f"no {path}")
        return handlers[path](body)

    def _generate(self, body: dict[str, Any]) -> Any:
        with self._state:
            if self._held != {"weights", "kv_cache"}:
                raise Refused(f"memory is given back; it has {sorted(self._held)}")
            self._running[body["rid"]] = False
            self.most_at_once = max(self.most_at_once, len(self._running))
        try:
            made = self._sample(body)
        finally:
            with self._state:
                del self._running[body["rid"]]
                self._state.notify_all()
        return self.spoil(made) if self.spoil is not None else made

    def _sample(self, body: dict[str, Any]) -> dict[str, Any]:
        wanted, prompt = body["sampling_params"], tuple(body["input_ids"])
        drawn = random.Random(wanted["sampling_seed"])
        tokens: list[int] = []
        scores: list[list[Any]] = []
        versions: list[str] = []
        reason: dict[str, Any] = {"type": "length", "length": wanted["max_new_tokens"]}
        while len(tokens) < wanted["max_new_tokens"]:
            time.sleep(self.token_s)
            with self._state:
                while self._paused is not None and not self._running[body["rid"]]:
                    self._state.wait()
                if self._running[body["rid"]]:
                    reason = {"type": "abort"}
                    break
                logits, label = self._logits((*prompt, *tokens)), self.label
            token, score = draw([one / wanted["temperature"] for one in logits], wanted, drawn)
            tokens.append(token)
            scores.append([score, token, None])
            versions.append(label)
            if token in wanted["stop_token_ids"]:
                reason = {"type": "stop", "matched": token}
                break
        meta = {
            "id": body["rid"], "finish_reason": reason, "prompt_tokens": len(prompt), "completion_tokens": len(tokens),
            "output_token_logprobs": scores, "weight_version": self.label, "weight_versions": spans(versions),
        }  # fmt: skip
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    def _logits(self, tokens: tuple[int, ...]) -> list[float]:
        with self._lock:
            if tokens not in self._prefixes:
                self._prefixes[tokens] = self.model.logits(tokens)
            return self._prefixes[tokens]

    # -- weights and memory ----------------------------------------------------------------------------------

    def _from_disk(self, body: dict[str, Any]) -> Any:
        if body.get("load_format", "dummy") == "dummy":  # as the server was started
            raise Refused("Failed to get model loader")
        try:
            with self._lock:
                self.model.load(Path(body["model_path"]))
        except (OSError, ValueError, KeyError) as problem:
            raise Refused(str(problem)) from None
        return self._updated(body)

    def _join(self, body: dict[str, Any]) -> Any:
        self.model.join(
            body["master_address"], body["master_port"], body["rank_offset"], body["world_size"], body["group_name"]
        )
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


class Handler(BaseHTTPRequestHandler):
    """Speaks HTTP, and spoils it as the server is told to."""

    fake: ClassVar[FakeSGLang]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        path = self.path.partition("?")[0]
        self.fake.calls.append((path, body))
        wanted = f"Bearer {self.fake.key}" if self.fake.key and not path.startswith(("/ready", "/health")) else None
        if wanted is not None and self.headers.get("Authorization") != wanted:
            return self._send(401, {"error": "Unauthorized"})
        faults = self.fake.faults.get(path)
        fault = faults.popleft() if faults else None
        if fault in self.FAULTS:
            return self.FAULTS[fault](self)
        if fault == "refuse":
            return self._send(400, {"success": False, "message": "told to"})
        try:
            self._send(200, self.fake.answer(path, body))
        except Refused as problem:
            self._send(400, {"success": False, "message": str(problem)})

    def _send(self, status: int, answer: Any, promised: int | None = None) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if promised is None else promised))
        self.end_headers()
        self.wfile.write(content)

    def _garbage(self) -> None:
        content = b"<html>502 Bad Gateway \x1b[31m</html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _half(self) -> None:
        self._send(200, {"output_ids": [1, 2]}, promised=10_000)
        self.close_connection = True

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _silence(self) -> None:
        time.sleep(30)

    def _huge(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(MOST_BYTES * 4))
        self.end_headers()
        try:
            for _ in range(4 * 64):
                self.wfile.write(b" " * (MOST_BYTES // 64))
        except OSError:
            self.close_connection = True

    FAULTS: ClassVar[dict[str, Callable[[Any], None]]] = {
        "garbage": _garbage, "half": _half, "reset": _reset, "silence": _silence, "huge": _huge,
    }  # fmt: skip

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def draw(logits: list[float], wanted: Mapping[str, Any], drawn: random.Random) -> tuple[int, float]:
    """A token, and its log-prob under the whole distribution."""
    highest = max(logits)
    total = highest + math.log(sum(math.exp(one - highest) for one in logits))
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if wanted["top_k"] > 0:
        order = order[: wanted["top_k"]]
    kept, sum_ = [], 0.0
    for token in order:
        kept.append(token)
        sum_ += math.exp(logits[token] - total)
        if sum_ >= wanted["top_p"]:
            break
    target = drawn.random() * sum(math.exp(logits[token] - total) for token in kept)
    for token in kept:
        target -= math.exp(logits[token] - total)
        if target <= 0:
            break
    return token, logits[token] - total


def spans(versions: list[str]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for place, version in enumerate(versions):
        if not made or made[-1]["version"] != version:
            made.append({"version": version, "start": place, "end": place})
        made[-1]["end"] = place + 1
    return made


def main() -> None:
    """`--config FILE --port PORT`, as `sglang.launch_server` reads them."""
    import yaml

    _, file, _, port = sys.argv[1:]
    settings = yaml.safe_load(Path(file).read_text())
    fake = FakeSGLang(HashModel(Path(settings["model-path"])), int(port), settings["api-key"],
                      settings.get("token-s", 0.0))  # fmt: skip
    fake.serve()


if __name__ == "__main__":
    main()
