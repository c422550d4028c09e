"""How far generation runs ahead of training, by the ledger: not further than the recipe allows,
but really ahead."""

import json
import sys

import pytest

from rlcli.errors import DataError, RecipeError
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.recipe.resolve import load_recipe
from rlcli.runtime.data_order import DataOrder, training_id

pytestmark = pytest.mark.timeout(420)  # a start on two ranks takes a while on a slow machine

TWO_RANKS = (
    "launch=local",
    "cluster.devices_per_node=2",
    "models.critic.devices='1'",
    "models.reward.devices='0'",
)
SLOW_CRITIC = "{type: toy, args: {seconds: 0.1}}"
SLOW_TRAINING = (
    f"graph.value.interface={SLOW_CRITIC}",
    f"graph.train_critic.interface={SLOW_CRITIC}",
)
DROPPING = ("graph.score.interface={type: toy_reward, args: {drop: 3}}",)
STEPS = 8


def trained(project, *overrides):
    """Run the toy recipe, account for all samples that it drew, and return the ledger's lines of
    those trained on."""
    settings = (f"train.steps={STEPS}", "train.eval.dataset=null", *overrides)
    with PlainDisplay(sys.stderr) as display:
        run_recipe(load_recipe("toy.yaml", settings), project / "run", display)
    lines = [json.loads(line) for line in (project / "run/ledger.jsonl").read_text().splitlines()]
    (state_file,) = project.glob(f"run/checkpoints/step-{STEPS:012d}/state.json")
    state = json.loads(state_file.read_text())
    places = [line["sample"] for line in lines] + [
        training_id(*draw[:2]) for draw in state["returned"]
    ]
    order = DataOrder(20, seed=5)
    assert sorted(places) == sorted(
        training_id(*order.at(position)) for position in range(state["drawn"])
    )
    trained = [line for line in lines if line["state"] == "trained"]
    assert [line["step"] for line in trained] == sorted(line["step"] for line in trained)
    assert len(trained) == STEPS * 8
    return trained


def lags(lines):
    """Of each sample: training steps between the weights that sampled it and those it trained."""
    return [line["step"] - 1 - line["versions"]["gen"] for line in lines]


def records(project):
    return [json.loads(line) for line in (project / "run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("staleness", [0, 1])
def test_samples_reach_but_never_exceed_the_allowed_staleness(project, staleness):
    """In one process the order of all calls is fixed."""
    sample_lags = lags(trained(project, f"train.max_staleness={staleness}"))
    assert set(sample_lags) == set(range(staleness + 1))


@pytest.mark.long
@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(("staleness", "drops"), [(1, DROPPING), (4, ())])
def test_generation_runs_ahead_of_slow_training_within_its_limit(project, staleness, drops):
    lines = trained(project, f"train.max_staleness={staleness}", *TWO_RANKS, *SLOW_TRAINING, *drops)
    sample_lags = lags(lines)
    assert min(sample_lags) >= 0
    assert max(sample_lags) <= staleness
    assert sum(sample_lags) / len(sample_lags) > 0
    for number, record in enumerate(records(project), start=1):
        of_step = lags([line for line in lines if line["step"] == number])
        assert record["actor/staleness"] == sum(of_step) / 8
        assert record["actor/ages"] == record["critic/ages"] == sum(of_step), (
            "both get the age of each sample"
        )
        assert (record["staleness/min"], record["staleness/max"]) == (min(of_step), max(of_step))
        shares = [record[f"staleness/share_{lag}"] for lag in range(staleness + 1)]
        assert shares == [of_step.count(lag) / 8 for lag in range(staleness + 1)]
        assert record["samples/expired"] == record["samples/retried"] == 0
        assert (
            record["samples/ready"] + record["samples/running"]
            <= record["samples/ahead"]
            <= (staleness + 1) * 8
        )


@pytest.mark.parametrize("chunk", [3, 8, 20])
def test_samples_are_made_in_chunks_of_any_size(project, chunk):
    sample_lags = lags(
        trained(project, "train.max_staleness=2", f"train.prompts_per_draw={chunk}", *DROPPING)
    )
    assert set(sample_lags) <= {0, 1, 2}
    assert sum(sample_lags) / len(sample_lags) > 0


def test_rewards_are_those_of_the_samples_that_a_step_trains_on(project):
    trained(project, "train.max_staleness=1")
    for record in records(project):
        assert record["reward/reward"] == pytest.approx(record["actor/rewards"] / 8)


def test_a_call_that_drops_samples_by_the_weights_of_their_step_is_refused(project):
    settings = ["train.max_staleness=1", "graph.score.model=critic", *DROPPING]
    with pytest.raises(RecipeError, match="score drops samples by the weights of their step"):
        load_recipe("toy.yaml", settings)


def test_prompts_per_draw_without_effect_is_refused(project):
    with pytest.raises(RecipeError, match="prompts_per_draw has no effect") as caught:
        load_recipe("toy.yaml", ["train.prompts_per_draw=5"])
    assert "train.prompts_per_draw=5\n" in str(caught.value)


def test_a_run_ahead_whose_samples_are_all_dropped_ends_with_the_reason(project):
    drop = "graph.score.interface={type: toy_reward, args: {drop: 1}}"
    with pytest.raises(
        DataError, match="a batch has 0 of its 8 samples, and 32 samples were dropped"
    ) as caught:
        trained(project, "train.max_staleness=1", drop, "train.max_redraws=2")
    assert (caught.value.code, caught.value.where) == ("F80", "graph.score")
    assert "dropped: score 32 (divisible)" in caught.value.what


def test_too_stale_samples_make_room_for_others_while_none_are_in_progress(project):
    settings = ("train.max_staleness=1", "train.take_first=freshest", "launch.step_deadline=20")
    assert set(lags(trained(project, *settings, *DROPPING))) == {0, 1}
    assert sum(record["samples/expired"] for record in records(project)) > 0


@pytest.mark.long
@pytest.mark.usefixtures("quick_ranks")
def test_a_follower_generates_while_the_critic_trains_on_the_other_rank(project):
    """The weights are copied before the critic trains: a step takes as long as all calls but the
    critic's training."""

    def takes(seconds):
        return f"{{type: toy, args: {{seconds: {seconds}}}}}"

    trained(
        project,
        "launch=local",
        "cluster.devices_per_node=2",
        "models.actor.rollout={backend: toy, devices: '1'}",
        f"graph.gen.interface={takes(0.4)}",
        f"graph.train_actor.interface={takes(0.1)}",
        f"graph.value.interface={takes(0.4)}",
        f"graph.train_critic.interface={takes(0.4)}",
    )
    steps = [record["time/step"] for record in records(project)]
    assert min(steps[1:-1]) <= 0.9 * 1.3  # one after the other: 1.3
