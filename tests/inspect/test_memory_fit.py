"""Whether the memory plan of a recipe fits into what this machine has free."""

import json

import pytest

from rlcli.inspect import memory_fit
from rlcli.inspect.devices import Gpu
from rlcli.inspect.host_memory import HostMemory
from rlcli.inspect.memory_fit import check_memory_plan
from rlcli.launch.memory_kills import ESTIMATE, write_estimate
from rlcli.observe.run_directory import RunDirectory
from rlcli.recipe.resolve import load_recipe
from rlcli.topology.configs import architecture_of

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch):
    """Sets the free memory of the host, and of each GPU, in bytes."""

    def has(host: int, *gpus: int) -> None:
        listed = [
            Gpu(index, "GPU", total_gib=80.0, free_gib=free / GIB, driver="1")
            for index, free in enumerate(gpus)
        ]
        monkeypatch.setattr(memory_fit, "host_memory", lambda: HostMemory(host, host))
        monkeypatch.setattr(memory_fit, "visible_gpus", lambda: listed)
        monkeypatch.setattr("rlcli.inspect.devices.visible_gpus", lambda: listed)

    return has


def finding(*overrides: str):
    resolved = load_recipe("ppo_math", overrides)
    roles = [name for name, role in resolved.recipe.models.items() if role.has_weights]
    sizes = {name: architecture_of(resolved, name) for name in roles}
    return check_memory_plan(resolved.recipe, sizes)


def test_a_recipe_that_fits_is_not_warned_of(machine):
    machine(64 * GIB)
    assert finding() is None


def test_a_recipe_that_does_not_fit_gets_settings_with_which_it_does(machine):
    machine(310 * MIB)
    warning = finding()
    assert warning.level == "warn"
    assert "which has 0.3 GiB free" in warning.says
    overrides = warning.fix.removeprefix("with ").removesuffix(" it fits").split()
    assert "train.max_tokens_per_microbatch" in warning.fix  # as fast on a CPU
    assert finding(*overrides) is None


def test_the_ranks_of_a_cpu_share_its_memory(machine):
    machine(320 * MIB)
    ranks = ["cluster.device=cpu", "cluster.devices_per_node=4", "launch=local"]
    assert "which has 0.1 GiB free" in finding(*ranks).says


def test_gpus_that_the_run_does_not_use_do_not_count(machine):
    machine(64 * GIB, 40 * GIB, GIB + 310 * MIB)
    assert finding() is None
    machine(64 * GIB, GIB + 310 * MIB, 40 * GIB)
    assert "which has 0.3 GiB free" in finding().says


def test_a_run_on_other_machines_is_not_judged_by_this_one(machine):
    machine(MIB)
    assert finding("launch=slurm") is None
    assert finding("cluster.nodes=2", "launch=local") is None


@pytest.mark.parametrize(("gpus", "device"), [((), "cpu"), ((GIB,), "auto")])
def test_what_a_kill_is_explained_by_is_the_memory_of_the_device_that_was_used(
    machine, tmp_path, gpus, device
):
    machine(64 * GIB, *gpus)
    with RunDirectory.create(tmp_path / "run", "ppo_math") as run:
        write_estimate(run, load_recipe("ppo_math", ()))
        assert json.loads((run.path / ESTIMATE).read_text())["device"] == device
