"""Paths of the runtime: complete runs, and how a worker handles its samples."""

import contextlib
import io
import json
import re
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
from pretend_cuda import pretend_cuda

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.checkpoint.rank_files import write_samples
from rlcli.interfaces._responses import sample_responses
from rlcli.launch.answering import lone_model
from rlcli.launch.resume import resume_run
from rlcli.launch.run import run_recipe
from rlcli.messaging.messages import MOVE, Request
from rlcli.observe.display import PlainDisplay
from rlcli.ops.product_rate import SIDES
from rlcli.recipe.mesh import Mesh
from rlcli.recipe.resolve import load_recipe
from rlcli.runtime.buffer import Transfer
from rlcli.runtime.data_lane import DataLane
from rlcli.runtime.pausing import PausingEngine
from rlcli.runtime.pool import packed, unpacked
from rlcli.runtime.roles import pick_device
from rlcli.runtime.weight_flow import WeightChannel, WeightTransfer
from rlcli.runtime.weight_wire import DeltaWire, WholeWire
from rlcli.runtime.worker import ModelWorker
from rlcli.testing.backend.samples import batch, prompts
from rlcli.testing.ranks import run_on_ranks
from rlcli.testing.tiny_models import TinyTokenizer, tiny_model
from rlcli.topology import RolePlacement, plan_topology
from rlcli.topology.groups import MOVES

from .device_functions import Function, functions_run
from .engine_paths import memory_of, responses, role, weights
from .interface_paths import data_of

HOME = Path(__file__).resolve().parents[2]
INLINE = ["launch.type=inline", "log.trackers=[]", "log.plot=false"]
TINY = (
    "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, "
    "num_attention_heads: 2, max_position_embeddings: 128, tie_word_embeddings: true}"
)
RUN_ON_RANKS: set[Function] = set()
"""Functions that ranks of a path have run on their pretend devices."""


def on(device):
    return pretend_cuda() if device.type == "cuda" else contextlib.nullcontext()


WATCHED = (
    "datasets.held_out.args.problems=4",
    "train.eval.every_steps=2",
    "checkpoint.every_steps=1",
)
UNWATCHED = ("datasets.held_out=null", "train.eval=null")


def ppo_recipe(device, *changes, evaluates=True):
    small = [
        "models.actor.path=null",
        f"models.actor.scratch={TINY}",
        "models.actor.tokenizer=builtin:arithmetic",
        "models.actor.backend.args.gradient_checkpointing=true",
        "models.actor.backend.args.eps=1e-2",
        "models.critic.backend.args.eps=1e-2",
        "ppo.adv_norm=false",
        "ppo.entropy_coef=0.1",
        "datasets.train.args.problems=64",
        "generation.max_new_tokens=6",
        "train.prompts_per_step=4",
        "train.steps=2",
        *(WATCHED if evaluates else UNWATCHED),
        "graph.actor_train.hooks={copy_to: ref, eta: 0.5}",
        "graph.ref_inf.hooks={offload: true}",
        f"cluster.device={device.type}",
        *INLINE,
    ]
    return load_recipe("ppo_math", [*small, *changes])


def quiet():
    return PlainDisplay(io.StringIO(), quiet=True)


def numbers(run_dir):
    """The metrics of a run without times and without a quotient of rounding differences."""
    left_out = re.compile(".*time/|perf/|tokens_per_second$|critic/explained_variance$")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in record.items() if not left_out.match(name)}
        for record in records
    ]


def ppo_runs_and_resumes(device, folder):
    run_recipe(ppo_recipe(device), folder / "run", quiet())
    resume_run(folder / "run", ["train.steps=3"], quiet(), accept_changes=True)
    assert (folder / "run" / "models" / "actor" / "model.safetensors").is_file()
    return numbers(folder / "run")


TURNS = (
    "graph.actor_gen.hooks={offload: true}",
    "graph.actor_train.hooks.offload=true",
    "graph.critic_inf.hooks={offload: true}",
    "graph.critic_train.hooks={offload: true}",
)


