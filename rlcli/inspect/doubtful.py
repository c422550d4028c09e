"""Valid recipe settings that are rarely intended: warnings, not errors. Settings without effect are
refused, in `rlcli.recipe.validation.semantics.effects`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlcli.api.dataflow import weight_writers
from rlcli.api.key_meaning import REFERENCE
from rlcli.inspect.processor import slow_dtypes
from rlcli.recipe.components import argument_of, declared
from rlcli.recipe.graph import train_graph
from rlcli.recipe.lengths import default_generation, generation_of, written_beyond
from rlcli.recipe.parsing.tree import KeyPath, dotted
from rlcli.recipe.role_sources import weights_origin
from rlcli.recipe.warm_start import warm_starts

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Call, Recipe

USUAL_WEIGHTS = 0.02
"""Standard deviation of the weights of most language models, at first and later."""
OF_PENALTY = ("kl_estimator", "kl_gradient")
"""Arguments of what takes a KL penalty into its loss."""
EVALUATION: KeyPath = ("train", "eval", "graph")
STOPS = "stop_token_ids"
OF_EPISODES = ("max_turns", "turn_tokens")
"""Arguments of what generates in several turns."""


def recipe_warnings(resolved: Resolved) -> Iterator[str]:
    """Warnings, each with its place. Nothing is loaded for them."""
    yield from slow_dtypes(resolved)
    yield from contradictions(resolved)


def contradictions(resolved: Resolved) -> Iterator[str]:
    """Settings that do not fit together, whatever machine the recipe runs on."""
    yield from _samplers_left_behind(resolved)
    yield from _endless_warmups(resolved)
    yield from _heads_that_never_learned(resolved)
    yield from _groups_of_equal_responses(resolved)
    yield from _unequal_temperatures(resolved)
    yield from _steps_beyond_weights(resolved)
    yield from _references_that_learn(resolved)
    yield from _penalties_that_teach_nothing(resolved)
    yield from _rows_of_both(resolved)
    yield from _episodes_of_one_turn(resolved)
    yield from _steps_that_are_not_traced(resolved)
    yield from _evaluations_left_behind(resolved)


def _samplers_left_behind(resolved: Resolved) -> Iterator[str]:
    """A role that generates, began as a copy of one that is trained, and never gets its weights."""
    recipe = resolved.recipe
    writers = weight_writers(train_graph(recipe))
    for name, call in recipe.graph.items():
        source = recipe.models[call.model].init
        if call.call == "generate" and call.model not in writers and source in writers:
            location = resolved.origin(("graph", name, "model"))
            yield (
                f"{location}: each step {name} samples with the weights that {call.model} began "
                f"with, while {source} is trained; "
                f"graph.{writers[source][0]}.hooks.copy_to={call.model} makes it follow"
            )


def _endless_warmups(resolved: Resolved) -> Iterator[str]:
    """A learning rate that is still rising when the run ends."""
    steps = resolved.recipe.train.steps
    for name in resolved.recipe.trained_roles:
        warmup = resolved.recipe.models[name].engine.args.get("warmup_steps")
        if steps is not None and isinstance(warmup, int) and warmup >= steps > 1:
            location = resolved.origin(("models", name, "backend", "args", "warmup_steps"))
            setting = f"models.{name}.backend.args.warmup_steps={steps // 10}"
            yield (
                f"{location}: the learning rate of {name} rises for {warmup} steps, and the run "
                f"has {steps}; {setting} leaves time to learn"
            )


def _heads_that_never_learned(resolved: Resolved) -> Iterator[str]:
    """A role whose values nothing trains, here or where its weights come from."""
    recipe = resolved.recipe
    starts = {start.role: start for start in warm_starts(resolved)}
    for name, role in recipe.models.items():
        start = starts.get(weights_origin(recipe, name))
        if start is None or role.head != "value" or name in recipe.changing_roles:
            continue
        source, key = start.source.recipe, "path" if name == start.role else "init"
        if source.models[start.source_role].head != "value":
            yield (
                f"{resolved.origin(('models', name, key))}: {name} gives every text "
                f"the value 0: {source.name} trains a model that predicts tokens, "
                "and nothing here trains the head; start from a recipe with head: value"
            )


def _groups_of_equal_responses(resolved: Resolved) -> Iterator[str]:
    """Several responses to a prompt, each of the most likely tokens."""
    recipe = resolved.recipe
    for name, call in recipe.graph.items():
        settings = generation_of(recipe, call) if call.call == "generate" else {}
        count = settings.get("responses_per_prompt", 1)
        if count > 1 and (settings["greedy"] or settings["top_k"] == 1):
            setting = "greedy: true" if settings["greedy"] else "top_k: 1"
            yield (
                f"{resolved.origin(('graph', name, 'interface'))}: the {count} responses of {name} "
                f"to a prompt are all the same, with {setting}: comparing them shows nothing; "
                "sample, or set responses_per_prompt to 1"
            )


def _unequal_temperatures(resolved: Resolved) -> Iterator[str]:
    """Log-probs of responses at another temperature than the one at which they were sampled."""
    recipe = resolved.recipe
    calls = {
        name: call for name, call in recipe.graph.items() if recipe.models[call.model].has_weights
    }
    sampled_at = {
        generation_of(recipe, call)["temperature"]
        for call in calls.values()
        if call.call == "generate"
    }
    for name, call in calls.items():
        argument, scored_at = _scored_at(recipe, call)
        if scored_at is not None and len(sampled_at) == 1 and scored_at not in sampled_at:
            yield (
                f"{resolved.origin(('graph', name, 'interface'))}: {name} computes log-probs at "
                f"temperature {scored_at}, of responses sampled at {min(sampled_at)}; "
                f"graph.{name}.interface.args.{argument}={min(sampled_at)} makes them equal"
            )


def _scored_at(recipe: Recipe, call: Call) -> tuple[str, Any]:
    """The argument with the temperature at which a call computes log-probs of responses, its own or
    one of its settings of generation, and that temperature; None if it has none."""
    if call.call == "generate" or written_beyond(call) is not None:
        return "", None
    if default_generation(call.interface.type) is not None:
        return "generation.temperature", generation_of(recipe, call)["temperature"]
    return "temperature", argument_of("interfaces", call.interface, "temperature")


def _steps_beyond_weights(resolved: Resolved) -> Iterator[str]:
    """A learning rate with which one step of AdamW, which moves each weight by up to that rate,
    replaces what the weights were."""
    for name in resolved.recipe.trained_roles:
        role = resolved.recipe.models[name]
        lr = argument_of("backends", role.engine, "lr")
        size = (role.scratch or {}).get("initializer_range", USUAL_WEIGHTS)
        if isinstance(lr, int | float) and isinstance(size, int | float) and lr >= size:
            yield (
                f"{resolved.origin(('models', name, 'backend', 'args', 'lr'))}: lr {lr:g} moves "
                f"each weight of {name} by up to {lr:g} a step, and weights are about {size:g} in "
                f"size; one step replaces the model: try {size / 20:.0e}"
            )


def _steps_that_are_not_traced(resolved: Resolved) -> Iterator[str]:
    """Steps for torch's profiler that the run does not have."""
    steps, traced = resolved.recipe.train.steps, resolved.recipe.log.profiled_steps
    if steps is not None and traced and traced[-1] > steps:
        yield (
            f"{resolved.origin(('log', 'profile'))}: step {traced[-1]} is to be traced, and the "
            f"run has {steps}; log.profile={steps} traces its last step"
        )


