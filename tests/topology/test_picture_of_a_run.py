"""The plan's picture against a run: a real master, and ranks on a virtual clock whose calls take as
long as drawn."""

import os
import runpy
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from rlcli.checkpoint.completion import RunIdentity
from rlcli.observe.display import PlainDisplay
from rlcli.observe.outputs import open_outputs
from rlcli.observe.run_directory import RunDirectory
from rlcli.recipe.resolve import load_recipe
from rlcli.runtime.master import MasterWorker
from rlcli.topology.overlap import COLUMNS, TURNS, Timetable
from rlcli.topology.placement import plan_topology

BENCH = runpy.run_path(str(Path(__file__).parents[1] / "bench/scale.py"))
SIMULATED = BENCH["SimulatedRanks"]
RECIPE = """\
models:
  actor: {scratch: {model_type: llama}, tokenizer: "builtin:toy_rows", backend: toy, devices: 0,
          rollout: {backend: toy, devices: 1}}
  critic: {init: actor, head: value, backend: toy, devices: 0}
  reward: {backend: null, devices: 0}
datasets:
  train: {type: toy_rows, args: {rows: 400}}
graph:
  gen: {model: actor, call: generate, interface: toy, inputs: [packed_prompts],
        outputs: [packed_input_ids, prompt_mask, packed_logprobs]}
  score: {model: reward, call: inference, interface: toy_reward,
          inputs: [packed_input_ids], outputs: [rewards, solved]}
  value: {model: critic, call: inference, interface: toy,
          inputs: [packed_input_ids, packed_logprobs], outputs: [values]}
  train_actor: {model: actor, call: train_step, interface: toy,
                inputs: [packed_input_ids, prompt_mask, packed_logprobs, rewards, solved, values]}
  train_critic: {model: critic, call: train_step, interface: toy,
                 inputs: [packed_input_ids, prompt_mask, packed_logprobs, rewards, solved, values]}
train: {prompts_per_step: 4, steps: 12, eval: {dataset: null}}
cluster: {device: cpu, devices_per_node: 2}
launch: {type: local, startup_deadline: 600}
checkpoint: {save: false, at_end: false, on_stop: false, every_seconds: null}
log: {trackers: [], plot: false, samples_per_step: 0}
"""


class TimedRanks(SIMULATED):
    """Notes when each call begins; what is generated has the version of the weights by then."""

    def __init__(self, recipe):
        super().__init__(recipe)
        self._seconds = {
            name: float(TURNS.get(call.call, 1)) for name, call in recipe.graph.items()
        }
        self.begins = defaultdict(list)
        self._ends_of_training = []
        self._versions = {}

    def send(self, rank, request, limit):
        if request.op == "run_call" and request.number not in self._versions:
            call = request.args["call"]
            begin = max(self.now, self._free.get((rank, request.lane), 0.0))
            self.begins[call].append(begin)
            self._versions[request.number] = sum(end <= begin for end in self._ends_of_training)
            if call == "train_actor":
                self._ends_of_training.append(begin + self._seconds[call])
        super().send(rank, request, limit)

    def _answer(self, request, rank):
        if request.op == "copy_weights":
            return {"bytes": 0}
        answer = super()._answer(request, rank)
        return (
            answer | {"version": self._versions[request.number]}
            if request.op == "run_call"
            else answer
        )


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCLI_PROJECT", os.environ.get("RLCLI_PROJECT", ""))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.chdir(tmp_path)
    BENCH["prepare"](tmp_path)
    (tmp_path / "apart.yaml").write_text(RECIPE)
    return tmp_path


# With a pool at 4, a copy and a call end in the same turn, and which comes first is random.
@pytest.mark.parametrize(
    ("staleness", "reward"),
    [(0, "null"), (1, "null"), (4, "null"), (0, "cpu_pool"), (1, "cpu_pool")],
)
def test_calls_begin_when_the_picture_shows_it(project, staleness, reward):
    recipe = load_recipe(
        "apart.yaml", [f"train.max_staleness={staleness}", f"models.reward.backend={reward}"]
    ).recipe
    topology, ranks = plan_topology(recipe), TimedRanks(recipe)
    with (
        RunDirectory.create(None, recipe.name) as run,
        PlainDisplay(sys.stderr, quiet=True) as display,
    ):
        master = MasterWorker(
            recipe, topology, ranks, run, display, RunIdentity(run.run_id, "0", "0")
        )
        master.start()
        with open_outputs(run, display.warning) as outputs:
            master.run(outputs)
    for call, row in Timetable(recipe, topology).turns().items():
        drawn = [row.index(step) for step in sorted({step for step in row if step is not None})]
        assert [begin for begin in ranks.begins[call] if begin < COLUMNS] == drawn, call
