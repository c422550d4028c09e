"""`rlcli train` from recipe to saved model, with the same metrics in one process and in several."""

import functools
import json
import os
import shutil
import subprocess
import sys

import pytest
from run_files import numbers, samples
from warm_command import ENVIRONMENT

from rlcli.errors import escape_control
from rlcli.launch.run import prepare_run
from rlcli.recipe.resolve import load_recipe

pytestmark = pytest.mark.timeout(420)  # some are several runs

RUN_FILES = {
    "README.md", "curve.png", "environment.json", "metrics.jsonl", "models", "origins.json",
    "recipe", "recipe.resolved.yaml", "samples.jsonl", "status.json", "tensorboard",
    "trackers",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_ppo, train_into):
    """A run shared by several tests, with all files that a run writes."""
    changes = [change for change in tiny_ppo if not change.startswith("log.")]
    return train_into(tmp_path_factory.mktemp("run"), "ppo_math", *changes)


def test_a_run_writes_the_files_and_metrics_of_the_readme(run):
    assert run.code == 0, run.err
    assert {path.name for path in run.folder.iterdir()} >= RUN_FILES
    assert run.status["state"] == "done"
    assert [record["step"] for record in run.records] == [0, 1, 2]
    assert run.records[0]["eval/accuracy"] == run.records[0]["eval/reward"]
    assert {
        "actor/loss",
        "actor/kl",
        "critic/loss",
        "time/actor_gen",
        "tokens_per_second",
    } <= run.records[1].keys()
    # before any update actor and reference are equal
    assert run.records[1]["actor/kl"] == pytest.approx(0, abs=1e-6)
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert {sample["phase"] for sample in samples} == {"train", "eval"}
    assert "before" in run.out
    assert escape_control(run.out) == run.out


def test_the_readme_of_a_run_lists_all_of_its_files(run):
    readme = (run.folder / "README.md").read_text()
    files = {path.name for path in run.folder.iterdir()} - {"README.md"}
    assert {name for name in files if f"`{name}" not in readme} == set()


def test_samples_have_lengths_advantages_and_reasons_and_the_next_commands_are_named(run):
    for line in (run.folder / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        assert sample["length"] <= 6
        has_advantage = sample["phase"] == "train" and sample["length"] > 0
        assert (sample["advantage"] is not None) == has_advantage
        assert (sample["reason"] is None) == (sample["reward"] == 1)
    assert "  rlcli plot run\n" in run.out


def test_the_saved_actor_gives_the_same_answers_in_transformers(run):
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

    folder = run.folder / "models" / "actor"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    last = [sample for sample in samples if sample["phase"] == "eval" and sample["step"] == 2]
    assert last
    for sample in last:
        question = tokenizer(sample["prompt"], return_tensors="pt")
        answer = model.generate(**question, max_new_tokens=6, do_sample=False)[
            0, question.input_ids.shape[1] :
        ]
        assert tokenizer.decode(answer, skip_special_tokens=True) == sample["response"]
    critic = AutoModelForTokenClassification.from_pretrained(run.folder / "models" / "critic")
    assert critic.config.num_labels == 1


def test_eval_gives_the_results_of_the_last_evaluation_of_the_run(run, warm_command):
    same = "models.actor.backend={type: inference, args: {dtype: float32}}"
    done = warm_command("eval", str(run.folder), same, "--show", "4", "--json")
    assert done.returncode == 0, done.stderr
    report, last = json.loads(done.stdout), run.records[-1]
    assert {name: one["mean"] for name, one in report["results"].items()} == {
        name.removeprefix("eval/"): value
        for name, value in last.items()
        if name.startswith("eval/")
    }
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    expected = [
        sample["response"] for sample in samples if (sample["phase"], sample["step"]) == ("eval", 2)
    ]
    assert [sample["response"] for sample in report["samples"]] == expected


TWO_RANKS = ("launch=local", "cluster.devices_per_node=2")
PENALIZED = (
    # A toy model solves no problem. A penalty, discounted along the response,
    # still gives different advantages.
    "graph.reward_inf.interface.args.wrong_reward=-1.0",
    "ppo.discount=0.9",
    # AdamW divides by the gradient's own size. With its usual epsilon, rounding noise around a zero
    # gradient would move a weight as far as a real gradient does,
    # and step 2 would start from other weights.
    "models.actor.backend.args.eps=1e-5",
    "models.critic.backend.args.eps=1e-5",
    # and the reference follows the actor, sharded or not
    "graph.actor_train.hooks={copy_to: ref, eta: 0.5}",
    "graph.ref_inf.hooks.offload=true",
)
LAYOUTS = {
    "micro_batches": ("train.microbatches=4",),
    "two_ranks": (*TWO_RANKS, "train.microbatches=2"),
    "critic_apart": (*TWO_RANKS, "models.critic.devices=1"),
    "tensor_parallel": (*TWO_RANKS, "models.actor.mesh.tp=2", "models.critic.mesh.tp=2"),
}
"""The backends' contracts have the last two, so that they are rare here."""


@pytest.fixture(scope="module")
def penalized(tmp_path_factory, tiny_ppo, train_into):
    """Runs whose samples have different advantages."""
    folder = tmp_path_factory.mktemp("penalized")

    @functools.cache
    def run(*layout):
        name = f"run{run.cache_info().misses}"
        return train_into(folder, "ppo_math", *tiny_ppo, *PENALIZED, *layout, name=name)

    return run


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("micro_batches", marks=pytest.mark.long),
        pytest.param("two_ranks", marks=pytest.mark.long),
        pytest.param("critic_apart", marks=pytest.mark.exhaustive),
        pytest.param("tensor_parallel", marks=pytest.mark.exhaustive),
    ],
)
def test_metrics_do_not_depend_on_ranks_and_micro_batches(penalized, layout):
    undivided, divided = penalized(), penalized(*LAYOUTS[layout])
    assert undivided.code == divided.code == 0, undivided.err + divided.err
    keys = (
        "actor/loss",
        "actor/grad_norm",
        "critic/loss",
        "critic/grad_norm",
        "reward/reward",
        "actor/entropy",
    )
    for ours, theirs in zip(divided.steps, undivided.steps, strict=True):
        for key in keys:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key
        assert ours["actor/grad_norm"] > 0.01


