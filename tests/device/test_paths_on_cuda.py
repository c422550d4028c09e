"""Everything that knows a device runs on one and gives the numbers of the CPU; and nothing that knows one is left out.

A path is a function of a device that returns numbers. It runs on the CPU and on the pretend CUDA device, where host
and device tensors refuse to mix. The functions that name a device, or make or move tensors, are found by reading the
source; the last test fails for each that no path has run.
"""

import contextlib
import functools
import io
import math
import tempfile
from pathlib import Path

import pytest
import torch

from rlcli.api.config import (
    FinetuneSpec,
    GenerationHyperparameters,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
)
from rlcli.api.data import SequenceSample
from rlcli.api.model import MicroBatchSpec, Model, call_interface
from rlcli.api.model_source import open_source
from rlcli.checkpoint.state import copy_to_host, fill, write_optimizer, write_weights
from rlcli.launch.resume import resume_run
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.recipe.resolve import load_recipe
from rlcli.registry import make_backend, make_interface
from rlcli.runtime.buffer import Transfer
from rlcli.runtime.messages import Request
from rlcli.runtime.roles import pick_device
from rlcli.runtime.worker import ModelWorker
from rlcli.testing.backend.base import answer_loss, answer_weight, batch, prompts, value_loss, value_weight
from rlcli.testing.batches import KEYS, make_batch
from rlcli.testing.held_source import HeldSource
from rlcli.testing.pretend_cuda import pretend_cuda
from rlcli.testing.pretend_cuda.paths import Function, device_functions, functions_run
from rlcli.testing.ranks import run_on_ranks
from rlcli.testing.tiny_models import END, VOCABULARY, TinyTokenizer, tiny_model
from rlcli.topology import plan_topology

if torch.version.cuda or torch.version.hip:
    pytest.skip("this torch has GPUs of its own", allow_module_level=True)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HOME = Path(__file__).resolve().parents[2]
SPEC = FinetuneSpec(total_train_steps=10, dataset_size=100, train_batch_size=10)
CUT = MicroBatchSpec(n_mbs=2)
WHOLE = ["launch.type=inline", "log.tensorboard=false", "log.plot=false"]
TINY = "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, max_position_embeddings: 128, tie_word_embeddings: true}"  # noqa: E501


def role(device, module=None, backend="fsdp", seed=0, tokenizer=None, **args):
    """A model on `device` under a backend that computes in float32."""
    source = HeldSource(module or tiny_model(seed=seed))
    model = Model("actor", None, tokenizer or TinyTokenizer(), device, source=source)
    settings = {"dtype": "float32", **args}
    if backend == "fsdp":  # Adam's first steps make much of rounding, unless eps is felt
        settings = {"lr": 1e-2, "eps": 1e-2, **settings}
    return make_backend(ModelBackendAbstraction(backend, settings)).initialize(model, SPEC)


def weights(engine):
    return {name: tensor.cpu().clone() for name, tensor in engine.state().weights.items()}


def train(engine, steps=2, first=0, loss=answer_loss, weight=answer_weight):
    return [
        engine.train_batch(batch(step).to(engine.device), loss, weight, mb_spec=CUT, version_steps=step)
        for step in range(first, first + steps)
    ]


def responses(engine, **settings):
    asked = GenerationHyperparameters(**{"max_new_tokens": 6, **settings})
    given = prompts().to(engine.device)
    made = engine.generate(given, TinyTokenizer(), asked, range(given.bs * asked.responses_per_prompt))
    return [tokens.tolist() for tokens in made.tokens], [scores.cpu() for scores in made.logprobs], made.ended.tolist()


# -- paths of engines ----------------------------------------------------------------------------------------------


def engine_trains(device, folder, family="llama", tolerance=None, **args):
    engine = role(device, tiny_model(family), **args).module
    stats = train(engine)
    return [{name: step[name] for name in ("loss", "grad_norm", "entropy", "loss_weight")} for step in stats]


