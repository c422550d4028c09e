"""The numbers' short forms, the learning curve as PNG, and the report at the end."""

import io
import math
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from rlcli.observe.plot import choose_panels, plot_curves, smooth, smooth_line, step_ticks
from rlcli.observe.report import RunOutcome, before_and_after, print_report
from rlcli.observe.samples import SampleRecord, changed_responses, write_samples
from rlcli.observe.series import clock_time, curve, find_key, short, sparkline
from rlcli.observe.terminal import open_console

NAN = float("nan")
RL = [
    {
        "step": step,
        "reward/task_reward": step / 40,
        "actor/kl": step / 1000,
        "actor/response_length": 30 + step,
        "actor/loss": 0.1,
        "critic/loss": 0.2,
        **({"eval/accuracy": step / 40, "eval/reward": step / 80} if step % 20 == 0 else {}),
    }
    for step in range(41)
]
SFT = [
    {"step": step, "actor/loss": 3.0 / step, "actor/accuracy": step / 20, "actor/lr": 1e-3}
    for step in range(1, 21)
]


def png_size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.6123, "0.612"),
        (34.21, "34.2"),
        (842.4, "842"),
        (25_300, "25.3k"),
        (1e-6, "1.0e-06"),
        (-0.5, "-0.500"),
        (0.01234, "0.0123"),
        (9.996, "10.0"),
        (0.99996, "1.00"),
        (2.5e6, "2.5M"),
        (math.nan, "nan"),
    ],
)
def test_short_gives_three_significant_digits(value, text):
    assert short(value) == text


@given(st.floats())
def test_short_has_at_most_ten_characters_and_is_close_to_the_value(value):
    text = short(value)
    assert len(text) <= 10
    if abs(value) < 1e300 and "k" not in text and "M" not in text:
        assert float(text) == pytest.approx(value, rel=0.06)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (272, "4:32"), (3872, "1:04:32"), (183_600, "2d 03:00")]
)
def test_clock_time_is_readable_from_seconds_to_days(seconds, text):
    assert clock_time(seconds) == text


@given(st.lists(st.floats(allow_nan=True), max_size=200), st.integers(0, 60))
def test_sparkline_is_never_too_wide(values, width):
    finite = sum(map(math.isfinite, values))
    assert len(sparkline(values, width)) == min(finite, width)
    assert sparkline(values, width, ascii_only=True).isascii()


def test_sparkline_rises_with_its_values():
    assert sparkline(range(8), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(range(800), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0], 8) == "▁▁"


def test_curves_are_found_by_the_last_component_of_their_keys():
    assert (
        find_key(["time/reward", "eval/reward", "reward/task_reward"], "reward")
        == "reward/task_reward"
    )
    assert find_key(["eval/reward", "time/kl"], "reward") is None
    records = [
        {"step": 0, "eval/reward": 1.0},
        {"step": 1, "a/kl": math.nan},
        {"step": 2, "a/kl": 0.5},
        {"a/kl": None},
    ]
    assert curve(records, "kl") == ([2.0], [0.5])


def test_png_of_a_reinforcement_run_has_four_panels(tmp_path):
    titles = [panel.title for panel in choose_panels(RL)]
    assert titles == [
        "Reward",
        "Accuracy on held-out problems",
        "KL from the reference",
        "Response length (tokens)",
    ]
    path = plot_curves(RL, tmp_path / "curve.png", "ppo_math $ unbalanced")
    assert png_size(path) == (1200, 792)
    assert [entry.name for entry in tmp_path.iterdir()] == ["curve.png"]


def test_png_of_supervised_training_shows_loss_and_accuracy(tmp_path):
    assert [panel.title for panel in choose_panels(SFT)] == [
        "Loss",
        "Accuracy in training",
        "Learning rate",
    ]
    assert png_size(plot_curves(SFT, tmp_path / "curve.png", "sft_math")) == (1200, 792)


def test_png_leaves_out_missing_series_and_is_not_written_without_any(tmp_path):
    single = [{"step": 0, "eval/accuracy": 0.5}]
    assert png_size(plot_curves(single, tmp_path / "one.png", "x")) == (1200, 396)
    for records in ([], [{"step": 1, "note": "x", "actor/loss": math.nan}]):
        assert plot_curves(records, tmp_path / "none.png", "x") is None
    assert not (tmp_path / "none.png").exists()


