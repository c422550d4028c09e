"""An evaluation: the second graph of a recipe, run over a whole dataset while nothing is
trained."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlcli.api.dataflow import ModelInterfaceType
from rlcli.api.headway import say
from rlcli.api.key_meaning import UNPLAYED
from rlcli.messaging.messages import Fields
from rlcli.messaging.transport import Transport
from rlcli.observe.responses import Moments
from rlcli.recipe.dataset_sizes import check_dataset_sizes
from rlcli.recipe.graph import eval_graph
from rlcli.recipe.schema import Recipe
from rlcli.runtime.building import build_models
from rlcli.runtime.calls import Calls
from rlcli.runtime.data_order import evaluation_id
from rlcli.runtime.flow import Batch, Flow
from rlcli.runtime.rank_counts import LOADING, READING
from rlcli.runtime.ranks import Ranks
from rlcli.runtime.report import Answered, named_reports
from rlcli.topology import Topology
from rlcli.topology.groups import lanes_of


@dataclass(frozen=True)
class Evaluated:
    """Results of an evaluation."""

    scores: Mapping[str, Moments]
    """Measures over the prompts (`rlcli.observe.responses`), and what calls counted."""
    stats: Mapping[str, float]
    """Statistics reported by calls to `evaluate`, which have no spread."""
    texts: list[Fields]
    """id, prompt, response, reward and answer of the responses to the first prompts."""
    seconds: float
    version: int
    """Version of the evaluated weights: the number of training steps behind them."""

    def numbers(self) -> dict[str, float]:
        """All results as an entry of the metrics: `eval/accuracy`, `eval/pass@4`, `time/eval`."""
        named = {name: moments.mean for name, moments in self.scores.items()} | dict(self.stats)
        return {f"eval/{name}": value for name, value in named.items()} | {
            "time/eval": self.seconds
        }


@dataclass
class HeldOut:
    """The samples of an evaluation. None is dropped, even if calls request it: the numbers are
    those of the whole dataset, except what could not be played."""

    all_ids: list[str]

    def ids(self, call: str) -> list[str]:
        """The samples that a call works on."""
        return self.all_ids

    def drop(self, call: str, reasons: Mapping[str, str]) -> None:
        """Leave out those whose environment failed."""
        self.all_ids = [id_ for id_ in self.all_ids if reasons.get(id_) != UNPLAYED]


async def evaluate(recipe: Recipe, calls: Calls, flow: Flow, rows: int, shown: int) -> Evaluated:
    """Run the evaluation graph over all `rows` of its dataset, and read the responses to the first
    `shown` of them."""
    dataset, graph = recipe.train.eval.dataset, eval_graph(recipe)
    assert dataset is not None
    began = time.perf_counter()
    ids = [evaluation_id(row) for row in range(rows)]
    await calls.load(graph, dataset, [(id_, row, 0) for row, id_ in enumerate(ids)])
    batch = Batch("the evaluation", HeldOut(ids), 0, is_step=False)
    await flow.go_through(graph, batch)
    generates = any(mfc.interface_type is ModelInterfaceType.GENERATE for mfc in graph)
    texts = await calls.describe(ids[:shown]) if generates else []
    calls.forget(ids)
    return _results(batch.reports_in(graph), texts, began)


def _results(reports: Sequence[Answered], texts: list[Fields], began: float) -> Evaluated:
    """`began`: when the evaluation began."""
    scores = named_reports(reports, Answered.averages, lambda _: "")
    stats = named_reports(reports, lambda answered: answered.stats, lambda _: "")
    version = max(answered.version for answered in reports)
    return Evaluated(scores, stats, texts, time.perf_counter() - began, version)


def evaluate_alone(
    recipe: Recipe,
    topology: Topology,
    transport: Transport,
    rows: int | None,
    shown: int,
) -> Evaluated:
    """Run only the evaluation of a recipe, on workers that have just been started, over at most the
    first `rows` of its dataset."""
    dataset, deadline = recipe.train.eval.dataset, recipe.launch.startup_deadline
    assert dataset is not None
    ranks = Ranks(transport, topology.world_size, recipe.launch.step_deadline)

    async def run() -> Evaluated:
        say(READING)
        available = (await ranks.ask_all("open_datasets", deadline=deadline))[0]["rows"][dataset]
        check_dataset_sizes(recipe, {dataset: available})
        say(LOADING)
        await build_models(ranks, recipe, steps=1, rows=available)
        calls = Calls(recipe, topology, ranks, say)
        flow = Flow(calls, [])
        evaluated = await evaluate(
            recipe, calls, flow, available if rows is None else min(rows, available), shown
        )
        await ranks.let_go(lanes_of(recipe, topology))
        return evaluated

    return ranks.run(run())
