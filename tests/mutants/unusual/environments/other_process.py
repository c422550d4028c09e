"""Asks another process, one for each episode."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.environment import Environment, Observation, register_environment


@dataclass(kw_only=True)
class OtherProcess(Environment):
    """An echo."""

    REPRODUCIBLE: ClassVar[bool] = True

    _process: Any = field(init=False, repr=False, default=None)

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        self._process = subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return None

    def step(self, action: str) -> Observation:
        self._process.stdin.write(json.dumps(action[:1000]) + "\n")
        self._process.stdin.flush()
        return Observation(json.loads(self._process.stdout.readline()), done=not action)

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None


register_environment("other_process", OtherProcess)