def engine_trains_a_value_head(device, folder):
    engine = role(device, tiny_model(head="value")).module
    return train(engine, loss=value_loss, weight=value_weight), weights(engine)


def engine_refuses_updates(device, folder):
    """An empty batch, a loss that is not finite, and a step that the interface does not want."""
    engine = role(device).module
    before = weights(engine)
    given = batch().to(device)
    empty = engine.train_batch(given.select_indices([]), answer_loss, answer_weight)
    bad = engine.train_batch(given, lambda output, _: output.logprobs.sum() * math.inf, answer_weight)
    unwanted = engine.train_batch(given, answer_loss, answer_weight, step_if=lambda stats: False)
    per_rank = engine.train_batch(given, answer_loss, answer_weight, token_normalize_scope="dp", cut="sequence")
    assert [empty["update_skipped"], bad["update_skipped"], unwanted["update_skipped"]] == [1, 1, 1]
    return before, per_rank["loss"], weights(engine)


def engine_scores(device, folder):
    engine = role(device, backend="inference").module
    given = batch().to(device)
    few = prompts().to(device)
    short = [[max(n - 1, 0) for n in group] for group in given.seqlens["packed_input_ids"]]
    return (
        engine.forward(given, CUT).cpu(),
        engine.forward(given, CUT, lambda output, _: output.logprobs, short).cpu(),
        engine.forward(given.select_indices([])).cpu(),
        engine.eval_batch(given, answer_loss, answer_weight, CUT),
        few.bs,
    )


def engine_generates(device, folder, family="llama", **settings):
    return responses(role(device, tiny_model(family), "inference").module, **settings)


def engine_is_offloaded(device, folder):
    """Offloaded, an engine still gives its state; it comes back for the next pass."""
    engine = role(device).module
    stats = train(engine)
    engine.offload()
    state = engine.state()
    assert {tensor.device.type for tensor in state.weights.values()} == {"cpu"}
    assert {tensor.device.type for tensor in state.optimizer.values() if tensor.dim()} == {"cpu"}
    copied = copy_to_host(state, leads=True)
    stats += train(engine, 1, first=2)
    assert {tensor.device.type for tensor in engine.state().weights.values()} == {device.type}
    engine.offload()
    made = responses(engine, greedy=True)
    engine.offload()
    engine.save_to_hf(None, str(folder / "export"))
    return stats, len(copied.weights), made, weights(engine)


def engine_continues_from_a_checkpoint(device, folder):
    """Into an engine that is offloaded, and into one that has trained."""
    engine = role(device).module
    train(engine)
    kept = copy_to_host(engine.state(), leads=True)
    (folder / "models").mkdir()
    write_weights(kept, folder / "models", 0)
    write_optimizer(kept, folder / "optim", 0)
    others = [role(device, seed=seed).module for seed in (1, 2)]
    others[0].offload()
    train(others[1], 1)
    for other in others:
        state = other.state(room_for_optimizer=True)
        fill(state.weights, folder / "models")
        fill(state.optimizer, folder / "optim")
        other.state_was_filled(state)
    expected = train(engine, 1, first=2)
    for other in others:
        assert train(other, 1, first=2) == expected
        assert all(torch.equal(weight, weights(other)[name]) for name, weight in weights(engine).items())
    engine.save_description(None, str(folder / "models"))
    return expected, weights(engine)


def engine_loads_a_folder(device, folder):
    """Weights of a file, whole and in blocks."""
    role(device, seed=4).module.save_to_hf(None, str(folder / "model"))
    source = open_source(str(folder / "model"), head="lm", tokenizer=None, seed=0)
    model = Model("actor", None, TinyTokenizer(), device, source=source)
    made = make_backend(ModelBackendAbstraction("inference", {"dtype": "float32"})).initialize(model, SPEC).module
    whole = {name: parameter.cpu() for name, parameter in source.load(device).named_parameters()}
    return weights(made), whole, source.read(next(iter(whole)))


