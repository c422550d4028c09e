"""Chat templates, rendered as transformers renders them, in a process with limited time and memory.

A template comes with a model: it is third-party code. `_chat_renderer.py` has the sandbox and the
limits.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rlcli.api.special_tokens import as_content, tokens_of
from rlcli.errors import ModelError
from rlcli.processes import start_isolated

SAFE_JINJA = (3, 1, 6)
"""Older versions of jinja2 have known sandbox escapes, and a template is third-party code."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message's reasoning is passed; templates read the first,
and some the second."""

LIMIT_S = 1.0
"""Seconds of processor time per conversation: a hundred times what today's longest templates
need."""
PATIENCE_S = 120.0
"""Seconds within which the process must reply, on a machine that may be busy."""
MAX_TEMPLATE = 1 << 20
"""Longest template, in characters."""

TOOL_USE = "tool_use"
"""Name of the template, among several of a tokenizer, that writes tools."""

DAY = date(2024, 7, 26)
"""The date that templates write into prompts instead of today's, so that the same rows give the
same data any day."""


class TemplateError(ValueError):
    """An error that a template raises, or a limit that it exceeds."""


class TooMuch(TemplateError):
    """A limit is exceeded, which could happen with any conversation."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as rendered by a template."""

    text: str
    spans: Sequence[tuple[int, int]]
    """[start, end) in characters of each part that the template marks with `{% generation %}`;
    none without marks."""


def render_marked(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    day: date | None = None,
    **variables: Any,
) -> Rendered:
    """Render a conversation. `day`: the date that the template gets; None: today.

    Raises TemplateError. Takes a bounded time, whatever the template does.
    """
    if not messages:
        raise ValueError("a conversation needs at least one message")
    if len(template) > MAX_TEMPLATE:
        raise TooMuch(f"it has {len(template)} characters; a chat template may have {MAX_TEMPLATE}")
    variables = {
        **variables,
        "messages": [
            _with_reasoning({k: v for k, v in message.items() if v is not None})
            for message in messages
        ],
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    task = {"template": template, "day": day and day.isoformat(), "variables": variables}
    return _renderer().render(json.dumps({"limit_s": LIMIT_S, "conversation": task}, default=str))


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
    """Only the text of `render_marked`."""
    return render_marked(template, messages, **how).text


def template_of(tokenizer: Any, tools: Sequence[Any] | None = None) -> str | None:
    """The chat template of a tokenizer (transformers' or ours); of several, the one that
    transformers chooses: that for tools if there are any, else the default one. Raises ModelError
    F32 if none of them is the default."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        name = TOOL_USE if tools and TOOL_USE in template else "default"
        if name not in template:
            message = f"{name_of(tokenizer)} has chat templates, but none is the default one"
            hint = f"name one of them default: {', '.join(sorted(template))}"
            raise ModelError(message, hint=hint, code="F32")
        template = template[name]
    return template


def name_of(tokenizer: Any) -> str:
    """Where a tokenizer comes from, for messages."""
    return getattr(tokenizer, "name_or_path", "") or "the tokenizer"


def conversation(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **how: Any) -> Rendered:
    """Render a conversation with a tokenizer's template, see `render_marked`; its text is meant for
    `tokens_of`, because names of special tokens in messages are marked in it.
    Raises ModelError F32."""
    content = as_content(tokenizer, messages)
    try:
        return render_marked(
            template_of(tokenizer, how.get("tools")) or "",
            content,
            **how,
            **tokenizer.special_tokens_map,
        )
    except TemplateError as error:
        raise ModelError(
            f"the chat template of {name_of(tokenizer)} fails: {error}", code="F32"
        ) from error


def conversation_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
    """Only the text of `conversation`."""
    return conversation(tokenizer, messages, **how).text


def conversation_tokens(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], **how: Any
) -> list[int]:
    """The tokens of `conversation`; only the template writes special ones."""
    return tokens_of(tokenizer, [conversation_text(tokenizer, messages, **how)])[0]


def shared_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Items at the start of two texts, or lists of tokens, that are the same."""
    pairs = enumerate(zip(left, right, strict=False))
    shortest = min(len(left), len(right))
    return next((place for place, (a, b) in pairs if a != b), shortest)


def check_template(tokenizer: Any, source: str) -> None:
    """Try a tokenizer's template on one message. Raises ModelError F32 if it exceeds a limit; other
    errors are ignored, as they depend on the conversation."""
    named = tokenizer.chat_template
    templates = named if isinstance(named, dict) else {"default": named}
    for template in templates.values():
        try:
            if template is not None:
                render_chat(
                    template, [{"role": "user", "content": "?"}], **tokenizer.special_tokens_map
                )
        except TooMuch as error:
            raise ModelError(f"the chat template of {source} fails: {error}", code="F32") from error
        except TemplateError:
            continue


def marks_generation(template: str) -> bool:
    """Whether the template marks what an assistant wrote with `{% generation %}`."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next(
        (message[name] for name in REASONING_FIELDS if message.get(name) is not None), None
    )
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Renderer:
    """The rendering process. One that has died is replaced at the next conversation."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def render(self, task: str) -> Rendered:
        with self._turn:
            if self._process is None or self._process.poll() is not None:
                self._process = _start()
            reply = _asked(self._process, task.encode() + b"\n")
            if reply is None:
                raise TooMuch(self._cause_of_death())
        if "error" in reply:
            raise (TooMuch if reply["limit"] else TemplateError)(reply["error"])
        return Rendered(str(reply["text"]), [(start, end) for start, end in reply["spans"]])

    def close(self) -> None:
        """End the process; does nothing in a fork of the process that started it."""
        if self._process is not None and self.owner == os.getpid():
            self._process.kill()
            self._process.wait(PATIENCE_S)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None

    def _cause_of_death(self) -> str:
        assert self._process is not None
        code = self._process.poll()
        self.close()
        if code == -signal.SIGPROF or code is None:
            return f"it takes more than {LIMIT_S:g} s of processor time"
        return (
            "the process that renders it died "
            f"({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"
        )


_held: list[_Renderer] = []


def _renderer() -> _Renderer:
    """The renderer of this process: a forked process must not use its parent's pipes."""
    if not _held or _held[0].owner != os.getpid():
        _held[:] = [_Renderer()]
    return _held[0]


def _start() -> subprocess.Popen[bytes]:
    _refuse_old_jinja()
    script = Path(__file__).with_name("_chat_renderer.py")
    return start_isolated([sys.executable, "-P", str(script), str(os.getpid())])


def _asked(process: subprocess.Popen[bytes], task: bytes) -> dict[str, Any] | None:
    """The process's reply; None if the task killed it or it does not reply in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(task)
        process.stdin.flush()
    except BrokenPipeError:
        process.wait(PATIENCE_S)
        return None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(PATIENCE_S):
            return None
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        process.wait(PATIENCE_S)
        return None
    return dict(json.loads(line))


def _refuse_old_jinja() -> None:
    from importlib.metadata import version

    installed = version("jinja2")
    if tuple(int(number) for number in re.findall(r"\d+", installed)[:3]) < SAFE_JINJA:
        raise ModelError(
            f"jinja2 {installed} cannot render chat templates safely",
            hint="pip install -U jinja2",
            code="S6",
        )


def opens_reasoning(prompt: str) -> bool:
    """Whether the turn after a prompt begins inside of its reasoning: some templates write the
    `<think>` themselves."""
    return prompt.rstrip().endswith("<think>")
