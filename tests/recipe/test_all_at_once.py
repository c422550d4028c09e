"""All problems of a recipe come in one report, and no problem is a consequence of another."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from rlcli.errors import RecipeError
from rlcli.recipe.parsing.merge import merge
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.reader import parse
from rlcli.recipe.resolve import load_recipe

MISTAKES = {
    "seed: .nan": "R34",
    "seed_: 3": "R42",
    "learning_rate: 1e-4": "R42",
    "name: ../x": "R68",
    "models: {actor: {backend: {args: {lr: fast}}}}": "R37",
    "models: {actor: {backend: {args: {betaz: 1}}}}": "R42",
    "models: {critic: {backend: fdsp}}": "R70",
    "models: {critic: {head: vlaue}}": "R37",
    "models: {critic: {inot: actor}}": "R42",
    "models: {ref: {init: '${gone}'}}": "R61",
    "models: {reward: {mesh: {tp: 2}}}": "R49",
    "models: {actor: {tokenizer: [1]}}": "R37",
    "datasets: {train: {args: {problems: many}}}": "R37",
    "datasets: {held_out: arithmatic}": "R70",
    "generation: {max_new_tokens: lots}": "R37",
    "generation: {temperature: 0.0}": "R49",
    "ppo: {kl_clt: 0.1}": "R42",
    "ppo: {minibatches: 65}": "R49",
    "graph: {actor_gen: {call: generte}}": "R37",
    "graph: {actor_gen: {modl: actor}}": "R42",
    "graph: {critic_inf: {inputs: {a: 1}}}": "R37",
    "graph: {reward_inf: {interface: math_rewrad}}": "R70",
    "graph: {ref_inf: {outputs: !x [a]}}": "R08",
    "train: {prompts_per_step: many}": "R37",
    "train: {steps: }": "R40",
    "train: {eval: {dataset: heldout}}": "R71",
    "train: {eval: {graph: {eval_gen: {interface: {args: {generation: {greedy: yes}}}}}}}": "R37",
    "cluster: {devices_per_nod: 8}": "R42",
    "cluster: {device: gpu}": "R37",
    "launch: locla": "R37",
    "checkpoint: {roles: [aktor]}": "R71",
    "checkpoint: {keep_best: none}": "R37",
    "log: {dir: '${env:RLCLI_TEST_UNSET}'}": "R62",
    "log: {plot: maybe, 1: x}": "R41",
}
"""A mistake in a layer over ppo_math, and its id; the last one is two."""


def problems_of(folder: Path, layers: list[str]) -> set[tuple[str, str | None]]:
    """(id, place) of all problems of ppo_math with these layers on top,
    each in a file of its own."""
    for number, text in enumerate(layers):
        (folder / f"layer{number}.yaml").write_text(text + "\n")
    names = [f"layer{number}.yaml" for number in range(len(layers))]
    try:
        load_recipe("ppo_math", (), names)
    except RecipeError as error:
        return {(problem.code, problem.where) for problem in error.problems}
    return set()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_is_one_problem(folder: Path, monkeypatch, mistake):
    monkeypatch.delenv("RLCLI_TEST_UNSET", raising=False)
    problems = problems_of(folder, [mistake])
    codes = {code for code, _ in problems}
    assert MISTAKES[mistake] in codes
    assert all(str(where).startswith("layer0.yaml") for _, where in problems), problems
    assert len(problems) == (2 if "plot: maybe" in mistake else 1), problems


@pytest.mark.parametrize("seed", range(12))
def test_several_mistakes_give_the_same_problems_as_each_alone(folder: Path, monkeypatch, seed):
    """Nothing is concluded from broken values, and little is hidden by them."""
    monkeypatch.delenv("RLCLI_TEST_UNSET", raising=False)
    drawn = random.Random(seed).sample(list(MISTAKES), len(MISTAKES))
    chosen = one_for_each_key(drawn[: random.Random(seed).randint(2, len(drawn))])
    expected = Counter(MISTAKES[mistake] for mistake in chosen)
    expected["R37"] += any("plot: maybe" in mistake for mistake in chosen)
    codes = Counter(code for code, _ in problems_of(folder, chosen))
    assert codes <= expected, chosen
    # checks across sections may have to wait
    assert set(expected - codes) <= {"R49", "R71"}, chosen


def one_for_each_key(mistakes: list[str]) -> list[str]:
    """Without those that set what an earlier one sets, so that no layer hides another's mistake."""
    chosen: list[str] = []
    merged = None
    for mistake in mistakes:
        tree = parse(mistake, "x", Problems())
        lower = keys_of(merged) if merged else set()
        if lower & keys_of(tree):
            continue
        merged = merge(merged, tree, Problems())
        chosen.append(mistake)
    return chosen


def keys_of(tree) -> set[tuple]:
    """Paths of sections but the outermost: mistakes in one section are kept apart."""
    from rlcli.recipe.parsing.tree import leaves

    return {path[:2] for path, _ in leaves(tree)}


def test_problems_of_layers_overrides_and_components_come_together(folder: Path):
    (folder / "p.yaml").write_text("cluster: {nodez: 3}\nseed: 1\nseed: 2\n")
    (folder / "top.yaml").write_text("extends: ppo_math\ntrain: {stepz: 3}\nppo: {kl_clt: 1}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("top.yaml", ["log.plot=maybe", "generation.top_k=.inf", "x"], ["p.yaml"])
    assert sorted(problem.code for problem in caught.value.problems) == [
        "R05",
        "R34",
        "R37",
        "R42",
        "R42",
        "R42",
        "R42",
    ]


def test_an_unreadable_layer_is_reported_without_follow_up_problems(folder: Path):
    (folder / "top.yaml").write_text("extends: [gone, small]\nstepz: 3\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("top.yaml", ["seed=.nan"])
    assert {problem.code for problem in caught.value.problems} == {"R51", "R34"}


def test_a_problem_names_the_key_as_it_was_written(folder: Path):
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", ["generation.max_new_tokens=lots", "ppo.kl_ctl=low"])
    assert [problem.what.partition(" must")[0] for problem in caught.value.problems] == [
        "generation.max_new_tokens",
        "ppo.kl_ctl",
    ]


def test_types_of_a_union_are_reported_together(refusal, folder: Path):
    text = (
        "extends: ppo_math\ntrain: {eval: {graph: {eval_reward: {outputs: [rewards]}}}}\n"
        "graph: {reward_inf: {outputs: [rewards], interface: {type: hf_reward, args: "
        "{path: a/b, label: [1]}}}}\n"
    )
    (folder / "bad.yaml").write_text(text)
    with pytest.raises(RecipeError, match="label must be int or text, found a list") as caught:
        load_recipe("bad.yaml")
    assert len(caught.value.problems) == 1


def test_a_mistake_that_an_alias_spreads_is_reported_once(folder: Path):
    with pytest.raises(RecipeError, match="did you mean packed_ref_logprob") as caught:
        load_recipe("ppo_math", ["graph.ref_inf.outputs=[packed_ref_logprob]"])
    assert len(caught.value.problems) == 1
