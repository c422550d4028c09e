"""The processes of a run as forks of one that has everything loaded:
a start takes one second instead of ten.

`with warm_processes():` replaces `subprocess.Popen`. Whatever then starts `python -m rlcli…`, or
`python -c "import rlcli…"`, gets a fork that does what a new process would: the same module or
code, arguments, environment, descriptors and session. So supervisor, master, agents, torchrun,
ranks, pools and the agents of servers are the real ones, and can be killed one by one.
"""

import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from unittest import mock

from rlcli import failpoints
from rlcli.launch import lifeline
from rlcli.testing.ranks import leave_groups_of_parent

STANDARD = (0, 1, 2)
LOADED_FIRST = (
    "torch.distributed.run", "rlcli.backends.sglang", "rlcli.cli.resume", "rlcli.launch.node",
    "rlcli.launch.resume", "rlcli.launch.server", "rlcli.launch.supervisor",
    "rlcli.runtime.pool",
)  # fmt: skip
"""Besides what `load_everything` loads."""


@contextlib.contextmanager
def warm_processes() -> Iterator[None]:
    """Processes of rlcli that this process and its forks start are forks."""
    for module in LOADED_FIRST:
        importlib.import_module(module)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    with (
        mock.patch.object(subprocess, "Popen", ForkedPopen),
        mock.patch.object(subprocess_handler, "Popen", ForkedPopen),
    ):
        yield


class ForkedPopen(subprocess.Popen):
    """A Popen whose child is a fork."""

    def _execute_child(self, args, *rest):  # type: ignore[no-untyped-def]
        if module_of(args) is None and code_of(args) is None:
            return super()._execute_child(args, *rest)
        (
            _,
            preexec_fn,
            close_fds,
            pass_fds,
            cwd,
            env,
            _,
            _,
            _,
            p2cread,
            _,
            _,
            c2pwrite,
            _,
            errwrite,
            *others,
        ) = rest
        start_new_session, process_group = others[-2:]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(*rest[9:15])
            return None
        code = 1
        try:
            if start_new_session:
                os.setsid()
            elif process_group >= 0:
                os.setpgid(0, process_group)
            _inherit((p2cread, c2pwrite, errwrite), pass_fds)
            os.chdir(cwd or ".")
            if env is not None:
                _set_environment(env)
            if preexec_fn is not None:
                preexec_fn()
            _close_descriptors(inherits=not close_fds, passed=pass_fds)
            code = _become(args)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def module_of(command: object) -> str | None:
    """The module of rlcli that a command runs; None if it runs anything else."""
    if not isinstance(command, list | tuple) or command[0] != sys.executable or "-m" not in command:
        return None
    module = str(command[list(command).index("-m") + 1])
    return module if module.split(".")[0] == "rlcli" else None


def code_of(command: object) -> str | None:
    """The program that uses rlcli and is written in a command itself; None if it is another."""
    if not isinstance(command, list | tuple) or tuple(command[:2]) != (sys.executable, "-c"):
        return None
    code = str(command[2])
    return code if code.lstrip().startswith("import rlcli\n") else None


def _inherit(streams: tuple[int, int, int], passed: tuple[int, ...]) -> None:
    """Have these descriptors as stdin, stdout and stderr, and let what we start have those that
    were passed to us, as it would have those of a new process."""
    for number, descriptor in zip(STANDARD, streams, strict=True):
        if descriptor not in (-1, number):
            os.dup2(descriptor, number)
    for descriptor in (*STANDARD, *passed):
        os.set_inheritable(descriptor, True)


def _set_environment(environment: dict[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def _close_descriptors(inherits: bool, passed: tuple[int, ...]) -> None:
    """Close descriptors that a new program would not have, including the parent's lock."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if number not in (*STANDARD, *passed) and not (inherits and os.get_inheritable(number)):
                os.close(number)


def _become(command: list[str]) -> int:
    """Run the module or code as a new process would; returns the exit code."""
    gc.freeze()  # objects of the parent must not be finalised here
    faulthandler.disable()
    _handle_signals_as_usual()
    leave_groups_of_parent()
    # those of pytest write to descriptors that were closed, and may be sockets now
    logging.getLogger().handlers.clear()
    failpoints._faults.cache_clear()  # passages are counted per process
    lifeline._line = lifeline._process = lifeline.supervisor = None
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.orig_argv = [*command]
    code = 0
    try:
        _run(command)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _handle_signals_as_usual() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(command: list[str]) -> None:
    module, code = module_of(command), code_of(command)
    if module is not None:
        sys.modules.pop(module, None)  # it is about to be run as __main__
        sys.argv = ["-m", *command[command.index("-m") + 2 :]]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    if code is not None:
        sys.argv = ["-c", *command[3:]]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
