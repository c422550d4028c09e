"""`rlcli status`, `rlcli logs` and other verbs for recorded runs, and how names select runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from rlcli.cli.output import print_described
from rlcli.launch.slurm.jobs import QUEUE
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.run_search import find_run, find_runs
from rlcli.processes import ProcessRecord, start_time


def record(
    path: str, state: str = "done", step: int = 2, steps: int = 4, message: str | None = None
) -> Path:
    """The folder of a run with metrics."""
    folder = Path(path)
    with RunDirectory.create(folder, "ppo_math", command=["rlcli", "train", "ppo_math"]) as run:
        lines = [
            {"step": n, "actor/reward": n / 10, "eval/accuracy": n / 20, "time/step": 2.0}
            for n in (1, 2)
        ]
        run.write_text(
            "metrics.jsonl",
            "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "torn',
        )
        run.write_status(state, step, steps, {"done": 0, "failed": 7}.get(state), message)
    return folder


def write_owner(folder: Path, owner: ProcessRecord) -> None:
    """Write another process into the lock file."""
    (folder / "lock").write_text(json.dumps({"owner": asdict(owner), "supervisor": None}))


def ended_process() -> ProcessRecord:
    """An ended process of this machine."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return ProcessRecord(socket.gethostname(), process.pid, "earlier")


def test_status_lists_runs_with_state_step_reward_and_host(rlcli):
    record("runs/ppo_math/one")
    write_owner(record("runs/ppo_math/two", "running"), ProcessRecord("elsewhere", 4242, "earlier"))
    record("runs/sweep/x/three", "running")  # held by this process
    write_owner(record("runs/ppo_math/four", "running"), ended_process())
    code, out, err = rlcli("status")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line.split() for line in out.splitlines()[2:]}
    assert rows["ppo_math/one"][1:6] == ["done", "2/4", "reward", "0.200", "here"]
    assert rows["ppo_math/two"][1:6] == ["running", "2/4", "reward", "0.200", "elsewhere"]
    assert rows["sweep/x/three"][1] == "running"
    assert rows["ppo_math/four"][1] == "died"
    document = json.loads(rlcli("status", "--json")[1])
    assert {Path(run["run"]).name: run["state"] for run in document["runs"]} == {
        "one": "done",
        "two": "running",
        "three": "running",
        "four": "died",
    }
    assert all(len(line) <= 80 for line in out.splitlines())


