"""Removes secrets from what leaves the run's folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlcli.recipe.parsing.interpolation import is_secret_name

REDACTED = "<redacted>"
SHORTEST = 8
"""Characters: shorter values of variables appear in ordinary texts."""
NOT_SECRET = re.compile(r"[-+\d.,\s\[\]]*|true|false|null")
"""Values of settings such as `max_new_tokens`, whose names are like those of secrets."""
IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
"""User and password of a URL."""
ASSIGNED = re.compile(
    r"""(?P<name>(?<![\w$])[A-Z][A-Z0-9_]{1,80}= | \bexport\s+\w{1,80}= | (?<=[?&])[\w.-]{1,80}=
    | --[A-Za-z][\w-]{0,80}(?:=|[ ]+))
    (?P<value>"[^"]*"|'[^']*'|[^\s"'&;]+)""",
    re.VERBOSE,
)
"""A variable in a line of a shell, an option of a command, or a part of a URL's query, with its
value."""
BEARER = re.compile(r"(?<=\bBearer )[\w.~+/=-]{16,}")
"""The token in a header of HTTP."""


def bare_address(url: str) -> str:
    """A URL without user, password and query, which may hold secrets; any other text as it is."""
    return IN_URL.sub(REDACTED, url).partition("?")[0]


class Redactor:
    """Replaces the values of secret variables of the environment, and whatever a key names as a
    secret."""

    def __init__(self, environment: Mapping[str, str]):
        secrets = {
            value
            for name, value in environment.items()
            if is_secret_name(name) and len(value) >= SHORTEST
        }
        longest_first = sorted(secrets, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, longest_first))) if secrets else None

    def text(self, text: str) -> str:
        """A text without the secrets of the environment, those in URLs and headers, and those that
        it gives to variables and options."""
        if self._secrets is not None:
            text = self._secrets.sub(REDACTED, text)
        text = BEARER.sub(REDACTED, IN_URL.sub(REDACTED, text))
        return ASSIGNED.sub(_without_value, text)

    def value(self, value: Any, key: str = "") -> Any:
        """A value of plain data, at any depth, without secrets."""
        if isinstance(value, dict):
            return {
                self.text(str(name)): self.value(inner, str(name)) for name, inner in value.items()
            }
        if isinstance(value, list | tuple):
            keys = [key, *(_as_option(word) or key for word in value)]
            return [self.value(inner, named) for inner, named in zip(value, keys, strict=False)]
        if isinstance(value, str):
            return REDACTED if value and is_secret_name(key) else self.text(value)
        return value

    def word(self, word: str) -> str:
        """A word of a command line: `KEY=VALUE` without a secret value."""
        key, equals, value = word.partition("=")
        is_secret = equals and is_secret_name(key.rpartition(".")[2])
        if is_secret and not NOT_SECRET.fullmatch(value):
            return f"{key}={REDACTED}"
        return self.text(word)


def _without_value(match: re.Match[str]) -> str:
    """What gives a value to a name, without the value of a secret."""
    name, value = match["name"], match["value"]
    is_secret = is_secret_name(name.strip("-= ")) and not NOT_SECRET.fullmatch(value)
    return f"{name}{REDACTED}" if is_secret else match[0]


def _as_option(word: Any) -> str:
    """A word of a command, if it is an option whose value is the next word; else empty."""
    return word if isinstance(word, str) and re.fullmatch(r"--[A-Za-z][\w-]*", word) else ""
