"""The command in forks of a process that has torch and the rest loaded: a short run takes one
second instead of ten.

`WarmCommand` asks; `python warm_command.py` is forked, with a line of JSON on its stdin for each
command, and two on its stdout: the pid, later the exit code. A fork does its work itself, without a
supervisor above it.
"""

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

HOME = str(Path(__file__).resolve().parents[2])
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONPATH": HOME,
    "COLUMNS": "80",
}


def load_everything() -> None:
    """Load libraries once here rather than in every fork."""
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import rlcli.backends.fsdp
    import rlcli.backends.inference
    import rlcli.cli.train
    import rlcli.interfaces.ppo_actor
    import rlcli.interfaces.ppo_critic
    import rlcli.launch.local
    import rlcli.runtime.master
    import rlcli.runtime.worker  # noqa: F401

    torch.set_num_threads(1)
    get_checkpoint_conversion_mapping("llama")  # compiles a thousand expressions


def start(
    arguments: list[str],
    out: str,
    err: str,
    folder: str = ".",
    prepare: Callable[[int], object] = lambda ranks: None,
    seconds: float | None = None,
) -> int:
    """`rlcli <arguments>` in a separate process, the leader of a group; returns its pid. Its ranks
    are forks too, and call `prepare` first (see `forked_ranks`). After `seconds` it writes the
    stacks of its threads to `err` and ends with exit code 1."""
    from forked_ranks import fork, forked_ranks, redirect

    from rlcli.cli.main import main as command

    def work() -> None:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        redirect(1, out)
        redirect(2, err)
        if seconds:
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)
        with forked_ranks(prepare):
            command(arguments)

    return fork(work)


def run_here(
    *arguments: str, cwd: Path, prepare: Callable[[int], object] = lambda ranks: None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in a fork of this process, which has libraries loaded."""
    with tempfile.TemporaryDirectory() as home:
        out, err = Path(home, "out"), Path(home, "err")
        code = finish(start([*arguments], str(out), str(err), str(cwd), prepare))
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())


def finish(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class WarmCommand:
    """Runs one command after the other. It is a process and is to be closed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )

    def run(
        self, arguments: list[str], folder: Path, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Raises TimeoutExpired after `timeout` seconds;
        all processes of the command are killed then."""
        with tempfile.TemporaryDirectory() as home:
            out, err = Path(home, "out"), Path(home, "err")
            self._say(
                {"arguments": arguments, "out": str(out), "err": str(err), "folder": str(folder)}
            )
            pid, late = self._hear()["pid"], threading.Event()
            timer = threading.Timer(timeout, lambda: (late.set(), _kill_group(pid)))
            timer.start()
            code = self._hear()["code"]
            timer.cancel()
            if late.is_set():
                raise subprocess.TimeoutExpired(
                    arguments, timeout, out.read_bytes(), err.read_bytes()
                )
            return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _say(self, request: dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, int]:
        assert self._process.stdout is not None
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def main() -> None:
    load_everything()
    for line in sys.stdin:
        pid = start(**json.loads(line))
        print(json.dumps({"pid": pid}), flush=True)
        print(json.dumps({"code": finish(pid)}), flush=True)


if __name__ == "__main__":
    main()
