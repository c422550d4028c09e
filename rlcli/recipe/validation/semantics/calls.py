"""Checks that calls connect by their keys, and that each is supported by its interface,
role and backend."""

from __future__ import annotations

from rlcli.api.declared_keys import DeclaredKeys, largest_number
from rlcli.api.default_backends import TRAINED, WEIGHTLESS
from rlcli.recipe.abilities import VERBS, ability_for
from rlcli.recipe.components import (
    argument_of,
    complete_arguments,
    dataset_keys,
    declared,
    declared_of_call,
    has_method,
    lacks_method,
)
from rlcli.recipe.graph import (
    Graph,
    GraphProblem,
    available_keys,
    calls_of,
    graph_problems,
    graphs_of,
)
from rlcli.recipe.lengths import responses_of
from rlcli.recipe.parsing.removal import removed_at
from rlcli.recipe.parsing.tree import KeyPath, dotted
from rlcli.recipe.schema import WEIGHTS, Call
from rlcli.recipe.validation.semantics.environments import check_environments
from rlcli.recipe.validation.semantics.hooks import check_hooks, roles_and_methods
from rlcli.recipe.validation.semantics.keys import (
    check_declared,
    check_effects,
    check_made,
    check_read,
    check_renames,
    check_written,
    is_listed,
    place_of_key,
    removed_maker,
)
from rlcli.recipe.validation.semantics.lengths import RESPONSES
from rlcli.recipe.validation.semantics.models import sources
from rlcli.recipe.validation.semantics.notes import Notes, in_words
from rlcli.recipe.validation.semantics.removals import without_role
from rlcli.recipe.validation.semantics.routing import check_routing
from rlcli.recipe.validation.semantics.row_keys import check_pairs, check_rows
from rlcli.registry import COMPUTED
from rlcli.spelling import nearest_name

MODELLESS_CALLS = ("inference", "evaluate")
"""Calls that an interface may answer without a model, unless it declares the head that it needs."""


def check(notes: Notes) -> None:
    training, evaluation = graphs_of(notes.recipe)
    _graph(notes, training, ("train", "dataset"))
    if evaluation.dataset is not None:
        _graph(notes, evaluation, ("train", "eval", "dataset"))
    if not notes.recipe.graph:
        notes.note("R39", "the graph has no calls", ("graph",))
    _strays(notes)
    _inabilities(notes)
    _shared_interfaces(notes)


def _strays(notes: Notes) -> None:
    """Report calls of roles that do not exist; those of a removed role as one problem."""
    for role, paths in notes.strays.items():
        hint = None
        if removed_at(notes.problems.written, ("models", role)) is not None:
            hint, paths = without_role(notes, role, paths), paths[:1]
            notes.removed.add(role)
        for path in paths:
            notes.unknown("role", role, ("models",), (*path, "model"), hint)


def _shared_interfaces(notes: Notes) -> None:
    """Calls of the same role and interface share its state, so they need the same arguments. If
    nothing is trained and no state is kept, each call may have its own."""
    sharing: dict[tuple[str, str], list[str]] = {}
    for name, call in notes.recipe.graph.items():
        sharing.setdefault((call.model, call.interface.type), []).append(name)
    for (role, interface), names in sharing.items():
        trains = any(notes.recipe.graph[name].call == "train_step" for name in names)
        if trains or not lacks_method(interface, "state_dict"):
            for name in names[1:]:
                _same_arguments(notes, role, interface, names[0], name)


def _same_arguments(notes: Notes, role: str, interface: str, first: str, second: str) -> None:
    components = [notes.recipe.graph[name].interface for name in (first, second)]
    args = [complete_arguments("interfaces", interface, each.args) for each in components]
    for argument in sorted({*components[0].args, *components[1].args}):
        if args[0].get(argument) == args[1].get(argument):
            continue
        values = [_shown(argument_of("interfaces", each, argument)) for each in components]
        message = (
            f"{first} and {second} share the interface {interface} of the role {role}, but "
            f"{argument} is {values[0]} in one and {values[1]} in the other"
        )
        _different_arguments(notes, argument, message, [second, first])


def _different_arguments(notes: Notes, argument: str, message: str, calls: list[str]) -> None:
    paths = [("graph", name, "interface", "args", argument) for name in calls]
    hint = f"set {argument} to the same value for both"
    needs = [*roles_and_methods(calls), *paths]
    notes.note("R71", message, notes.first_set(*paths), hint, needs=needs)


def _shown(value: object) -> str:
    """The value of an argument, in a message."""
    return "its default" if value is COMPUTED else repr(value)


def _graph(notes: Notes, graph: Graph, dataset_path: KeyPath) -> None:
    for name, call in graph.calls.items():
        _call(notes, call, graph.at(name))
        _group(notes, graph, name)
    if notes.unresolved.about_entries(graph.path):
        return
    _links(notes, graph, dataset_path)
    for name in graph.calls:
        check_read(notes, graph, name)
        check_effects(notes, graph, name)
    check_routing(notes, graph)
    check_environments(notes, graph)


