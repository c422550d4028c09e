"""Paths of engines on several ranks: each has its own pretend device,
and they communicate over gloo."""

from torch.distributed.device_mesh import init_device_mesh

from rlcli.checkpoint.state import copy_to_host
from rlcli.runtime.roles import MESH_ORDER
from rlcli.testing.ranks import run_on_ranks

from .device_functions import Function, functions_run
from .engine_paths import responses, role, train, weights
from .runtime_paths import HOME, RUN_ON_RANKS, on


def on_two_ranks(backend, dtype="float32", context_parallel=None, **degrees):
    """Two ranks that share a model train like a single rank on the CPU. (Both have the same batch,
    so losses count twice and are divided by twice the weight.)"""

    def path(device, folder):
        if device.type == "cpu":
            engine = role(device, dtype=dtype).module
            return train(engine)[-1]["loss"], answers_of(engine), sums(weights(engine).items())
        answers = run_on_ranks(2, lambda rank: part_of(device, rank))
        RUN_ON_RANKS.update(Function(*one) for answer in answers for one in answer["run"])
        return answers[0]["numbers"]

    def part_of(device, rank):
        with on(device), functions_run(HOME) as run:
            args = {"context_parallel": context_parallel} if context_parallel else {}
            mesh = mesh_of(device, degrees)
            engine = role(device, backend=backend, mesh=mesh, dtype=dtype, **args).module
            numbers = [
                train(engine)[-1]["loss"],
                answers_of(engine),
                sums(engine.whole_parameters()),
            ]
            copy_to_host(engine.state(), leads=rank == 0)
        return {"numbers": numbers, "run": [[one.file, one.name] for one in run]}

    def answers_of(engine):
        """None in 16 bits, where rounding may choose another token."""
        is_compared = backend == "fsdp" and dtype == "float32"
        return responses(engine, greedy=True)[0] if is_compared else []

    return path


def mesh_of(device, degrees):
    """A mesh as in a run, which names the kind of its devices."""
    return init_device_mesh(
        device.type, tuple(degrees.get(name, 1) for name in MESH_ORDER), mesh_dim_names=MESH_ORDER
    )


def sums(parameters):
    return {name: parameter.detach().double().abs().sum().item() for name, parameter in parameters}


RANKS = {
    "fsdp, sharded": on_two_ranks("fsdp", dp=2),
    "fsdp, tensor-parallel": on_two_ranks("fsdp", tp=2),
    "fsdp, Ulysses": on_two_ranks("fsdp", context_parallel="ulysses", cp=2),
    "fsdp, ring": on_two_ranks("fsdp", context_parallel="ring", cp=2),
    "fsdp, ring, 16 bits": on_two_ranks("fsdp", "bfloat16", "ring", cp=2),
    "megatron, stages": on_two_ranks("megatron", pp=2),
}