def engine_follows_another(device, folder):
    """From and to devices and host memory, wholly and in part."""
    source, target = role(device, seed=1).module, role(device, backend="inference", seed=2).module
    found = []
    for eta, is_source_away, is_target_away in (
        (0.25, False, False),
        (0.5, True, False),
        (0.5, False, True),
        (1, 1, 1),
    ):
        for engine, is_away in ((source, is_source_away), (target, is_target_away)):
            engine.forward(prompt_tokens(device))  # brings it to its device
            if is_away:
                engine.offload()
        target.take_parameters(source, eta)
        found.append(weights(target))
    return found


def prompt_tokens(device):
    return make_batch(["packed_input_ids"], [[(2, 1)]], vocabulary=VOCABULARY, end=END).to(device)


ENGINES = {
    "training": engine_trains,
    "training, recomputed": functools.partial(engine_trains, gradient_checkpointing=True),
    "training, biases": functools.partial(engine_trains, family="gpt2"),
    "training, capped scores and windows": functools.partial(engine_trains, family="gemma2"),
    "training, 16 bits": functools.partial(engine_trains, dtype="bfloat16"),
    "training, 16 bits, recomputed": functools.partial(engine_trains, dtype="bfloat16", gradient_checkpointing=True),
    "training, 16 bits, windows": functools.partial(engine_trains, family="mistral", dtype="bfloat16"),
    "training, dtype of the device": functools.partial(engine_trains, dtype="auto"),
    "value head": engine_trains_a_value_head,
    "updates refused": engine_refuses_updates,
    "scores": engine_scores,
    "generation": functools.partial(engine_generates, responses_per_prompt=3),
    "generation, greedy": functools.partial(engine_generates, greedy=True, max_concurrent_responses=2),
    "generation, truncated": functools.partial(engine_generates, top_p=0.8, top_k=20, min_new_tokens=3),
    "generation, windows": functools.partial(engine_generates, family="mistral", temperature=0.7),
    "offload": engine_is_offloaded,
    "checkpoint": engine_continues_from_a_checkpoint,
    "loading": engine_loads_a_folder,
    "weight copies": engine_follows_another,
}

# -- paths of interfaces -------------------------------------------------------------------------------------------


def interface(kind, **args):
    return make_interface(ModelInterfaceAbstraction(kind, args))


def rollout(device, **changes):
    """Groups of two responses with every key that a graph knows."""
    return make_batch(KEYS, vocabulary=VOCABULARY, end=END, **changes).to(device)


def data_of(sample):
    return {key: tensor.cpu() for key, tensor in sample.data.items()} | {"metadata": sample.metadata}


def two_steps(device, kind, module=None, **args):
    if kind.startswith("ppo"):
        args = {"generation": {"responses_per_prompt": 2}, "minibatches": 2, **args}
    made, model = interface(kind, **args), role(device, module)
    return [call_interface(made, "train_step", model, rollout(device, seed=seed), CUT) for seed in range(2)], weights(
        model.module
    )


def trains_by(kind, **args):
    return lambda device, folder: two_steps(
        device, kind, tiny_model(head="value") if "critic" in kind else None, **args
    )


def infers_by(kind, head="lm", **args):
    def path(device, folder):
        model = role(device, tiny_model(head=head), "inference")
        return data_of(call_interface(interface(kind, **args), "inference", model, rollout(device), CUT))

    return path


def sft_evaluates(device, folder):
    parts = [rollout(device, seed=seed) for seed in range(2)]
    return call_interface(interface("sft"), "evaluate", role(device), parts)


def actor_generates(device, folder):
    args = {"generation": {"responses_per_prompt": 2, "max_new_tokens": 6}}
    model = role(device, backend="inference")
    return data_of(call_interface(interface("ppo_actor", **args), "generate", model, prompts().to(device), CUT))


