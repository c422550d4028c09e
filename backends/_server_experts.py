"""The experts that a server's tokens were routed to, in base64: vLLM's answers have a NumPy file of
three dimensions, SGLang's its numbers alone, as int32.

The file's header is not given to a general parser: a server is another machine.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy
import torch

from ._routing_replay import RoutedLayers

_FILE = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<kind>\|u1|<u2|<i2|<i4)', 'fortran_order': False, "
    rb"'shape': \((?P<shape>\d{1,9}, \d{1,9}, \d{1,9})\), \} *\n",
    re.DOTALL,
)
"""Version 1.0 of the format (https://numpy.org/doc/stable/reference/generated/numpy.lib.format)."""
_WIDEST = 4
"""Bytes of a number."""


def bytes_of_experts(tokens: int, routed: RoutedLayers) -> int:
    """The most that an answer holds of them."""
    return 2 * _WIDEST * tokens * routed.layers * routed.per_token


def read_experts(encoded: Any, tokens: int, routed: RoutedLayers) -> torch.Tensor:
    """[tokens, L, k], like `RoutedLayers.no_tokens`. Layers without experts may have a row too.
    Raises ValueError for anything else."""
    if type(encoded) is not str:
        raise ValueError("with experts that are not a text in base64")
    numbers = _numbers(base64.b64decode(encoded.encode(), validate=True), tokens, routed)
    if numbers.shape[1] != len(routed.indices):
        numbers = numbers[:, list(routed.indices)]
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < routed.experts:
        raise ValueError(f"with experts that are not numbers below {routed.experts}")
    return torch.from_numpy(numbers.astype(numpy.int32)).to(routed.no_tokens.dtype)


def _numbers(content: bytes, tokens: int, routed: RoutedLayers) -> numpy.ndarray[Any, Any]:
    expected = [(tokens, count, routed.per_token) for count in (len(routed.indices), routed.layers)]
    match = _FILE.match(content)
    if match is None:
        return _plain_numbers(content, expected)
    shape = tuple(map(int, match["shape"].split(b", ")))
    if shape not in expected:
        raise ValueError(f"with experts of shape {shape} where {expected[0]} was expected")
    dtype = numpy.dtype(match["kind"].decode())
    if len(content) - match.end() != prod(shape) * dtype.itemsize:
        raise ValueError("with experts that are cut off")
    return numpy.frombuffer(content, dtype, offset=match.end()).reshape(shape)


def _plain_numbers(
    content: bytes, shapes: Sequence[tuple[int, int, int]]
) -> numpy.ndarray[Any, Any]:
    """In the first of the shapes that they fill."""
    for shape in shapes:
        if len(content) == _WIDEST * prod(shape):
            return numpy.frombuffer(content, "<i4").reshape(shape)
    message = "with experts that are neither a NumPy file of whole numbers nor int32 of shape "
    raise ValueError(f"{message}{shapes[0]}")
