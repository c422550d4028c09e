"""Runs from Python: what they are given, what they return, and how they end."""

import json
import math
import operator
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from warm_command import load_everything
from warm_processes import warm_processes

import rlcli
from rlcli.errors import (
    Errors,
    ModelError,
    NumericError,
    Problem,
    RecipeError,
    ResourceError,
    Stopped,
    UsageError,
    as_document,
    from_document,
)
from rlcli.observe.page.rendering import DEMO
from rlcli.observe.run_search import NoSuchRun
from rlcli.python.metrics import Metrics
from rlcli.python.runs import as_words
from rlcli.python.started import HeldBack
from rlcli.recipe.resolve import load_recipe

HOME = str(Path(__file__).parents[2])


def test_the_names_of_the_page_are_offered_and_others_refused():
    assert {"train", "run", "runs", "Run", "RlcliError"} <= set(dir(rlcli))
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        rlcli.trian  # noqa: B018


@pytest.mark.parametrize(
    ("key", "value", "resolved"),
    [
        ("checkpoint.every_seconds", 0.02, 0.02),
        ("checkpoint.every_seconds", np.float32(0.5), 0.5),
        ("train.steps", np.int64(7), 7),
        ("log.plot", False, False),
        ("log.dir", Path("elsewhere"), "elsewhere"),
        ("log.dir", "ünïcode 😀 # x", "ünïcode 😀 # x"),
        ("log.dir", "null", "null"),
        ("checkpoint.every_seconds", None, None),
    ],
)
def test_a_value_of_python_arrives_as_it_is(key, value, resolved):
    recipe = load_recipe("ppo_math", as_words({key: value})).recipe
    assert operator.attrgetter(key)(recipe) == resolved


def test_values_without_a_json_form_are_written_as_yaml_or_refused():
    assert as_words({"a": math.inf, "b": -math.inf}) == ["a=.inf", "b=-.inf"]
    assert as_words(["a=1"]) == as_words("a=1") == ["a=1"]
    for value, why in (
        ({1, 2}, "no values of type set"),
        ([object()], "no values of type object"),
        ({"b": math.inf}, "Out of range float"),
    ):
        with pytest.raises(UsageError, match=why) as refused:
            as_words({"a": value})
        assert refused.value.where == "a"


def test_metrics_are_arrays_with_nan_where_a_step_has_none():
    records = [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "reward/reward": 0.5, "reward/accuracy": 0.1, "actor/loss": math.inf},
    ]
    metrics = Metrics(records)
    assert metrics.steps.tolist() == [0, 1]
    np.testing.assert_array_equal(metrics["reward"], [math.nan, 0.5])
    np.testing.assert_array_equal(metrics["eval/accuracy"], [0.25, math.nan])
    np.testing.assert_array_equal(metrics["actor/loss"], [math.nan, math.inf])
    assert list(metrics) == ["eval/accuracy", "reward/reward", "reward/accuracy", "actor/loss"]
    assert {name: values.shape for name, values in metrics.items()} == dict.fromkeys(metrics, (2,))
    with pytest.raises(KeyError, match="rewrad; the run has eval/accuracy, reward/reward"):
        metrics["rewrad"]


@pytest.mark.parametrize(
    "error",
    [
        RecipeError([Problem("R42", "unknown key", "a.yaml:1:2", "did you mean b?", "  x\n  ^")]),
        NumericError("step 3: actor/loss is not finite", hint="lower the learning rate"),
        Errors([ResourceError("no disk", code="F75"), ResourceError("no port")]),
    ],
)
def test_an_error_of_a_command_is_the_same_error_here(error):
    again = from_document(json.loads(json.dumps(as_document(error))))
    assert (type(again), str(again), again.exit_code) == (type(error), str(error), error.exit_code)


def test_an_error_of_a_class_that_is_not_listed_becomes_its_listed_parent():
    again = from_document(as_document(NoSuchRun("there is no run 'x'", code="F72")))
    assert type(again) is ResourceError


