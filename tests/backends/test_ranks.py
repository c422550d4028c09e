"""One rank and two give the same losses, gradients, weights and responses, however unevenly the batch is shared."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("ranks_script.py")


def run(ranks: int, out: Path) -> dict:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT)]
    done = subprocess.run([*command, str(out)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return {n: (run(n, folder / f"{n}.json"), folder / f"{n}.model") for n in (1, 2)}


def test_losses_and_gradient_norms_do_not_depend_on_ranks(results):
    one, two = results[1][0]["steps"], results[2][0]["steps"]
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, rel=1e-5)
        assert a["grad_norm"] > 0


def test_weights_saved_by_two_ranks_equal_those_of_one(results):
    one, two = (load_file(results[n][1] / "model.safetensors") for n in (1, 2))
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-5, rtol=1e-4, msg=name)


def test_all_ranks_refuse_the_gradient_that_one_spoiled(results):
    assert results[2][0]["poisoned"] == 1.0


def test_gathered_parameters_answer_like_whole_ones(results):
    assert results[1][0]["response"] == results[2][0]["response"]


def test_state_goes_on_alike_on_any_number_of_ranks(results):
    """The two-rank run, which came second, took up its own state and that of one rank."""
    alone = results[1][0]["resumed"]["1.state"]
    for written_by in ("1.state", "2.state"):
        assert results[2][0]["resumed"][written_by] == pytest.approx(alone, rel=1e-4), written_by
    assert alone["grad_norm"] > 0


def test_the_state_of_two_ranks_is_in_two_files_and_of_one_rank_is_a_model(results, tmp_path):
    folder = results[1][1].parent
    assert {file.name for file in (folder / "1.state" / "models").iterdir()} == {"model.safetensors"}
    shards = sorted((folder / "2.state" / "models").iterdir())
    assert [shard.name[:11] for shard in shards] == ["shard-00001", "shard-00002"]
    whole = load_file(folder / "2.model" / "model.safetensors")
    from rlcli.checkpoint.state import fill

    read = {name: torch.empty_like(tensor) for name, tensor in whole.items()}
    fill(read, folder / "2.state" / "models")
    for name, tensor in whole.items():
        assert torch.equal(read[name], tensor), name
