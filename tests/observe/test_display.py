"""The displays: plain lines off a terminal, a picture of bounded size on one,
and no harm from either."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from heard_work import HeardWork
from rich.cells import cell_len
from rich.console import Console

from rlcli.api.headway import Count
from rlcli.observe.display import PlainDisplay, open_display
from rlcli.observe.events import EventDisplay, show_event
from rlcli.observe.live import LiveDisplay
from rlcli.observe.progress import Progress
from rlcli.observe.terminal import PatientStream, open_console

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def rl_record(step):
    times = {
        f"time/{name}": 10.0 / (place + 1)
        for place, name in enumerate(["actor_gen", "actor_train", "ref_inf"])
    }
    calls = {f"time/a_call_with_a_long_name_{number}": 0.1 for number in range(9)}
    return {
        "step": step,
        "reward/task_reward": step / 400,
        "actor/kl": 0.001 * step,
        "actor/response_length": 842.0,
        "actor/loss": 0.1,
        "tokens_per_second": 2512.3,
        **times,
        **calls,
    }


@pytest.fixture
def clock():
    return Clock()


def plain(clock, **options):
    stream = io.StringIO()
    return PlainDisplay(stream, clock=clock, **options), stream


def test_plain_display_prints_a_limited_number_of_lines_per_run(clock):
    display, stream = plain(clock)
    with display:
        display.start("ppo_math", "runs/ppo_math/1", 400)
        display.evaluation(0, {"eval/accuracy": 0.25, "eval/length": 12, "step": 0})
        for step in range(1, 401):
            clock.now += 2
            display.phase("actor_gen")
            display.step(rl_record(step))
        display.warning("a worker is slow")
        display.finish("done")
    lines = stream.getvalue().splitlines()
    assert lines[:2] == [
        "run ppo_math -> runs/ppo_math/1",
        "evaluation at step 0: accuracy 0.250  length 12.0",
    ]
    assert lines[-2:] == ["warning: a worker is slow", "done"]
    steps = [line for line in lines if line.startswith("step ")]
    assert 20 <= len(steps) <= 30
    assert steps[0].startswith(
        "step 1/400  reward 0.0025  kl 0.0010  length 842  2.00 s/step  2512 tok/s  eta 13:18"
    )
    assert steps[-1].startswith("step 400/400  reward 1.00")
    assert "\x1b" not in stream.getvalue()


def test_the_pace_of_a_resumed_run_counts_only_its_own_steps(clock):
    display, stream = plain(clock)
    display.start("ppo_math", "runs/ppo_math/1", 80)
    clock.now += 10
    display.evaluation(41, {"eval/accuracy": 0.25})
    display.step(rl_record(41))
    assert "  10.0 s/step  " in stream.getvalue()
    assert stream.getvalue().endswith("eta 6:30\n")


def test_staleness_is_shown_when_samples_are_made_ahead(clock):
    stream = io.StringIO()
    with PlainDisplay(stream, clock=clock) as display:
        display.start("ppo", "runs/ppo", steps=400)
        clock.now += 2
        record = {
            "step": 1,
            "reward/reward": 0.5,
            "rollout/staleness": 1.25,
            "time/step": 2.0,
            "time/gen": 1.0,
        }
        display.step(record | {"time/idle_share/actor": 0.5})
    assert "reward 0.500  staleness 1.25  2.00 s/step" in stream.getvalue()


def test_each_slow_step_gets_a_line_and_fast_steps_do_not_flood(clock):
    for seconds, expected in ((31.0, 100), (0.001, 2)):
        display, stream = plain(clock)
        display.start("x", "y", 100)
        for step in range(1, 101):
            clock.now += seconds
            display.step({"step": step, "actor/loss": 1.0})
        assert stream.getvalue().count("loss 1.00") == expected


def test_quiet_prints_only_warnings(clock):
    display, stream = plain(clock, quiet=True)
    display.start("x", "y", 1)
    display.step({"actor/loss": 1.0})
    display.warning("low disk")
    display.finish("done")
    assert stream.getvalue() == "warning: low disk\n"


def test_control_characters_in_texts_do_not_reach_the_terminal(clock):
    display, stream = plain(clock)
    display.start("x\x1b[2J", "y", 1)
    display.note("says \x1b]0;owned\x07 [bold]hi[/bold]")
    display.evaluation(1, {"eval/\x9b31m": 1.0})
    assert "\x1b" not in stream.getvalue()
    assert "\x9b" not in stream.getvalue()
    assert "[bold]hi[/bold]" in stream.getvalue()
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system=None, width=80, markup=False
    )
    live = LiveDisplay(console)
    live.note("\x1b[2J[bold]hi[/bold]")
    assert console.file.getvalue() == "\\x1b[2J[bold]hi[/bold]\n"


def render(display):
    """The lines of the picture, on paper so wide that nothing but the display itself bounds
    them."""
    console = Console(width=500, file=io.StringIO(), record=True)
    console.print(display.picture())
    return console.export_text().splitlines()


@pytest.fixture(params=[(80, "utf-8"), (80, "ascii"), (40, "utf-8"), (200, "utf-8")], ids=str)
def live(request, clock):
    width, encoding = request.param
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = open_console(stream, force_terminal=True, width=width)
    display = LiveDisplay(console, clock)
    yield display, width, encoding
    display.stop()


def test_picture_fits_the_terminal_at_every_stage(live):
    display, width, encoding = live
    display.start("ppo_math", "runs/ppo_math/1", 400, "warm start sft_math")
    pictures = [render(display)]
    for step in range(1, 401):
        display._clock.now += 21.4
        display.phase("実行中 " * 30)
        display.step(rl_record(step))
        if step % 100 == 0:
            display.evaluation(step, {"eval/accuracy": step / 400, "eval/reward": 1e-9})
            pictures.append(render(display))
    display.finish("done")
    pictures.append(render(display))
    for lines in pictures:
        assert len(lines) <= 12
        assert max(cell_len(line) for line in lines) <= min(width, 100)
        if encoding == "ascii":
            assert all(
                character.isascii() or character in "実行中" for line in lines for character in line
            )


def test_picture_shows_progress_metrics_and_the_current_call(clock):
    display = LiveDisplay(open_console(io.StringIO(), force_terminal=True, width=80), clock)
    display.start("ppo_math", "runs/x", 400)
    display.evaluation(0, {"accuracy": 0.31})
    for step in range(1, 121):
        clock.now += 20.0
        display.step(rl_record(step))
    display.evaluation(100, {"accuracy": 0.87})
    display.phase("actor_gen")
    picture = "\n".join(render(display))
    display.stop()
    assert re.search(r"step 120/400  ━+─+  eta 1:33:20", picture)
    assert re.search(r"reward +0\.300 +▁.*█", picture)
    assert re.search(r"eval acc +0\.870 +▁█  0\.310 at first, last at step 100", picture)
    assert re.search(r"kl +0\.120 ", picture)
    assert re.search(r"length +842 ", picture)
    assert re.search(
        r"pace +20\.0 s/step   2512 tok/s\n +actor_gen 10\.0 · actor_train 5\.00 · ref_inf 3\.33",
        picture,
    )
    assert "now: actor_gen" in picture


def test_what_is_done_before_a_run_starts_is_on_a_line_of_its_own(clock):
    set_up = HeardWork()
    console = open_console(io.StringIO(), force_terminal=True, width=80)
    with LiveDisplay(console, clock, setting_up=set_up) as display:
        display.phase("loading the models")
        display.count(Count(1, 2, "servers"))
        assert set_up.phases == ["loading the models"]
        assert set_up.counts == [Count(1, 2, "servers")]
        display.start("x", "runs/x", 5)
        assert set_up.phases[-1] == ""
        display.phase("actor_gen")
        display.count(Count(1, 8, "responses"))
        assert (set_up.phases[-1], len(set_up.counts)) == ("", 1)
        assert "now: actor_gen" in render(display)[-1]


def test_another_program_is_sent_counts_too():
    reading, writing = os.pipe()
    display = EventDisplay(writing)
    display.phase("loading the models")
    display.count(Count(1, 2, "servers"), "build")
    display.stop()
    del display
    shown = []
    receiver = SimpleNamespace(
        phase=lambda text: shown.append(text), count=lambda *args: shown.append(args)
    )
    with os.fdopen(reading) as lines:
        for _ in range(2):
            show_event(lines.readline(), receiver)
    assert shown == ["loading the models", (Count(1, 2, "servers"), "build")]


def test_a_log_has_a_count_after_half_a_minute_without_lines(clock):
    display, stream = plain(clock)
    display.start("x", "runs/x", 100)
    display.phase("actor_gen")
    for done in range(1, 65):
        clock.now += 1
        display.count(Count(done, 64, "responses"))
    assert stream.getvalue().splitlines()[1:] == [
        "actor_gen: 30/64 responses, eta 0:34", "actor_gen: 60/64 responses, eta 0:04",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80])
def test_long_names_are_cut_and_numbers_are_not(clock, width):
    role = "the_policy_that_is_being_trained_with_a_very_long_name_of_its_own"
    times = {f"time/{role}_{number}_gen": 100.0 - number for number in range(9)}
    display = LiveDisplay(open_console(io.StringIO(), force_terminal=True, width=width), clock)
    display.start("x", "runs/x", 100_000, f"warm start {role}")
    clock.now += 100
    display.step({"step": 1, f"{role}/kl": 0.5, f"{role}/reward": 0.25} | times)
    display.phase(f"{role}_gen")
    clock.now += 10
    display.count(Count(30, 64, "responses"))
    with display:
        lines = render(display)
    assert all(cell_len(line) <= width for line in lines)
    expected = {
        0: r"warm start t\w*…      1/100000  ━*─+  eta 115d \d\d:\d\d",
        1: r"  reward +0\.250 .*",
        -2: r"  the_policy_\w+… 100\.0.*",
        -1: r"  now: the_\w+…  ━+─+  30/64 responses  eta 0:11",
    }
    for number, pattern in expected.items():
        assert re.fullmatch(pattern, lines[number])


def test_lines_that_stay_wrap_between_words_and_keep_paths_whole(clock):
    stream, path = io.StringIO(), "/a/long/path" * 9
    display = LiveDisplay(open_console(stream, force_terminal=True, width=60), clock)
    with display:
        display.start("a_recipe_with_a_name", path, 1)
        display.note(f"starting from {path}, a checkpoint of another run")
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stream.getvalue())
    assert text.split().count(path) == 1
    assert f"\n{path}," in text
    assert "checkpoint of another run\n" in text


def test_the_last_picture_shows_no_current_call(clock):
    stream = io.StringIO()
    display = LiveDisplay(open_console(stream, force_terminal=True, width=80), clock)
    with display:
        display.start("ppo_math", "runs/x", 1)
        display.step(rl_record(1))
        display.phase("saving critic")
    assert "now:" not in "".join(render(display))


def test_the_picture_starts_over_for_each_run_of_a_chain(clock):
    display = LiveDisplay(open_console(io.StringIO(), force_terminal=True, width=80), clock)
    display.start("sft_math", "runs/a", 300, "warm start sft_math")
    display.step({"step": 120, "actor/loss": 0.5})
    assert render(display)[0].startswith("warm start sft_math 120/300")
    display.start("ppo_math", "runs/b", 10)
    assert render(display)[0].startswith("step  0/10")
    display.stop()


def test_the_terminal_is_restored_after_an_exception(clock):
    stream = io.StringIO()
    before = sys.stdout, sys.stderr
    display = LiveDisplay(open_console(stream, force_terminal=True), clock)

    def raise_within_display():
        with display:
            display.start("x", "y", 5)
            display.step({"actor/loss": 1.0})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raise_within_display()
    assert (sys.stdout, sys.stderr) == before
    text = stream.getvalue()
    assert HIDE_CURSOR in text
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    display.stop()  # twice is fine


class ClosedPipe(io.StringIO):
    def write(self, text):
        raise BrokenPipeError

    def isatty(self):
        return True


def test_a_closed_pipe_does_not_stop_a_display(clock):
    for display in (
        PlainDisplay(ClosedPipe(), clock=clock),
        LiveDisplay(open_console(ClosedPipe()), clock),
    ):
        with display:
            display.start("x", "y", 2)
            display.step({"actor/loss": 1.0})
            display.note("hello")
            display.finish("done")


def test_characters_that_a_stream_cannot_encode_are_escaped():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    PatientStream(stream).write("é ▁")
    assert raw.getvalue() == b"\\xe9 \\u2581"


def test_open_display_chooses_by_the_stream(monkeypatch):
    terminal = ClosedPipe()
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_display(stream=terminal), LiveDisplay)
    assert isinstance(open_display(stream=terminal, quiet=True), PlainDisplay)
    assert isinstance(open_display(stream=io.StringIO()), PlainDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_display(stream=terminal), PlainDisplay)


SET_UP = """
import time
from rlcli.observe.display import open_display
with open_display() as display:
    display.phase("verifying the checkpoint")
    time.sleep(1)
    display.warning("it is damaged")
    time.sleep(0.5)
    display.start("x", "y", 3)
