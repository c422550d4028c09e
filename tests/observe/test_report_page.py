"""The page of `rlcli report`: what its document says, and that it is safe and small enough."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recorded_runs import answered, record_run, record_timeline

from rlcli.api.timing import TimeSpan
from rlcli.observe.charts import deviation, mean
from rlcli.observe.page.contents import contents
from rlcli.observe.page.curves import MOST_POINTS
from rlcli.observe.page.rendering import DEMO, LARGEST, render_page
from rlcli.observe.page.timeline import MOST_TRACKS
from rlcli.observe.series import thinned
from rlcli.observe.trace import MASTER, STEP, STEPS, Traced, TraceFile


class Parts(HTMLParser):
    """The elements of a page with their texts."""

    def __init__(self, page: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        """Tag and text of each element."""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.texts.append((tag, ""))

    def handle_endtag(self, tag):
        self.texts.append(("", ""))

    def handle_data(self, text):
        if self.texts:
            tag, before = self.texts.pop()
            self.texts.append((tag, before + text))


def document_in(page: str) -> dict:
    packed = re.search(r'id="document">([^<]*)<', page)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_curves_have_the_numbers_of_the_run(tmp_path):
    numbers = {1: -0.25, 2: 0.0, 3: 1234567.0, 4: 1e-9}
    run = record_run(tmp_path / "run", metrics=lambda step: {"actor/reward": numbers[step]})
    document = contents([run])
    assert document["curves"]["actor/reward"] == [[[1, 2, 3, 4], list(numbers.values())]]
    assert document["usual"] == {"actor/reward": "Reward"}


def test_runs_that_differ_in_their_seed_share_a_curve_with_its_spread(tmp_path):
    runs = [
        record_run(
            tmp_path / f"{kl_ctl}-{seed}",
            seed=seed,
            kl_ctl=kl_ctl,
            metrics=lambda step, seed=seed: {"actor/reward": float(step * seed)},
        )
        for kl_ctl in (0.1, 0.2)
        for seed in (1, 3)
    ]
    document = contents(runs)
    assert [group["label"] for group in document["groups"]] == ["ppo.kl_ctl=0.1", "ppo.kl_ctl=0.2"]
    steps, means, spread = document["curves"]["actor/reward"][0]
    assert (steps, means) == ([1, 2, 3, 4], [2, 4, 6, 8])
    assert spread == pytest.approx([2**0.5, 2 * 2**0.5, 3 * 2**0.5, 4 * 2**0.5], rel=1e-5)
    assert {"key": "ppo.kl_ctl", "set_to": ["0.1", "0.2"]} in document["differences"]


def test_the_results_of_a_group_are_those_of_all_its_runs(tmp_path):
    runs = [
        record_run(
            tmp_path / str(seed),
            seed=seed,
            metrics=lambda step, seed=seed: {"actor/reward": float(step * seed)},
        )
        for seed in (1, 3)
    ]
    document = contents(runs)
    (result,) = document["groups"][0]["results"]
    assert (result["label"], result["after"]) == ("reward in training", (2.5 + 7.5) / 2)
    assert result["spread"] == pytest.approx(2.5 * 2**0.5)
    assert document["means"] == {"time/step": [2.0]}


def test_the_mean_of_a_long_run_is_that_of_all_its_steps(tmp_path):
    """The first step of a curve that is thinned stands for itself alone."""
    run = record_run(
        tmp_path / "run",
        steps=2 * MOST_POINTS,
        metrics=lambda step: {"time/gen": 1.0 + 2000.0 * (step == 1)},
    )
    assert contents([run])["means"]["time/gen"] == [2.0]


def test_equal_values_have_no_spread_and_diverged_ones_a_finite_one():
    assert (mean([0.1] * 3), deviation([0.1] * 3)) == (0.1, 0.0)
    assert deviation([-1e200, 1e200]) == pytest.approx(2**0.5 * 1e200)


def test_a_long_curve_is_thinned_to_means_between_its_ends():
    column = [float(number) for number in range(10_000)]
    short = thinned(column, MOST_POINTS)
    assert (len(short), short[0], short[-1]) == (MOST_POINTS, 0.0, 9999.0)
    assert short == sorted(short)
    assert sum(short[1:-1]) / len(short[1:-1]) == pytest.approx(sum(column) / len(column), rel=1e-3)
    assert thinned(column[:MOST_POINTS], MOST_POINTS) == column[:MOST_POINTS]


def test_settings_say_where_they_were_set_without_folders_of_a_person(tmp_path):
    document = contents([record_run(tmp_path / "run")])
    group = document["groups"][0]
    assert ["ppo.kl_ctl", "0.1", "recipes/ppo_math.yaml:3:11"] in group["recipe"]
    assert group["command"] == "rlcli train ppo_math ppo.kl_ctl=0.1"
    assert "/home/me" not in json.dumps(document)
    assert not {"host", "executable", "working_directory"} & group["environment"].keys()


def test_numbers_that_are_not_finite_leave_gaps(tmp_path):
    def numbers(step):
        return {"actor/loss": float("nan") if step == 2 else 1.0}

    document = contents([record_run(tmp_path / "run", metrics=numbers)])
    assert document["curves"]["actor/loss"] == [[[1, 3, 4], [1, 1, 1]]]


def test_only_the_scripts_of_the_page_may_run_and_nothing_is_requested(tmp_path):
    page = Parts(render_page(contents([record_run(tmp_path / "run")])))
    (policy,) = [
        attributes["content"]
        for _, attributes in page.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    scripts = [text for tag, text in page.texts if tag == "script"][1:]
    styles = [text for tag, text in page.texts if tag == "style"]
    digests = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (*scripts, *styles)
    ]
    assert policy.startswith("default-src 'none'; ")
    assert re.findall("'sha256-([^']*)'", policy) == digests
    assert not [tag for tag, attributes in page.elements if {"src", "href"} & attributes.keys()]


HOSTILE = "</script><script>document.title='ran'</script><img src=x onerror=alert(1)>"


def test_what_a_model_writes_is_not_part_of_the_html(tmp_path):
    samples = [answered(1, HOSTILE, prompt=HOSTILE, reason=HOSTILE, answer=HOSTILE)]
    page = render_page(contents([record_run(tmp_path / "run", samples=samples)]))
    assert "onerror" not in page
    assert document_in(page)["samples"][0]["response"] == HOSTILE


def test_a_page_keeps_its_limit_by_leaving_out_samples_of_steps_between(tmp_path):
    rng = random.Random(0)
    steps, texts = 40, [rng.randbytes(100_000).hex() for _ in range(40)]
    samples = [answered(step, texts[step - 1]) for step in range(1, steps + 1)]
    page = render_page(contents([record_run(tmp_path / "run", steps=steps, samples=samples)]))
    document = document_in(page)
    shown = [sample["step"] for sample in document["samples"]]
    assert len(page) <= LARGEST
    assert (shown[0], shown[-1], document["samples_left_out"]) == (1, steps, steps - len(shown))
    assert len(shown) >= 20


def test_the_timeline_has_the_last_steps_within_their_bounds(tmp_path):
    run = record_run(tmp_path / "run")
    record_timeline(run, steps=12)
    timeline = contents([run])["groups"][0]["timeline"]
    numbers = [step["step"] for step in timeline["steps"]]
    assert numbers[-5:] == [8, 9, 10, 11, 12]
    assert timeline["shown"] in numbers
    for step in timeline["steps"]:
        assert [stretch[0] for stretch in step["path"]] == ["gen", "ref", "train", "between calls"]
        assert [(track["rank"], track["name"]) for track in step["tracks"]] == [
            (0, "calls"),
            (1, "calls"),
        ]
        ends = [began + took for track in step["tracks"] for _, _, began, took, _ in track["spans"]]
        assert max(ends) <= step["seconds"] == pytest.approx(10)


def test_a_timeline_with_many_spans_keeps_the_longest(tmp_path):
    run = record_run(tmp_path / "run")
    file = TraceFile(run, 5)
    window = Traced(MASTER, TimeSpan("step 1", STEP, 0.0, 10.0, STEPS))
    spans = [TimeSpan("running", "running", 0.0, n / 1000, f"server {n}") for n in range(1, 5_000)]
    file.add(1, [window, *(Traced(0, span) for span in spans)])
    (step,) = contents([run])["groups"][0]["timeline"]["steps"]
    shown = [span for track in step["tracks"] for span in track["spans"]]
    assert len(shown) + step["left_out"] == len(spans)
    assert len(shown) == len(step["tracks"]) == MOST_TRACKS


def test_the_demo_shows_a_run_that_has_learnt():
    document = contents([DEMO])
    accuracy = document["curves"]["eval/accuracy"][0][1]
    assert accuracy[-1] - accuracy[0] > 0.3
    assert document["samples"]
    assert len(render_page(document)) < 1_000_000


def test_the_licence_of_the_bundled_library_is_there():
    static = Path(__file__).parents[2] / "rlcli/observe/page/static"
    assert "MIT License" in (static / "uPlot.LICENSE").read_text()
