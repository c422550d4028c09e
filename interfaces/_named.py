"""A function chosen by a setting."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def named(
    functions: Mapping[Any, Callable[..., Any]], name: str, settings: object
) -> Callable[..., Any]:
    """The function of that name, with its keyword-only parameters bound to the settings of the same
    names."""
    function = functions[name]
    parameters = inspect.signature(function).parameters.values()
    bound = {p.name: getattr(settings, p.name) for p in parameters if p.kind is p.KEYWORD_ONLY}
    return lambda *inputs: function(*inputs, **bound)