def _references_that_learn(resolved: Resolved) -> Iterator[str]:
    """Log-probs of a reference that are those of a role which is trained here; one that follows at
    a distance, by `copy_to`, is no mistake."""
    recipe = resolved.recipe
    for name, call in recipe.graph.items():
        if REFERENCE in call.outputs and call.model in recipe.trained_roles:
            location = resolved.origin(("graph", name, "model"))
            yield (
                f"{location}: {name} takes {call.model}, which is trained, as the reference: the "
                "policy is at no distance from itself; name a role of its own, with "
                f"{{init: {call.model}}}"
            )


def _penalties_that_teach_nothing(resolved: Resolved) -> Iterator[str]:
    """A KL penalty in the loss whose gradient is 0 on average."""
    for name, call in resolved.recipe.graph.items():
        settings = [argument_of("interfaces", call.interface, argument) for argument in OF_PENALTY]
        if call.call == "train_step" and settings == ["k1", "naive"]:
            yield (
                f"{resolved.origin(('graph', name, 'interface'))}: the KL penalty of {name} has no "
                "effect: with kl_gradient: naive the gradient of k1 is 0 on average; leave out "
                "kl_gradient"
            )


def _rows_of_both(resolved: Resolved) -> Iterator[str]:
    """Rows that are trained on and evaluated."""
    recipe = resolved.recipe
    trained, evaluated = recipe.train.dataset, recipe.train.eval.dataset
    if evaluated is None or trained not in recipe.datasets or evaluated not in recipe.datasets:
        return
    if recipe.datasets[trained] == recipe.datasets[evaluated]:
        yield (
            f"{resolved.origin(('train', 'eval', 'dataset'))}: the evaluation has the rows that "
            "are trained on, so that it cannot show what is learned by heart; keep some rows apart "
            "for it"
        )