def test_a_job_is_shown_from_its_files_without_squeue(rlcli, tmp_path, monkeypatch, caplog):
    folder = record("runs/ppo_math/one", "running")
    (folder / "job.json").write_text(
        '{"launcher": "slurm", "job_id": "77", "cluster": null, "submitted": "now"}'
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, _ = rlcli("status")
    assert (code, "there is no squeue here" in caplog.text) == (0, True)
    assert out.splitlines()[2].split()[:3] == ["ppo_math/one", "running", "2/4"]
    assert "job 77" in out


def queue_answers(folder: Path, line: str) -> None:
    """Let `squeue` print this line."""
    (folder / "squeue").write_text(f"#!/bin/sh\necho '{line}'\n")
    (folder / "squeue").chmod(0o755)


def test_waiting_jobs_have_no_host_and_finished_ones_have_nodes(rlcli, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    allocation = {"job": "76", "restart": 0, "started": "now", "nodes": "gpu-[16-17]", "step": None}
    waits, done = record("runs/ppo_math/waits", "submitted"), record("runs/ppo_math/done")
    for folder, job in ((waits, "77"), (done, "76")):
        (folder / "job.json").write_text(
            json.dumps({"launcher": "slurm", "job_id": job, "submitted": "now"})
        )
    (done / "job.allocations.jsonl").write_text(json.dumps(allocation) + "\n")
    columns = {"JobArrayID": "77", "State": "PENDING", "Reason": "Priority"}
    queue_answers(
        tmp_path, "".join(f"{columns.get(name, ''):<{width}}" for name, width in QUEUE.items())
    )
    out = rlcli("status", "waits")[1]
    assert "waits  waiting" in out
    assert "pid" not in out
    assert "where" not in out
    document = json.loads(rlcli("status", "waits", "--json")[1])
    assert (document["state"], document["job"], document["host"], document["pid"]) == (
        "waiting",
        "77",
        None,
        None,
    )
    assert "job                76 on gpu-[16-17]" in rlcli("status", "done")[1]
    rows = {line.split()[0]: line for line in rlcli("status")[1].splitlines()[2:]}
    assert "job 76 on gpu-[16-17]" in rows["ppo_math/done"]
    assert socket.gethostname() not in rows["ppo_math/waits"]


def test_missing_logs_of_a_job_are_explained(rlcli, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    folder = record("runs/ppo_math/waits", "submitted")
    (folder / "job.json").write_text('{"launcher": "slurm", "job_id": "77", "submitted": "now"}')
    code, _, err = rlcli("logs", "waits")
    assert (code, "inline" in err) == (6, False)
    assert "job 77 has not begun; rlcli status" in err
    (folder / "status.json").unlink()
    record("runs/ppo_math/ended", "failed")
    (tmp_path / "runs/ppo_math/ended/job.json").write_text(
        '{"launcher": "slurm", "job_id": "78", "submitted": "now"}'
    )
    assert "job 78 has not written any" in rlcli("logs", "ended")[2]


def test_status_names_the_logs_of_a_run_only_if_it_has_some(rlcli):
    folder = record("runs/ppo_math/ended", "failed")
    out = rlcli("status", "ended")[1]
    assert "rlcli logs" not in out, "a run of one process wrote to its terminal"
    assert "continue: rlcli resume runs/ppo_math/ended\n" in out
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs/rank0.log").write_text("its last words\n")
    assert "look: rlcli logs ppo_math/ended\n" in rlcli("status", "ended")[1]
    assert rlcli("logs", "ppo_math/ended") == (0, "its last words\n", "")


def test_status_names_runs_of_another_folder_so_that_other_verbs_find_them(rlcli):
    record("others/ppo_math/ended", "failed")
    Path("others/ppo_math/ended/logs").mkdir(exist_ok=True)
    Path("others/ppo_math/ended/logs/rank0.log").write_text("its last words\n")
    out = rlcli("status", "ended", "--runs", "others")[1]
    assert "look: rlcli logs others/ppo_math/ended\n" in out


def test_a_reused_process_id_is_not_taken_for_the_run(rlcli):
    folder = record("runs/ppo_math/one", "running")
    this_process = ProcessRecord.of_this_process()
    write_owner(folder, this_process)
    assert json.loads(rlcli("status", "one", "--json")[1])["state"] == "running"
    write_owner(
        folder, ProcessRecord(this_process.host, this_process.pid, f"{this_process.started}0")
    )
    assert json.loads(rlcli("status", "one", "--json")[1])["state"] == "died"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system records the start time")
def test_a_run_is_found_alive_after_the_clock_was_set(rlcli, monkeypatch):
    """Linux derives the time of day at which a process began from the clock as it is now."""
    write_owner(record("runs/ppo_math/one", "running"), ProcessRecord.of_this_process())
    earlier = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: earlier + 3600)
    assert json.loads(rlcli("status", "one", "--json")[1])["state"] == "running"


def test_status_of_a_failed_run_shows_the_error_and_the_next_command(rlcli):
    record(
        "runs/ppo_math/one", "failed", message="rank 1 was killed\nlast lines of \x1b[2Jrank1.log"
    )
    code, out, _ = rlcli("status", "ppo_math")
    assert code == 0
    assert "failed, exit code 7  step 2/4" in out
    assert "rank 1 was killed" in out
    assert "\x1b" not in out
    assert "held-out accuracy  0.0500 -> 0.100" in out
    assert "rlcli resume runs/ppo_math/one" in out
    document = json.loads(rlcli("status", "ppo_math", "--json")[1])
    assert (document["metrics"]["actor/reward"], document["last"]) == (
        0.2,
        {"name": "reward", "value": 0.2},
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", "[]\n"),
        ("metrics.jsonl", "{\n"),
        ("lock", "{}"),
        ("lock", '{"owner": {"host": 1, "pid": -1, "started": null}}'),
        ("procs.json", '[{"name": 1, "pid": true}, 3]'),
        ("status.json", "torn"),
    ],
)
def test_corrupted_files_of_a_run_are_ignored(rlcli, name, text):
    (record("runs/ppo_math/one") / name).write_text(text)
    for arguments in (["status"], ["status", "one"], ["status", "one", "--json"]):
        assert rlcli(*arguments)[0] == 0


SAMPLES = [
    {
        "step": 1,
        "id": "a",
        "prompt": "1+1?",
        "response": "3",
        "reward": 0.0,
        "answer": "2",
        "phase": "eval",
    },
    {
        "step": 1,
        "id": "b",
        "prompt": "2+1?",
        "response": "3",
        "reward": 1.0,
        "answer": "3",
        "phase": "eval",
    },
    {
        "step": 2,
        "id": "a",
        "prompt": "1+1?",
        "response": "\x1b[2J2\nso 2",
        "reward": 1.0,
        "phase": "eval",
    },
    {
        "step": 2,
        "id": "b",
        "prompt": "2+1?",
        "response": "3",
        "reward": 0.5,
        "finish": "length",
        "phase": "eval",
    },
    {
        "step": 2,
        "id": "c",
        "prompt": "x" * 5000,
        "response": "\u202eno",
        "reward": -1.0,
        "phase": "train",
    },
]


@pytest.fixture
def sampled(rlcli):
    """`rlcli samples` of a run with SAMPLES."""
    folder = record("runs/ppo_math/one")
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    return lambda *options: rlcli("samples", "one", *options)


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ([], ["2a", "2b", "2c"]),
        (["--phase", "eval"], ["2a", "2b"]),
        (["--step", "1"], ["1a", "1b"]),
        (["--id", "a"], ["1a", "2a"]),
        (["--grep", "so [0-9]"], ["2a"]),
        (["--grep", r"2\+1", "--step", "2"], ["2b"]),
        (["--worst", "2"], ["2c", "1a"]),
        (["--worst", "2", "--step", "2"], ["2c", "2b"]),
        (["--best", "1", "--step", "1"], ["1b"]),
        (["--limit", "1"], ["2a"]),
    ],
)
def test_options_select_samples(sampled, options, rows):
    document = json.loads(sampled(*options, "--json")[1])
    assert [f"{sample['step']}{sample['id']}" for sample in document["samples"]] == rows
    assert sampled(*options)[1].count("    prompt ") == len(rows)