def classifier_rewards(device, folder):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = byte_tokens()
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, max_position_embeddings=64, **size)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = Model("reward", None, tokenizer, device)
    made = interface("hf_reward", path=str(folder), output="prob", batch_size=3)
    return data_of(call_interface(made, "inference", model, rollout(device), CUT))


def byte_tokens():
    from rlcli.testing.tokenizer import as_transformers, byte_tokenizer

    return as_transformers(byte_tokenizer())


def rule_rewards(device, folder):
    model = Model("reward", None, byte_tokens(), device)
    return data_of(call_interface(interface("math_reward"), "inference", model, rollout(device), CUT))


def interfaces_pretend(device, folder):
    """Mocks, which answer for an engine that is not there."""
    given, made = rollout(device), []
    model = Model("actor", None, TinyTokenizer(), device, seed=3)
    for kind, call in (("ppo_actor", "generate"), ("ppo_actor", "inference"), ("ppo_critic", "inference")):
        made.append(data_of(interface(kind).mock(call, model, given)))
    return made


INTERFACES = {
    "sft": trains_by("sft"),
    "sft, evaluation": sft_evaluates,
    "actor": trains_by("ppo_actor"),
    "actor, dense rewards": trains_by("ppo_actor", use_dense_reward=True),
    "actor, no critic": trains_by("ppo_actor", disable_value=True, kl_ctl=0, entropy_coef=0.01),
    "actor, groups": trains_by("ppo_actor", group_adv_norm=True, mask_too_long=True, mask_no_eos_with_zero=True),
    "actor, decoupled": trains_by("ppo_actor", use_decoupled_loss=True, behav_imp_weight_cap=2.0, kl_estimator="k3"),
    "actor, recomputed": trains_by("ppo_actor", recompute_logprob=True, adaptive_kl_ctl=True, c_clip=3.0),
    "grpo": trains_by("grpo"),
    "grpo, by sequences": trains_by(
        "grpo", policy_loss="gspo", baseline="leave_one_out", scale="batch", kl_in="reward"
    ),
    "grpo, by tokens": trains_by(
        "grpo",
        policy_loss="cispo",
        loss_aggregation="constant",
        loss_constant=8.0,
        credit="to_go",
        adv_norm=True,
        overlong_buffer=4,
    ),
    "actor, best of two": trains_by("ppo_actor", generation={"responses_per_prompt": 1}, generation_size=2),
    "critic": trains_by("ppo_critic"),
    "critic, other settings": trains_by("ppo_critic", value_norm_type="ma", value_loss="huber", bootstrap_no_eos=False),
    "log-probs": infers_by("ppo_actor"),
    "reference": infers_by("reference", temperature=0.7),
    "values": infers_by("ppo_critic", head="value"),
    "responses": actor_generates,
    "classifier": classifier_rewards,
    "rule": rule_rewards,
    "mocks": interfaces_pretend,
}


# -- paths of the runtime ------------------------------------------------------------------------------------------


def ppo_recipe(device, *changes):
    small = [
        "models.actor.path=null", f"models.actor.scratch={TINY}", "models.actor.tokenizer=builtin:arithmetic",
        "models.actor.backend.args.gradient_checkpointing=true", "models.actor.backend.args.eps=1e-2",
        "models.critic.backend.args.eps=1e-2", "ppo.adv_norm=false", "ppo.entropy_coef=0.1",
        "datasets.train.args.problems=64", "datasets.held_out.args.problems=4", "generation.max_new_tokens=6",
        "train.prompts_per_step=4", "train.steps=2", "train.eval.every_steps=2", "checkpoint.every_steps=1",
        "graph.actor_train.hooks={copy_to: ref, eta: 0.5}",
        "graph.ref_inf.hooks={offload: true}", f"cluster.device={device.type}", *WHOLE,
    ]  # fmt: skip
    return load_recipe("ppo_math", [*small, *changes])


