"""Benches find planted faults: a figure is then above its limit. Small sizes."""

from __future__ import annotations

import contextlib
import importlib
import re
import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chat_model import write_chat_model
from transformers import AutoModelForCausalLM

from rlcli.runtime.calls import Calls
from rlcli.testing.tiny_models import tiny_model

BENCHES = Path(__file__).parent


@pytest.fixture
def ahead(tmp_path, monkeypatch):
    """Runs main() and returns its exit code; `is_broken` sets max_staleness to 0 in the run."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RLCLI_PROJECT", "")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.chdir(tmp_path)
    bench = runpy.run_path(str(BENCHES / "ahead.py"))

    def run(is_broken: bool) -> int:
        settings = bench["settings"]
        if is_broken:
            bench["measure"].__globals__["settings"] = lambda staleness, unit, steps: settings(
                0, unit, steps
            )
        return bench["main"](["--staleness", "1", "--unit", "0.2", "--steps", "8"])

    return run


@pytest.mark.exhaustive
def test_ahead_fails_if_generation_does_not_run_ahead(ahead, capsys):
    assert ahead(is_broken=True) == 1
    assert "times the least, 1.25 allowed" in capsys.readouterr().out


def test_ahead_has_a_limit_for_each_staleness():
    judge = runpy.run_path(str(BENCHES / "ahead.py"))["above"]
    figures = {"max_staleness": 4, "seconds": 0.5, "of_least": 1.05, "staleness": 3.9}
    assert judge(figures) == []
    assert judge(figures | {"of_least": 1.4}) == [
        "max_staleness 4: 1.4 times the least, 1.25 allowed"
    ]
    assert judge(figures | {"staleness": 4.2}) == ["max_staleness 4: samples are 4.2 steps old"]
    assert judge(figures | {"max_staleness": 0, "staleness": 0, "of_least": 1.85}) == []


@pytest.fixture
def scale(tmp_path, monkeypatch):
    """Runs measure() and returns the figures above their limits. A call may take far longer than
    it does on an idle machine."""
    monkeypatch.setenv("RLCLI_PROJECT", "")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.chdir(tmp_path)
    bench = runpy.run_path(str(BENCHES / "scale.py"))
    monkeypatch.setitem(bench["measure"].__globals__, "MS_PER_CALL", 250.0)
    bench["prepare"](tmp_path)
    return lambda: bench["measure"]([8], samples=16, real=0, staleness=0)[1]


@pytest.mark.exhaustive
def test_scale_reports_figures_above_the_limit_if_calls_sleep(scale, monkeypatch):
    assert scale() == []
    prepare = Calls.prepare

    def slow(self, *arguments, **options):
        time.sleep(0.5)
        return prepare(self, *arguments, **options)

    monkeypatch.setattr(Calls, "prepare", slow)
    cost, path = scale()
    assert re.fullmatch(r"8 ranks: a call costs \d+ ms, 255 allowed", cost)
    assert "of the critical path" in path


@pytest.mark.exhaustive
def test_start_up_fails_for_a_slow_verb(monkeypatch):
    bench = runpy.run_path(str(BENCHES / "start_up.py"))
    quick = {
        "rlcli --help": 0.1,
        "rlcli validate ppo_math": 0.25,
        "rlcli check ppo_math": 0.5,
        "rlcli doctor": 3.0,
        "trl --help": 9.0,
    }
    assert bench["above"](quick) == []
    assert bench["above"](quick | {"rlcli ls": 0.4}) == ["rlcli ls: 0.400 s, 0.3 allowed"]
    assert bench["above"](quick | {"rlcli check ppo_math": 0.7}) == [
        "rlcli check ppo_math: 0.700 s, 0.6 allowed"
    ]
    scope = bench["main"].__globals__
    monkeypatch.setitem(scope, "measure", lambda command: (0.5, 0.4))
    monkeypatch.setattr("sys.argv", ["start_up.py", "--runs", "1"])
    assert bench["main"]() == 1
    monkeypatch.setitem(scope, "measure", lambda command: (0.2, 0.2))
    assert bench["main"]() == 0


@pytest.mark.exhaustive
def test_neighbour_fails_if_a_busy_machine_costs_too_much(monkeypatch):
    bench = runpy.run_path(str(BENCHES / "neighbour.py"))
    scope = bench["main"].__globals__
    monkeypatch.setattr("sys.argv", ["neighbour.py", "--rounds", "1"])
    monkeypatch.setitem(scope, "neighbour", contextlib.nullcontext)
    for seconds, code in (((0.1, 0.2), 0), ((0.1, 0.5), 1)):
        steps = iter(seconds)
        monkeypatch.setitem(
            scope, "seconds_per_step", lambda count, steps=steps, **variables: next(steps)
        )
        assert bench["main"]() == code


def test_engines_can_run_every_layout_that_is_compared():
    bench = runpy.run_path(str(BENCHES / "engines.py"))
    assert [layout.title for layout in bench["LAYOUTS"] if layout.refusal is not None] == []


def test_engines_shows_why_an_engine_cannot_run_a_layout(capsys, monkeypatch):
    bench = runpy.run_path(str(BENCHES / "engines.py"))
    refused = bench["Layout"]("megatron", {}, {"virtual_stages": 2})
    monkeypatch.setitem(bench["main"].__globals__, "LAYOUTS", (refused,))
    monkeypatch.setattr("sys.argv", ["engines.py"])
    assert bench["main"]() == 0
    assert "refused: models.actor has 2 virtual stages" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_engines_sees_an_update_with_gradients_a_thousandth_too_large(tmp_path, monkeypatch):
    bench = runpy.run_path(str(BENCHES / "engines.py"))
    layout = bench["LAYOUTS"][0]
    backend = sys.modules[type(bench["_contract"](layout).backend()).__module__]
    clip = backend.clip_gradients

    def clip_and_enlarge(parameters, max_norm):
        norm = clip(parameters, max_norm)
        for parameter in parameters:
            parameter.grad.mul_(1.001)
        return norm

    assert bench["_above"](bench["measure"](layout, tmp_path)) == []
    monkeypatch.setattr(backend, "clip_gradients", clip_and_enlarge)
    assert bench["_above"](bench["measure"](layout, tmp_path)) == ["updates"]


@pytest.mark.parametrize("figure", ["loss", "norm", "updates", "log-probs", "entropies", "values"])
def test_engines_fails_for_a_figure_above_its_limit(monkeypatch, figure):
    bench = runpy.run_path(str(BENCHES / "engines.py"))
    limits, layout = bench["LIMITS"], bench["LAYOUTS"][0]
    monkeypatch.setattr("sys.argv", ["engines.py"])
    for factor, code in ((0.5, 0), (2.0, 1), (float("nan"), 1)):
        apart = dict.fromkeys(limits, 0.0) | {figure: limits[figure] * factor}
        monkeypatch.setitem(
            bench["main"].__globals__, "measured", lambda layouts, apart=apart: [(layout, apart)]
        )
        assert bench["main"]() == code


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    return folder


SLOWER, LARGER = "import time\ntime.sleep(6)\n", "filled = b'1' * (200 << 20)\n"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "excess"), [("", ""), (SLOWER, " s, "), (LARGER, " MiB, 64 allowed")]
)
def test_convert_finds_a_conversion_that_is_slow_or_large(
    small_model, monkeypatch, capsys, fault, excess
):
    bench = runpy.run_path(str(BENCHES / "convert.py"))
    scope = bench["main"].__globals__
    monkeypatch.setitem(scope, "CONVERT", scope["CONVERT"] + fault)
    # Other tests run at the same time; a busy disk makes `cp` slow, and so would allow any time.
    monkeypatch.setitem(scope, "SECONDS_MORE", 4.0)
    monkeypatch.setitem(scope, "TIMES_CP", 0.0)
    arguments = ["--model", str(small_model), "--random-gb", "0", "--repeat", "1", "--only-ours"]
    assert bench["main"](arguments) == (1 if fault else 0)
    excesses = [line for line in capsys.readouterr().out.splitlines() if "allowed" in line]
    assert sum(excess in line for line in excesses) == (4 if fault else 0), excesses


def test_convert_allows_time_in_proportion_to_cp():
    bench = runpy.run_path(str(BENCHES / "convert.py"))
    conversion = bench["Conversion"]("to", seconds=8.0, mib=12.0, cp_seconds=2.0)
    assert bench["above"]([conversion]) == []
    assert bench["above"]([replace(conversion, cp_seconds=1.0)]) == [
        "to takes 8.00 s, 4.50 allowed"
    ]


@pytest.fixture
def next_to_trl(tmp_path, monkeypatch):
    """The bench with a tiny model, whose responses get rewards that differ."""
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    # the bench sets it
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", grpo_trainer.shuffle_sequence_dict)
    monkeypatch.syspath_prepend(BENCHES)
    bench = importlib.import_module("next_to_trl")
    for module in ("chat_sums", "trl_grpo"):
        monkeypatch.setattr(sys.modules[module], "reward", lambda text, answer: len(text) % 4 / 3)
    folder = write_chat_model(tmp_path / "model")
    return lambda *options: bench.main(["--model", str(folder), *options])


@pytest.mark.exhaustive
def test_next_to_trl_finds_updates_that_differ(next_to_trl, monkeypatch):
    assert next_to_trl("--only", "updates") == 0
    chat_sums = sys.modules["chat_sums"]
    monkeypatch.setattr(chat_sums, "CLIP", 0.001)
    assert next_to_trl("--only", "updates") == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ours", "code"), [((0.5, 0.4, 0.45), 0), ((0.35, 0.3, 0.25), 1)])
def test_next_to_trl_finds_that_less_is_learned(next_to_trl, monkeypatch, ours, code):
    bench = sys.modules["next_to_trl"]
    curves = {
        "our_curve": dict(zip((1, 2, 3), ours, strict=True)),
        "their_curve": {1: 0.4, 2: 0.5, 3: 0.45},
    }
    for name, heights in curves.items():
        monkeypatch.setattr(
            bench, name, lambda task, seed, steps, every, heights=heights: {4: heights[seed]}
        )
    monkeypatch.setattr(bench, "examine", lambda task, model: 0.3)
    assert next_to_trl("--only", "learning", "--seeds", "3", "--steps", "4") == code


@pytest.mark.exhaustive
def test_weight_bytes_fails_above_its_limit(tmp_path, monkeypatch, capsys):
    """At the first rate nearly nothing changes, at the second nearly everything."""
    tiny_model("llama").save_pretrained(tmp_path)
    bench = runpy.run_path(str(BENCHES / "weight_bytes.py"))
    monkeypatch.setitem(bench["main"].__globals__, "LIMITS", {1e-9: 0.3, 1.0: 0.3})
    assert bench["main"]([str(tmp_path), "--rates", "1e-9", "--steps", "1"]) == 0
    assert bench["main"]([str(tmp_path), "--rates", "1.0", "--steps", "1"]) == 1
    assert capsys.readouterr().out.count("| yes |") == 2


@pytest.mark.parametrize(("limits", "code"), [({}, 0), ({"SECONDS": 0.0}, 1), ({"SHARE": 0.9}, 1)])
def test_transfer_plan_fails_above_each_of_its_limits(monkeypatch, limits, code):
    bench = runpy.run_path(str(BENCHES / "transfer_plan.py"))
    scope = bench["main"].__globals__
    cases = scope["cases"]
    monkeypatch.setitem(scope, "cases", lambda ranks: cases(ranks)[:2])
    for name, limit in limits.items():
        monkeypatch.setitem(scope, name, limit)
    assert bench["main"](["--ranks", "16", "--senders", "2"]) == code


@pytest.mark.exhaustive
def test_the_first_hour_notices_a_command_that_ends_otherwise_than_expected(tmp_path, capsys):
    record = runpy.run_path(str(BENCHES / "first_hour.py"))["record"]
    assert record("echo done", tmp_path, {}, 12)
    assert record("exit 2  # 2", tmp_path, {}, 12)
    assert not record("exit 4  # 2", tmp_path, {}, 12)
    assert not record("exit 1", tmp_path, {}, 12)
    assert "$ echo done\ndone\n" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_responses_pause_for_a_small_part_of_a_copy(capsys):
    bench = runpy.run_path(str(BENCHES / "pause.py"))
    bench["main"].__globals__["LIMIT"] = 0.13  # the bench allows a tenth
    assert bench["main"](["--copies", "1"]) == 0, capsys.readouterr().out


@pytest.fixture
def next_to_peers(tmp_path, monkeypatch):
    """main() of the bench with a tiny model and a page of its own, and the page."""
    bench = runpy.run_path(str(BENCHES / "next_to_peers.py"))
    page = tmp_path / "speed.md"
    page.write_text(
        f"Text before.\n\n{bench['BEGINNING'].format(device='cpu')}\n{bench['END']}\nText after.\n"
    )
    scope = bench["main"].__globals__
    monkeypatch.setitem(scope, "PAGE", page)
    folder = write_chat_model(tmp_path / "model")

    def run(*options: str, theirs: Path = folder) -> int:
        models = {"ours": folder, "theirs": theirs}
        command = bench["command"]
        monkeypatch.setitem(
            scope,
            "command",
            lambda job, side, how: command(job, side, replace(how, model=str(models[side]))),
        )
        return bench["main"](["--model", str(folder), "--rounds", "1", *options])

    return run, page


@pytest.mark.exhaustive
def test_next_to_peers_finds_updates_that_differ(next_to_peers, tmp_path):
    run, page = next_to_peers
    folder = write_chat_model(tmp_path / "damaged")
    damaged = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        damaged.get_output_embeddings().weight.mul_(1.1)
    damaged.save_pretrained(folder)
    assert run("--only", "branching", "--write", theirs=folder) == 1
    assert re.search(r"\| branching, float32 \|.*\| no \|", page.read_text())


@pytest.mark.exhaustive
def test_next_to_peers_replaces_only_the_rows_that_it_has_measured(next_to_peers):
    run, page = next_to_peers
    lines = page.read_text().splitlines()
    lines[3:3] = ["| branching, float32 | whole | old |", "| sft, float32 | TRL | old |"]
    page.write_text("\n".join(lines))
    assert run("--only", "branching", "--write") == 0
    text = page.read_text()
    assert text.startswith("Text before.\n")
    assert text.endswith("\nText after.")
    rows = re.findall(r"^\| (\w+), float32 \|.*\| (\w+) \|$", text, re.MULTILINE)
    assert rows == [("branching", "yes"), ("sft", "old")]
    assert text.count("shared machine") == 1


@pytest.mark.exhaustive
def test_next_to_peers_shows_why_a_side_has_failed(next_to_peers, tmp_path):
    run, _ = next_to_peers
    with pytest.raises(SystemExit, match=r"peer_sides\.py(?s:.)*Traceback"):
        run("--only", "branching", theirs=tmp_path / "missing")


@pytest.fixture
def growth(monkeypatch):
    """Runs main() with updates that take `seconds(number)`; returns its exit code."""
    bench = runpy.run_path(str(BENCHES / "growth.py"))

    def run(seconds, *arguments):
        measured = lambda series, number, *how: seconds(number)  # noqa: E731
        bench["measure"].__globals__["seconds_of"] = measured
        return bench["main"](list(arguments))

    return run


def test_growth_names_the_formula_and_draws_it(growth, capsys, tmp_path):
    assert growth(lambda number: 0.5 + 0.002 * number, "--picture", str(tmp_path / "a.png")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all("0.50 s + 2 ms per " in line for line in lines)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_growth_fails_where_time_does_not_grow_in_a_straight_line(growth):
    assert growth(lambda number: number**2) == 1