def test_a_failing_plot_is_one_warning(tmp_path):
    warnings = []
    assert plot_curves(RL, tmp_path / "missing" / "curve.png", "x", warnings.append) is None
    assert len(warnings) == 1


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=100))
def test_smoothed_values_stay_between_minimum_and_maximum(values):
    smoothed = smooth(values)
    assert len(smoothed) == len(values)
    assert min(values) - 1e-6 <= min(smoothed) <= max(smoothed) <= max(values) + 1e-6
    assert (smoothed[0], smoothed[-1]) == (values[0], values[-1])


def test_a_smooth_line_of_a_long_run_has_few_points_and_its_ends():
    steps, values = smooth_line(range(1, 100_001), [0.0, *[1.0] * 99_998, 2.0])
    assert len(steps) == len(values) <= 2_000
    assert [steps[0], steps[-1], values[0], values[-1]] == [1, 100_000, 0.0, 2.0]


def test_answers_are_compared_with_those_to_the_same_prompt(tmp_path):
    """One prompt could not be played at first."""
    samples = [
        SampleRecord(step=step, id=prompt, prompt=prompt, response=str(step), phase="eval")
        for step, prompts in ((0, "BC"), (4, "ABC"))
        for prompt in prompts
    ]
    write_samples(tmp_path / "samples.jsonl", samples)
    pairs = changed_responses(tmp_path / "samples.jsonl")
    assert [(before.prompt, after.prompt) for before, after in pairs] == [("B", "B"), ("C", "C")]


@pytest.mark.parametrize(
    ("first", "last", "ticks"),
    [
        (0, 30, [0, 5, 10, 15, 20, 25, 30]),
        (0, 41, [0, 8, 16, 24, 32, 41]),
        (7, 7, [7]),
        (1, 3, [1, 2, 3]),
    ],
)
def test_the_steps_of_a_plot_are_named_from_the_first_to_the_last(first, last, ticks):
    assert step_ticks(first, last) == ticks


def test_before_and_after_compare_the_first_and_last_steps():
    rows = {row.label: (row.before, row.after) for row in before_and_after(RL)}
    assert list(rows)[:2] == ["held-out accuracy", "held-out reward"]
    assert rows["held-out accuracy"] == (0.0, 1.0)
    # means of steps 0..4 and 36..40
    assert rows["reward in training"] == pytest.approx((2 / 40, 38 / 40))
    assert rows["response length"] == pytest.approx((32, 68))
    (only,) = before_and_after([{"step": 0, "eval/accuracy": 0.5}])
    assert (only.before, only.after) == (None, 0.5)


def test_the_last_evaluation_counts_even_if_it_is_not_finite():
    records = [{"step": step, "eval/ppl": value} for step, value in ((0, 9.0), (1, 8.0), (2, NAN))]
    (row,) = before_and_after(records)
    assert (row.before, str(row.after)) == (9.0, "nan")
    assert row.as_document() == {"label": "held-out ppl", "before": 9.0, "after": None}


@pytest.fixture
def outcome(tmp_path):
    def sample(response, reward):
        return SampleRecord(
            step=1, id="a", prompt="What is 17 + 50?", response=response, reward=reward, answer="67"
        )

    (tmp_path / "tensorboard").mkdir()
    pair = (sample("it is 57\x1b[31m " + "very " * 200, 0.0), sample("[bold]it is 67[/bold]", 1.0))
    return RunOutcome(
        recipe="ppo_math",
        run_dir=tmp_path,
        records=RL,
        seconds=272.0,
        models={"actor": tmp_path / "models" / "actor"},
        samples=[pair],
    )


def report(outcome, **options):
    stream = io.StringIO()
    print_report(outcome, open_console(stream, width=80, **options))
    return stream.getvalue()


def test_the_report_of_one_step_says_step(outcome):
    assert "ppo_math: 1 step in" in report(replace(outcome, records=[{"step": 1}]))


