"""What the sections of a recipe must mean together."""

from __future__ import annotations

import re
from collections.abc import Mapping as ReadMapping

from rlcli.recipe.components import dataset_keys, lacks_method
from rlcli.recipe.graph import graph_problems
from rlcli.recipe.mesh import DevicesError, devices_of, mesh_of
from rlcli.recipe.problems import Problems
from rlcli.recipe.schema import Call, Recipe, Role
from rlcli.recipe.suggest import close_to
from rlcli.recipe.tree import Mapping, Mark, Path, dotted, key_mark, nearest

MODELLESS_CALLS = ("inference", "evaluate")
"""Calls that an interface may answer without a model."""


def check_meaning(recipe: Recipe, tree: Mapping, problems: Problems, unknown_in: set[Path]) -> None:
    """Note every contradiction. `unknown_in`: mappings with unknown keys, which may lack what those mean."""
    checker = _Checker(recipe, tree, problems, unknown_in)
    checker.models()
    checker.calls(recipe.graph, ("graph",), recipe.train.dataset)
    if recipe.train.eval.dataset is not None:
        checker.calls(recipe.train.eval.graph, ("train", "eval", "graph"), recipe.train.eval.dataset)
    checker.roles_in_use()
    checker.training()
    checker.devices()
    checker.kept()