def test_samples_are_escaped_and_shortened(sampled):
    _, out, _ = sampled()
    assert "\\x1b[2J2\n              so 2" in out
    assert "\\u202eno" in out
    assert "cut off at the limit" in out
    assert max(map(len, out.splitlines())) < 1000
    assert max(map(len, sampled("--full")[1].splitlines())) > 5000
    (pair,) = json.loads(sampled("--changed", "--json")[1])["changed"]
    assert (pair["before"]["response"], pair["after"]["step"]) == ("3", 2)
    assert "    step 1    3  [reward 0]\n    step 2    \\x1b[2J2\n" in sampled("--changed")[1]


def test_a_sample_is_shown_with_its_length_its_advantage_and_why_it_has_its_reward(sampled):
    told = SAMPLES[0] | {"length": 12, "advantage": -1.25, "reason": "wrong answer: 5\x1b[2J"}
    Path("runs/ppo_math/one/samples.jsonl").write_text(json.dumps(told) + "\n")
    head, *rest = sampled()[1].splitlines()
    assert "advantage -1.25  12 tokens  step 1  eval" in head
    assert rest[-1] == "    why       wrong answer: 5\\x1b[2J"


EPISODE = SAMPLES[0] | {
    "response": "5⟨higher⟩7",
    "turns": [
        {"sampled": True, "text": "5", "tokens": 1},
        {"sampled": False, "text": "higher\n", "tokens": 2},
        {"sampled": True, "text": "7", "tokens": 1},
    ],
}