def trained_roles_take_turns(device, folder):
    """Actor and critic are on the device only during their calls; metrics equal those of a run in
    which both stay."""

    def train(name, *changes):
        run_recipe(ppo_recipe(device, *changes, evaluates=False), folder / name, quiet())

    train("staying")  # what libraries allocate once is allocated now
    in_turns = peak_memory(device, lambda: train("turns", *TURNS))
    staying = peak_memory(device, lambda: train("again"))
    if device.type == "cuda":
        assert numbers(folder / "turns") == numbers(folder / "staying")
        critic = (folder / "turns" / "models" / "critic" / "model.safetensors").stat().st_size
        assert staying - in_turns > 2.5 * critic, (staying, in_turns)  # its weights and two moments
    return numbers(folder / "turns")


def peak_memory(device, work):
    """Bytes of a CUDA device that `work` takes at most."""
    if device.type == "cpu":
        work()
        return 0
    before = memory_of(device)
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() - before


def sft_runs(device, folder):
    small = [
        f"models.actor.scratch={TINY}",
        "train.steps=2",
        "train.prompts_per_step=4",
        "datasets.train.args.problems=32",
        "log.profile=2",
        f"cluster.device={device.type}",
        *INLINE,
    ]
    # products that are large enough for a GPU take the processor half a minute
    with mock.patch.dict(SIDES, cuda=64):
        run_recipe(load_recipe("sft_math", small), folder / "run", quiet())
    return numbers(folder / "run")


def worker_of(device, rank=0):
    recipe = ppo_recipe(device).recipe
    worker = ModelWorker(recipe, plan_topology(recipe), rank, device, {}, lambda *report: None)
    return worker, lambda op, **args: worker.handle(Request(0, op, args))


def worker_holds_its_samples_on_its_device(device, folder):
    worker, ask = worker_of(device)
    ask("open_datasets")
    ask("load_rows", dataset="train", rows=[("a", 0, 0), ("b", 1, 0)])
    samples = [worker.samples.sample(id_) for id_ in "ab"]
    return [
        tensor.device.type == device.type for sample in samples for tensor in sample.data.values()
    ]


def worker_keeps_samples_in_a_checkpoint(device, folder):
    """They are written from the device, and restored to it."""
    worker, ask = worker_of(device)
    samples = [batch().select_indices([number]).to(device) for number in range(3)]
    for number, sample in enumerate(samples):
        sample.ids = [f"row-{number}"]
    write_samples(samples, folder, rank=0)
    ask("load_samples", folder=str(folder), ids=["row-2", "row-0"])
    restored = [worker.samples.sample(id_) for id_ in ("row-2", "row-0")]
    assert {tensor.device.type for sample in restored for tensor in sample.data.values()} == {
        device.type
    }
    return [data_of(sample.cpu()) for sample in restored]


def samples_move(device, folder):
    on_device = batch().to(device)
    assert batch().cpu().data["packed_input_ids"].device.type == "cpu"
    moved = batch().cuda() if device.type == "cuda" else batch()
    assert moved.data["packed_input_ids"].device == on_device.data["packed_input_ids"].device
    return on_device.cu_seqlens("packed_input_ids").cpu(), data_of(moved)


def worker_without_samples_runs_calls(device, folder):
    """A rank with an empty share receives a description, and runs the call for its collectives."""
    _, ask = worker_of(device)
    ask("open_datasets")
    assert ask("measure", roles=["actor"]) == {"actor": {}}
    ask("build", steps=1, rows=4)
    described = ask_rows(ask, "a", 0)
    described.metadata = {}
    return [
        ask("run_call", call="actor_gen", ids=[], empty=described.as_json())["batch"]["ids"],
        ask("run_call", call="actor_gen", ids=["a"])["batch"]["seqlens"],
        ask("describe", ids=["a"]),
    ]


def ask_rows(ask, id_, row):
    return SequenceSample.from_json(
        ask("load_rows", dataset="train", rows=[(id_, row, 0)])["batch"]
    )


