"""Everything that knows a device runs on one and gives the numbers of the CPU; and nothing that knows one is left out.

A path is a function of a device that returns numbers. It runs on the CPU and on the pretend CUDA device, where host
and device tensors refuse to mix. The functions that name a device, or make or move tensors, are found by reading the
source; the last test fails for each that no path has run.
"""

import functools
import gc
import importlib
import tempfile
from pathlib import Path

import pytest
import torch

from rlcli.backends._process_group import _group_of_one
from rlcli.backends._zero import import_deepspeed
from rlcli.testing.pretend_cuda import pretend_cuda
from rlcli.testing.pretend_cuda.paths import Function, device_functions, functions_run

from .engine_paths import ENGINES
from .interface_paths import INTERFACES
from .rank_paths import RANKS
from .runtime_paths import HOME, OF_RANKS, RUN_ON_RANKS, RUNTIME

if torch.version.cuda or torch.version.hip:
    pytest.skip("this torch has GPUs of its own", allow_module_level=True)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

PATHS = {
    f"{kind}: {name}": path
    for kind, paths in {"engine": ENGINES, "interface": INTERFACES, "runtime": RUNTIME, "ranks": RANKS}.items()
    for name, path in paths.items()
}
ROUGH = ("16 bits", "dtype of the device")
"""CUDA's autocast keeps other operations in float32 than the CPU's."""
RUN: set[Function] = set()
"""Functions that some path has run on the pretend device."""


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Loaded once, here: deepspeed as for the CPU, which other tests of the process may use; megatron as for GPUs."""
    import_deepspeed(CPU)
    with pretend_cuda():
        model = importlib.import_module("rlcli.backends._megatron_model")
    # What a process makes once may be there from other tests; it is to be made here.
    model.get_cuda_rng_tracker().reset()
    _group_of_one.cache_clear()
    gc.collect()
    gc.freeze()  # what is loaded: deepspeed and the paths have the garbage collector look through all objects
    yield
    gc.unfreeze()


@functools.cache
def on_cuda(name):
    """What a path returns on the pretend device; it runs once, whoever asks first."""
    with tempfile.TemporaryDirectory() as folder:
        if PATHS[name] in OF_RANKS or name.startswith("ranks"):  # they have a device of their own each
            return PATHS[name](CUDA, Path(folder))
        with pretend_cuda(), functions_run(HOME) as run:
            made = PATHS[name](CUDA, Path(folder))
    RUN.update(run)
    return made


@pytest.mark.parametrize("name", PATHS)
def test_a_path_gives_the_numbers_of_the_cpu(name, tmp_path):
    rough = any(word in name for word in ROUGH)
    least = 1e-4 if name.startswith("runtime") else 1e-5  # steps of a run are differences of what rounding has changed
    close = {"rtol": 5e-2, "atol": 5e-2} if rough else {"rtol": 1e-4, "atol": least}
    torch.testing.assert_close(plain(on_cuda(name)), plain(PATHS[name](CPU, tmp_path)), **close)


def plain(found):
    """Tensors, numbers, lists and dicts; text and truth as they are compared."""
    if isinstance(found, dict):
        return {str(key): plain(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [plain(one) for one in found]
    return [ord(letter) for letter in found] if isinstance(found, str) else found


# -- and none is left out ------------------------------------------------------------------------------------------

ROOMS = ("backends", "interfaces", "rlcli/api", "rlcli/checkpoint", "rlcli/ops", "rlcli/runtime")

NOT_HERE = {
    "rlcli/api/engine.py HoldsWeights.device": "is that of engines without a device",
    "backends/_sglang_engine.py": "is on the host: servers have the devices",
    "backends/_sglang_memory.py devices_of_servers": "numbers devices for a plan, and uses none",
    "backends/sglang.py SGLang._environment": "names devices to servers of its own, which no pretend device can run",
    "backends/_sglang_response.py": "is on the host",
    "backends/_sglang_weights.py": "is on the host",
    "rlcli/checkpoint/conversion_check.py": "`rlcli convert` compares models on the host",
    "rlcli/api/sample_json.py _tensor": "reads JSON, on the host; a run moves what it reads",
    "rlcli/runtime/roles.py _device_mesh": "belongs to several ranks",
    "backends/_deepspeed_memory.py": "speaks of a device, and uses none",
    "rlcli/ops/evaluation.py pass_at_k": "counts answers, on the host",
    "rlcli/runtime/harness.py": "needs lm-eval, an extra",
    "rlcli/runtime/pool.py": "runs in processes without a device",
    "rlcli/runtime/worker_main.py _start": "begins a process that talks by NCCL",
}
"""Functions, or files, that no path on one device can run, and why."""


@pytest.mark.timeout(600)  # run by itself it runs every path
def test_every_function_that_knows_a_device_has_run():
    for name in PATHS:
        on_cuda(name)
    files = [file for room in ROOMS for file in sorted((HOME / room).rglob("*.py"))]
    known = {str(one): one for one in device_functions(files, HOME)}
    left_out = {name for name, one in known.items() if one not in RUN | RUN_ON_RANKS}
    unexplained = sorted(name for name in left_out if not {name, name.split()[0]} & NOT_HERE.keys())
    advice = "add a path that runs these on the device, or say in NOT_HERE why none can"
    assert not unexplained, "\n".join([advice, *unexplained])
    stale = [given for given in NOT_HERE if not any(name == given or name.split()[0] == given for name in left_out)]
    assert not stale, "these need no excuse"
