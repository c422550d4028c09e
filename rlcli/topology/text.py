"""A plan as text for people: 80 columns, no colour."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlcli.recipe.call_keys import graphs_of
from rlcli.recipe.graph import made_keys, producers, reasons_to_drop, stages
from rlcli.recipe.introspection.readable import by_label
from rlcli.recipe.layouts import mesh_overrides, whole_sequences
from rlcli.recipe.lengths import scores_sequences
from rlcli.topology.drawing import draw, ranks_text, weights_text
from rlcli.topology.groups import process_groups
from rlcli.topology.layouts import (
    PlannedLayout,
    best_layout,
    planned_layout,
    planned_layouts,
    trained_calls,
)
from rlcli.topology.memory import GIB, Peak
from rlcli.topology.overlap import Timetable
from rlcli.topology.servers import BYTES_PER_SECOND

if TYPE_CHECKING:
    from rlcli.recipe.mesh import Mesh
    from rlcli.recipe.parsing.tree import KeyPath
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Call
    from rlcli.recipe.servers import PlacedServer
    from rlcli.topology.memory import RoleMemory
    from rlcli.topology.report import Plan
    from rlcli.topology.servers import RoleServers

WIDTH = 80
SHOWN_SERVERS = 4
"""Servers of a role whose devices are listed."""
_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
UNITS = ((1 << 40, "TiB"), (GIB, "GiB"), (1 << 20, "MiB"))


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
    topology, recipe = plan.topology, plan.recipe
    cluster = f"{_count(topology.nodes, 'node')} x {_count(topology.devices_per_node, 'device')}"
    yield f"{recipe.name} · {cluster} ({topology.device}) · launch {topology.launch}"
    if plan.runs_first:
        yield "runs after " + " → ".join(plan.runs_first) + ", whose results it starts from"
    for problem in plan.missing:
        text = f"{problem.where}: {problem.what} here: {problem.hint}"
        yield from _wrapped(text, rest="  ")
    yield ""
    yield from draw(recipe, topology)
    yield from _beside_ranks(plan)
    yield ""
    yield from _weights(plan)
    yield ""
    yield from (_graph(plan) if graph else _order(plan))
    yield from (_timetable(plan) if timeline else ())
    yield from _overlaps(Timetable(plan.recipe, topology))
    yield ""
    first, *others = (*topology.batch.lines(), *_micro_batch_lines(plan))
    yield f"step: {first}"
    for line in others:
        yield from _wrapped(line, first="  ", rest="    ")
    yield ""
    yield from _memory(plan, memory)
    yield from _layouts(plan) if layouts else _messages(plan)
    yield from _storage(plan)
    hidden = {"--graph": graph, "--timeline": timeline, "--memory": memory, "--layouts": layouts}
    if folded := [option for option, is_shown in hidden.items() if not is_shown]:
        yield f"in detail: {' '.join(folded)}"


def _order(plan: Plan) -> Iterator[str]:
    """The calls of each graph in one line."""
    for path, calls, dataset in graphs_of(plan.recipe):
        if calls and dataset is not None:
            order = " → ".join(", ".join(stage) for stage in stages(calls))
            yield from _wrapped(f"{_title(path)}: {order}", rest="  ")


def _graph(plan: Plan) -> Iterator[str]:
    """Each graph as a table with the keys of its calls."""
    unread: list[str] = []
    for path, calls, dataset in graphs_of(plan.recipe):
        if calls and dataset is not None:
            yield from [""] if path != ("graph",) else []
            yield _title(path)
            yield from _calls(plan.resolved, calls, path)
            unread += [key for key in producers(calls) if key not in _read(calls)]
    yield "  keys are as the interfaces declare them, except where a file:line is shown"
    if unread:
        yield "  (key): not read by any other call"


def _title(path: KeyPath) -> str:
    return "graph" if path == ("graph",) else "evaluation"


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, **_WHOLE_WORDS)


def size(count: int | None) -> str:
    """`3.7 GiB`."""
    if count is None:
        return "unknown"
    unit, name = next((pair for pair in UNITS if count >= pair[0]), UNITS[-1])
    return f"{count / unit:.3g} {name}" if count < 1000 * unit else f"{count / unit:.0f} {name}"


def number(count: int) -> str:
    """`494 M` of parameters."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return str(count)


def _beside_ranks(plan: Plan) -> Iterator[str]:
    """Servers and pools."""
    for group in process_groups(plan.recipe, plan.topology):
        if group.kind != "ranks":
            nodes = sorted({*group.nodes})
            where = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {nodes[0]}-{nodes[-1]}"
            count = len(group.nodes) // group.processes_of_each
            processes = _count(
                count, *(("server",) if group.kind == "server" else ("process", "es"))
            )
            spread = f", each over {group.processes_of_each}" if group.processes_of_each > 1 else ""
            yield f"{group.name}: {processes} on {where}{spread}, outside the ranks"