def test_a_run_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ResourceError, match="there is no run 'nowhere'"):
        rlcli.run("nowhere", tmp_path)
    assert rlcli.runs(tmp_path) == []
    with pytest.raises(ResourceError, match="is not the folder of a run"):
        rlcli.run(tmp_path)


@pytest.mark.parametrize(
    ("config", "code"),
    [({"auto_map": {"AutoConfig": "code.Configuration"}}, "S6"), ({}, "MODEL")],
)
def test_a_model_in_the_run_of_a_stranger_runs_no_code(tmp_path, config, code):
    run = shutil.copytree(DEMO, tmp_path / "run")
    actor = run / "models/actor"
    actor.mkdir(parents=True)
    (actor / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (actor / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ModelError) as caught:
        rlcli.run(run).model()
    assert caught.value.code == code


def test_what_components_print_is_shown_and_the_result_is_not(capsys):
    result = HeldBack("{", sys.stdout)
    for line in ("from a reward", "{", "not the result", "{", '  "ok": true', "}"):
        result.take(line)
    assert capsys.readouterr().out == "from a reward\n{\nnot the result\n"
    assert json.loads("\n".join(result.lines)) == {"ok": True}


def test_errors_that_are_raised_are_not_shown_too(capsys):
    errors = HeldBack("error[", sys.stderr, several=True)
    for line in ("from a reward", "error[mine]", "error[R42] one", "  hint", "error[R37] two"):
        errors.take(line)
    errors.show(all_but=2)
    assert capsys.readouterr().err == "from a reward\nerror[mine]\n"


def test_a_single_profile_is_one_layer(monkeypatch):
    commands = []
    monkeypatch.setattr("rlcli.python.runs.run_command", lambda words, _: commands.append(words))
    with pytest.raises(TypeError):  # there is no result
        rlcli.train("ppo_math", with_="gpu8")
    assert commands[0][-4:] == ["--with", "gpu8", "--", "ppo_math"]


TRAIN = """
import rlcli
tiny = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "tie_word_embeddings": True}
try:
    rlcli.train("sft_math", {"models.actor.scratch": tiny, "train.steps": 100_000,
                             "train.prompts_per_step": 8, "log.trackers": []}, run_dir="long")
except rlcli.RlcliError as error:
    print(type(error).__name__, error.exit_code, error.hint)
"""


@pytest.fixture
def training(tmp_path):
    """A program that trains, once the run has made two steps; and the run. All processes are
    forks."""
    load_everything()
    with warm_processes():
        yield from _started(tmp_path)


def _started(tmp_path):
    program = subprocess.Popen(
        [sys.executable, "-c", TRAIN],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": HOME},
        stdout=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "long/metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert program.poll() is None
        time.sleep(0.1)
    yield program, rlcli.run(tmp_path / "long")
    program.kill()
    program.wait()


@pytest.mark.timeout(240)
def test_a_run_stops_with_a_checkpoint_when_its_program_is_killed(training):
    program, run = training
    program.kill()
    while run.state != "stopped":
        time.sleep(0.1)
    assert list(run.path.glob("checkpoints/*"))


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_run_that_is_stopped_from_elsewhere_raises_stopped(training):
    program, run = training
    subprocess.run(
        [sys.executable, "-m", "rlcli", "stop", str(run.path)],
        env={**os.environ, "PYTHONPATH": HOME},
        check=True,
        capture_output=True,
    )
    printed, _ = program.communicate()
    assert printed.startswith(f"{Stopped.__name__} {Stopped.exit_code} rlcli.run(")
    assert ".resume() continues it" in printed
    assert run.state == "stopped"


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_second_interrupt_ends_the_run_at_once(training):
    program, run = training
    for _ in range(2):
        program.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert program.wait() != 0
    assert run.state in ("failed", "stopped")
