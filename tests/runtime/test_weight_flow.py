"""Weights between roles on different ranks, from any layout to any other."""

import queue
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pretend_cuda import needs_pretend_device, pretend_cuda
from torch.distributed.device_mesh import DeviceMesh

from rlcli.api.config import ModelVersion
from rlcli.errors import WorkerError
from rlcli.messaging.messages import WRITTEN, Request
from rlcli.recipe.mesh import Mesh
from rlcli.recipe.resolve import load_recipe
from rlcli.runtime import weight_flow, weight_wire
from rlcli.runtime.roles import MESH_ORDER
from rlcli.runtime.weight_flow import WeightChannel, WeightTransfer
from rlcli.runtime.weight_wire import DeltaWire, WholeWire
from rlcli.runtime.worker import ModelWorker
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import SETTINGS
from rlcli.testing.backend.objectives import train
from rlcli.testing.ranks import RankError, run_on_ranks
from rlcli.topology import RolePlacement, plan_topology

CPU = torch.device("cpu")
LAYOUTS = {
    "actor": ("fsdp", {}, (0, 1), {"dp": 2}),
    "sharded": ("fsdp", {}, (2, 3), {"tp": 2}),
    "staged": ("megatron", {}, (0, 3), {"pp": 2}),
    "divided": ("deepspeed", {"zero_stage": 3}, (1, 2), {"dp": 2}),
    "rollout": ("inference", {}, (3,), {"dp": 1}),
}  # fmt: skip


def placement(role):
    _, _, ranks, mesh = LAYOUTS[role]
    return RolePlacement(role, ranks, Mesh(**mesh))


def engine(role, rank, dtype="float32"):
    """Of random weights that differ from role to role. All ranks make all meshes."""
    backend, settings, ranks, degrees = LAYOUTS[role]
    shape = [degrees.get(name, 1) for name in MESH_ORDER]
    mesh = (
        DeviceMesh("cpu", torch.tensor(ranks).view(shape), mesh_dim_names=MESH_ORDER)
        if len(ranks) > 1
        else None
    )
    if rank not in ranks:
        return None

    class Checks(BackendContract):
        name = backend
        args = settings
        device = "cuda:0" if backend == "megatron" else "cpu"

    wanted = {} if backend == "inference" else SETTINGS
    return Checks().engine("llama", mesh=mesh, seed=len(role), dtype=dtype, **wanted)


def fingerprint(engine):
    """Bits of all weights, by name."""
    whole = ((name, tensor.cpu()) for name, tensor in engine.whole_parameters())
    return {name: tensor.view(torch.int32).sum(dtype=torch.int64).item() for name, tensor in whole}


def channel_between(source, target, wire=WholeWire):
    return WeightChannel(placement(source), placement(target), wire(CPU))


def copy(source, target, engines, rank, bucket=weight_flow.BUCKET, eta=1.0):
    return transfer_over(
        channel_between(source, target),
        source,
        target,
        engines,
        rank,
        bucket,
        eta,
    )


def transfer_over(channel, source, target, engines, rank, bucket=weight_flow.BUCKET, eta=1.0):
    """The version that arrives at the target; None on other ranks."""
    model = (
        SimpleNamespace(module=engines[source], version=ModelVersion(0, 3, 3))
        if engines[source]
        else None
    )
    if model is None and engines[target] is None:
        return None
    transfer = WeightTransfer(channel, rank, CPU, model, engines[target], bucket)
    if engines[target] is None:
        transfer.finish()
        return None
    engines[target].take_parameters(transfer, eta)
    return transfer.version.global_step


def some_numbers(engine):
    """Of all weights, every seventh."""
    return {name: tensor.flatten()[::7].tolist() for name, tensor in engine.whole_parameters()}


@pytest.mark.long
@needs_pretend_device
def test_weights_are_copied_between_any_two_layouts():
    """Sharded by rows, by tensor parallelism, by stages on a device, into ranges, and whole; ranks
    that are apart, and some that are in both. Then moving averages, into all of these."""

    def work(rank):
        with pretend_cuda():
            return flow(rank)

    def flow(rank):
        engines = {role: engine(role, rank) for role in LAYOUTS}
        if engines["actor"] is not None:
            train(engines["actor"], 0)

        def seen(look):
            return {role: look(one) for role, one in engines.items() if one is not None}

        before = seen(fingerprint)
        chain = ["actor", "sharded", "staged", "divided", "rollout"]
        versions = [copy(*pair, engines, rank, bucket=2000) for pair in pairwise(chain)]
        after, old = seen(fingerprint), seen(some_numbers)
        if engines["actor"] is not None:
            train(engines["actor"], 1)
        for target in chain[1:]:
            copy("actor", target, engines, rank, bucket=2000, eta=0.25)
        return {
            "before": before,
            "after": after,
            "versions": versions,
            "old": old,
            "mixed": seen(some_numbers),
        }

    told = run_on_ranks(4, work)
    actor = told[0]["before"]["actor"]
    assert actor != told[3]["before"]["rollout"]
    for one in told:
        for role, weights in one["after"].items():
            assert weights == actor, role
    assert [one["versions"] for one in told] == [
        [None, 3, None, None],
        [None, None, 3, None],
        [3, None, 3, None],
        [3, 3, None, 3],
    ]
    assert_mixed(told)