def test_report_off_a_terminal_is_plain_text_of_80_columns(outcome, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    text = report(outcome)
    assert text.isascii()
    assert "\x1b" not in text
    wide = [
        line for line in text.splitlines() if len(line) > 80 and str(outcome.run_dir) not in line
    ]
    assert wide == []
    assert "ppo_math: 40 steps in 4:32" in text
    row = next(line for line in text.splitlines() if line.startswith("held-out accuracy"))
    assert row.split() == ["held-out", "accuracy", "0", "1.00", "+1.00"]
    assert "it is 57\\x1b[31m" in text
    assert "[bold]it is 67[/bold]  [reward 1.00]" in text
    assert f"model actor: {outcome.run_dir / 'models' / 'actor'}\n" in text
    assert f"  tensorboard --logdir {outcome.run_dir / 'tensorboard'}\n" in text
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "tensorboard --logdir" not in report(outcome)


def test_the_time_of_a_resumed_run_is_said_of_the_steps_that_took_it(outcome):
    resumed = replace(outcome, seconds=9.0, began_after=38)
    assert "ppo_math: 40 steps, 2 of them in 0:09\n" in report(resumed)


def test_report_on_a_terminal_fits_80_columns(outcome):
    text = report(outcome, force_terminal=True, color_system=None)
    assert "───" in text
    assert all(
        cell_len(line) <= 80 for line in text.splitlines() if str(outcome.run_dir) not in line
    )


def test_report_goes_to_stdout(tmp_path, capsys):
    print_report(RunOutcome(recipe="x", run_dir=tmp_path, records=[]))
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["", "x: 0 steps"]
    assert captured.err == ""


def commands_after(outcome):
    lines = report(outcome).partition("next:\n")[2].splitlines()
    return [line.strip() for line in lines]


@pytest.fixture
def trained(outcome, tmp_path, monkeypatch):
    """The outcome of a run with an actor, in the folder of its recipe."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    run = tmp_path / "ppo_math" / "second"
    (run / "models/actor").mkdir(parents=True)
    return replace(outcome, run_dir=run, models={"actor": run / "models/actor"})


def add_a_second_run(run):
    for folder in (run, run.parent / "first"):
        folder.mkdir(exist_ok=True)
        (folder / "status.json").touch()


def test_report_names_the_commands_that_fit_the_run(trained):
    run = trained.run_dir
    usual = [
        f"rlcli samples {run} --changed",
        f"rlcli plot {run}",
        f"rlcli eval {run}",
        f"rlcli chat {run}",
    ]
    assert commands_after(trained) == usual
    add_a_second_run(run)
    assert commands_after(trained) == [*usual, f"rlcli compare {run.parent}"]


def test_report_of_a_run_without_an_actor_names_other_commands(trained):
    run = trained.run_dir
    (run / "samples.jsonl").write_text("{}\n")
    critic = replace(trained, models={"critic": run / "models/critic"}, samples=[], records=SFT)
    assert commands_after(critic) == [f"rlcli samples {run}", f"rlcli plot {run}"]
    rewarded = replace(critic, records=[{"step": 1, "actor/reward": 0.5}])
    assert commands_after(rewarded) == [f"rlcli samples {run} --worst 3", f"rlcli plot {run}"]
    answered = replace(critic, records=[{"step": 1, "time/step": 0.5}])
    assert commands_after(answered) == [f"rlcli samples {run}"]


def test_report_names_the_picture_of_the_curves(trained):
    assert "curves:" not in report(trained)
    (trained.run_dir / "curve.png").touch()
    assert f"curves: {trained.run_dir}/curve.png\n" in report(trained)


def test_report_is_not_truncated_on_a_narrow_terminal(tmp_path):
    stream = io.StringIO()
    records = [{"step": 0, "eval/response_length": 12.0}, {"step": 9, "eval/response_length": 34.5}]
    print_report(
        RunOutcome(recipe="ppo", run_dir=tmp_path, records=records), open_console(stream, width=40)
    )
    table = stream.getvalue().partition("next:")[0].split()
    assert [word for word in table if word.startswith(("held", "resp"))] == [
        "held-out",
        "response_length",
    ]
    assert {"12.0", "34.5"} <= set(table)
