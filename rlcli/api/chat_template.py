"""Chat templates, rendered as transformers renders them: the same sandbox, filters and functions, no import of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from rlcli.errors import ModelError

SAFE_JINJA = (3, 1, 6)
"""Older versions of jinja2 have known ways out of their sandbox, and a template is somebody else's code."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message's reasoning is passed; templates read the first, some the second."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    **variables: Any,
) -> str:
    """The text of a conversation. Raises jinja2's TemplateError where the template does."""
    if not messages:
        raise ValueError("a conversation needs at least one message")
    return _compiled(template).render(
        messages=[_with_reasoning({k: v for k, v in message.items() if v is not None}) for message in messages],
        tools=None,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )


def marks_generation(template: str) -> bool:
    """Whether the template marks what an assistant wrote with `{% generation %}`."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """The template in an environment where it can call nothing but what transformers offers it."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    _refuse_old_jinja()

    class Generation(Extension):
        """`{% generation %} … {% endgeneration %}` renders what it encloses."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

        def _render(self, caller: Any) -> str:
            return str(caller())

    class Namespace(jinja2.utils.Namespace):
        """A namespace without names that lead into Python's own workings."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, args = args[0], args[1:]
            names = dict(*args, **kwargs)
            for name in names:
                _refuse_private(name)
            jinja2.utils.Namespace.__init__(self, names)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": Namespace,
    }
    return environment.from_string(template)


class _Dict:
    """`dict` as a template may use it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _refuse_private(name: Any) -> None:
    from jinja2.exceptions import SecurityError

    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not set {name!r} on a namespace")


def _refuse_old_jinja() -> None:
    from importlib.metadata import version

    installed = version("jinja2")
    if tuple(int(part) for part in re.findall(r"\d+", installed)[:3]) < SAFE_JINJA:
        raise ModelError(
            f"jinja2 {installed} cannot render chat templates safely", hint="pip install -U jinja2", code="S6"
        )
