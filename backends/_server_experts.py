"""The experts that a server's tokens were routed to: a NumPy file of three dimensions, in base64.

Its header is not given to a general parser: a server is another machine.
"""

from __future__ import annotations

import base64
import re
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
    match = _FILE.match(content)
    if match is None:
        raise ValueError("with experts that are not whole numbers of three dimensions")
    shape = tuple(map(int, match["shape"].split(b", ")))
    expected = [(tokens, count, routed.per_token) for count in (len(routed.indices), routed.layers)]
    if shape not in expected:
        raise ValueError(f"with experts of shape {shape} where {expected[0]} was expected")
    dtype = numpy.dtype(match["kind"].decode())
    if len(content) - match.end() != prod(shape) * dtype.itemsize:
        raise ValueError("with experts that are cut off")
    return numpy.frombuffer(content, dtype, offset=match.end()).reshape(shape)
