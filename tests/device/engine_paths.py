"""Paths of engines: training, scores, generation, checkpoints, weight copies."""

import functools
import math

import torch

from rlcli.api.config import FinetuneSpec, GenerationHyperparameters, ModelBackendAbstraction
from rlcli.api.model import MicroBatchSpec, Model
from rlcli.api.model_source import open_source
from rlcli.checkpoint.state import copy_to_host, fill, write_optimizer, write_weights
from rlcli.registry import make_backend
from rlcli.testing.backend.base import answer_loss, answer_weight, batch, prompts, value_loss, value_weight
from rlcli.testing.batches import make_batch
from rlcli.testing.held_source import HeldSource
from rlcli.testing.tiny_models import END, VOCABULARY, TinyTokenizer, tiny_model

SPEC = FinetuneSpec(total_train_steps=10, dataset_size=100, train_batch_size=10)
CUT = MicroBatchSpec(n_mbs=2)


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


def engine_generates(device, folder, family="llama", dtype="float32", **settings):
    return responses(role(device, tiny_model(family), "inference", dtype=dtype).module, **settings)


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
    "generation, 16 bits": functools.partial(engine_generates, dtype="bfloat16", greedy=True),
    "offload": engine_is_offloaded,
    "checkpoint": engine_continues_from_a_checkpoint,
    "loading": engine_loads_a_folder,
    "weight copies": engine_follows_another,
}