def worker_joins_local_and_received_rows(device, folder):
    """Two ranks: the samples of a call are partly local rows,
    partly received from the other rank."""

    def work(rank):
        with on(device), functions_run(HOME) as run:
            worker, ask = worker_of(device)
            lane = DataLane(rank, worker.samples, device, timedelta(seconds=60))
            ask("open_datasets")
            rows = [ask_rows(ask, "ab"[rank], rank)]
            moved = Transfer(1, 0, described_by_rank_1(device))
            lane.handle(Request(1, MOVE, {"transfers": [moved.as_json()]}, MOVES))
            lengths = []
            if rank == 0:
                ask("build", steps=1, rows=4)
                answer = ask("run_call", call="actor_gen", ids=["a", "b"])
                assert unpacked(packed(worker.samples.gather(["a"], ["packed_prompts"]))).ids == [
                    "a"
                ]
                lengths = answer["batch"]["seqlens"]["packed_input_ids"]
        return {"rows": len(rows), "lengths": lengths, "run": [[one.file, one.name] for one in run]}

    answers = run_on_ranks(2, work)
    RUN_ON_RANKS.update(Function(*one) for answer in answers for one in answer["run"])
    return answers[0]["lengths"]


def weights_reach_another_rank(device, folder, wire_of=WholeWire):
    """One rank has a role, the other one a role that follows it through a second copy, too."""

    def work(rank):
        with on(device), functions_run(HOME) as run:
            model = role(device, backend="inference", seed=rank + 1)
            channel = WeightChannel(
                RolePlacement("actor", (0,), Mesh()),
                RolePlacement("rollout", (1,), Mesh()),
                wire_of(device),
            )
            ends = (model, None) if rank == 0 else (None, model.module)
            for _ in range(2):
                transfer = WeightTransfer(channel, rank, device, *ends, bucket=2000)
                if rank == 0:
                    transfer.finish()
                else:
                    model.module.take_parameters(transfer, 1.0)
            totals = {
                name: tensor.double().sum().item() for name, tensor in weights(model.module).items()
            }
        return {"held": totals, "run": [[one.file, one.name] for one in run]}

    answers = run_on_ranks(2, work)
    RUN_ON_RANKS.update(Function(*one) for answer in answers for one in answer["run"])
    assert answers[0]["held"] == answers[1]["held"]
    return answers[1]["held"]


def changed_weights_reach_another_rank(device, folder):
    return weights_reach_another_rank(device, folder, DeltaWire)


def responses_of_a_pausing_role(device, folder):
    """As those of a call during which weights may change."""
    engine = PausingEngine(role(device, backend="inference"), max_segments=2, most_prompts=8)
    settings = GenerationHyperparameters(max_new_tokens=6, greedy=True, responses_per_prompt=2)
    with engine.in_use() as model:
        sampled = sample_responses(model, prompts().to(device), settings)
    return data_of(sampled.cpu())


def single_model_generates(device, folder):
    tiny_model().save_pretrained(folder)
    return responses(lone_model(str(folder), TinyTokenizer(), device, 1, "float32").module)


def described_by_rank_1(device):
    """The row that rank 1 holds, as the master describes it to rank 0."""
    _, ask = worker_of(device)
    ask("open_datasets")
    return ask_rows(ask, "b", 1).select(["packed_prompts"])


def device_is_picked(device, folder):
    """The start of a rank under torchrun is not run here, because NCCL needs GPUs,
    but its choice of a device is."""
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    return pick_device(device.type, 0).type == device.type, pick_device("auto", 0).type == automatic


RUNTIME = {
    "PPO, resumed": ppo_runs_and_resumes,
    "PPO, roles take turns": trained_roles_take_turns,
    "SFT": sft_runs,
    "rows": worker_holds_its_samples_on_its_device,
    "samples of a checkpoint": worker_keeps_samples_in_a_checkpoint,
    "samples": samples_move,
    "empty share": worker_without_samples_runs_calls,
    "two ranks": worker_joins_local_and_received_rows,
    "a model alone": single_model_generates,
    "weights": weights_reach_another_rank,
    "changed weights": changed_weights_reach_another_rank,
    "responses while weights change": responses_of_a_pausing_role,
    "choice": device_is_picked,
}
OF_RANKS = (
    worker_joins_local_and_received_rows,
    weights_reach_another_rank,
    changed_weights_reach_another_rank,
)
"""Paths of several ranks, each of which creates its own device."""