def quiet():
    return PlainDisplay(io.StringIO(), quiet=True)


def numbers(run_dir):
    """What a run's steps report, but for times, and a quotient of what are differences of rounding here."""
    import json

    left_out = ("tokens_per_second", "critic/explained_variance")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in record.items() if "time/" not in name and name not in left_out}
        for record in records
    ]


def ppo_runs_and_resumes(device, folder):
    run_recipe(ppo_recipe(device), folder / "run", quiet())
    resume_run(folder / "run", ["train.steps=3"], quiet(), accept_changes=True)
    assert (folder / "run" / "models" / "actor" / "model.safetensors").is_file()
    return numbers(folder / "run")


def sft_runs(device, folder):
    small = [f"models.actor.scratch={TINY}", "train.steps=2", "train.prompts_per_step=4",
             "datasets.train.args.problems=32",
             f"cluster.device={device.type}", *WHOLE]  # fmt: skip
    run_recipe(load_recipe("sft_math", small), folder / "run", quiet())
    return numbers(folder / "run")


def worker_of(device, rank=0):
    recipe = ppo_recipe(device).recipe
    worker = ModelWorker(recipe, plan_topology(recipe), rank, device, {}, lambda *report: None)
    return worker, lambda op, **args: worker.handle(Request(0, op, args))


def worker_holds_its_samples_on_its_device(device, folder):
    worker, ask = worker_of(device)
    ask("open_datasets")
    ask("load_rows", dataset="train", rows=[("a", 0, 0), ("b", 1, 1)])
    return [tensor.device.type == device.type for sample in worker._samples.values() for tensor in sample.data.values()]


def samples_move(device, folder):
    there = batch().to(device)
    assert batch().cpu().data["packed_input_ids"].device.type == "cpu"
    moved = batch().cuda() if device.type == "cuda" else batch()
    assert moved.data["packed_input_ids"].device == there.data["packed_input_ids"].device
    return there.cu_seqlens("packed_input_ids").cpu(), data_of(moved)


def worker_without_samples_takes_part(device, folder):
    """A rank whose share is empty gets a description, and runs the call for its collectives."""
    _, ask = worker_of(device)
    ask("open_datasets")
    ask("build", steps=1)
    described = ask_rows(ask, "a", 0)
    described.metadata = {}
    return [
        ask("run_call", call="actor_gen", ids=[], transfers=[], empty=described.as_json())["batch"]["ids"],
        ask("run_call", call="actor_gen", ids=["a"], transfers=[])["batch"]["seqlens"],
        ask("describe", texts=["a"], scores=[])["texts"],
    ]


def ask_rows(ask, id_, row):
    return SequenceSample.from_json(ask("load_rows", dataset="train", rows=[(id_, row, row)])["batch"])


def worker_joins_own_and_received_rows(device, folder):
    """Two ranks: a call's samples are partly this rank's own rows, partly those that another rank has sent."""

    def work(rank):
        with on(device), functions_run(HOME) as run:
            _, ask = worker_of(device, rank)
            ask("open_datasets")
            rows = [ask_rows(ask, "ab"[rank], rank)]
            moved = Transfer(1, 0, "packed_prompts", ("b",), described_elsewhere(device))
            if rank == 0:
                ask("build", steps=1)
            made = ask("run_call", call="actor_gen", ids=["a", "b"], transfers=[moved.as_json()])
        lengths = made["batch"]["seqlens"]["packed_input_ids"] if rank == 0 else []
        return {"rows": len(rows), "lengths": lengths, "run": [[one.file, one.name] for one in run]}

    answers = run_on_ranks(2, work)
    RUN.update(Function(*one) for answer in answers for one in answer["run"])
    return answers[0]["lengths"]


