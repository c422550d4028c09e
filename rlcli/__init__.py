"""A recipe toolkit for reinforcement-learning post-training of language models."""

__version__ = "0.1.0"

NOT_ON_WINDOWS = "rlcli runs on Linux, macOS or WSL, and not on Windows itself"