def _links(notes: Notes, graph: Graph, dataset_path: KeyPath) -> None:
    """Check that each key is made once, by a call or the dataset, and not in a circle."""
    calls, dataset = graph.calls, graph.dataset
    assert dataset is not None
    basis = [graph.at(name, field) for name in calls for field in ("outputs", "output_key_remap")]
    basis += [dataset_path, ("datasets", dataset, "type")]
    unmade: dict[str, list[str]] = {}
    for problem in graph_problems(calls, dataset_keys(notes.recipe.datasets, dataset)):
        is_declared = not is_listed(notes, graph.at(problem.call), "inputs")
        if problem.is_unmade and problem.key and is_declared:
            unmade.setdefault(problem.key, []).append(problem.call)
        else:
            _linked_wrongly(notes, graph, problem, basis)
    of_rows = check_rows(notes, graph, unmade, basis)
    check_pairs(notes, calls, dataset)
    others = {key: readers for key, readers in unmade.items() if key not in of_rows}
    check_made(notes, graph, others, basis)


def _linked_wrongly(
    notes: Notes, graph: Graph, problem: GraphProblem, basis: list[KeyPath]
) -> None:
    readers = [*graph.calls] if problem.key is None else [problem.call]
    needs = [*basis, *(graph.at(name, "inputs") for name in readers)]
    where = _place(notes, graph, problem)
    hint = _hint_on_key(notes, graph, problem, problem.key) if problem.key else None
    notes.note("R71", problem.fault, where, hint, needs=needs, same=problem.key)


def _hint_on_key(notes: Notes, graph: Graph, problem: GraphProblem, key: str) -> str | None:
    if problem.is_unmade and (removed := removed_maker(notes, graph, key)):
        return removed
    near = nearest_name(key, available_keys(notes.recipe, graph))
    if near and near != key:
        return f"did you mean {near}?"
    keys = dataset_keys(notes.recipe.datasets, graph.dataset)
    return f"rows of {graph.dataset} have {', '.join(keys)}" if keys and problem.is_unmade else None


def _place(notes: Notes, graph: Graph, problem: GraphProblem) -> KeyPath:
    path = graph.at(problem.call)
    if problem.key is None:
        return path
    call = graph.calls[problem.call]
    if problem.key in call.inputs:
        return place_of_key(notes, call, path, "inputs", problem.key)
    own_names = {call.output_key_remap.get(key, key): key for key in call.outputs}
    return place_of_key(notes, call, path, "outputs", own_names.get(problem.key, ""))


def _call(notes: Notes, call: Call, path: KeyPath) -> None:
    kind = (*path, "interface", "type")
    if lacks_method(call.interface.type, call.call):
        message = f"the interface {call.interface.type} has no {call.call}"
        hint = f"rlcli show interface {call.interface.type} lists what it does"
        notes.note("R71", message, (*path, "call"), hint, needs=[kind])
    check_declared(notes, call, path)
    check_written(notes, call, path)
    check_renames(notes, call, path)
    if call.model not in notes.recipe.models:
        notes.strays.setdefault(call.model, []).append(path)
    else:
        _role(notes, call, path)
    check_hooks(notes, call, path)


def _role(notes: Notes, call: Call, path: KeyPath) -> None:
    """Check that the role named by a call can perform it."""
    role = notes.recipe.models[call.model]
    backend = role.engine.type
    head = _needed_head(call)
    if not role.has_weights and (head is not None or call.call not in MODELLESS_CALLS):
        # otherwise the error is the role's own
        if declared("backends", backend, "RUNS_MODEL") is False:
            _without_weights(notes, call, path)
        return
    if declared("backends", backend, "POOLED"):
        _pooled(notes, call, path)
        return
    if head not in (None, role.head):
        _other_head(notes, call, path, role.head, head)
    _able(notes, call, path, backend)


def _identity(path: KeyPath) -> list[KeyPath]:
    """The values that say what a call is: its method, its role and its interface."""
    return [(*path, "call"), (*path, "model"), (*path, "interface", "type")]


def _other_head(notes: Notes, call: Call, path: KeyPath, head: str, needed: str | None) -> None:
    name = call.model
    key = notes.key(("models", name))
    message = (
        f"{key} has the head {head}; {dotted(path)} ({call.interface.type}) needs the head {needed}"
    )
    hint = f"{key}.head={needed}"
    others = [
        dotted(other_path)
        for other_path, other in calls_of(notes.recipe)
        if (other.model, _needed_head(other)) == (name, head)
    ]
    if others:
        need = "need" if others[1:] else "needs"
        hint = f"{in_words(others)} {need} the head {head}: choose another interface or role"
    needs = _identity(path)
    notes.note_once(("head", name), "R71", message, ("models", name, "head"), hint, needs)