def test_an_episode_is_shown_turn_by_turn(sampled):
    Path("runs/ppo_math/one/samples.jsonl").write_text(
        json.dumps(EPISODE | {"turn_rewards": [0.0, 1.0]}) + "\n"
    )
    assert sampled()[1].splitlines()[3:] == [
        "    turn 1    5  [reward 0]",
        "    observed  higher",
        "    turn 2    7  [reward 1.00]",
    ]


@pytest.mark.parametrize(
    "broken",
    [{"turns": "x"}, {"turns": [{"text": "x"}]}, {"turns": [{"sampled": True, "text": 5}]},
     {"turn_rewards": ["x"]}],
)  # fmt: skip
def test_broken_turns_are_reported(sampled, broken):
    Path("runs/ppo_math/one/samples.jsonl").write_text(json.dumps(EPISODE | broken) + "\n")
    code, _, err = sampled()
    assert (code, "a field has the wrong type" in err) == (4, True)


def test_options_that_select_no_samples_are_answered_with_why(sampled):
    unrewarded = SAMPLES[0] | {"reward": None}
    Path("runs/ppo_math/one/samples.jsonl").write_text(json.dumps(unrewarded) + "\n")
    assert "no samples have a reward" in sampled("--worst", "3")[2]
    assert "no prompt has answers of two steps that differ" in sampled("--changed")[2]
    assert "no samples match" in sampled("--changed", "--step", "9")[2]


def test_invalid_options_and_missing_samples_are_reported(sampled):
    for options in (["--grep", "("], ["--worst", "1", "--best", "1"], ["--worst", "0"]):
        assert sampled(*options)[0] == 2
    assert "no samples match" in sampled("--grep", "no such thing")[2]
    Path("runs/ppo_math/one/samples.jsonl").write_text(
        '{"step": 1, "id": 1, "prompt": 5, "response": "x"}\n'
    )
    assert sampled()[0] == 4
    Path("runs/ppo_math/one/samples.jsonl").unlink()
    assert sampled()[0] == 6


def test_metrics_are_plotted_in_the_terminal(rlcli):
    record("runs/ppo_math/one")
    record("runs/ppo_math/two")
    code, out, _ = rlcli("plot", "one", "reward")
    lines = out.splitlines()
    assert (code, lines[0], lines[-1].split()) == (0, "reward", ["━━", "ppo_math/one", "0.200"])
    _, out, _ = rlcli("plot", "one", "two", "reward", "eval/accuracy")
    assert "b ppo_math/two  0.200" in out  # no colours here: a letter for each
    assert max(map(len, out.splitlines())) <= 80
    document = json.loads(rlcli("plot", "one", "two", "reward", "--json")[1])
    line = {"label": "ppo_math/two", "steps": [1.0, 2.0], "values": [0.1, 0.2], "spread": None}
    assert document["charts"][0]["lines"][1] == line | {"number": 1}
    usual = json.loads(rlcli("plot", "one", "--json")[1])["charts"]
    assert [chart["metric"] for chart in usual] == ["reward", "eval/accuracy"]
    code, out, err = rlcli("plot", "one", "reword")
    assert (code, out) == (2, "")
    assert "did you mean reward?" in err
    assert rlcli("plot", "nothing", "reward")[0] == 6


def test_a_plot_of_a_run_without_the_usual_metrics_asks_for_one(rlcli):
    lines = [{"step": n, "time": "later", "time/step": 2.0, "actor/forks": 1.0} for n in (1, 2)]
    file = record("runs/answers/one") / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = rlcli("plot", "one")
    assert (code, out) == (2, "")
    assert "these runs report no reward, eval/accuracy, kl, loss or length" in err
    assert "hint: name a metric, for example actor/forks, time/step" in err
    file.write_text("")
    assert "no run has a metric yet" in rlcli("plot", "one")[2]


def test_a_curve_is_a_metric_even_if_a_recipe_or_a_folder_is_called_like_it(rlcli):
    record("runs/ppo_math/one")
    record("runs/reward/two")
    Path("loss").mkdir()
    document = json.loads(rlcli("plot", "one", "reward", "--json")[1])
    (drawn,) = document["charts"]
    assert (drawn["metric"], len(drawn["lines"])) == ("reward", 1)
    code, _, err = rlcli("plot", "one", "loss")
    assert (code, "'loss' is neither a run nor a metric" in err) == (2, True)
    document = json.loads(rlcli("plot", "reward", "reward", "--json")[1])
    assert document["charts"][0]["lines"][0]["label"] == "reward/two"