def described_elsewhere(device):
    """The row that rank 1 holds, as the master describes it to rank 0."""
    _, ask = worker_of(device)
    ask("open_datasets")
    return ask_rows(ask, "b", 1).select(["packed_prompts"])


def meets_in_a_process_group(device, folder):
    """The first steps of a rank under torchrun are not run here: NCCL needs GPUs. Which device it picks is."""
    return pick_device(device.type, 0).type == device.type == pick_device("auto", 0).type


RUNTIME = {
    "PPO, resumed": ppo_runs_and_resumes,
    "SFT": sft_runs,
    "rows": worker_holds_its_samples_on_its_device,
    "samples": samples_move,
    "empty share": worker_without_samples_takes_part,
    "two ranks": worker_joins_own_and_received_rows,
    "choice": meets_in_a_process_group,
}


# -- the numbers are those of the CPU ------------------------------------------------------------------------------

PATHS = {
    f"{kind}: {name}": path
    for kind, paths in {"engine": ENGINES, "interface": INTERFACES, "runtime": RUNTIME}.items()
    for name, path in paths.items()
}
ROUGH = ("16 bits", "dtype of the device")
"""CUDA's autocast keeps other operations in float32 than the CPU's."""
RUN: set[Function] = set()
"""Functions that some path has run on the pretend device."""


def on(device):
    return pretend_cuda() if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def on_cuda(name):
    """What a path returns on the pretend device; it runs once, whoever asks first."""
    with tempfile.TemporaryDirectory() as folder:
        if PATHS[name] is worker_joins_own_and_received_rows:  # its ranks each have a device of their own
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
    "rlcli/api/engine.py ForwardEngine.device": "is that of engines without a device",
    "rlcli/checkpoint/conversion_check.py": "`rlcli convert` compares models on the host",
    "rlcli/api/sample_json.py _tensor": "reads JSON, on the host; a run moves what it reads",
    "rlcli/api/flat_parts.py": "belongs to several ranks",
    "backends/_engine.py gathered_beyond": "belongs to several ranks",
    "backends/_put_away.py _on_host": "is for storages, which the pretend device does not have",
    "backends/_process_group.py": "belongs to engines of libraries",
    "backends/_tensor_parallel.py": "belongs to several ranks",
    "backends/megatron.py": "Megatron's own tests run it on ranks of their own",
    "backends/_megatron_engine.py": "Megatron's own tests run it on ranks of their own",
    "backends/_megatron_model.py": "Megatron's own tests run it on ranks of their own",
    "backends/_megatron_optimizer.py": "Megatron's own tests run it on ranks of their own",
    "backends/_megatron_state.py": "Megatron's own tests run it on ranks of their own",
    "backends/_deepspeed_engine.py": "its library takes the CPU for good where it finds no GPU",
    "backends/_zero.py": "its library takes the CPU for good where it finds no GPU",
    "backends/_zero_stages.py": "its library takes the CPU for good where it finds no GPU",
    "rlcli/ops/vocabulary.py": "belongs to several ranks",
    "rlcli/runtime/roles.py _device_mesh": "belongs to several ranks",
    "rlcli/runtime/worker_main.py _start": "begins a process that talks by NCCL",
}
"""Functions, or files, that no path on one device can run, and why."""


def test_every_function_that_knows_a_device_has_run():
    for name in PATHS:
        on_cuda(name)
    files = [file for room in ROOMS for file in sorted((HOME / room).rglob("*.py"))]
    known = {str(one): one for one in device_functions(files, HOME)}
    left_out = {name for name, one in known.items() if one not in RUN}
    unexplained = sorted(name for name in left_out if not {name, name.split()[0]} & NOT_HERE.keys())
    advice = "add a path that runs these on the device, or say in NOT_HERE why none can"
    assert not unexplained, "\n".join([advice, *unexplained])
    stale = [given for given in NOT_HERE if not any(name == given or name.split()[0] == given for name in left_out)]
    assert not stale, "these need no excuse"
