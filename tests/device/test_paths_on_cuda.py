"""Every function that uses a device runs on one with the results of the CPU, and none is left out.

A path is a function of a device that returns numbers. It runs on the CPU and on the pretend CUDA
device, where host and device tensors refuse to mix. The functions that name a device, or make or
move tensors, are found by reading the source; the last test fails for each that no path has run.
"""

import functools
import gc
import importlib
import tempfile
from pathlib import Path

import pytest
import torch
from pretend_cuda import needs_pretend_device, pretend_cuda

from rlcli.backends._process_group import _group_of_one
from rlcli.backends._zero import import_deepspeed

from .device_functions import Function, device_functions, functions_run
from .engine_paths import ENGINES
from .interface_paths import INTERFACES
from .rank_paths import RANKS
from .runtime_paths import HOME, OF_RANKS, RUN_ON_RANKS, RUNTIME

pytestmark = needs_pretend_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

PATHS = {
    f"{kind}: {name}": path
    for kind, paths in {
        "engine": ENGINES,
        "interface": INTERFACES,
        "runtime": RUNTIME,
        "ranks": RANKS,
    }.items()
    for name, path in paths.items()
}
ROUGH = ("16 bits", "dtype of the device")
"""CUDA's autocast keeps other operations in float32 than the CPU's."""
RUN: set[Function] = set()
"""Functions that some path has run on the pretend device."""


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Loaded once here: deepspeed for the CPU, which other tests of the process may use;
    megatron for GPUs."""
    import_deepspeed(CPU)
    with pretend_cuda():
        importlib.import_module("rlcli.backends._megatron_model")
    # State that a process creates once may exist from other tests; it must be created here.
    _group_of_one.cache_clear()
    gc.collect()
    # loaded objects: deepspeed and the paths make the garbage collector scan all others
    gc.freeze()
    yield
    gc.unfreeze()


@functools.cache
def on_cuda(name):
    """The result of a path on the pretend device; each path runs once."""
    with tempfile.TemporaryDirectory() as folder:
        # each of their ranks has its own device
        if PATHS[name] in OF_RANKS or name.startswith("ranks"):
            return PATHS[name](CUDA, Path(folder))
        with pretend_cuda(), functions_run(HOME) as run:
            result = PATHS[name](CUDA, Path(folder))
    RUN.update(run)
    return result


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PATHS)
def test_a_path_has_the_same_results_as_on_the_cpu(name, tmp_path):
    rough = any(word in name for word in ROUGH)
    least = 1e-4 if name.startswith("runtime") else 1e-5  # steps of a run amplify rounding
    close = {"rtol": 5e-2, "atol": 5e-2} if rough else {"rtol": 1e-4, "atol": least}
    torch.testing.assert_close(plain(on_cuda(name)), plain(PATHS[name](CPU, tmp_path)), **close)


def plain(result):
    """Tensors, numbers, lists and dicts for comparison; text as numbers."""
    if isinstance(result, dict):
        return {str(key): plain(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [plain(one) for one in result]
    return [ord(letter) for letter in result] if isinstance(result, str) else result


# -- completeness ----------------------------------------------------------------------------------

ROOMS = ("backends", "interfaces", "rlcli/api", "rlcli/checkpoint", "rlcli/ops", "rlcli/runtime")

NOT_HERE = {
    "rlcli/api/engine.py HoldsWeights.device": "is that of engines without a device",
    "backends/_server_engine.py": "is on the host: servers have the devices",
    "backends/_server_memory.py devices_of_servers": "numbers devices for a plan, and uses none",
    "backends/_server_backend.py ServerBackend._environment": (
        "names devices to servers of its own, which no pretend device can run"
    ),
    "backends/_product_speed.py": "measures the speed of the host",
    "backends/_generation_copy.py JointProduct.pack": "packs weights in an order of the host",
    "backends/_generation_copy.py JointProduct._result": "multiplies with weights in that order",
    "backends/_server_experts.py": "is on the host",
    "backends/_training_memory.py TrainingMemory.savings": "speaks of a device, and uses none",
    "backends/_decoding_rows.py uniforms": "is for checks, which read the numbers on the host",
    "backends/_vllm_dialect.py _unsuitable": "reads what a server says of its device",
    "backends/_server_response.py": "is on the host",
    "backends/_server_weights.py": "is on the host",
    "rlcli/checkpoint/library_moves.py": "`rlcli convert` reads and writes files on the host",
    "rlcli/checkpoint/conversion_check.py": "`rlcli convert` compares models on the host",
    "rlcli/api/sample_json.py _tensor": "reads JSON, on the host; a run moves what it reads",
    "rlcli/runtime/roles.py _device_mesh": "belongs to several ranks",
    "backends/_deepspeed_memory.py": "speaks of a device, and uses none",
    "interfaces/rewards/_text_reward.py": "is the base of rewards of projects; none is built in",
    "rlcli/ops/prefix_attention.py PrefixAttention.is_padding": (
        "is for losses of routers, with which no prefix is shared"
    ),
    "rlcli/ops/evaluation.py pass_at_k": "counts answers, on the host",
    "rlcli/runtime/pool.py": "runs in processes without a device",
    "rlcli/runtime/worker_main.py _start": "begins a process that talks by NCCL",
}
"""Functions or files that no path on a single device can run, and why."""


@pytest.mark.exhaustive
@pytest.mark.timeout(600)  # when run alone, it runs every path
def test_every_function_that_uses_a_device_has_run():
    for name in PATHS:
        on_cuda(name)
    files = [file for room in ROOMS for file in sorted((HOME / room).rglob("*.py"))]
    functions = {str(one): one for one in device_functions(files, HOME)}
    left_out = {name for name, one in functions.items() if one not in RUN | RUN_ON_RANKS}
    unexplained = sorted(name for name in left_out if not {name, name.split()[0]} & NOT_HERE.keys())
    advice = "add a path that runs these on the device, or say in NOT_HERE why none can"
    assert not unexplained, "\n".join([advice, *unexplained])
    stale = [
        given
        for given in NOT_HERE
        if not any(name == given or name.split()[0] == given for name in left_out)
    ]
    assert not stale, "these need no excuse"
