"""An evaluation: the second graph of a recipe, run over a whole dataset while nothing is trained."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcli.api.dataflow import ModelInterfaceType
from rlcli.recipe.dataset_sizes import check_dataset_sizes
from rlcli.recipe.graph import eval_graph
from rlcli.recipe.schema import Recipe
from rlcli.runtime.answered import Answered, named_reports
from rlcli.runtime.calls import Calls
from rlcli.runtime.data_order import evaluation_id
from rlcli.runtime.lanes import lanes_of
from rlcli.runtime.measures import Moments
from rlcli.runtime.requests import Requests
from rlcli.runtime.scheduler import Scheduler
from rlcli.runtime.transport import Transport
from rlcli.topology import Topology


@dataclass(frozen=True)
class Evaluated:
    """Results of an evaluation."""

    scores: Mapping[str, Moments]
    """Measures over the prompts (`rlcli.runtime.measures`), and what calls counted."""
    stats: Mapping[str, float]
    """Statistics reported by calls to `evaluate`, which have no spread."""
    texts: list[dict[str, Any]]
    """id, prompt, response, reward and answer of the responses to the first prompts."""
    seconds: float
    version: int
    """Version of the evaluated weights: the number of training steps behind them."""

    def numbers(self) -> dict[str, float]:
        """All results as an entry of the metrics: `eval/accuracy`, `eval/pass@4`, `time/eval`."""
        named = {name: moments.mean for name, moments in self.scores.items()} | dict(self.stats)
        return {f"eval/{name}": value for name, value in named.items()} | {"time/eval": self.seconds}


def evaluate(
    recipe: Recipe,
    calls: Calls,
    requests: Requests,
    rows: int,
    shown: int,
    meanwhile: Callable[[], None] = lambda: None,
) -> Evaluated:
    """Run the evaluation graph over all `rows` of its dataset, and read the responses to the first `shown` of them.
    `meanwhile` is called before each answer, to do other pending work.

    No sample is dropped, even if calls request it: the numbers are those of the whole dataset.
    """
    dataset, graph = recipe.train.eval.dataset, eval_graph(recipe)
    assert dataset is not None
    began = time.perf_counter()
    ids, is_loaded, finished = [evaluation_id(row) for row in range(rows)], list[bool](), deque[Answered]()
    calls.load(graph, dataset, [(id_, row, 0) for row, id_ in enumerate(ids)], lambda: is_loaded.append(True))
    while not is_loaded:
        meanwhile()
        requests.wait()
    reports: list[Answered] = []
    scheduler = Scheduler(graph, 1)
    while not scheduler.finished:
        for task in scheduler.ready():
            scheduler.start(task)
            calls.dispatch(task, ids, finished.append)
        while not finished:
            meanwhile()
            requests.wait()
        reports.append(finished.popleft())
        scheduler.finish(reports[-1].task)
    scores = named_reports(reports, Answered.averages, lambda _: "")
    stats = named_reports(reports, Answered.stats, lambda _: "")
    texts: list[dict[str, Any]] = []
    if any(mfc.interface_type is ModelInterfaceType.GENERATE for mfc in graph):
        texts = _texts(calls, requests, ids[:shown])
    calls.forget(ids)
    return Evaluated(scores, stats, texts, time.perf_counter() - began, max(one.version for one in reports))


def evaluate_alone(
    recipe: Recipe, topology: Topology, transport: Transport, phase: Callable[[str], None], rows: int | None, shown: int
) -> Evaluated:
    """Run only the evaluation of a recipe, on workers that have just been started, over at most the first `rows` of its
    dataset."""
    dataset, deadline = recipe.train.eval.dataset, recipe.launch.startup_deadline
    assert dataset is not None
    requests = Requests(transport, topology.world_size, recipe.launch.step_deadline)
    phase("reading the data")
    there = requests.ask_all("open_datasets", deadline=deadline)[0]["rows"][dataset]
    check_dataset_sizes(recipe, {dataset: there})
    phase("loading the model")
    requests.ask_all("build", {"steps": 1, "rows": there}, deadline=deadline)
    calls = Calls(recipe, topology, requests, phase)
    found = evaluate(recipe, calls, requests, there if rows is None else min(rows, there), shown)
    requests.let_go(lanes_of(recipe, topology))
    return found


def _texts(calls: Calls, requests: Requests, ids: Sequence[str]) -> list[dict[str, Any]]:
    described: list[list[dict[str, Any]]] = []
    calls.describe(ids, described.append)
    while not described:
        requests.wait()
    return described[0]