def _weights(plan: Plan) -> Iterator[str]:
    from rlcli.topology.report import parameters_of

    parameters = {
        role: number(count) for role, count in parameters_of(plan.recipe, plan.sizes).items()
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
    order = [
        (str(position), name)
        for position, stage in enumerate(stages(calls), start=1)
        for name in stage
    ]
    read = _read(calls)
    rows = [
        [position, name, f"{calls[name].model}.{calls[name].call}", calls[name].interface.type]
        for position, name in order
    ]
    head, *lines = aligned(["", "call", "model", "interface"], rows)
    yield head
    for line, (_, name) in zip(lines, order, strict=True):
        call = calls[name]
        yield line
        yield from _keys("reads", call.inputs, resolved, (*path, name, "inputs"))
        outputs = [key if key in read else f"({key})" for key in made_keys(call)]
        yield from _keys("makes", outputs, resolved, (*path, name, "outputs"))
        if reasons := reasons_to_drop(call):
            yield f"{'':5}drops  samples: {', '.join(reasons)}"


def _timetable(plan: Plan) -> Iterator[str]:
    """A few steps in time."""
    table = Timetable(plan.recipe, plan.topology)
    width = max(len(name) for name in table.calls)
    places = {name: _place(of) for name, of in table.places.items()}
    widest = max(len("ranks"), *map(len, places.values()))
    turns = table.turns()
    yield ""
    yield "timeline: one column per turn; digits are step numbers"
    for name in sorted(
        table.calls,
        key=lambda name: min((isinstance(lane, str), lane) for lane in table.places[name]),
    ):
        cells = " ".join("·" if step is None else str(step % 10) for step in turns[name])
        yield f"  {places[name]:{widest}}  {name:{width}}  {cells}"[:WIDTH].rstrip()
    yield "  assuming 4 turns to generate, 2 to train, 1 for other calls"


def _overlaps(table: Timetable) -> Iterator[str]:
    """Which calls run at the same time as others."""
    for steps_before, when in enumerate(("the same step", "the step before")):
        for name, others in table.overlaps(steps_before).items():
            yield from _wrapped(
                f"{name} overlaps with {', '.join(others)} of {when}", first="  ", rest="    "
            )


def _place(places: Iterable[int | str]) -> str:
    """Ranks, or the name of a pool."""
    pools = [lane for lane in places if isinstance(lane, str)]
    ranks = [lane for lane in places if isinstance(lane, int)]
    return pools[0] if pools else ranks_text(sorted(ranks))


def _read(calls: Mapping[str, Call]) -> set[str]:
    return {key for call in calls.values() for key in call.inputs}


def _keys(word: str, keys: Sequence[str], resolved: Resolved, path: KeyPath) -> Iterator[str]:
    mark = resolved.origin(path)
    if keys:
        text = ", ".join(keys) + ("" if mark.is_default else f"  # {by_label(str(mark), resolved)}")
        lead = f"{'':5}{word}  "
        yield from _wrapped(text, first=lead, rest=" " * len(lead))


def _micro_batch_lines(plan: Plan) -> Iterator[str]:
    from rlcli.topology.memory import micro_batches_of

    reasons = _whole_sequences(plan)
    yield _lengths_line(plan, is_shared=None in reasons.values())
    training = {name: call for name, call in plan.recipe.graph.items() if call.call == "train_step"}
    sizes = {
        name: micro_batches_of(plan.recipe, plan.topology, call) for name, call in training.items()
    }
    for tokens, count in dict.fromkeys(sizes.values()):
        names = ", ".join(name for name, of_call in sizes.items() if of_call == (tokens, count))
        batches = _count(count, "micro-batch", "es")
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


def _memory(plan: Plan, with_roles: bool) -> Iterator[str]:
    """Peaks of calls, and what each role holds throughout."""
    memory = plan.memory
    for why in dict.fromkeys(memory.unknown.values()):
        roles = ", ".join(role for role, reason in memory.unknown.items() if reason == why)
        yield from _wrapped(f"memory of {roles} is unknown: {why}", rest="  ")
    if not memory.peaks:
        return
    without = " without those roles" if memory.unknown else ""
    unit, name = (GIB, "GiB") if memory.highest >= GIB else (GIB >> 10, "MiB")
    yield f"memory of a device{without}, in {name}, after the first optimizer step"
    if with_roles:
        held_rows = [_role(role, unit) for role in memory.roles]
        held_rows += [_server(servers, unit) for servers in memory.servers if servers.on_devices]
        head = ["held", "weights", "optimizer", "buffers", "total"]
        yield from aligned(head, held_rows, right=range(1, 5))
        yield ""
    verdicts = ["verdict"] if plan.device_bytes else []
    rows = [
        [*_peak(peak, unit), *([plan.verdict(peak)] if plan.device_bytes else [])]
        for peak in memory.peaks
    ]
    head = ["peak of", "held", "grads", "gathered", "activ.", "kv", "logits", "total", *verdicts]
    yield from aligned(head, rows, right=range(1, 8))
    yield (
        f"  for the longest sequences, within about {memory.within_percent} % "
        "(measured on CPUs, 1 and 2 ranks)"
    )
    for role, remark in memory.remarks:
        yield from _wrapped(f"{role}: {remark}", "  ", "    ")
    yield from _about_servers(plan)
    if plan.device_bytes:
        spare = f", {size(plan.reserved)} of it reserved for CUDA" if plan.reserved else ""
        yield f"  a device has {size(plan.device_bytes)}{spare}"
        for calls, keys in _same_advice(plan):
            yield from _advice(calls, keys)


def _messages(plan: Plan) -> Iterator[str]:
    """What the recipe's own layouts send, where they have several ranks."""
    texts: dict[str, list[str]] = {}
    for role in trained_calls(plan.recipe):
        layout = planned_layout(plan, role, plan.topology.placement(role).mesh)
        sent = [f"{_sent(layout)} sent per update"] if layout.sent else []
        idle = [f"stages idle for {layout.idle:.0%} of it"] if layout.idle else []
        if sent or idle:
            texts.setdefault(", ".join([*sent, *idle]), []).append(role)
    for text, roles in texts.items():
        yield from _wrapped(f"{', '.join(roles)}: {text}", "  ", "    ")


def _layouts(plan: Plan) -> Iterator[str]:
    """The layouts of each trained role as a table, and the best one."""
    for role in trained_calls(plan.recipe):
        layouts = planned_layouts(plan, role)
        mesh = plan.topology.placement(role).mesh
        yield ""
        yield f"layouts of {role}, fastest first (* as in the recipe); sent per rank and update"
        head = ["layout", "memory", "idle", *(["verdict"] if plan.device_bytes else []), "sent"]
        yield from aligned(head, [_layout(plan, layout, mesh) for layout in layouts], right=(1, 2))
        best = best_layout(plan, layouts)
        if best is None:
            yield "  none of them is known to fit into the memory of these devices"
        elif best.mesh == mesh:
            yield "  the recipe's own is the fastest" + (" that fits" if plan.device_bytes else "")
        else:
            yield from _wrapped(f"advised: {mesh_overrides(role, best.mesh, mesh)}", "  ", "    ")


def _layout(plan: Plan, layout: PlannedLayout, mesh: Mesh) -> list[str]:
    """A row; `mesh` is that of the recipe."""
    mark = " *" if layout.mesh == mesh else ""
    total = size(layout.peak.total) if layout.peak else "?"
    row = [f"{layout.mesh}{mark}", total, f"{layout.idle:.0%}"]
    if plan.device_bytes:
        row.append(plan.verdict(layout.peak) if layout.peak else "?")
    return [*row, _sent(layout) or "-"]


def _sent(layout: PlannedLayout) -> str:
    return ", ".join(f"{kind} {size(count)}" for kind, count in layout.sent.items())


def _role(role: RoleMemory, unit: int) -> list[str]:
    resident = role.resident
    away = (
        " (offloaded)"
        if role.away and role.away == role.total
        else " (optimizer offloaded)"
        if role.away
        else ""
    )
    columns = (resident.weights, resident.optimizer, resident.buffers, resident.total)
    return [f"{role.role}{away}", *(amount(count, unit) for count in columns)]


def _peak(peak: Peak, unit: int) -> list[str]:
    name = f"load {peak.role}" if peak.phase == "load" else peak.call
    parts = peak.parts
    columns = (
        peak.resident,
        parts.gradients,
        parts.gathered,
        parts.activations,
        parts.cache,
        parts.logits,
        peak.total,
    )
    return [name, *(amount(column, unit) for column in columns)]


def _server(servers: RoleServers, unit: int) -> list[str]:
    taken = servers.memory
    return [
        f"{servers.role} server",
        *(amount(column, unit) for column in (taken.weights, 0, taken.cache, taken.total)),
    ]


def _about_servers(plan: Plan) -> Iterator[str]:
    """What the table of memory leaves out, and what is sent when weights change."""
    for servers in plan.memory.servers:
        name, taken = f"servers of {servers.role}", servers.memory
        yield from _wrapped(f"{name}: {_where_and_how_many(servers, plan)}", "  ", "    ")
        if not servers.placed:
            yield from _wrapped(
                f"{name} are not started by the run; their memory is not counted", "  ", "    "
            )
        elif not servers.on_devices:
            yield from _wrapped(
                f"{name} compute on processors; their memory is not counted", "  ", "    "
            )
        elif plan.device_bytes is None:
            yield from _wrapped(
                f"{name}: --device-memory also counts what they reserve for their cache",
                "  ",
                "    ",
            )
        if servers.do_not_fit(plan.topology.devices_per_node):
            yield from _wrapped(
                f"{name} would share devices, or need more than a node has, if these are GPUs",
                "  ",
                "    ",
            )
        if servers.follows:
            count = len(servers.placed)
            each = f"each of {count} servers" if count > 1 else "each server"
            time = (
                f"about {_duration(servers.seconds_per_update)} at {BYTES_PER_SECOND / 1e9:g} GB/s"
            )
            text = f"weights to {servers.role}: {size(taken.sent)} to {each} per update, {time}"
            text += (
                f"; up to {size(2 * taken.sent)} on disk per rank of "
                f"{servers.role} (weights_folder)"
            )
            yield from _wrapped(text, "  ", "    ")


def _where_and_how_many(servers: RoleServers, plan: Plan) -> str:
    """`2, on devices 0-1 and 2-3 of node 0; each rank has up to 64 responses at once`."""
    count, taken = len(servers.placed), servers.memory
    rank_servers = Counter(server.rank for server in servers.placed)
    of_each = max(rank_servers.values(), default=1)
    longest = plan.memory.lengths.sequence
    room = size(-(-taken.at_once // of_each) * longest * taken.per_token)
    places = f"{count}, " if count else ""
    if servers.on_devices:
        shown = [_devices_of(server) for server in servers.placed[:SHOWN_SERVERS]]
        if count > len(shown):
            shown.append(f"{count - len(shown)} on other devices")
        places += f"on {'; '.join(shown)}; "
    return (
        f"{places}up to {taken.at_once} responses at once for each rank, whose keys and values "
        f"take up to {room} on each device at {longest} tokens"
    )


def _devices_of(server: PlacedServer) -> str:
    """`devices 0-3 of node 0`."""
    first, last = server.devices[0], server.devices[-1]
    devices = f"device {first}" if first == last else f"devices {first}-{last}"
    of = f"node {server.nodes[0]}"
    if len(server.nodes) > 1:
        of = f"nodes {server.nodes[0]}-{server.nodes[-1]}"
    return f"{devices} of {of}"


def _duration(seconds: float) -> str:
    """`4:42`, or `0.3 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes else f"{seconds:.2g} s"


def _same_advice(plan: Plan) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """Calls that the same keys help, and these keys."""
    for keys in dict.fromkeys(plan.advice.values()):
        yield [call for call, others in plan.advice.items() if others == keys], keys


def _advice(calls: Sequence[str], keys: Sequence[str]) -> Iterator[str]:
    if keys:
        text = f"{', '.join(calls)}: would fit with {' '.join(keys)}"
    else:
        tried = "engines, layouts, dtypes, fewer tokens and responses at once"
        text = (
            f"{', '.join(calls)}: none of the settings tried ({tried}) makes this fit; use "
            "more or larger devices"
        )
    yield from _wrapped(text, first="  ", rest="    ")


def amount(count: int, unit: int) -> str:
    """An amount in a unit, to three digits; `-` for nothing."""
    if count == 0:
        return "-"
    value = count / unit
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _storage(plan: Plan) -> Iterator[str]:
    storage = plan.storage
    yield ""
    free = f"; {size(storage.free)} free in {storage.folder}" if storage.free is not None else ""
    if storage.checkpoint is None:
        yield f"the size of a checkpoint is unknown{free}"
        return
    yield (
        f"disk: checkpoints of {size(storage.checkpoint)}, up to {storage.checkpoints_kept} at "
        f"once, and {size(storage.models)} of models"
    )
    yield f"      {size(storage.needed)} in all{free}{': not enough' if storage.is_short else ''}"


def _count(count: int, word: str, plural: str = "s") -> str:
    return f"{count} {word}{'' if count == 1 else plural}"


def aligned(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> Iterator[str]:
    """Columns under their headings; the last one wraps at 80 columns."""
    if not rows:
        return
    table = [list(head), *map(list, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    before = sum(widths[:-1]) + 2 * len(widths)
    for row in table:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = [
            f"{cell:>{width}}" if column in right else f"{cell:{width}}"
            for column, (cell, width) in pairs
        ]
        lead = "  " + "  ".join(cells[:-1]) + "  "
        wrapped = textwrap.wrap(row[-1], max(20, WIDTH - before), **_WHOLE_WORDS) or [""]
        lines = [cells[-1]] if len(widths) - 1 in right else wrapped
        for index, line in enumerate(lines):
            yield ((lead if index == 0 else " " * before) + line).rstrip()
