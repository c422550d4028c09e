"""A recipe toolkit for reinforcement-learning post-training of language models."""

from typing import Any

__version__ = "0.1.0"

NOT_ON_WINDOWS = "rlcli runs on Linux, macOS or WSL, and not on Windows itself"


def __getattr__(name: str) -> Any:
    from rlcli.api.elsewhere import attributes_of

    return attributes_of(__name__)(name)