@pytest.mark.exhaustive
def test_a_role_that_follows_the_actor_samples_with_its_current_weights(train, tiny_ppo):
    """Also on a separate rank, which could begin the next step before the actor is trained."""
    follower = (
        "models.actor.rollout.backend.args.dtype=float32",
        "models.actor.backend.args.lr=1e-3",
        "graph.reward_inf.interface.args.wrong_reward=-1.0",
        "ppo.discount=0.9",
    )
    apart = (
        "launch=local",
        "cluster.devices_per_node=2",
        "models.critic.devices=1",
        "models.ref.devices=1",
    )
    apart += ("models.actor.rollout.devices=1",)
    inline = train("ppo_math", *tiny_ppo, *follower, name="follower")
    two_ranks = train("ppo_math", *tiny_ppo, *follower, *apart, name="follower_apart")
    assert inline.code == two_ranks.code == 0, inline.err + two_ranks.err
    kl = [[step["actor/kl"] for step in run.steps] for run in (inline, two_ranks)]
    assert kl[0] == pytest.approx(kl[1], rel=1e-4, abs=1e-7)
    assert kl[0][0] == pytest.approx(0, abs=1e-6)
    assert abs(kl[0][1]) > 1e-4  # the reference stays behind


@pytest.mark.exhaustive
def test_a_rollout_role_does_not_change_responses_and_metrics(train, tiny_ppo):
    """In the same process, and on a separate rank."""
    learns = (
        "models.actor.backend.args.lr=1e-3",
        "graph.reward_inf.interface.args.wrong_reward=-1.0",
    )
    rollout = ("models.actor.rollout.backend.args.dtype=float32",)
    apart = (
        "launch=local",
        "cluster.devices_per_node=2",
        "models.critic.devices=0",
        "models.ref.devices=0",
    )
    apart += ("models.actor.rollout.devices=1",)
    delta = ("models.actor.rollout.transfer=delta",)
    layouts = {
        "alone": (),
        "rollout": rollout,
        "rollout_apart": (*rollout, *apart),
        "deltas": (*rollout, *apart, *delta),
    }
    runs = {
        name: train("ppo_math", *tiny_ppo, *learns, *changes, name=name)
        for name, changes in layouts.items()
    }
    for name, run in runs.items():
        assert run.code == 0, f"{name}: {run.err}"
        assert samples(run.folder) == samples(runs["alone"].folder), name
        assert _by_metric(run) == _by_metric(runs["alone"]), name


def _by_metric(run):
    """The metrics of each step without times, by name;
    the role of generation is renamed to the actor."""
    renamed = [
        {name.replace("actor_rollout/", "actor/"): number for name, number in step.items()}
        for step in numbers(run.folder)
    ]
    return [
        {name: number for name, number in step.items() if not name.startswith("queue/")}
        for step in renamed
    ]


@pytest.mark.long
def test_generation_on_separate_devices_may_run_one_step_ahead(train, tiny_ppo):
    devices = {"actor": 0, "critic": 0, "ref": 0, "actor.rollout": 1}
    run = train(
        "ppo_math",
        "--with",
        "async",
        *tiny_ppo[:-1],
        "train.steps=5",
        "launch=local",
        "cluster.devices_per_node=2",
        *(f"models.{role}.devices={device}" for role, device in devices.items()),
    )
    assert run.code == 0, run.err
    staleness = [step["actor_rollout/staleness"] for step in run.steps]
    assert staleness[0] == 0
    assert set(staleness) == {0, 1}
    ledger = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    by_step = {entry["step"]: entry["versions"] for entry in ledger}
    assert by_step == {k + 1: {"actor_gen": k - late} for k, late in enumerate(staleness)}


