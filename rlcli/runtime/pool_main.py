"""A process of a pool: `python -P -m rlcli.runtime.pool_main ROLE RUN_DIR INDEX`.

It runs the calls of a role for one of the role's ranks, on the CPU, within limits on CPU time and memory.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rlcli.errors import ResourceError
from rlcli.garbage import collect_as_usual, collect_rarely, leave_garbage
from rlcli.processes import keep_private
from rlcli.runtime.control import Control
from rlcli.runtime.messages import Failure, Request
from rlcli.runtime.pool import LARGEST_BATCH, packed, unpacked
from rlcli.runtime.rank_warnings import report_warnings
from rlcli.runtime.transport import ZmqWorker
from rlcli.runtime.worker_main import read_recipe
from rlcli.topology.groups import LAST_EXIT, pool_name, process_folder

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe

GIB = 2**30
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")
"""What torch's error says where Python would raise MemoryError."""


def main(role: str, run_dir: Path, index: int) -> None:
    collect_rarely()
    keep_private()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    name = f"{pool_name(role)}{index}"

    def failure(error: BaseException) -> Failure:
        traceback.print_exception(error)
        return Failure.of(error, name, "".join(traceback.format_exception(error)))

    recipe = read_recipe(run_dir)
    folder = process_folder(run_dir, "pool", pool_name(role), index)
    started: PoolWorker | BaseException
    try:
        started = PoolWorker(recipe, role, index)
    except Exception as error:
        started = error
    collect_as_usual()
    Control.wait_for(folder, recipe.launch.startup_deadline)
    link = ZmqWorker(folder, 0, most=LARGEST_BATCH)
    report_warnings(link.report)
    if isinstance(started, BaseException):
        link.fail(failure(started))
        link.close()
        sys.exit(1)
    last_exit = os.environ.get(LAST_EXIT)
    link.serve(
        started.handle, failure, last_exit=int(last_exit) if last_exit is not None else None, cpu_s=started.cpu_s
    )


class PoolWorker:
    """Runs the calls of one role."""

    def __init__(self, recipe: Recipe, role: str, index: int):
        import torch

        from rlcli.recipe.graph import eval_graph, train_graph
        from rlcli.runtime.interfaces import Interfaces
        from rlcli.runtime.roles import describe_role
        from rlcli.topology import plan_topology

        self._recipe = recipe
        self._rank = plan_topology(recipe).placement(role).ranks[index]
        graphs = train_graph(recipe), eval_graph(recipe)
        self._calls = {mfc.name: mfc for graph in graphs for mfc in graph if mfc.model_name == role}
        self._interfaces = Interfaces(*graphs)
        model, backend = describe_role(recipe, role, torch.device("cpu"))
        self._model = backend.initialize(model, None)
        self.cpu_s: float = backend.cpu_s  # type: ignore[attr-defined]
        self._memory_gib: float = backend.memory_gib  # type: ignore[attr-defined]
        self._limit_memory()

    def _limit_memory(self) -> None:
        """Limit this process's memory. Raises ResourceError if even an idle process takes more."""
        limit, taken = int(self._memory_gib * GIB), psutil.Process().memory_info().vms
        if limit < taken:
            message = f"a process of a pool takes {taken / GIB:.3g} GiB of address space before it has done anything"
            raise ResourceError(message, hint=f"{self._memory_key} is {self._memory_gib:g}", code="F51")
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))

    @property
    def _memory_key(self) -> str:
        return f"models.{self._model.name}.backend.args.memory_gib"

    def handle(self, request: Request) -> dict[str, Any]:
        """A call that uses more CPU time than allowed is ended by the kernel, together with this process."""
        from rlcli.runtime.component_faults import attribute_user_errors

        signal.setitimer(signal.ITIMER_PROF, self.cpu_s)
        try:
            with attribute_user_errors():
                return self._within_memory(**request.args)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _within_memory(self, call: str, **args: Any) -> dict[str, Any]:
        try:
            return self._run(call, **args)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not any(words in str(error) for words in OUT_OF_MEMORY):
                raise
            message = f"call {call} needs more than {self._memory_gib:g} GiB of memory"
            raise ResourceError(message, hint=f"{self._memory_key} is the limit", code="F51") from error

    def _run(self, call: str, step: int, batch: dict[str, Any], tensors: bytes) -> dict[str, Any]:
        from rlcli.api.key_meaning import DROPPED
        from rlcli.api.model import call_interface
        from rlcli.runtime.data_order import place_of_sample
        from rlcli.runtime.interfaces import seed_global_streams
        from rlcli.runtime.origin import origin_of_call
        from rlcli.runtime.output_checks import checked_output, read_counts, read_drops

        mfc, data = self._calls[call], unpacked({"batch": batch, "tensors": tensors})
        interface = self._interfaces.of(mfc)
        seed_global_streams(self._recipe.seed, call, step, self._rank)
        made = call_interface(interface, mfc.interface_type.value, self._model, data, mfc.mb_spec)
        origin = origin_of_call(
            self._recipe, mfc, interface, has_model=False, describe=lambda id_: place_of_sample(self._recipe, str(id_))
        )
        promised = {key: mfc.output_key_remap.get(key, key) for key in mfc.output_keys}
        kept = checked_output(made, data, promised, origin, self._model.device)
        own = {name: values for name, values in kept.metadata.items() if name not in data.metadata}
        reported = {*read_counts(own, origin), *([DROPPED] if read_drops(kept, mfc.drops, origin) else [])}
        kept.metadata = {name: list(values) for name, values in own.items() if name in reported}
        return packed(kept)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    leave_garbage()
