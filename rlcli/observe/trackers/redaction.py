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
        """A text without the secrets of the environment and those in URLs."""
        if self._secrets is not None:
            text = self._secrets.sub(REDACTED, text)
        return IN_URL.sub(REDACTED, text)

    def value(self, value: Any, key: str = "") -> Any:
        """A value of plain data, at any depth, without secrets."""
        if isinstance(value, dict):
            return {
                self.text(str(name)): self.value(inner, str(name)) for name, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(inner, key) for inner in value]
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
