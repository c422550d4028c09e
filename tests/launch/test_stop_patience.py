"""How long `rlcli stop` waits for a run that saves before it ends it at once."""

from types import SimpleNamespace

import pytest

from rlcli.launch import stop_run
from rlcli.launch.stop_run import QUIET, StopPatience, wait_for_end


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]

    def sleep(seconds):
        now[0] += seconds

    stand_in = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(stop_run, "time", stand_in)
    return stand_in


def write(file, size):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"." * size)


def test_a_run_gets_more_time_while_it_saves(clock, tmp_path):
    checkpoint = tmp_path / "checkpoints" / ".tmp-7-run"
    write(checkpoint / "rank0.safetensors", 1)
    patience = StopPatience(60, tmp_path)

    def is_over_after(seconds):
        clock.sleep(seconds)
        return patience.is_over()

    for size in (2, 3, 4):
        write(checkpoint / "rank0.safetensors", size)
        assert not is_over_after(59)
    assert not is_over_after(QUIET - 1)  # it is synced and digested
    checkpoint.rename(checkpoint.with_name("step-000000000007"))
    assert not is_over_after(2)
    write(tmp_path / "models" / "actor" / "model.safetensors", 5)
    assert not is_over_after(QUIET - 1)
    assert is_over_after(QUIET)


def test_a_run_that_saves_nothing_gets_no_more_time(clock, tmp_path):
    write(tmp_path / "models" / "actor" / "model.safetensors", 5)  # of an earlier stop
    write(tmp_path / "checkpoints" / ".tmp-7-run" / "rank0.safetensors", 1)  # of a killed start
    holder = SimpleNamespace(is_alive=lambda: True)
    began = clock.monotonic()
    assert not wait_for_end(holder, StopPatience(60, tmp_path))
    assert clock.monotonic() - began == pytest.approx(60, abs=1)


def test_a_limit_that_the_user_sets_is_kept(clock, tmp_path):
    patience = StopPatience(60)
    write(tmp_path / "checkpoints" / ".tmp-7-run" / "rank0.safetensors", 1)
    clock.sleep(60)
    assert patience.is_over()
    assert (str(patience), str(StopPatience(60, tmp_path))) == (
        "up to 60 s",
        "up to 60 s, and while it saves",
    )
