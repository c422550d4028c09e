"""`rlcli ckpt`: the checkpoints of a run are listed, verified, shown and pruned."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.checkpoint.commit import begin
from rlcli.observe.run_directory import RunDirectory

one_save = runpy.run_path(str(Path(__file__).parents[1] / "checkpoint/one_save.py"))
save = one_save["save"]
ACCURACIES = {10: 0.1, 20: 0.9, 30: 0.3, 40: 0.5}
TENSORS = "models/actor/model.safetensors"


@pytest.fixture
def run(rlcli, tmp_path):
    """A run with four checkpoints, of which the second is the best."""
    with RunDirectory.create(
        tmp_path / "run", "ppo_math", command=["rlcli", "train", "ppo_math"]
    ) as run:
        run.write_text(
            "recipe.resolved.yaml", "checkpoint: {best_metric: eval/accuracy, best_is: highest}\n"
        )
        run.write_status("done", 40, 40, 0)
    for step, accuracy in ACCURACIES.items():
        save(
            run.checkpoints,
            step,
            metrics={"eval/accuracy": accuracy, "actor/loss": -accuracy},
            run_id=run.run_id,
        )
    return Path("run")


def id_of(run: Path) -> str:
    return RunDirectory.open(run).run_id


def checkpoint(run: Path, step: int) -> Path:
    return run / f"checkpoints/step-{step:012d}"


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[-12:]) for path in (run / "checkpoints").glob("step-*"))


def test_ls_lists_checkpoints_and_marks_latest_and_best(rlcli, run):
    code, out, err = rlcli("ckpt", "ls", str(run))
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()[2:]]
    assert [line[0] for line in lines] == ["40", "30", "20", "10"]
    assert lines[0][-2:] == ["ok", "LATEST"]
    assert out.count("best") == 1
    assert "best (eval/accuracy 0.9)" in out.splitlines()[4]
    assert max(map(len, out.splitlines())) <= 80


def test_ls_marks_the_best_by_the_chosen_metric(rlcli, run):
    _, out, _ = rlcli("ckpt", "ls", str(run), "--best-metric", "actor/loss")
    assert "best (actor/loss -0.1)" in out.splitlines()[5]
    (run / "recipe.resolved.yaml").write_text(
        "checkpoint: {best_metric: actor/loss, best_is: lowest}"
    )
    assert "best (actor/loss -0.9)" in rlcli("ckpt", "ls", str(run))[1].splitlines()[4]
    (run / "recipe.resolved.yaml").write_text("checkpoint: [")
    assert "best (eval/accuracy 0.9)" in rlcli("ckpt", "ls", str(run))[1]


def test_ls_shows_the_state_of_each_checkpoint(rlcli, run):
    os.truncate(checkpoint(run, 40) / TENSORS, 3)
    (checkpoint(run, 20) / "MANIFEST.json").unlink()
    (checkpoint(run, 10) / "state.json").unlink()
    begin(run / "checkpoints", 50, id_of(run))
    document = json.loads(rlcli("ckpt", "ls", str(run), "--json")[1])
    states = {checkpoint["step"]: checkpoint["state"] for checkpoint in document["checkpoints"]}
    assert states == {40: "corrupt", 30: "ok", 20: "incomplete", 10: "incomplete"}
    first = document["checkpoints"][0]
    assert (first["latest"], first["best"], first["metrics"]["eval/accuracy"]) == (True, False, 0.5)
    assert first["faults"][0]["where"].endswith(TENSORS)
    assert document["checkpoints"][1]["best"] is True
    assert document["unfinished"] == [f".tmp-50-{id_of(run)}"]
    _, out, _ = rlcli("ckpt", "ls", str(run))
    assert "size 3, the manifest says" in out
    assert "1 folder being written or deleted" in out


def test_a_run_without_checkpoints_is_reported(rlcli, run):
    shutil.rmtree(run / "checkpoints")
    code, out, _ = rlcli("ckpt", "ls", str(run))
    assert (code, out) == (0, "no checkpoints in run/checkpoints\n")
    assert json.loads(rlcli("ckpt", "ls", str(run), "--json")[1])["checkpoints"] == []
    for verb in ("verify", "show"):
        code, out, err = rlcli("ckpt", verb, str(run))
        assert (code, out) == (5, "")
        assert "there is no checkpoint" in err


def test_verify_accepts_valid_checkpoints(rlcli, run):
    code, out, err = rlcli("ckpt", "verify", str(run))
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines()] == [
        ["step", str(step), "ok"] for step in (40, 30, 20, 10)
    ]
    (checkpoint(run, 30) / "mine.txt").touch()
    code, out, _ = rlcli("ckpt", "verify", str(run), "--step", "30")
    assert (code, "not part of it: mine.txt" in out) == (0, True)


def test_verify_finds_a_flipped_bit_and_names_the_file(rlcli, run):
    file = checkpoint(run, 30) / TENSORS
    content = bytearray(file.read_bytes())
    content[11] ^= 4
    file.write_bytes(content)
    assert "corrupt" not in rlcli("ckpt", "ls", str(run))[1]
    code, out, err = rlcli("ckpt", "verify", str(run))
    assert code == 5
    assert "step 30  corrupt" in out
    assert err.startswith(f"error[F18] {file}: ")
    code, out, err = rlcli("ckpt", "verify", str(run), "--json")
    document = json.loads(out)
    assert (code, err, document["ok"]) == (5, "", False)
    assert [
        checkpoint["step"] for checkpoint in document["checkpoints"] if checkpoint["faults"]
    ] == [30]
    assert rlcli("ckpt", "verify", str(run), "--step", "40", "--step", "20")[0] == 0
    assert rlcli("ckpt", "verify", str(checkpoint(run, 20)))[0] == 0
    assert rlcli("ckpt", "verify", str(checkpoint(run, 30)))[0] == 5


def test_verify_names_the_run_that_a_stray_checkpoint_belongs_to(rlcli, run):
    shutil.rmtree(checkpoint(run, 10))
    save(run / "checkpoints", 10, run_id="6b" * 16)
    code, _, err = rlcli("ckpt", "verify", str(run / "checkpoints"), "--step", "10")
    assert code == 5
    assert "error[F19]" in err
    assert f"belongs to run {'6b' * 16}" in err


def test_prune_deletes_all_but_the_newest_and_best(rlcli, run):
    code, out, _ = rlcli(
        "ckpt", "prune", str(run), "--keep-last", "1", "--keep-best", "1", "--dry-run"
    )
    assert code == 0
    assert "would delete  step 30, 10" in out
    assert steps(run) == [10, 20, 30, 40]
    _, out, _ = rlcli("ckpt", "prune", str(run), "--keep-last", "1", "--keep-best", "1", "--json")
    document = json.loads(out)
    assert [checkpoint["step"] for checkpoint in document["deleted"]] == [30, 10]
    assert [checkpoint["step"] for checkpoint in document["kept"]] == [40, 20]
    assert steps(run) == [20, 40]
    _, out, _ = rlcli("ckpt", "prune", str(run), "--keep-last", "1")
    assert "deleted       step 20" in out
    assert "deleted       nothing" in rlcli("ckpt", "prune", str(run), "--keep-last", "1")[1]


def test_prune_keeps_the_last_valid_checkpoint(rlcli, run):
    for step in (30, 40):
        (checkpoint(run, step) / "state.json").unlink()
    rlcli("ckpt", "prune", str(run), "--keep-last", "1")
    assert steps(run) == [20, 40]  # LATEST names the damaged one


def test_prune_refuses_a_run_in_progress(rlcli, run):
    with RunDirectory.reopen(run):
        temporary = begin(run / "checkpoints", 50, id_of(run))
        for folder in (run, run / "checkpoints"):
            code, _, err = rlcli("ckpt", "prune", str(folder), "--keep-last", "1")
            assert code == 6
            assert "error[F71]" in err
        assert rlcli("ckpt", "prune", str(run), "--keep-last", "1", "--dry-run")[0] == 0
    assert temporary.is_dir()
    assert steps(run) == [10, 20, 30, 40]
    rlcli("ckpt", "prune", str(run), "--keep-last", "4")
    assert not temporary.exists()


def test_prune_removes_leftovers_only_inside_the_folder_of_a_run(rlcli, run, tmp_path):
    elsewhere = shutil.move(run / "checkpoints", tmp_path / "large-disk")
    leftover = begin(elsewhere, 50, id_of(run))
    assert rlcli("ckpt", "prune", str(elsewhere), "--keep-last", "3")[0] == 0
    assert leftover.exists()
    shutil.move(elsewhere, run / "checkpoints")
    assert rlcli("ckpt", "prune", str(run), "--keep-last", "2")[0] == 0
    assert [path.name[:4] for path in (run / "checkpoints").iterdir() if path.is_dir()] == [
        "step",
        "step",
    ]


def test_checkpoints_outside_a_run_are_listed_and_pruned(rlcli, run):
    (run / "checkpoints").rename("elsewhere")
    assert "LATEST" in rlcli("ckpt", "ls", "elsewhere")[1]
    assert rlcli("ckpt", "prune", "elsewhere", "--keep-last", "2")[0] == 0
    assert len(list(Path("elsewhere").glob("step-*"))) == 2


def test_show_lists_metrics_and_files_of_a_checkpoint(rlcli, run):
    code, out, _ = rlcli("ckpt", "show", str(run), "--step", "20")
    assert code == 0
    assert f"run       {id_of(run)}\n" in out
    assert "by rlcli 1.0 on 1 rank\n" in out
    assert [line.split() for line in out.splitlines() if "accuracy" in line] == [
        ["eval/accuracy", "0.9"]
    ]
    assert TENSORS in out
    assert max(map(len, out.splitlines())) <= 80
    document = json.loads(rlcli("ckpt", "show", str(run), "--json")[1])
    written = json.loads((checkpoint(run, 40) / "MANIFEST.json").read_text())
    assert document["step"] == 40
    assert document["files"] == written["files"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("ls", "nowhere"), 2, "there is no folder nowhere"),
        (("ls", "."), 2, "neither a run nor a folder of checkpoints"),
        (("verify", "run", "--step", "77"), 2, "there are: 40, 30, 20, 10"),
        (("show", "run", "--step", "77"), 2, "there are: 40, 30, 20, 10"),
        (("prune", "run", "--keep-last", "0"), 2, "at least one checkpoint must be kept"),
        (
            ("prune", "run/checkpoints/step-000000000010", "--keep-last", "1"),
            2,
            "is a single checkpoint",
        ),
        (("prune", "run"), 2, "--keep-last"),
        (("lst", "run"), 2, "did you mean ls?"),
    ],
)
def test_mistakes(rlcli, run, arguments, code, says):
    ended, out, err = rlcli("ckpt", *arguments)
    assert (ended, out) == (code, "")
    assert says in err


def test_the_verbs_load_no_heavy_library(run, tmp_path):
    program = (
        "import sys\nfrom rlcli.cli.main import main\n"
        "for words in (['ls', 'run'], ['verify', 'run'], ['show', 'run'], ['prune', 'run', "
        "'--keep-last', '1']):\n"
        "    try:\n        main(['ckpt', *words])\n    except SystemExit as end:\n        assert "
        "not end.code\n"
        "print(sorted({'torch', 'transformers', 'sympy', 'safetensors', 'numpy'} & "
        "set(sys.modules)), file=sys.stderr)"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == "[]\n"


def test_the_name_of_a_recipe_is_its_newest_run(rlcli, run):
    folder = Path("runs/ppo_math/20261126-101500")
    folder.parent.mkdir(parents=True)
    shutil.move(run, folder)
    for name in ("ppo_math", "20261126-101500", str(folder)):
        code, out, _ = rlcli("ckpt", "ls", name)
        assert (code, "best (eval/accuracy 0.9)" in out) == (0, True), name
    code, _, err = rlcli("ckpt", "ls", "sft_math")
    assert code == 6
    assert "it is a recipe without runs in runs; start one: rlcli train sft_math" in err
    assert (
        "there is no role judge in runs"
        in rlcli("convert", "ppo_math", "--role", "judge", "--to-hf", "out")[2]
    )
