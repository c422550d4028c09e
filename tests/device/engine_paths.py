"""Paths of engines: training, scores, generation, checkpoints, weight copies."""

import functools
import gc
import math

import torch
from cuda_libraries import deepspeed_on_cuda

from rlcli.api.block_parts import BlockPart
from rlcli.api.config import FinetuneSpec, GenerationHyperparameters, ModelBackendAbstraction
from rlcli.api.key_meaning import ROUTED_EXPERTS
from rlcli.api.model import GenerationEngine, MicroBatchSpec, Model
from rlcli.api.model_source import open_source
from rlcli.checkpoint.families import family_of
from rlcli.checkpoint.state import copy_to_host, write_optimizer, write_weights
from rlcli.checkpoint.state_reading import fill
from rlcli.interfaces._responses import sample_responses
from rlcli.registry import make_backend
from rlcli.testing.backend.objectives import answer_loss, answer_weight, value_loss, value_weight
from rlcli.testing.backend.samples import batch, prompts
from rlcli.testing.batches import make_batch
from rlcli.testing.held_source import HeldSource
from rlcli.testing.tiny_models import END, VOCABULARY, TinyTokenizer, tiny_model

SPEC = FinetuneSpec(total_train_steps=10, dataset_size=100, train_batch_size=10)
CUT = MicroBatchSpec(n_mbs=2)
SMALLEST_BLOCK = 512
"""Bytes that the smallest tensor takes of a CUDA device."""


def role(device, module=None, backend="fsdp", seed=0, tokenizer=None, mesh=None, **args):
    """A model on `device` under a backend that computes in float32."""
    source = HeldSource(module or tiny_model(seed=seed))
    family = family_of(source.config.model_type)
    model = Model(
        "actor",
        None,
        tokenizer or TinyTokenizer(),
        device,
        source=source,
        family=family,
        device_mesh=mesh,
    )
    settings = {"dtype": "float32", **args}
    if backend != "inference":  # Adam's first steps amplify rounding unless eps is large
        settings = {"lr": 1e-2, "eps": 1e-2, **settings}
    return make_backend(ModelBackendAbstraction(backend, settings)).initialize(model, SPEC)


def weights(engine):
    return {
        name: local_tensor(tensor).cpu().clone() for name, tensor in engine.state().weights.items()
    }


def local_tensor(tensor):
    """The local tensor; on a single rank it is the full tensor."""
    return tensor.values.view(tensor.shape) if isinstance(tensor, BlockPart) else tensor


def train(engine, steps=2, first=0, loss=answer_loss, weight=answer_weight):
    return [
        engine.train_batch(
            batch(step).to(engine.device), loss, weight, mb_spec=CUT, version_steps=step
        )
        for step in range(first, first + steps)
    ]


def responses(engine, **settings):
    asked = GenerationHyperparameters(**{"max_new_tokens": 6, **settings})
    inputs = prompts().to(engine.device)
    generated = engine.generate(
        inputs, TinyTokenizer(), asked, range(inputs.bs * asked.responses_per_prompt)
    )
    return (
        [tokens.tolist() for tokens in generated.tokens],
        [scores.cpu() for scores in generated.logprobs],
        generated.ended.tolist(),
    )


def engine_trains(device, folder, family="llama", tolerance=None, **args):
    engine = role(device, tiny_model(family), **args).module
    stats = train(engine)
    return [
        {name: step[name] for name in ("loss", "grad_norm", "entropy", "loss_weight")}
        for step in stats
    ]


def engine_trains_a_value_head(device, folder, **args):
    engine = role(device, tiny_model(head="value"), **args).module
    return train(engine, loss=value_loss, weight=value_weight), weights(engine)


def engine_refuses_updates(device, folder):
    """An empty batch, a loss that is not finite, and a step that the interface refuses."""
    engine = role(device).module
    before = weights(engine)
    samples = batch().to(device)
    empty = engine.train_batch(samples.select_indices([]), answer_loss, answer_weight)
    bad = engine.train_batch(
        samples, lambda output, _: output.logprobs.sum() * math.inf, answer_weight
    )
    unwanted = engine.train_batch(samples, answer_loss, answer_weight, step_if=lambda stats: False)
    per_rank = engine.train_batch(
        samples, answer_loss, answer_weight, token_normalize_scope="dp", cut="sequence"
    )
    assert [empty["update_skipped"], bad["update_skipped"], unwanted["update_skipped"]] == [1, 1, 1]
    return before, per_rank["loss"], weights(engine)


def engine_scores(device, folder):
    engine = role(device, backend="inference").module
    samples = batch().to(device)
    few = prompts().to(device)
    short = [[max(n - 1, 0) for n in group] for group in samples.seqlens["packed_input_ids"]]
    return (
        engine.forward(samples, CUT).cpu(),
        engine.forward(samples, CUT, lambda output, _: output.logprobs, short).cpu(),
        engine.forward(samples.select_indices([])).cpu(),
        engine.eval_batch(samples, answer_loss, answer_weight, CUT),
        few.bs,
    )


def engine_generates(device, folder, family="llama", dtype="float32", **settings):
    return responses(role(device, tiny_model(family), "inference", dtype=dtype).module, **settings)


