"""The page of `rlcli report` in headless Chromium. Runs with `make test-browser`."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager

import pytest
from recorded_runs import answered, record_run, record_timeline

from rlcli.observe.page.contents import contents
from rlcli.observe.page.rendering import render_page

pytestmark = pytest.mark.skipif(
    "RLCLI_TEST_BROWSER" not in os.environ, reason="runs with make test-browser"
)
HOSTILE = (
    "</script><script>document.title='ran'</script>",
    "<img src=http://127.0.0.1:1/x onerror=\"document.title='ran'\">",
    "</div><iframe src=javascript:parent.document.title='ran'>",
    "${document.title='ran'} {{ 7*7 }} <b>bold</b> \u202e backwards \ud800 \0 end",
)
USABLE = 2.0
"""Seconds within which the largest page answers."""


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path, options = shutil.which("chromium"), ["--no-sandbox"]  # root has no other choice
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, tmp_path):
    """Opens the page of some runs; complaints and requests of the page are faults."""

    @contextmanager
    def open_page(runs, width=1200, height=800, scheme="light"):
        file = tmp_path / "report.html"
        file.write_text(render_page(contents(runs)))
        page = chromium.new_page(
            viewport={"width": width, "height": height}, color_scheme=scheme, offline=True
        )
        problems, requests = [], []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=20_000)
        yield page
        assert problems == []
        assert requests == [file.as_uri()]
        page.close()

    return open_page


def test_hostile_responses_are_shown_as_text_and_do_not_run(opened, tmp_path):
    samples = [
        answered(1, text, id=text, prompt=text, answer=text, reason=text, reward=1.0)
        for text in HOSTILE
    ]
    with opened([record_run(tmp_path / "run", samples=samples)]) as page:
        shown = page.locator("#responses").inner_text()
        assert "</script><script>document.title='ran'</script>" in shown
        assert "{{ 7*7 }} <b>bold</b>" in shown
        assert page.title() == "ppo_math · rlcli"
        assert (
            page.locator("#responses img, #responses iframe, #responses b:not(.good)").count() == 0
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1600])
def test_no_size_of_window_needs_to_be_scrolled_sideways(opened, tmp_path, width, scheme):
    runs = [
        record_run(
            tmp_path / f"{kl_ctl}-{seed}",
            seed=seed,
            kl_ctl=kl_ctl,
            samples=[answered(1, "word " * 300)],
        )
        for kl_ctl in (0.1, 0.2)
        for seed in (1, 2)
    ]
    with opened(runs, width, 700, scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("canvas").count() == 1
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
        page.locator("#theme").click()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground


def test_a_thousand_steps_of_64_responses_are_usable_at_once(opened, tmp_path):
    samples = [
        answered(step, f"the sum is {step * number}", id=number, reward=float(number % 2))
        for step in range(1, 1001)
        for number in range(64)
    ]
    run = record_run(tmp_path / "run", steps=1000, samples=samples)
    with opened([run]) as page:
        seconds = page.evaluate("performance.now() / 1000")
        assert seconds < USABLE
        assert "of 64000" in page.locator("#responses").inner_text()
        seconds = page.evaluate(
            """() => {
              const began = performance.now();
              const search = document.querySelector("#responses input");
              search.value = "63000";
              search.dispatchEvent(new Event("input"));
              return (performance.now() - began) / 1000;
            }"""
        )
        assert seconds < USABLE
        assert page.locator("#responses article").count() > 0


def test_responses_are_searched_sorted_and_paged(opened, tmp_path):
    samples = [
        answered(step, f"answer {step}", id=f"row {step}", reward=step / 30) for step in range(30)
    ]
    with opened([record_run(tmp_path / "run", samples=samples)]) as page:
        responses = page.locator("#responses article")
        assert responses.count() == 20
        assert "step 29" in responses.first.inner_text()
        page.locator("#responses button", has_text="next").click()
        assert responses.count() == 10
        page.locator("#responses label", has_text="order").locator("select").select_option("worst")
        assert "step 0" in responses.first.inner_text()
        page.locator("#responses input").fill("answer 17")
        assert responses.count() == 1


def test_the_first_and_the_last_response_to_a_prompt_are_side_by_side(opened, tmp_path):
    samples = [answered(step, f"it is {step}", reward=0.5) for step in (1, 2, 3)]
    with opened([record_run(tmp_path / "run", samples=samples)]) as page:
        page.locator("#responses label", has_text="view").locator("select").select_option("change")
        (pair,) = page.locator("#responses article").all_inner_texts()
        assert "it is 1" in pair
        assert "it is 3" in pair
        assert "it is 2" not in pair


def test_evaluations_and_checkpoints_are_no_part_of_a_step(opened, tmp_path):
    times = {"time/gen": 1.0, "time/eval": 4.0, "time/checkpoint": 30.0}
    with opened([record_run(tmp_path / "run", metrics=lambda step: times)]) as page:
        rows = page.locator("#time tr").all_inner_texts()
    cells = {row.split("\t")[0]: row.split("\t")[1:3] for row in rows}
    assert cells["time/gen"] == ["1 s", "50 %"]
    assert cells["time/eval"] == ["4 s", ""]
    assert cells["time/checkpoint"] == ["30 s", ""]


def test_a_metric_is_added_by_name_and_closed(opened, tmp_path):
    with opened([record_run(tmp_path / "run")]) as page:
        page.locator("#curves input[type=search]").fill("time/step")
        assert page.locator(".chart").count() == 2
        page.get_by_label("close time/step").click()
        assert page.locator(".chart").count() == 1


def test_defaults_of_the_recipe_are_shown_on_request(opened, tmp_path):
    with opened([record_run(tmp_path / "run")]) as page:
        rows = page.locator("#recipe tbody tr")
        before = rows.count()
        page.get_by_label("defaults too").check()
        assert rows.count() > before


EPISODE = answered(
    1,
    "ab⟨no⟩c",
    turns=[
        {"sampled": True, "text": "ab", "tokens": 2},
        {"sampled": False, "text": "no", "tokens": 1},
        {"sampled": True, "text": "c", "tokens": 1},
    ],
    tokens=["a", "b", "no", "c"],
    token_logprobs=[0.0, -9.0, None, -1.0],
    versions=[[3, 1], [4, 2]],
)


@pytest.mark.parametrize("width", [360, 1200])
def test_the_timeline_of_a_step_is_drawn_to_scale(opened, tmp_path, width):
    run = record_run(tmp_path / "run")
    record_timeline(run)
    with opened([run], width) as page:
        drawing = page.locator("#timeline svg")
        assert drawing.get_attribute("aria-label") == "timeline of step 2"
        boxes = drawing.locator("rect").evaluate_all(
            """boxes => Object.fromEntries(boxes.map((box) =>
              [box.querySelector("title").textContent, box.getBoundingClientRect().width]))"""
        )
        gen, train = boxes["gen, step 2: 5 s"], boxes["train, step 2: 2.8 s"]
        assert train / gen == pytest.approx(2.8 / 5, rel=0.02)
        assert "rank 1 waits 5.00 s for it" in page.locator("#timeline").inner_text()
        page.locator("#timeline select").select_option("3")
        assert drawing.get_attribute("aria-label") == "timeline of step 3"
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_run_without_a_timeline_has_no_such_section(opened, tmp_path):
    with opened([record_run(tmp_path / "run")]) as page:
        assert page.locator("#timeline").count() == 0


def test_tokens_are_coloured_by_what_was_recorded_of_them(opened, tmp_path):
    run = record_run(tmp_path / "run", samples=[answered(1, "other"), EPISODE])
    with opened([run]) as page:
        choice = page.locator("#responses label", has_text="colour").locator("select")
        assert choice.locator("option").all_inner_texts() == ["nothing", "log-prob", "version"]
        choice.select_option("logprob")
        assert page.locator("#responses article").count() == 1, "the other one has no tokens"
        tokens = page.locator(".token")
        assert tokens.all_inner_texts() == ["a", "b", "c"]
        assert page.locator("span.observed").all_inner_texts() == ["no"]
        assert tokens.nth(1).get_attribute("title") == "log-prob -9, version 4"
        colours = "spans => spans.map((span) => getComputedStyle(span).backgroundColor)"
        certain, surprising, _ = tokens.evaluate_all(colours)
        assert certain.endswith(", 0)")
        assert surprising.endswith(", 0.6)")