"""


def test_lines_that_stay_are_above_what_is_done_before_a_run_starts():
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    command = [sys.executable, "-c", SET_UP]
    subprocess.run(command, stderr=theirs, env=environment, check=True, timeout=60)
    os.close(theirs)
    drawn = b"".join(iter(lambda: _read_terminal(ours), b"")).decode()
    os.close(ours)
    before, _, after = re.sub(r"\x1b\[[\d;]*m", "", drawn).partition("warning: it is damaged\r\n")
    assert before.endswith("\r\x1b[2K")  # what was drawn is erased before the line
    assert "verifying the checkpoint" in before
    assert "verifying the checkpoint" in after


SCRIPT = """
import json, sys
from rlcli.observe.display import open_display
with open_display() as display:
    display.start("x", "y", 3)
    for step in (1, 2, 3):
        display.step({"step": step, "actor/loss": 1.0})
        print(json.dumps({"result": step}))
    display.finish("over")
"""


def test_progress_goes_to_stderr_and_results_to_stdout():
    """A real terminal on stderr, a pipe on stdout."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment,
        check=True,
        timeout=60,
    )
    os.close(theirs)
    progress = b"".join(iter(lambda: _read_terminal(ours), b"")).decode()
    os.close(ours)
    assert [json.loads(line) for line in process.stdout.splitlines()] == [
        {"result": n} for n in (1, 2, 3)
    ]
    assert "over" in progress
    assert progress.rindex(SHOW_CURSOR) > progress.rindex(HIDE_CURSOR)


def _read_terminal(terminal):
    """What it has received; nothing once all that was written has been read."""
    try:
        return os.read(terminal, 100_000)
    except OSError:  # nobody has it open any more
        return b""


REPORT = """
import sys
from pathlib import Path
from rlcli.observe.report import RunOutcome, print_report
sys.stdin.read()
print_report(RunOutcome(recipe="x", run_dir=Path("."), records=[]))
print("somebody else's line")
"""


def test_report_into_a_closed_pipe_ends_with_exit_code_0():
    process = subprocess.Popen(
        [sys.executable, "-c", REPORT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    process.stdin.close()
    assert (process.wait(timeout=60), process.stderr.read()) == (0, b"")
    process.stderr.close()


def test_eta_counts_down_and_ignores_what_came_before_the_first_step(clock):
    progress = Progress("step", 10, clock)
    assert progress.eta is None
    clock.now += 500  # loading and a first evaluation
    progress.evaluation(0, {"eval/accuracy": 0.5})
    clock.now += 10
    progress.step({"step": 1})
    assert progress.eta == pytest.approx(90)
    clock.now += 4
    assert progress.eta == pytest.approx(86)
    clock.now += 100
    assert progress.eta == pytest.approx(80)
