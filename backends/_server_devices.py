"""The devices of a server: its share of those of its node. No torch:
`rlcli validate` imports this."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
MULTIPLIERS = ("pp-size", "dp-size", "pipeline-parallel-size", "data-parallel-size")
"""Options of SGLang and of vLLM that multiply the devices of a server."""


def devices_of_a_server(args: Mapping[str, Any]) -> int:
    """How many devices each server that the run starts takes, from the arguments of its backend."""
    options = {
        str(name).replace("_", "-"): value for name, value in (args.get("options") or {}).items()
    }
    sizes = (args.get("tp"), *(options.get(name) for name in MULTIPLIERS))
    return math.prod(size for size in sizes if type(size) is int and size > 0)


def share(environment: Mapping[str, str], first: int, count: int) -> str | None:
    """The value of CUDA_VISIBLE_DEVICES for `count` devices from the `first` on, of those that a
    process with this environment sees; None if it sees too few."""
    seen = environment.get(VISIBLE)
    names = [str(number) for number in range(first + count)] if seen is None else seen.split(",")
    return ",".join(names[first : first + count]) if len(names) >= first + count else None