def assert_mixed(told):
    """After a training step, every follower has a quarter of the new weights."""
    old, new = told[0]["old"]["actor"], told[0]["mixed"]["actor"]
    assert max(abs(a - b) for name in old for a, b in zip(old[name], new[name], strict=True)) > 1e-4
    for one in told:
        for role in one["mixed"].keys() - {"actor"}:
            for name, mixed in one["mixed"][role].items():
                wanted = [0.25 * a + 0.75 * b for a, b in zip(new[name], old[name], strict=True)]
                assert mixed == pytest.approx(wanted, abs=1e-6), (role, name)


def test_engines_that_cannot_say_what_they_hold_give_and_take_whole_parameters():
    def work(rank):
        engines = {role: engine(role, rank) for role in ("actor", "rollout")}
        for one in filter(None, engines.values()):
            one.weight_blocks = lambda: None
        copy("actor", "rollout", engines, rank, bucket=2000)
        return {role: fingerprint(one) for role, one in engines.items() if one is not None}

    told = run_on_ranks(4, work)
    assert told[3]["rollout"] == told[0]["actor"]


def test_every_rank_of_the_source_sends_its_own_part_and_nothing_is_gathered():
    """By a plan that is made with the first transfer and used by the second."""

    def work(rank):
        engines = {role: engine(role, rank) for role in ("actor", "rollout")}
        sent, gathered = [], []
        exchange = dist.batch_isend_irecv

        def counted(operations):
            sent.extend(one.tensor.numel() for one in operations if one.op is dist.isend)
            return exchange(operations)

        dist.batch_isend_irecv = counted
        channel = channel_between("actor", "rollout")
        for one in filter(None, engines.values()):
            one.whole_parameters = lambda: gathered.append(1)
        plans = []
        for _ in range(2):
            transfer_over(channel, "actor", "rollout", engines, rank)
            plans.append(channel.plan)
        held = engines["actor"].weight_blocks() if engines["actor"] is not None else ()
        numbers = sum(block.numbers for block in held)
        return {
            "sent": sum(sent),
            "held": numbers,
            "gathered": len(gathered),
            "once": plans[0] is plans[1],
        }

    told = run_on_ranks(4, work)
    tail = 2 * weight_wire.TAIL
    assert [one["sent"] for one in told] == [
        2 * (told[0]["held"] + tail),
        2 * (told[1]["held"] + tail),
        0,
        0,
    ]
    assert told[0]["held"] > 0 < told[1]["held"]
    assert not any(one["gathered"] for one in told)
    assert all(one["once"] for one in told)