def engine_replays_experts(device, folder):
    """Log-probs of responses with the experts that their tokens were sampled with, and an update
    with these."""
    sampler, trainer = (
        role(device, tiny_model("mixtral", seed=seed), backend)
        for seed, backend in ((1, "inference"), (2, "fsdp"))
    )
    settings = GenerationHyperparameters(
        max_new_tokens=6, greedy=True, responses_per_prompt=2, routing_replay=True
    )
    sampled = sample_responses(sampler, prompts().to(device), settings)
    rows = sampled.seqlens[ROUTED_EXPERTS]
    logprobs = trainer.module.forward(sampled, CUT, lambda output, _: output.logprobs, rows)
    stats = trainer.module.train_batch(sampled, answer_loss, answer_weight, mb_spec=CUT)
    return sampled.data[ROUTED_EXPERTS].cpu(), logprobs.cpu(), stats["loss"], stats["grad_norm"]


def engine_is_paused(device, folder):
    """With unfinished responses, which continue with other weights."""
    engine, source = (role(device, backend="inference", seed=seed).module for seed in (1, 2))
    asked = GenerationHyperparameters(max_new_tokens=8, max_concurrent_responses=3)
    inputs = prompts().to(engine.device)
    texts = inputs.data["packed_prompts"].split(inputs.flat_seqlens("packed_prompts"))
    with engine.open(TinyTokenizer(), asked, max(map(len, texts))) as stream:
        for seed, text in enumerate(texts):
            stream.submit(text, seed)
        collected = stream.collect()
        stream.pause()
        engine.take_parameters(source, 1.0)
        stream.resume()
        while finished := stream.collect():
            collected += finished
    collected.sort(key=lambda response: response.number)
    return (
        [response.tokens.tolist() for response in collected],
        [response.logprobs for response in collected],
        [len(response.segments) for response in collected],
    )


def engine_is_offloaded(device, folder, generates=True, **args):
    """An offloaded engine still returns its state without using memory of the device, and returns
    for the next pass."""
    engine = role(device, **args).module
    stats = train(engine)
    engine.offload()
    memory = memory_of(device)
    state = engine.state()
    tensors = {**state.weights, **state.optimizer}
    assert {local_tensor(tensor).device.type for tensor in tensors.values() if tensor.dim()} == {
        "cpu"
    }
    copied = copy_to_host(state, leads=True)
    del state, tensors
    assert memory_of(device) == memory
    engine.forward(prompt_tokens(device))  # weights return, the optimizer stays
    memory, later_state = memory_of(device), engine.state()
    del later_state
    assert memory_of(device) == memory
    stats += train(engine, 1, first=2)
    engine.offload()
    generated = responses(engine, greedy=True) if generates else None
    engine.offload()
    engine.save_to_hf(None, str(folder / "export"))
    return stats, len(copied.weights), generated, weights(engine)


def memory_of(device):
    """Bytes that are in use on a CUDA device."""
    gc.collect()
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def engine_continues_from_a_checkpoint(device, folder, others=2, **args):
    """Restored into an offloaded engine, and into one that has trained."""
    engine = role(device, **args).module
    train(engine)
    engine.offload()
    copy = copy_to_host(engine.state(), leads=True)
    (folder / "models").mkdir()
    write_weights(copy, folder / "models", 0)
    write_optimizer(copy, folder / "optim", 0)
    others = [role(device, seed=1 + number, **args).module for number in range(others)]
    others[0].offload()
    for resumed in others[1:]:
        train(resumed, 1)
    for resumed in others:
        memory = memory_of(device)
        state = resumed.state(room_for_optimizer=True)
        fill(state.weights, folder / "models")
        fill(state.optimizer, folder / "optim")
        resumed.state_was_filled(state)
        del state
        counts_of_steps = len(list(resumed.lm.parameters())) * SMALLEST_BLOCK
        assert memory_of(device) <= memory + counts_of_steps
    expected = train(engine, 1, first=2)
    trained = weights(engine)
    for resumed in others:
        assert train(resumed, 1, first=2) == expected
        same = weights(resumed)
        assert all(torch.equal(weight, same[name]) for name, weight in trained.items())
    engine.save_description(None, str(folder / "models"))
    return expected, trained


def engine_loads_a_folder(device, folder):
    """Weights of a file, in full and by blocks."""
    role(device, seed=4).module.save_to_hf(None, str(folder / "model"))
    source = open_source(str(folder / "model"), head="lm", tokenizer=None, seed=0)
    model = Model("actor", None, TinyTokenizer(), device, source=source)
    engine = (
        make_backend(ModelBackendAbstraction("inference", {"dtype": "float32"}))
        .initialize(model, SPEC)
        .module
    )
    full = {name: parameter.cpu() for name, parameter in source.load(device).named_parameters()}
    return weights(engine), full, source.read(next(iter(full)))


def engine_follows_another(device, folder):
    """From and to devices and host memory, with several values of eta."""
    source, target = role(device, seed=1).module, role(device, backend="inference", seed=2).module
    results = []
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
        results.append(weights(target))
    return results


