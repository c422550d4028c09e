"""Python: a tool that runs the programs which a policy writes, where they can do no harm."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import ClassVar, Literal

from rlcli.api.environment import Environment, Examples, register_environment
from rlcli.api.limits import Limits, check_arguments
from rlcli.errors import ResourceError

from ..rewards._code_worker import run_program
from ..rewards._confinement import Limits as ProgramLimits
from ..rewards._sandbox import NoSandbox

_MIB = 1 << 20
_SURROUNDINGS = """\
import os, resource
for name in ("CPU", "AS", "FSIZE", "NPROC"):
    print(name, resource.getrlimit(getattr(resource, f"RLIMIT_{name}")))
print("alone" if os.getpid() < 9 else "with others")
"""
"""A program that shows where it runs."""


@dataclass(kw_only=True)
class Python(Environment):
    """Runs programs as `code_reward` does: isolated by Linux namespaces, with Python's standard
    library and an empty folder; no network, none of the machine's other files, no other processes.
    Each program starts anew. Where namespaces are unavailable the run is refused.

    It does not score: a call of the graph compares the answer.
    """

    EXAMPLES: ClassVar[Examples] = (
        {
            "turns": [
                {"run": {"program": "print(6 * 7)"}},
                {"run": {"program": "kept = 1"}},
                {"run": {"program": "import sys\nsys.exit('no such file')"}},
                "42",
            ],
            "observed": ["42", "(it printed nothing, and ended with status 0)", "no such file"],
        },
        {"turns": [{"run": {"program": _SURROUNDINGS}}]},
    )
    NO_EFFECT_ON_NUMBERS: ClassVar[tuple[str, ...]] = ("wall_s",)
    LIMITS: ClassVar[Limits] = {
        "cpu_s": {"ge": 1, "le": 1_000_000},
        "wall_s": {"gt": 0, "le": 1_000_000},
        "memory_mib": {"ge": 32},
        "file_mib": {"ge": 1},
        "processes": {"ge": 1},
    }

    isolation: Literal["namespaces", "limits"] = "namespaces"
    """limits: programs run with the limits below and no isolation. They can then read your files,
    talk to the machine's services and kill your processes."""

    cpu_s: int = 5
    """Seconds of processor time per process of a program."""

    wall_s: float = 10.0
    """Wall-clock seconds for a program."""

    memory_mib: int = 512
    """Memory of a program: of all its processes together, and the address space of each."""

    file_mib: int = 16
    """Largest file that a program may write; twice as much in total."""

    processes: int = 16
    """Maximum number of processes and threads of a program."""

    def __post_init__(self) -> None:
        check_arguments(self)
        _, room = resource.getrlimit(resource.RLIMIT_AS)
        if resource.RLIM_INFINITY != room < self.memory_mib * _MIB:
            raise ValueError(
                f"memory_mib is {self.memory_mib}, but the process has only {room // _MIB} MiB: "
                "raise memory_gib of the interface episodes"
            )

    def run(self, program: str) -> str:
        """Run a Python program, and read what it prints."""
        try:
            ended = run_program(
                program, "", self._limits(), self.isolation == "namespaces", with_errors=True
            )
        except NoSandbox as problem:
            hint = (
                "allow unprivileged user namespaces, or set environment_args.isolation to limits, "
                "which lets programs read your files"
            )
            raise ResourceError(
                f"programs cannot be isolated here: {problem}", hint=hint, code="F53"
            ) from problem
        printed = ended.output.decode(errors="replace").removesuffix("\n")
        if ended.why:  # first: the end of what it printed may be cut off
            return f"error: the program {ended.why}\n{printed}".rstrip("\n")
        return printed or f"(it printed nothing, and ended with status {ended.status})"

    def _limits(self) -> ProgramLimits:
        return ProgramLimits(
            cpu_s=self.cpu_s,
            wall_s=self.wall_s,
            memory_bytes=self.memory_mib * _MIB,
            file_bytes=self.file_mib * _MIB,
            output_bytes=_MIB,
            processes=self.processes,
        )


register_environment("python", Python)