def test_the_accuracy_of_evaluations_and_that_of_training_share_no_chart(rlcli):
    line = {"step": 1, "reward/accuracy": 0.25, "time/step": 2.0}
    record("runs/ppo_math/one")
    (record("runs/ppo_math/two") / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    for names in (("one", "two"), ("two", "one")):
        (drawn,) = json.loads(rlcli("plot", *names, "accuracy", "--json")[1])["charts"]
        labels = [each["label"] for each in drawn["lines"]]
        assert (drawn["metric"], labels) == ("eval/accuracy", ["ppo_math/one"])
    (drawn,) = json.loads(rlcli("plot", "two", "accuracy", "--json")[1])["charts"]
    assert (drawn["metric"], drawn["lines"][0]["values"]) == ("accuracy", [0.25])


def test_metrics_are_plotted_to_a_file(rlcli, tmp_path):
    record("runs/ppo_math/one")
    code, out, err = rlcli("plot", "one", "reward", "-o", "curves.png")
    assert (code, out, err) == (0, "", "wrote curves.png\n")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert rlcli("plot", "one", "reward", "-o", "curves.pdf")[0] == 2
    assert rlcli("plot", "one", "reward", "-o", "gone/curves.png")[0] == 6


@pytest.fixture
def swept(rlcli):
    """Two values with two seeds each, and a run with neither."""
    for number, (rate, seed) in enumerate([("0.1", 1), ("0.1", 2), ("0.2", 1), ("0.2", 2)]):
        folder = record(f"runs/ppo_math/sweep/{number}")
        (folder / "recipe").mkdir()
        (folder / "recipe/overrides.txt").write_text(
            f"train.steps=4\nppo.kl_ctl={rate}\nseed={seed}\n"
        )
        (folder / "recipe.resolved.yaml").write_text(
            f"name: ppo_math\nseed: {seed}\nlaunch:\n  type: inline\nppo:\n  kl_ctl: "
            f"{rate}\ntrain:\n  steps: 4\n"
        )
        line = {"step": 1, "actor/reward": number / 10, "eval/accuracy": 0.5, "time/step": 2.0}
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return rlcli


def test_runs_that_differ_only_in_the_seed_are_grouped(swept):
    code, out, _ = swept("compare", "ppo_math/sweep", "reward")
    assert code == 0
    rows = [line for line in out.splitlines() if "  ppo.kl_ctl=" in line]
    assert [row.split()[:4] for row in rows] == [
        ["a", "ppo.kl_ctl=0.1", "2", "1"],
        ["b", "ppo.kl_ctl=0.2", "2", "1"],
    ]
    assert "0.0500 ±0.071" in rows[0]
    assert "b ppo.kl_ctl=0.2  0.250 ± 0.0707" in out
    assert "b  ppo_math/sweep/2, ppo_math/sweep/3\n" in out
    groups = json.loads(swept("compare", "ppo_math/sweep", "--json")[1])["groups"]
    assert [(group["label"], len(group["runs"])) for group in groups] == [
        ("ppo.kl_ctl=0.1", 2),
        ("ppo.kl_ctl=0.2", 2),
    ]
    assert groups[1]["results"]["reward in training"]["mean"] == pytest.approx(0.25)


def test_an_unfinished_run_has_a_row_of_its_own_and_a_seed_counts_once(swept):
    again = record("runs/ppo_math/sweep/again")
    for name in ("recipe/overrides.txt", "recipe.resolved.yaml", "metrics.jsonl"):
        (again / name).parent.mkdir(exist_ok=True)
        (again / name).write_text(Path("runs/ppo_math/sweep/0", name).read_text())
    status = Path("runs/ppo_math/sweep/3/status.json")
    status.write_text(status.read_text().replace('"done"', '"stopped"'))
    _, out, _ = swept("compare", "ppo_math/sweep", "reward")
    rows = [line.split()[1:5] for line in out.splitlines() if "  ppo.kl_ctl=" in line]
    assert rows == [
        ["ppo.kl_ctl=0.1", "2", "1", "0.500"],
        ["ppo.kl_ctl=0.2", "1", "1", "0.500"],
        ["ppo.kl_ctl=0.2", "(unfinished)", "1", "1"],
    ]
    assert "1 run is left out: a later one has the same recipe and seed" in out


def test_a_run_that_was_resumed_with_another_setting_is_not_one_that_had_it_from_the_start(swept):
    change = {"key": "ppo.kl_ctl", "before": 0.1, "now": 0.2, "kind": "alters"}
    longer = {"key": "train.steps", "before": 2, "now": 4, "kind": "safe"}
    for number, changes in ((2, [longer]), (3, [change, longer])):
        resumed = {"time": "now", "step": 2, "changes": changes}
        Path(f"runs/ppo_math/sweep/{number}/resumes.jsonl").write_text(json.dumps(resumed) + "\n")
    groups = json.loads(swept("compare", "ppo_math/sweep", "--json")[1])["groups"]
    assert [len(group["runs"]) for group in groups] == [2, 1, 1]
    assert "ppo.kl_ctl=0.2 after step 2" in groups[2]["label"]


def test_a_run_keeps_its_letter_in_charts_that_others_are_not_in(swept):
    line = {"step": 1, "actor/reward": 0.5, "critic/loss": 0.5, "time/step": 2.0}
    for number in (2, 3):
        Path(f"runs/ppo_math/sweep/{number}/metrics.jsonl").write_text(json.dumps(line) + "\n")
    _, out, _ = swept("plot", "sweep/0", "sweep/2", "sweep/3", "loss", "reward")
    assert [out.count(f"{letter} ppo_math/sweep/3  0.500") for letter in "bc"] == [0, 2]


def test_a_diverged_run_is_compared_and_what_it_lacks_is_named(swept):
    nonfinite = {"step": 1, "actor/loss": None, "nonfinite": {"actor/loss": "nan"}, "time/step": 2}
    for number in range(4):
        file = Path(f"runs/ppo_math/sweep/{number}/metrics.jsonl")
        file.write_text(json.dumps(nonfinite) + "\n")
    code, out, _ = swept("compare", "ppo_math/sweep")
    assert (code, "seconds per step" in out) == (0, True)
    for words in (("plot", "sweep/0"), ("compare", "sweep/0", "loss")):
        code, _, err = swept(*words)
        assert (code, "loss is never a finite number in these runs" in err) == (2, True)


def test_seeds_without_a_step_in_common_have_no_curve(swept):
    for number, step in ((0, 1), (1, 2)):
        line = {"step": step, "actor/reward": 0.5, "eval/loss": 1e200 * (-1) ** step}
        file = Path(f"runs/ppo_math/sweep/{number}/metrics.jsonl")
        file.write_text(json.dumps(line) + "\n")
    code, out, _ = swept("compare", "sweep/0", "sweep/1")
    assert (code, "0.500 ±0" in out) == (0, True)
    code, _, err = swept("compare", "sweep/0", "sweep/1", "reward")
    assert (code, "nothing to draw of reward" in err) == (2, True)


def test_single_runs_are_labelled_by_recipe_and_overrides(swept):
    record("runs/sft_math/one")
    Path("runs/sft_math/one/recipe.resolved.yaml").write_text("name: sft_math\nseed: 1\n")
    groups = json.loads(swept("compare", "sweep/0", "sft_math/one", "--json")[1])["groups"]
    assert [group["label"] for group in groups] == [
        "ppo_math train.steps=4 ppo.kl_ctl=0.1",
        "sft_math",
    ]
    assert groups[0]["results"]["reward in training"] == {"mean": 0.0, "spread": None}
    code, _, err = swept("compare", "sweep/0", "rewrad")
    assert (code, "did you mean reward?" in err) == (2, True)
    Path("runs/sft_math/one/recipe.resolved.yaml").unlink()
    assert swept("compare", "sft_math/one")[0] == 6


def test_a_comparison_with_long_labels_fits_80_columns(swept):
    setting = "models.critic.backend.args.lr_scheduler_type"
    for number, folder in enumerate(sorted(Path("runs/ppo_math/sweep").iterdir())):
        overrides = folder / "recipe/overrides.txt"
        rates = f"{setting}=cosine\nmodels.critic.backend.args.lr=0.000{number}\n"
        overrides.write_text(overrides.read_text() + rates)
    _, out, _ = swept("compare", "ppo_math/sweep", "reward")
    assert max(map(len, out.splitlines())) <= 80
    legend = out[out.index("step ") :]
    assert "models.critic.backend.args.lr=0.0002" in legend


def test_sweep_options_without_a_sweep_are_refused(rlcli):
    assert rlcli("train", "ppo_math", "--at-once", "2")[0] == 2


def test_a_sweep_may_set_what_its_recipe_lacks(rlcli):
    Path("rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    for model in ("one", "two"):
        Path(model).mkdir()
        Path(model, "config.json").write_text("{}")
    on_slurm = ("--data", "rows.jsonl", "launch=slurm", "--dry-run")
    code, out, err = rlcli("train", "sft", "--sweep", "models.actor.path=one,two", *on_slurm)
    assert (code, "# 2 runs of sft" in out) == (0, True), err
    code, _, err = rlcli("train", "sft", "--sweep", "train.epochs=1,2", *on_slurm)
    assert (code, "models.actor has no weights" in err) == (2, True)


def test_attach_to_a_finished_run_shows_how_it_ended(rlcli):
    record("runs/ppo_math/one", "failed", message="rank 1 died")
    code, out, err = rlcli("attach", "one")
    assert (code, out) == (7, "ppo_math/one failed at step 2/4: rank 1 died\n")
    assert err.splitlines()[-1].startswith("step 2/4  reward 0.200  2.00 s/step")
    write_owner(record("runs/ppo_math/two", "running"), ended_process())
    assert rlcli("attach", "two", "--json")[0] == 7


def test_status_without_runs_names_the_folder(rlcli):
    assert rlcli("status")[:2] == (0, "no runs in runs\n")
    assert json.loads(rlcli("status", "--json", "--runs", "other")[1]) == {
        "runs": [],
        "left_out": 0,
    }


def test_names_select_runs(rlcli, tmp_path):
    first, second, of_sft = (
        record(f"runs/{name}") for name in ("ppo_math/one", "ppo_math/two", "sft_math/one")
    )
    for age, folder in enumerate((of_sft, second, first)):
        os.utime(folder / "status.json", (1000 + age, 1000 + age))
    assert find_runs() == [first, second, of_sft]
    assert find_run("ppo_math") == first
    assert find_run("two") == find_run("ppo_math/two") == find_run("runs/ppo_math/two/") == second
    assert find_run("ppo_math", is_meant=lambda folder: folder == second) == second
    assert find_run(str(tmp_path / of_sft)) == tmp_path / of_sft
    code, out, err = rlcli("status", "one")
    assert (code, out) == (6, "")
    assert err.startswith(
        "error[F72]: 2 runs are called one\n  hint: name one of them: runs/ppo_math/one, "
    )
    assert "did you mean ppo_math/two?" in rlcli("status", "ppo_math/tow")[2]
    assert rlcli("status", "a\0b")[0] == 6


def test_logs_show_the_last_lines_of_each_process(rlcli):
    folder = record("runs/ppo_math/one", "failed")
    assert rlcli("logs", "one")[0] == 6
    (folder / "logs").mkdir(mode=0o700)
    for rank in (0, 1, 10):
        (folder / f"logs/rank{rank}.log").write_text(
            "".join(f"line {n} of {rank}\n" for n in range(30)) + "\x1b[2Jtorn"
        )
    (folder / "logs/node0.log").write_text("")
    lines = rlcli("logs", "one", "-n", "2")[1].splitlines()
    assert lines == [
        line
        for rank, name in ((0, "rank0 "), (1, "rank1 "), (10, "rank10"))
        for line in (f"{name}  line 29 of {rank}", f"{name}  \\x1b[2Jtorn")
    ]
    assert rlcli("logs", "one", "--rank", "10", "-n", "1")[1] == "\\x1b[2Jtorn\n"
    document = json.loads(rlcli("logs", "one", "--rank", "1", "--json")[1])
    assert len(document["logs"]["rank1"]["lines"]) == 20
    code, _, err = rlcli("logs", "one", "--rank", "2")
    assert code == 6
    assert "rank0, rank1, rank10, node0" in err
    # it is over
    assert rlcli("logs", "one", "-f", "-n", "1")[1].splitlines()[0] == "rank0   line 29 of 0"


def test_followed_logs_name_processes_that_come_later_and_end_with_their_last_words(
    rlcli, monkeypatch
):
    folder = record("runs/ppo_math/one", "running")  # held by this process
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs/node0.log").write_text("starts\n")

    def end(_):
        (folder / "logs/rank0.log").write_text("works\nkilled while")
        with RunDirectory.open(folder) as run:
            run.write_status("failed", 2, 4, 7)

    monkeypatch.setattr("rlcli.cli.logs.time.sleep", end)
    lines = rlcli("logs", "one", "--follow")[1].splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [
        ["node0", "starts"],
        ["rank0", "works"],
        ["rank0", "killed while"],
    ]


def test_only_a_run_in_progress_on_this_machine_is_stopped(rlcli):
    folder = record("runs/ppo_math/one")
    code, out, _ = rlcli("stop", "one")
    assert (code, out) == (0, "runs/ppo_math/one was not running: done at step 2/4\n")
    RunDirectory.open(folder).write_status("running", 2, 4)
    write_owner(
        folder, ProcessRecord("elsewhere", os.getpid(), ProcessRecord.of_this_process().started)
    )
    code, out, err = rlcli("stop", "one")
    assert (code, out) == (6, "")
    assert "is running on elsewhere, which is another machine" in err
    assert f"rlcli stop {folder.absolute()}" in err
    (folder / "lock").write_text("{}")
    assert rlcli("stop", "one")[0] == 6
    assert not (folder / "stop.json").exists()


def test_a_run_whose_folder_takes_no_files_is_stopped(rlcli, caplog):
    """Such as one on a full disk, which may be why it is stopped."""
    folder = record("runs/ppo_math/one", "running")
    with subprocess.Popen(["sleep", "100"]) as process:
        started = start_time(process.pid)
        write_owner(folder, ProcessRecord(socket.gethostname(), process.pid, str(started)))
        (folder / "stop.json").mkdir()
        assert rlcli("stop", "one", "--no-wait")[0] == 0
        assert process.wait(20) == -signal.SIGTERM
    assert "stop.json cannot be written (Is a directory): asking again ends the run" in caplog.text


@pytest.mark.parametrize("columns", ["60", "80"])
def test_status_shows_everything_of_runs_with_long_names(rlcli, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    long = "grpo_for_a_cluster/sweep-20261127-075000/actor.optim.lr=1e-06,train.seed=3,x=1"
    record(f"runs/{long}", "failed")
    record("runs/ppo_math/one")
    out = rlcli("status")[1]
    assert sorted(out.splitlines()[::2]) == [long, "ppo_math/one"]
    facts = dict(zip(out.splitlines()[::2], out.splitlines()[1::2], strict=True))
    assert facts[long].startswith("  failed, 2/4, reward 0.200, here, ")
    assert facts["ppo_math/one"].startswith("  done, 2/4, reward 0.200, here, ")


def test_a_long_value_wraps_between_words_on_a_terminal_only(monkeypatch, capsys):
    message = "rank 5 was killed by the system " + "/a/long/path" * 8 + " and more words than fit"
    monkeypatch.setenv("COLUMNS", "60")
    print_described("  why      ", f"{message}\nnext")
    assert capsys.readouterr().out == f"  why      {message}\n           next\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_described("  why      ", message)
    lines = capsys.readouterr().out.splitlines()
    assert [word for line in lines for word in line.split()] == ["why", *message.split()]
    assert all(line.startswith(" " * 11) for line in lines[1:])
    assert all(len(line) <= 60 or len(line.split()) == 1 for line in lines)