def _episodes_of_one_turn(resolved: Resolved) -> Iterator[str]:
    """Episodes of several turns whose first turn may take all of their tokens."""
    recipe = resolved.recipe
    for name, call in recipe.graph.items():
        turns, of_turn = (
            argument_of("interfaces", call.interface, argument) for argument in OF_EPISODES
        )
        if call.call != "generate" or not isinstance(turns, int) or not isinstance(of_turn, int):
            continue
        of_episode = generation_of(recipe, call)["max_new_tokens"]
        if turns > 1 and of_turn >= of_episode:
            yield (
                f"{resolved.origin(('graph', name, 'interface'))}: a turn of {name} may take "
                f"{of_turn} tokens, and an episode {of_episode} in all its {turns} turns, with "
                "what the environment writes; raise generation.max_new_tokens, or lower "
                "turn_tokens"
            )


def _evaluations_left_behind(resolved: Resolved) -> Iterator[str]:
    """Evaluations in another environment than training, or whose responses do not end where those
    of training do, because a layer has changed training alone; what that layer says of evaluations,
    or one above it, is meant."""
    recipe = resolved.recipe
    samplers = {call.model: name for name, call in recipe.graph.items() if call.call == "generate"}
    for name, call in recipe.train.eval.graph.items():
        if call.call == "generate" and call.model in samplers:
            yield from _in_another_environment(resolved, name, samplers[call.model])
            yield from _without_stops(resolved, name, samplers[call.model])


def _in_another_environment(resolved: Resolved, evaluation: str, sampler: str) -> Iterator[str]:
    recipe = resolved.recipe
    argument, environment = _environment_of(recipe.train.eval.graph[evaluation])
    _, trained_in = _environment_of(recipe.graph[sampler])
    if not environment or not trained_in or environment == trained_in:
        return
    paths = [(*args, argument) for args in _arguments_of(evaluation, sampler)]
    if _is_behind(resolved, *paths):
        yield (
            f"{resolved.origin(paths[0])}: {evaluation} plays in {environment}, while {sampler} "
            f"trains in {trained_in}; {dotted(paths[0])}={trained_in} makes them equal"
        )


def _environment_of(call: Call) -> tuple[str, Any]:
    """The argument that names the environment in which a call plays, and its value; empty and None
    if it plays in none."""
    name = (declared("interfaces", call.interface.type, "ENVIRONMENT") or {}).get("name", "")
    return name, argument_of("interfaces", call.interface, name)


def _without_stops(resolved: Resolved, evaluation: str, sampler: str) -> Iterator[str]:
    recipe = resolved.recipe
    calls = (recipe.train.eval.graph[evaluation], recipe.graph[sampler])
    stops, trained_with = (set(generation_of(recipe, call)[STOPS]) for call in calls)
    of_section = ("generation", STOPS)
    paths = [(*args, *of_section) for args in _arguments_of(evaluation, sampler)]
    if trained_with - stops and _is_behind(resolved, *paths, of_section):
        yield (
            f"{resolved.origin((*EVALUATION, evaluation))}: responses of {evaluation} do not end "
            f"at the tokens {sorted(trained_with - stops)}, as those of {sampler} do; "
            f"{dotted(paths[0])}={sorted(stops | trained_with)} ends them there"
        )


def _arguments_of(evaluation: str, sampler: str) -> list[KeyPath]:
    """The keys of the arguments of both calls."""
    calls = ((*EVALUATION, evaluation), ("graph", sampler))
    return [(*call, "interface", "args") for call in calls]


def _is_behind(resolved: Resolved, path: KeyPath, *of_training: KeyPath) -> bool:
    """Whether it is set by no layer, or by one below that which sets the key of training."""
    return _height(resolved, path) < max(_height(resolved, key) for key in of_training)


def _height(resolved: Resolved, path: KeyPath) -> int:
    """The number of the layer that sets it, from the lowest; the command line is above all."""
    mark = resolved.origin(path)
    if mark.is_default:
        return -1
    files = [layer.file for layer in resolved.layers]
    return files.index(mark.file) if mark.file in files else len(files)
