"""Temporarily silencing loggers whose warnings are reported in another way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Show only errors from this logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