def _without_weights(notes: Notes, call: Call, path: KeyPath) -> None:
    key = notes.key(("models", call.model))
    message = f"{key} has no weights, which {dotted(path)} ({call.call}) needs"
    hint = f"give one of {', '.join(f'{key}.{source}' for source in WEIGHTS)}"
    needs = [*sources(call.model), (*path, "call"), (*path, "interface", "type")]
    notes.note_once(("weights", call.model), "R39", message, ("models", call.model), hint, needs)


def _able(notes: Notes, call: Call, path: KeyPath, backend: str) -> None:
    """Check that a backend can do what a call requires; `_inabilities` reports what it cannot."""
    ability = ability_for(call)
    needs = [(*path, "call"), (*path, "model")]
    if ability is None or any(map(notes.is_doubtful, needs)):
        return
    if declared("backends", backend, ability) is False:
        notes.unable.setdefault(call.model, {})[path] = VERBS[ability]


def _inabilities(notes: Notes) -> None:
    """Report each backend that cannot do what calls ask of it, once."""
    for name, verbs in notes.unable.items():
        section = ("models", name, "backend")
        backend, key = notes.recipe.models[name].engine, notes.key(section)
        asked = in_words(map(dotted, verbs))
        ask = "ask" if len(verbs) > 1 else "asks"
        message = (
            f"the backend {backend.type} of {key.removesuffix('.backend')} cannot "
            f"{' or '.join(dict.fromkeys(verbs.values()))}, which {asked} {ask} of it"
        )
        notes.note("R71", message, (*section, "type"), f"for example {key}={TRAINED}")
        notes.unresolved.values.add((*section, "args"))  # they would be those of another
        notes.problems.withdraw((*notes.written(section), "args"))


def _needed_head(call: Call) -> str | None:
    """The head of the model that a call needs; None if it may do without a model."""
    if call.call == "generate":
        return "lm"
    heads = declared_of_call("HEAD", call)
    return heads.needed[0] if heads is not None and heads.needed else None


def _pooled(notes: Notes, call: Call, path: KeyPath) -> None:
    """A process of a pool may be replaced at any time,
    so its results must depend only on its inputs."""
    backend, interface = ("models", call.model, "backend", "type"), call.interface.type
    if call.call != "inference":
        problem = f"{dotted(path)} ({call.call}) cannot run in a pool, which does inference"
    elif has_method("interfaces", interface, "state_dict"):
        problem = f"{dotted(path)} cannot run in a pool: the interface {interface} keeps a state"
    else:
        return
    hint = f"{notes.key(backend[:3])}={WEIGHTLESS}"
    notes.note("R71", problem, backend, hint, needs=_identity(path))


def _group(notes: Notes, graph: Graph, name: str) -> None:
    """An interface whose class declares `NEEDS_GROUP` compares the responses to a prompt."""
    call = graph.calls[name]
    sizes = declared_of_call("NEEDS_GROUP", call)
    if sizes is None or not sizes.needed:
        return
    needed = largest_number(sizes)
    why = _setting_of_group(notes, graph.at(name, "interface", "args"), sizes, needed)
    needs = f"compares the responses to one prompt{why} and needs at least {needed}"
    hint = f"{dotted(RESPONSES)}={max(needed, 8)}"
    for generating, responses in _numbers_of_responses(notes, graph).items():
        if responses < needed:
            of_call = graph.at(generating, "interface", "args", *RESPONSES)
            message = f"{call.interface.type} {needs}, but {generating} makes {responses}"
            where = notes.first_set(of_call, RESPONSES)
            basis = [*_basis_of_group(graph, name, sizes), graph.at(generating, "call"), of_call]
            notes.note("R49", message, where, hint, needs=basis)


def _setting_of_group(notes: Notes, args: KeyPath, sizes: DeclaredKeys, needed: int) -> str:
    """` (best, mine.yaml:3:8)`, if an argument decides how many responses a call needs."""
    setting = (*args, sizes.due_to.get(str(needed), ""))
    return f" ({setting[-1]}, {notes.mark(setting)})" if notes.is_set(setting) else ""


def _basis_of_group(graph: Graph, name: str, sizes: DeclaredKeys) -> list[KeyPath]:
    """The values that say how many responses to a prompt a call needs."""
    arguments = [graph.at(name, "interface", "args", key) for key in sizes.due_to.values()]
    return [graph.at(name, "call"), graph.at(name, "interface", "type"), *arguments]


def _numbers_of_responses(notes: Notes, graph: Graph) -> dict[str, int]:
    """Call that generates → how many responses to each prompt."""
    return {
        name: responses_of(notes.recipe, call)
        for name, call in graph.calls.items()
        if call.call == "generate"
    }