def engine_passes_weights_on(device, folder, **args):
    """The engine follows another one and is followed, also while offloaded, and scores with the
    received weights."""
    source, target = (
        role(device, seed=1, backend="inference").module,
        role(device, seed=2, **args).module,
    )
    target.take_parameters(source, 0.5)
    target.offload()
    target.take_parameters(source, 0.5)
    source.take_parameters(target, 0.5)
    return weights(source), weights(target), target.forward(batch().to(device), CUT).cpu()


def prompt_tokens(device):
    return make_batch(["packed_input_ids"], [[(2, 1)]], vocabulary=VOCABULARY, end=END).to(device)


def with_deepspeed(path, **args):
    """On the CPU, the path runs with fsdp for comparison."""

    def either(device, folder):
        if device.type == "cpu":
            return path(device, folder)
        with deepspeed_on_cuda():
            return path(device, folder, backend="deepspeed", **args)

    return either


def with_megatron(path, **args):
    """On the CPU, where Megatron does not run, the path runs with fsdp for comparison."""

    def either(device, folder):
        return path(device, folder, backend="fsdp" if device.type == "cpu" else "megatron", **args)

    return either


def engine_without_generation(device, folder):
    """The engine of megatron does not generate; recipes that request it are refused."""
    if device.type == "cpu":
        return False
    return isinstance(role(device, backend="megatron").module, GenerationEngine)


EXPERTS = {"family": "mixtral", "router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.1}
SELECTIVE = {"gradient_checkpointing": True, "recompute": "selective"}

ENGINES = {
    "training": engine_trains,
    "training, recomputed": functools.partial(engine_trains, gradient_checkpointing=True),
    "training, recomputed in part": functools.partial(engine_trains, **SELECTIVE),
    "training, inputs of layers in host memory": functools.partial(
        engine_trains, gradient_checkpointing=True, offload_activations=True
    ),
    "training, biases": functools.partial(engine_trains, family="gpt2"),
    "training, capped scores and windows": functools.partial(engine_trains, family="gemma2"),
    "training, 16 bits": functools.partial(engine_trains, dtype="bfloat16"),
    "training, 16 bits, recomputed": functools.partial(
        engine_trains, dtype="bfloat16", gradient_checkpointing=True
    ),
    "training, 16 bits, recomputed in part": functools.partial(
        engine_trains, dtype="bfloat16", **SELECTIVE
    ),
    "training, 16 bits, windows": functools.partial(
        engine_trains, family="mistral", dtype="bfloat16"
    ),
    "training, experts": functools.partial(engine_trains, **EXPERTS),
    "training, experts replayed": engine_replays_experts,
    "training, dtype of the device": functools.partial(engine_trains, dtype="auto"),
    "training, another optimizer for matrices": functools.partial(
        engine_trains, optimizer="muon", lr=1e-3
    ),
    "value head": engine_trains_a_value_head,
    "updates refused": engine_refuses_updates,
    "scores": engine_scores,
    "generation": functools.partial(engine_generates, responses_per_prompt=3),
    "generation, greedy": functools.partial(
        engine_generates, greedy=True, max_concurrent_responses=2
    ),
    "generation, truncated": functools.partial(
        engine_generates, top_p=0.8, top_k=20, min_new_tokens=3
    ),
    "generation, paused": engine_is_paused,
    "generation, windows": functools.partial(engine_generates, family="mistral", temperature=0.7),
    "generation, 16 bits": functools.partial(engine_generates, dtype="bfloat16", greedy=True),
    "offload": engine_is_offloaded,
    "checkpoint": engine_continues_from_a_checkpoint,
    "loading": engine_loads_a_folder,
    "weight copies": engine_follows_another,
    "deepspeed, stage 1, offload": with_deepspeed(engine_is_offloaded, zero_stage=1),
    "deepspeed, stage 1, checkpoint": with_deepspeed(
        engine_continues_from_a_checkpoint, others=1, zero_stage=1
    ),
    "deepspeed, stage 1, weight copies": with_deepspeed(engine_passes_weights_on, zero_stage=1),
    "deepspeed, stage 3, offload": with_deepspeed(engine_is_offloaded, zero_stage=3),
    "deepspeed, stage 3, checkpoint": with_deepspeed(
        engine_continues_from_a_checkpoint, others=1, zero_stage=3
    ),
    "deepspeed, stage 3, weight copies": with_deepspeed(engine_passes_weights_on, zero_stage=3),
    "megatron, training, recomputed": with_megatron(engine_trains, gradient_checkpointing=True),
    "megatron, training, experts": with_megatron(engine_trains, **EXPERTS),
    "megatron, training, experts, 16 bits": with_megatron(
        engine_trains, **EXPERTS, dtype="bfloat16"
    ),
    "megatron, value head": with_megatron(engine_trains_a_value_head),
    "megatron, offload": with_megatron(engine_is_offloaded, generates=False),
    "megatron, checkpoint": with_megatron(engine_continues_from_a_checkpoint, others=1),
    "megatron, weight copies": with_megatron(engine_passes_weights_on),
    "megatron, no generation": engine_without_generation,
}