def test_a_bucket_that_is_damaged_in_transfer_is_an_error():
    def work(rank):
        engines = {role: engine(role, rank) for role in ("actor", "rollout")}
        exchange = dist.batch_isend_irecv

        def damaged(operations):
            for one in exchange(operations):
                one.wait()
            for one in operations:
                if one.op is dist.irecv:
                    one.tensor[len(one.tensor) // 2] += 1e-3
            return []

        dist.batch_isend_irecv = damaged
        copy("actor", "rollout", engines, rank)
        return {}

    with pytest.raises(RankError, match=r"rank 3: .*weights did not arrive as they were sent"):
        run_on_ranks(4, work)


def two_copies_of_a_delta(rank, role="sharded", between=lambda engines: None):
    """Copy the actor twice to a role that holds bfloat16, with a small training step in between;
    what each copy sent, and the weights after it."""
    engines = {"actor": engine("actor", rank), role: engine(role, rank, "bfloat16")}
    channel = channel_between("actor", role, DeltaWire)
    sent, weights = [], []
    for step in range(2):
        before = channel.wire.bytes_sent
        transfer_over(channel, "actor", role, engines, rank)
        sent.append(channel.wire.bytes_sent - before)
        weights.append({name: whole_weights(module) for name, module in engines.items()})
        if step == 0 and engines["actor"] is not None:
            move_a_little(engines["actor"])
        if step == 0:
            between(engines)
    return {"sent": sent, "weights": weights}


def whole_weights(module):
    """Name → bits of the weights in bfloat16; None without an engine."""
    if module is None:
        return None
    return {
        name: tensor.cpu().bfloat16().view(torch.int16).flatten().tolist()
        for name, tensor in module.whole_parameters()
    }


def move_a_little(module):
    """Change one weight in a hundred by about a hundredth, as a step does to bfloat16 weights."""
    for tensor in (read() for read in module.weight_blocks().values()):
        with torch.no_grad():
            tensor.flatten()[::100].mul_(1.01)


def assert_followed(reports, role):
    for step in range(2):
        actor = reports[0]["weights"][step]["actor"]
        for report in reports:
            followed = report["weights"][step][role]
            assert followed is None or followed == actor
    first, second = (reports[0]["weights"][step]["actor"] for step in range(2))
    assert first != second


@pytest.mark.long
@pytest.mark.parametrize("role", ["sharded", "rollout"])
def test_a_delta_gives_the_same_weights_in_few_bytes(role):
    reports = run_on_ranks(4, lambda rank: two_copies_of_a_delta(rank, role))
    assert_followed(reports, role)
    anchors, deltas = (sum(report["sent"][copy] for report in reports) for copy in range(2))
    assert 0 < deltas < 0.15 * anchors


def test_a_target_that_holds_something_else_gets_an_anchor():
    """As after a restart from a checkpoint."""

    def forget(engines):
        if engines["rollout"] is not None:
            move_a_little(engines["rollout"])

    reports = run_on_ranks(4, lambda rank: two_copies_of_a_delta(rank, "rollout", forget))
    assert_followed(reports, "rollout")
    anchors, again = (sum(report["sent"][copy] for report in reports) for copy in range(2))
    assert again > 0.8 * anchors


def damage_messages(monkeypatch, times):
    """Flip a bit in the middle of the first `times` deltas that this process receives."""
    exchange = dist.batch_isend_irecv
    count = 0

    def damaged(operations):
        nonlocal count
        for work in exchange(operations):
            work.wait()
        for operation in operations:
            tensor = operation.tensor
            if operation.op is dist.irecv and tensor.dtype == torch.uint8 and count < times:
                count += 1
                tensor[len(tensor) // 2] ^= 1
        return []

    monkeypatch.setattr(dist, "batch_isend_irecv", damaged)


def test_a_damaged_delta_is_replaced_by_an_anchor(monkeypatch):
    def work(rank):
        damage_messages(monkeypatch, times=1)
        return two_copies_of_a_delta(rank, "rollout")

    assert_followed(run_on_ranks(4, work), "rollout")


def test_a_wire_that_always_damages_ends_the_copy(monkeypatch):
    def work(rank):
        damage_messages(monkeypatch, times=10**9)
        return two_copies_of_a_delta(rank, "rollout")

    with pytest.raises(RankError, match=r"rank 3: .*weights did not arrive as they were sent"):
        run_on_ranks(4, work)


TINY = (
    "{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, "
    "num_attention_heads: 2, max_position_embeddings: 128, tie_word_embeddings: true}"
)


def test_a_follower_whose_copy_failed_is_not_used_until_it_is_restored(tmp_path, monkeypatch):
    overrides = [
        "models.actor.path=null",
        f"models.actor.scratch={TINY}",
        "models.actor.tokenizer=builtin:arithmetic",
        "graph.actor_train.hooks.copy_to=ref",
        "generation.max_new_tokens=4",
        "train.prompts_per_step=1",
    ]
    recipe = load_recipe("ppo_math", overrides).recipe
    written = queue.SimpleQueue()
    worker = ModelWorker(
        recipe, plan_topology(recipe), 0, CPU, {}, lambda *report: written.put(report)
    )

    def ask(op, **args):
        return worker.handle(Request(0, op, args))

    ask("open_datasets")
    ask("load_rows", dataset="train", rows=[("a", 0, 0)])
    ask("build", steps=1, rows=4)
    ask("run_call", call="actor_gen", ids=["a"])
    ask("checkpoint", folder=str(tmp_path), step=0, samples={})
    while written.get()[0] != WRITTEN:  # counts of a slow step come before it
        pass
    follower, source = worker.models["ref"], worker.models["actor"]
    source.version.global_step = 3

    def half(transfer, eta):
        next(transfer.parameter_blocks())
        raise OSError("lost")

    monkeypatch.setattr(follower.module, "take_parameters", half)
    with pytest.raises(OSError, match="lost"):
        ask("copy_weights", after="actor_train")
    monkeypatch.undo()
    assert follower.version.global_step == 0
    with pytest.raises(WorkerError, match="ref has weights of two versions"):
        ask("run_call", call="ref_inf", ids=["a"])
    ask("restore", folder=str(tmp_path), versions={}, interfaces={})
    ask("run_call", call="ref_inf", ids=["a"])
    ask("copy_weights", after="actor_train")
    assert follower.version.global_step == 3
