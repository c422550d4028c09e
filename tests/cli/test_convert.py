"""`rlcli convert` as a user sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.testing.tiny_models import tiny_model

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    return folder


def _run_directory(model: Path, rlcli) -> Path:
    """A finished run, with an actor as written by two ranks."""
    assert (
        rlcli(
            "convert",
            "--from-hf",
            str(model),
            "--to",
            "run/models/actor",
            "--ranks",
            "2",
            "--no-verify",
        )[0]
        == 0
    )
    return Path("run")


def test_a_run_is_converted_to_a_folder_for_transformers(model, rlcli):
    run = _run_directory(model, rlcli)
    code, out, err = rlcli("convert", str(run), "--to-hf", "out/model")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "reading  run/models/actor: 2 sharded files, llama, f32"
    assert lines[1].startswith("writing  out/model: 1 safetensors (")
    assert "checking names and shapes 21/21 · embeddings untied as in the source · no NaN" in lines
    assert "         all 21 parameters equal those of the source" in lines
    assert "         outputs on 8 prompts: max diff 0.0 against the source" in lines
    assert lines[-1].startswith("done     in ")
    assert all(len(line) <= 80 for line in lines)
    assert (Path("out/model") / "model.safetensors").read_bytes() == (
        model / "model.safetensors"
    ).read_bytes()


def test_convert_as_json(model, rlcli):
    code, out, _ = rlcli("convert", str(model), "--to-hf", "out", "--dtype", "bfloat16", "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["ok"], document["written"], document["dtypes"], document["tensors"]) == (
        True,
        True,
        ["bf16"],
        21,
    )
    assert document["verified"]["max_difference"] == 0.0
    assert document["files"] == ["model.safetensors"]


def test_a_dry_run_writes_no_files(model, rlcli):
    code, out, _ = rlcli(
        "convert", str(model), "--to-hf", "out", "--dry-run", "--max-shard-size", "20KB"
    )
    assert code == 0
    assert "would be out: 7 safetensors" in out
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--to-hf", "out"], 2, "needs SOURCE"),
        (["MODEL"], 2, "needs either --to-hf, or --from-hf and --to"),
        (["--from-hf", "MODEL"], 2, "needs either --to-hf, or --from-hf and --to"),
        (["MODEL", "--from-hf", "MODEL", "--to", "out"], 2, "--from-hf names the folder to read"),
        (["MODEL", "--to-hf", "out", "--to", "out"], 2, "needs either"),
        (["nowhere", "--to-hf", "out"], 2, "there is no folder nowhere"),
        (["MODEL", "--to-hf", "out", "--step", "3"], 2, "--step does not apply"),
        (["MODEL", "--to-hf", "out", "--dtype", "float8"], 2, "--dtype"),
        (["MODEL", "--to-hf", "out", "--max-shard-size", "big"], 2, "not a valid file size"),
        (["--from-hf", "MODEL", "--to", "out", "--ranks", "0"], 2, "at least 1"),
        (["MODEL", "--to-hf", "MODEL"], 6, "error[F72]"),
        ([".", "--to-hf", "out"], 5, "neither a run"),
    ],
)
def test_mistakes(arguments, code, message, model, rlcli):
    exit_code, _, err = rlcli(
        "convert", *(str(model) if argument == "MODEL" else argument for argument in arguments)
    )
    assert exit_code == code
    assert message in err
    assert "Traceback" not in err
    assert not Path("out").exists()


def test_conversion_does_not_load_torch(model, tmp_path):
    """Neither help, nor a plan, nor the conversion itself loads torch or transformers."""
    script = (
        "import sys\n"
        "from rlcli.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as ended: assert not ended.code, ended.code\n"
        "assert not {'torch', 'transformers', 'datasets', 'sympy'} & set(sys.modules), 'heavy'\n"
    )
    for arguments in (
        ["--help"],
        [str(model), "--to-hf", "planned", "--dry-run"],
        [str(model), "--to-hf", "out", "--no-verify", "--dtype", "bfloat16"],
    ):
        command = [sys.executable, "-c", script, "convert", *arguments]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()
