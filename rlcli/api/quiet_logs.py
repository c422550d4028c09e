"""Loggers that are quiet for a while, because what they would warn of is reported in another way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Only errors of this logger are seen."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