class _Checker:
    def __init__(self, recipe: Recipe, tree: Mapping, problems: Problems, unknown_in: set[Path]):
        self.recipe = recipe
        self.tree = tree
        self.problems = problems
        self.unknown_in = unknown_in

    def note(self, code: str, what: str, path: Path, hint: str | None = None) -> None:
        """Point at the value, or at the key if the value is a mapping or a default."""
        if path in self.unknown_in:
            return
        self.problems.add(code, what, self.mark(path), hint)

    def mark(self, path: Path) -> Mark:
        node = nearest(self.tree, path)
        key = key_mark(self.tree, path)
        return key if key is not None and hasattr(node, "entries") else node.mark

    # -- models ----------------------------------------------------------------------------------------

    def models(self) -> None:
        for name, role in self.recipe.models.items():
            self.weights(name, role, ("models", name))
        self.circles_of_init()

    def weights(self, name: str, role: Role, path: Path) -> None:
        assert role.backend is not None
        given = [key for key in ("path", "init", "scratch") if getattr(role, key) is not None]
        if len(given) > 1:
            places = ", ".join(f"{key} at {self.mark((*path, key))}" for key in given)
            self.note("R47", f"{dotted(path)} has {' and '.join(given)}; keep one ({places})", (*path, given[-1]))
        if not given and role.backend.type != "null":
            what = f"{dotted(path)} has no weights: give one of path, init, scratch"
            self.note("R39", what, path, "a role that needs no weights has `backend: null`")
        if given and role.backend.type == "null":
            what = f"{dotted(path)} has {given[0]}, but its backend `null` runs no model"
            self.note("R47", what, (*path, "backend", "type"), "drop one of the two")
        if role.init is not None and role.init not in self.recipe.models:
            self.unknown("role", role.init, self.recipe.models, (*path, "init"))
        if role.scratch is not None:
            if not isinstance(role.scratch.get("model_type"), str):
                self.note("R39", f"{dotted(path)}.scratch.model_type is required", (*path, "scratch"))
            if role.tokenizer is None:
                self.note("R39", f"{dotted(path)}.tokenizer is required with scratch", path)
        if role.path is not None and role.warm_start is not None and not all(role.warm_start):
            what = f"{role.path!r} does not say which role of which recipe"
            self.note("R45", what, (*path, "path"), "write recipe:<name or path>#<role>")

    def circles_of_init(self) -> None:
        models = self.recipe.models
        reported: set[str] = set()
        for start in models:
            walked: list[str] = []
            name: str | None = start
            while name in models and name not in walked:
                walked.append(name)
                name = models[name].init
            if name in walked and not reported & set(walked):
                circle = [*walked[walked.index(name) :], name]
                reported |= set(walked)
                what = "the roles start from each other: " + " → ".join(circle)
                self.note("R47", what, ("models", name, "init"))

    # -- graph -----------------------------------------------------------------------------------------

    def calls(self, calls: ReadMapping[str, Call], path: Path, dataset: str) -> None:
        for name, call in calls.items():
            self.call(call, (*path, name))
        component = self.recipe.datasets.get(dataset)
        keys = dataset_keys(component.type) if component else None
        for problem in graph_problems(calls, keys):
            place: Path = (*path, problem.call)
            if problem.key is not None:
                call = calls[problem.call]
                field = "inputs" if problem.key in call.inputs else "outputs"
                listed = getattr(call, field)
                place = (*place, field, listed.index(problem.key)) if problem.key in listed else (*place, field)
            near = close_to(problem.key, self.makeable(calls, keys)) if problem.key else None
            hint = f"did you mean {near}?" if near and near != problem.key else None
            self.note("R71", problem.what, place, hint)

    def makeable(self, calls: ReadMapping[str, Call], keys: tuple[str, ...] | None) -> list[str]:
        made = [call.output_key_remap.get(key, key) for call in calls.values() for key in call.outputs]
        return [*made, *(keys or ())]

    def call(self, call: Call, path: Path) -> None:
        if lacks_method(call.interface.type, call.call):
            what = f"the interface {call.interface.type} has no {call.call}"
            self.note("R71", what, (*path, "call"), f"rlcli show interface {call.interface.type} lists what it does")
        for field, keys in (("input_key_remap", call.inputs), ("output_key_remap", call.outputs)):
            for key in getattr(call, field):
                if key not in keys:
                    what = f"{dotted((*path, field))} renames {key}, which the call does not list"
                    self.note("R71", what, (*path, field, key))
        role = self.recipe.models.get(call.model)
        if role is None:
            self.unknown("role", call.model, self.recipe.models, (*path, "model"))
        elif not role.has_weights and call.call not in MODELLESS_CALLS:
            what = f"models.{call.model} has no weights, which {dotted(path)} ({call.call}) needs"
            self.note("R39", what, ("models", call.model), "give one of path, init, scratch")

        self.hooks(call, path)

    def hooks(self, call: Call, path: Path) -> None:
        """Weights are copied between roles that live together, to one that nothing trains."""
        target = call.hooks.copy_to
        if target is not None:
            place = (*path, "hooks", "copy_to")
            source, role = self.recipe.models.get(call.model), self.recipe.models.get(target)
            if role is None:
                self.unknown("role", target, self.recipe.models, place)
            elif target == call.model or target in self.recipe.trained_roles:
                self.note("R71", f"{target} is trained by itself and cannot follow {call.model}", place)
            elif source is not None and (role.devices, role.head) != (source.devices, source.head):
                what = f"{call.model} and {target} must live on the same devices and have the same head"
                self.note("R71", what, place)
        if call.hooks.offload and call.model in self.recipe.trained_roles:
            what = f"{call.model} is trained; its weights stay where its optimizer is"
            self.note("R71", what, (*path, "hooks", "offload"))

    def roles_in_use(self) -> None:
        calls = [*self.recipe.graph.values(), *self.recipe.train.eval.graph.values()]
        used = {call.model for call in calls} | {role.init for role in self.recipe.models.values()}
        for name in self.recipe.models:
            if name not in used:
                self.note("R71", f"no call uses the role {name}", ("models", name))

    # -- training --------------------------------------------------------------------------------------

    def training(self) -> None:
        train = self.recipe.train
        if train.steps is not None and train.epochs is not None:
            places = f"steps at {self.mark(('train', 'steps'))}, epochs at {self.mark(('train', 'epochs'))}"
            self.note("R47", f"train has both steps and epochs; keep one ({places})", ("train", "epochs"))
        if train.steps is None and train.epochs is None:
            self.note("R39", "train needs steps or epochs", ("train",))
        if train.dataset not in self.recipe.datasets:
            self.unknown("dataset", train.dataset, self.recipe.datasets, ("train", "dataset"))
        held_out = train.eval.dataset
        if held_out is not None and held_out not in self.recipe.datasets:
            self.unknown("dataset", held_out, self.recipe.datasets, ("train", "eval", "dataset"))
        elif held_out is not None and not train.eval.graph:
            self.note("R39", "train.eval.graph is required: which calls evaluate?", ("train", "eval"))
        if not self.recipe.graph:
            self.note("R39", "the graph has no calls", ("graph",))

    def devices(self) -> None:
        cluster = self.recipe.cluster
        world = cluster.nodes * cluster.devices_per_node
        if self.recipe.launch.type == "inline" and world > 1:
            what = f"launch inline runs one process, but the cluster has {world} devices"
            key = ("launch", "type") if "launch" in self.tree.entries else ("cluster", "devices_per_node")
            self.note("R49", what, key, "use launch=local")
        if self.recipe.launch.type == "local" and cluster.nodes > 1:
            what = f"launch local stays on this machine, but the cluster has {cluster.nodes} nodes"
            self.note("R49", what, ("cluster", "nodes"), "use cluster.nodes=1")
        for name, role in self.recipe.models.items():
            try:
                ranks = devices_of(name, role.devices, world)
                mesh = mesh_of(name, role.mesh, len(ranks))
            except DevicesError as error:
                code = "R50" if error.missing else "R49"
                self.note(code, str(error), ("models", name, error.key))
                continue
            rows = self.recipe.train.prompts_per_step
            if mesh.dp > rows:
                what = f"train.prompts_per_step is {rows}, but {name} has {mesh.dp} data-parallel ranks"
                self.note("R49", what, ("train", "prompts_per_step"), f"use at least {mesh.dp}")

    def kept(self) -> None:
        for index, name in enumerate(self.recipe.checkpoint.roles or ()):
            if name not in self.recipe.models:
                self.unknown("role", name, self.recipe.models, ("checkpoint", "roles", index))
            elif not self.recipe.models[name].has_weights:
                self.note("R49", f"{name} has no weights to save", ("checkpoint", "roles", index))
        if re.search(r"(^|/)\.\.(/|$)|\0", self.recipe.log.dir) or not self.recipe.log.dir.strip():
            self.note("R68", f"log.dir {self.recipe.log.dir!r} is no folder for runs", ("log", "dir"))

    def unknown(self, what: str, name: str, known: ReadMapping[str, object], path: Path) -> None:
        near = close_to(name, known)
        hint = f"did you mean {near}?" if near else f"there is {', '.join(known) or 'none'}"
        self.note("R71", f"no {what} is named {name!r}", path, hint)
