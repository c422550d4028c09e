"""A plan as text for people: 80 columns, no colour."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rlcli.recipe.engine_layouts import whole_sequences
from rlcli.recipe.graph import graphs_of, made_keys, producers, reasons_to_drop, stages
from rlcli.recipe.introspection.readable import by_label
from rlcli.recipe.lengths import scores_sequences
from rlcli.topology.drawing import draw, ranks_text, weights_text
from rlcli.topology.groups import process_groups
from rlcli.topology.layout_text import layout_lines, message_lines
from rlcli.topology.memory_text import memory_lines, storage_lines
from rlcli.topology.overlap import Lane, Timetable
from rlcli.topology.text_format import WIDTH, aligned, number, wrapped
from rlcli.units import count

if TYPE_CHECKING:
    from rlcli.recipe.parsing.tree import KeyPath
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Call
    from rlcli.topology.report import Plan


def plan_lines(
    plan: Plan,
    graph: bool = False,
    timeline: bool = False,
    memory: bool = False,
    layouts: bool = False,
) -> Iterator[str]:
    """The plan on one screen: topology, graph, batch, memory, disk. With `graph`, what each call
    reads and makes; with `timeline`, a few steps in time; with `memory`, what each role holds; with
    `layouts`, what other layouts would take and send."""
    table = Timetable(plan.recipe, plan.topology)
    yield from _heading(plan)
    yield ""
    yield from draw(plan.recipe, plan.topology)
    yield from _outside_ranks(plan)
    yield ""
    yield from _weights(plan)
    yield ""
    yield from _graph(plan) if graph else _order(plan)
    if timeline:
        yield from _timetable(table)
    yield from _overlaps(table)
    yield ""
    yield from _step(plan)
    yield ""
    yield from memory_lines(plan, memory)
    yield from layout_lines(plan) if layouts else message_lines(plan)
    yield from storage_lines(plan)
    shown = {"--graph": graph, "--timeline": timeline, "--memory": memory, "--layouts": layouts}
    folded = [option for option, is_shown in shown.items() if not is_shown]
    if folded:
        yield f"in detail: {' '.join(folded)}"


def _heading(plan: Plan) -> Iterator[str]:
    """The recipe and its cluster, and what must be there before it runs."""
    topology = plan.topology
    cluster = f"{count(topology.nodes, 'node')} x {count(topology.devices_per_node, 'device')}"
    yield f"{plan.recipe.name} · {cluster} ({topology.device}) · launch {topology.launch}"
    if plan.runs_first:
        yield "runs after " + " → ".join(plan.runs_first) + ", whose results it starts from"
    for problem in plan.missing:
        yield from wrapped(f"{problem.where}: {problem.what} here: {problem.hint}", rest="  ")


def _step(plan: Plan) -> Iterator[str]:
    """The samples of a step, and how they are divided."""
    first, *others = (*plan.topology.batch.lines(), *_micro_batch_lines(plan))
    yield f"step: {first}"
    for line in others:
        yield from wrapped(line, first="  ", rest="    ")


def _running_graphs(plan: Plan) -> Iterator[tuple[KeyPath, Mapping[str, Call]]]:
    """The graphs that have calls, and rows to run them on."""
    for path, calls, dataset in graphs_of(plan.recipe):
        if calls and dataset is not None:
            yield path, calls


def _order(plan: Plan) -> Iterator[str]:
    """The calls of each graph in one line."""
    for path, calls in _running_graphs(plan):
        order = " → ".join(", ".join(stage) for stage in stages(calls))
        yield from wrapped(f"{_title(path)}: {order}", rest="  ")


def _graph(plan: Plan) -> Iterator[str]:
    """Each graph as a table with the keys of its calls."""
    unread: list[str] = []
    for path, calls in _running_graphs(plan):
        if path != ("graph",):
            yield ""
        yield _title(path)
        yield from _calls(plan.resolved, calls, path)
        unread += [key for key in producers(calls) if key not in _read(calls)]
    yield "  keys are as the interfaces declare them, except where a file:line is shown"
    if unread:
        yield "  (key): not read by any other call"


def _title(path: KeyPath) -> str:
    return "graph" if path == ("graph",) else "evaluation"


def _outside_ranks(plan: Plan) -> Iterator[str]:
    """Servers and pools."""
    for group in process_groups(plan.recipe, plan.topology):
        if group.kind == "ranks":
            continue
        members = len(group.nodes) // group.processes_of_each
        is_server = group.kind == "server"
        processes = count(members, "server") if is_server else count(members, "process", "es")
        first, last = min(group.nodes), max(group.nodes)
        nodes = f"node {first}" if first == last else f"nodes {first}-{last}"
        spread = f", each over {group.processes_of_each}" if group.processes_of_each > 1 else ""
        yield f"{group.name}: {processes} on {nodes}{spread}, outside the ranks"


def _weights(plan: Plan) -> Iterator[str]:
    from rlcli.topology.report import parameters_of

    parameters = {
        role: number(weights) for role, weights in parameters_of(plan.recipe, plan.sizes).items()
    }
    rows = [
        [
            role,
            ranks_text(plan.topology.placement(role).ranks),
            parameters.get(role, "?"),
            weights_text(section),
        ]
        for role, section in plan.recipe.models.items()
        if section.has_weights
    ]
    yield from aligned(["weights", "ranks", "params", "from"], rows, right=(2,))


def _calls(resolved: Resolved, calls: Mapping[str, Call], path: KeyPath) -> Iterator[str]:
    """The calls in order, each with its keys; those that a layer lists are shown with their
    place."""
    order: list[str] = []
    rows: list[list[str]] = []
    for position, stage in enumerate(stages(calls), start=1):
        for name in stage:
            call = calls[name]
            order.append(name)
            rows.append([str(position), name, f"{call.model}.{call.call}", call.interface.type])
    head, *lines = aligned(["", "call", "model", "interface"], rows)
    yield head
    read = _read(calls)
    for line, name in zip(lines, order, strict=True):
        yield line
        yield from _keys_of_call(calls[name], read, resolved, (*path, name))


def _keys_of_call(
    call: Call, read: Collection[str], resolved: Resolved, path: KeyPath
) -> Iterator[str]:
    """The keys that a call reads and makes, and why it drops samples; `read`: the keys that some
    call reads."""
    yield from _keys("reads", call.inputs, resolved, (*path, "inputs"))
    outputs = [key if key in read else f"({key})" for key in made_keys(call)]
    yield from _keys("makes", outputs, resolved, (*path, "outputs"))
    if reasons := reasons_to_drop(call):
        yield f"{'':5}drops  samples: {', '.join(reasons)}"


def _timetable(table: Timetable) -> Iterator[str]:
    """A few steps in time."""
    lanes = {name: _lanes_text(lanes) for name, lanes in table.places.items()}
    lanes_width = max(len("ranks"), *map(len, lanes.values()))
    name_width = max(map(len, table.calls))
    turns = table.turns()
    yield ""
    yield "timeline: one column per turn; digits are step numbers"
    for name in sorted(table.calls, key=lambda name: _first_lane(table.places[name])):
        cells = " ".join("·" if step is None else str(step % 10) for step in turns[name])
        yield f"  {lanes[name]:{lanes_width}}  {name:{name_width}}  {cells}"[:WIDTH].rstrip()
    yield "  assuming 4 turns to generate, 2 to train, 1 for other calls"


def _overlaps(table: Timetable) -> Iterator[str]:
    """Which calls run at the same time as others."""
    for steps_before, when in enumerate(("the same step", "the step before")):
        for name, others in table.overlaps(steps_before).items():
            yield from wrapped(
                f"{name} overlaps with {', '.join(others)} of {when}", first="  ", rest="    "
            )


def _lanes_text(lanes: Iterable[Lane]) -> str:
    """Ranks, or the name of a pool."""
    pools = [lane for lane in lanes if isinstance(lane, str)]
    ranks = [lane for lane in lanes if isinstance(lane, int)]
    return pools[0] if pools else ranks_text(sorted(ranks))


def _first_lane(lanes: Iterable[Lane]) -> tuple[bool, Lane]:
    """A key to sort by: ranks in their order, then pools."""
    return min((isinstance(lane, str), lane) for lane in lanes)


def _read(calls: Mapping[str, Call]) -> set[str]:
    return {key for call in calls.values() for key in call.inputs}


def _keys(word: str, keys: Sequence[str], resolved: Resolved, path: KeyPath) -> Iterator[str]:
    mark = resolved.origin(path)
    if keys:
        text = ", ".join(keys) + ("" if mark.is_default else f"  # {by_label(str(mark), resolved)}")
        lead = f"{'':5}{word}  "
        yield from wrapped(text, first=lead, rest=" " * len(lead))


def _micro_batch_lines(plan: Plan) -> Iterator[str]:
    from rlcli.topology.memory import micro_batches_of

    reasons = _whole_sequences(plan)
    yield _lengths_line(plan, is_shared=None in reasons.values())
    training = {name: call for name, call in plan.recipe.graph.items() if call.call == "train_step"}
    sizes = {
        name: micro_batches_of(plan.recipe, plan.topology, call) for name, call in training.items()
    }
    for largest in dict.fromkeys(sizes.values()):
        names = ", ".join(name for name, of_call in sizes.items() if of_call == largest)
        tokens, number_of_batches = largest
        batches = count(number_of_batches, "micro-batch", "es")
        yield f"{names}: {batches} of ≤ {tokens} tokens per update and rank"
    for reason in dict.fromkeys(filter(None, reasons.values())):
        names = ", ".join(name for name, of_call in reasons.items() if of_call == reason)
        yield f"{names}: common prefixes are computed for each sequence, as {reason}"


def _lengths_line(plan: Plan, is_shared: bool) -> str:
    lengths = plan.memory.lengths
    bound = "assumed" if lengths.assumed else "at most"
    if not lengths.prompt:
        once = ", common prefixes computed once" if is_shared else ""
        return f"sequences {bound} {lengths.sequence} tokens{once}"
    once = " (computed once)" if is_shared else ""
    response = lengths.sequence - lengths.prompt
    sizes = f"{lengths.prompt} + {response} = {lengths.sequence} tokens"
    return f"sequences {bound} {sizes}, prompt{once} and response"


def _whole_sequences(plan: Plan) -> dict[str, str | None]:
    """Each call that reads groups of sequences → why it computes what they have in common for each
    of them; None: once."""
    from rlcli.topology.lengths import group_size

    if group_size(plan.recipe) == 1:
        return {}
    meshes = {role: plan.topology.placement(role).mesh for role in plan.recipe.models}
    return {
        name: whole_sequences(plan.recipe, call.model, meshes[call.model])
        for name, call in plan.recipe.graph.items()
        if scores_sequences(plan.recipe, call)
    }
