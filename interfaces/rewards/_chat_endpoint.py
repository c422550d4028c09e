"""Chat completions from a server that speaks OpenAI's protocol,
each within a wall-clock deadline."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rlcli.api.http_request import (
    HttpAnswer,
    HttpRequest,
    ServerGone,
    ServerLate,
    ServerUntrusted,
)
from rlcli.api.network import demand_private_way
from rlcli.api.peer_json import Size, parsed

LARGEST = Size(4 << 20, 200_000)
"""Largest reply."""
LONGEST_PAUSE_S = 30.0
REFUSED = {400, 413, 422}
"""Status codes for a question that is too long, or that the server does not answer."""
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
"""Status codes worth retrying."""


class EndpointError(Exception):
    """No usable reply was received."""

    def __init__(
        self, message: str, *, again: bool = True, pause_s: float = 0.0, of_question: bool = False
    ):
        super().__init__(message)
        self.of_question = of_question
        """Whether the server works, and only has no usable reply to this question."""
        self.again = again
        """Whether a retry may help."""
        self.pause_s = pause_s
        """How long the server asks to wait before a retry."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for a reply, and how often to try."""

    tries: int
    try_s: float
    """Seconds per try."""
    deadline_s: float
    """Seconds for all tries together."""
    pause_s: float
    """Wait before the second try; doubles before each further one."""


class ChatEndpoint:
    """A chat server. It receives `key` and nothing else about this machine;
    redirects are not followed."""

    def __init__(self, url: str, key: str | None):
        """Raises ValueError for an invalid URL, or one that would send the key in plain text to
        another machine."""
        parts = urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.username
            or parts.port == 0
        ):
            raise ValueError(f"url is {url!r}; it must be like http://localhost:8000/v1")
        if key and not (key.isascii() and key.isprintable()):
            raise ValueError("the key has characters that no key has, such as the end of a line")
        if key:
            demand_private_way(url, "key")
        path = f"{parts.path.rstrip('/')}/chat/completions"
        self._url = parts._replace(path=path, fragment="").geturl()
        self._key = key

    def ask(
        self,
        body: dict[str, Any],
        read: Callable[[str], float],
        patience: Patience,
        stop: threading.Event,
    ) -> tuple[float, str]:
        """Return `read(reply)` and the reply. `read` raises ValueError for a reply that it does not
        accept.

        Raises EndpointError after the last try, at the deadline, or once `stop` is set.
        """
        end, pause, last = (
            time.monotonic() + patience.deadline_s,
            patience.pause_s,
            EndpointError("it was not queried"),
        )
        for number in range(patience.tries):
            if number:
                wait = min(max(pause, last.pause_s), LONGEST_PAUSE_S)
                pause *= 2
                if time.monotonic() + wait >= end or stop.wait(wait):
                    break
            try:
                reply = self._complete(body, min(patience.try_s, end - time.monotonic()))
                return read(reply), reply
            except ValueError as problem:
                last = EndpointError(str(problem), of_question=True)
            except EndpointError as problem:
                last = problem
                if not problem.again:
                    break
        raise last

    def _complete(self, body: dict[str, Any], seconds: float) -> str:
        request = HttpRequest(self._url, max(seconds, 0.001), body, self._key)
        try:
            answer = request.answer(LARGEST.bytes)
        except ServerUntrusted as problem:
            raise EndpointError(str(problem), again=False) from None
        except (ServerGone, ServerLate) as problem:
            raise EndpointError(str(problem)) from None
        if answer.status != 200:
            raise self._of_status(answer)
        return self._text(answer.content)

    def _of_status(self, answer: HttpAnswer) -> EndpointError:
        excerpt = self._redacted(answer.content[:300].decode(errors="replace"))
        return EndpointError(
            f"status {answer.status}: {excerpt}",
            again=answer.status in AGAIN,
            pause_s=_seconds(answer.retry_after),
            of_question=answer.status in REFUSED,
        )

    def _text(self, content: bytes) -> str:
        if len(content) > LARGEST.bytes:
            raise EndpointError(
                f"its reply has more than {LARGEST.bytes >> 20} MiB", of_question=True
            )
        try:
            text = parsed(content, LARGEST)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError):
            excerpt = self._redacted(content[:100].decode(errors="replace"))
            raise EndpointError(f"its reply is not a chat completion: {excerpt!r}") from None
        if not isinstance(text, str):
            raise EndpointError("its reply has no text", of_question=True)
        return text

    def _redacted(self, text: str) -> str:
        return text.replace(self._key, "<redacted>") if self._key else text


def _seconds(text: str | None) -> float:
    """Seconds of a Retry-After header; 0 for a date or an invalid value."""
    try:
        seconds = float(text or 0)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