@pytest.fixture
def with_warm_start(tmp_path):
    """after.yaml, which starts from the result of warm.yaml."""
    (tmp_path / "warm.yaml").write_text(
        "extends: sft_math\n"
        "models: {actor: {scratch: {hidden_size: 32, num_hidden_layers: 1, intermediate_size: "
        "32}}}\n"
        "datasets: {train: {args: {problems: 32}}}\n"
        "train: {steps: 1, prompts_per_step: 8}\n"
    )
    (tmp_path / "after.yaml").write_text(
        "extends: ppo_math\n"
        "models: {actor: {path: 'recipe:warm.yaml#actor'}}\n"
        "datasets: {train: {args: {problems: 16}}, held_out: {args: {problems: 4}}}\n"
        "generation: {max_new_tokens: 4}\n"
        "train: {steps: 1, prompts_per_step: 4, eval: {every_steps: null}}\n"
    )
    return tmp_path


@pytest.mark.long
def test_a_warm_start_is_run_only_once(with_warm_start, tmp_path, warm_command):
    first = warm_command("train", "after.yaml", "--json", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "training that first" in first.stderr
    again = warm_command("train", "after.yaml", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "starting from" in again.stderr
    assert len(list((tmp_path / "runs" / "warm").iterdir())) == 1
    assert len(list((tmp_path / "runs" / "after").iterdir())) == 2
    assert json.loads(first.stdout)["steps"] == 1


@pytest.mark.exhaustive
def test_an_interrupted_warm_start_is_continued(with_warm_start, tmp_path, warm_command):
    with (tmp_path / "warm.yaml").open("a") as recipe:
        recipe.write("checkpoint: {every_steps: 1, asynchronous: false}\n")
    (tmp_path / "warm.yaml").write_text(
        (tmp_path / "warm.yaml").read_text().replace("steps: 1, p", "steps: 4, p")
    )
    faults = {"RLCLI_ENABLE_FAILPOINTS": "1", "RLCLI_FAILPOINTS": "checkpoint.committed:kill@2"}
    killed = subprocess.run(
        [sys.executable, "-m", "rlcli", "train", "after.yaml"],
        cwd=tmp_path,
        env=os.environ | ENVIRONMENT | faults,
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == 7, killed.stderr
    shutil.copytree(tmp_path, tmp_path / "damaged")
    for manifest in (tmp_path / "damaged/runs/warm").glob("*/checkpoints/*/MANIFEST.json"):
        manifest.write_text("{}")
    over = warm_command("train", "after.yaml", cwd=tmp_path / "damaged")
    assert over.returncode == 0, over.stderr
    assert "starting over in a new folder" in over.stderr
    done = warm_command("train", "after.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs/warm").iterdir()
    assert f"continuing runs/warm/{run.name}, which was interrupted, after step 2" in " ".join(
        done.stderr.split()
    )
    assert [
        json.loads(line)["step"] for line in (run / "resumes.jsonl").read_text().splitlines()
    ] == [2]
    uninterrupted = warm_command("train", "warm.yaml", "--run-dir", "whole", cwd=tmp_path)
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    for file in ("ledger.jsonl", "models/actor/model.safetensors"):
        assert (run / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.exhaustive
def test_a_run_prepared_for_a_job_runs_its_warm_start_when_it_begins(
    with_warm_start, tmp_path, warm_command, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    prepare_run(load_recipe("after.yaml", ()), tmp_path / "prepared")
    assert json.loads((tmp_path / "prepared/status.json").read_text())["state"] == "submitted"
    assert (
        json.loads((tmp_path / "prepared/starts.json").read_text())["actor"]
        == "recipe:warm.yaml#actor"
    )
    assert not (tmp_path / "runs").exists()
    done = warm_command("resume", "prepared", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "training that first" in done.stderr
    assert "resuming" not in done.stderr
    (warm,) = (tmp_path / "runs/warm").iterdir()
    assert json.loads((tmp_path / "prepared/starts.json").read_text())["actor"] == str(
        warm / "models/actor"
    )
    assert not (tmp_path / "prepared/resumes.jsonl").exists()
    trained = warm_command("train", "after.yaml", "--run-dir", "trained", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    for file in ("samples.jsonl", "models/actor/model.safetensors"):
        assert (tmp_path / "prepared" / file).read_bytes() == (
            tmp_path / "trained" / file
        ).read_bytes()


def test_a_used_folder_is_refused(run, train_into, tiny_ppo):
    before = (run.folder / "metrics.jsonl").read_text()
    again = train_into(run.folder.parent, "ppo_math", *tiny_ppo, name=run.folder.name)
    assert again.code == 6
    assert "error[F72]" in again.err
    assert (run.folder / "metrics.jsonl").read_text() == before
