"""References to other values and to the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcli.errors import RecipeError
from rlcli.recipe.resolve import load_recipe

TOP = "extends: small\n"


def write(folder: Path, text: str) -> Path:
    (folder / "top.yaml").write_text(TOP + text)
    return folder / "top.yaml"


def chain(length: int, value: str) -> str:
    """`x1` to `x<length>`, each of which refers to the one before."""
    return "".join(f"x{i + 1}: {value.replace('%d', str(i))}\n" for i in range(length))


def test_a_reference_as_the_entire_value_keeps_type_and_origin(folder: Path):
    path = write(
        folder,
        "n: {rows: 8, opt: {lr: 1e-3, eps: 1e-6}}\ntrain: {prompts_per_step: '${n.rows}'}\n"
        "models: {actor: {backend: {type: fsdp, args: '${n.opt}'}}}\n",
    )
    resolved = load_recipe(path)
    assert resolved.recipe.train.prompts_per_step == 8
    assert resolved.recipe.models["actor"].backend.args == {"lr": 1e-3, "eps": 1e-6}
    assert str(resolved.origin("models.actor.backend.args.eps")) == "top.yaml:2:35"


def test_a_reference_inside_text_is_inserted_as_text(folder: Path, monkeypatch):
    monkeypatch.setenv("RLCLI_PLACE", "there")
    path = write(folder, "log: {dir: 'out/${seed}-${env:RLCLI_PLACE}-$${x}'}\nseed: 5\n")
    assert load_recipe(path).recipe.log.dir == "out/5-there-${x}"


@pytest.mark.parametrize("target", ["log.project", "train.eval.dataset", "datasets"])
def test_a_reference_inside_text_to_null_or_a_section_is_refused(refusal, target):
    text = f"log: {{dir: 'out/${{{target}}}'}}\ntrain: {{eval: {{dataset: null}}}}\n"
    assert refusal(TOP + text) == [("R37", "bad.yaml:2:12")]


def test_environment_values_are_typed_by_their_field(folder: Path, monkeypatch):
    monkeypatch.setenv("RLCLI_STEPS", "12")
    path = write(folder, "train: {steps: '${env:RLCLI_STEPS}'}\nlog: {dir: '${env:RLCLI_STEPS}'}\n")
    recipe = load_recipe(path).recipe
    assert (recipe.train.steps, recipe.log.dir) == (12, "12")


@pytest.mark.parametrize("word", ["null", "Null", "~"])
def test_a_variable_that_holds_the_word_null_is_text(folder: Path, monkeypatch, word):
    monkeypatch.setenv("RLCLI_WORD", word)
    path = write(folder, "log: {dir: '${env:RLCLI_WORD}'}\n")
    assert load_recipe(path).recipe.log.dir == word
    path = write(folder, "train: {max_tokens_per_microbatch: '${env:RLCLI_WORD}'}\n")
    with pytest.raises(RecipeError, match="found text"):
        load_recipe(path)


def test_entries_over_a_reference_merge_with_its_target(folder: Path):
    path = write(
        folder,
        "opt: {lr: 1e-3, eps: 1e-6}\nmodels: {actor: {backend: {type: fsdp, args: '${opt}'}}}\n",
    )
    resolved = load_recipe(path, ["models.actor.backend.args.lr=0.5"])
    assert resolved.recipe.models["actor"].backend.args == {"lr": 0.5, "eps": 1e-6}


def test_a_block_that_nothing_refers_to_is_refused(refusal):
    assert refusal(TOP + "ppo: {x: 1}\n") == [("R42", "bad.yaml:2:1")]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("seed: ${a}\na: ${b}\nb: ${a}\n", "R64"),
        ("seed: ${a.x}\na: {x: '${a}'}\n", "R64"),
        ("seed: ${seed}\n", "R64"),
        ("seed: ${nothing.here}\n", "R61"),
        ("seed: ${train.here}\n", "R61"),
        ("seed: ${env:RLCLI_NOT_SET}\n", "R62"),
        ("seed: ${env:RLCLI_EMPTY}\n", "R62"),
        ("seed: ${env:RLCLI_API_TOKEN}\n", "R62"),
        ("seed: '${env:RLCLI_EMPTY:-3}'\n", "R63"),
        ("seed: '${a${b}}'\nb: 1\n", "R63"),
        ("seed: '${}'\n", "R63"),
        ("seed: '${open'\n", "R63"),
        ("log: {dir: 'x${train}'}\n", "R37"),
        ("log: {dir: '${x30}'}\nx0: aaaaaaaaaa\n" + chain(30, "'${x%d}${x%d}'"), "R65"),
        ("log: {dir: '${x99}'}\nx0: a\n" + chain(99, "'${x%d}'"), "R65"),
        ("seed: '${x6}'\nx0: [1, 1, 1]\n" + chain(6, "[" + "'${x%d}', " * 20 + "]"), "R65"),
        ("seed: '${x40}'\nx0: 1\n" + chain(40, "{v: '${x%d}'}"), "R65"),
    ],
)  # fmt: skip
def test_invalid_references_are_refused(refusal, monkeypatch, text, code):
    monkeypatch.setenv("RLCLI_EMPTY", "")
    monkeypatch.setenv("RLCLI_API_TOKEN", "canary-value")
    assert code in [reported for reported, _ in refusal(TOP + text)]


def test_a_cycle_is_reported_in_order_and_no_secret_is_printed(folder: Path, monkeypatch):
    from rlcli.errors import RecipeError

    monkeypatch.setenv("RLCLI_API_TOKEN", "canary-value")
    path = write(folder, "seed: ${a}\na: ${b}\nb: ${a}\nname: ${env:RLCLI_API_TOKEN}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert "a → b → a" in str(caught.value)
    assert "RLCLI_API_TOKEN" in str(caught.value)
    assert "canary-value" not in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ("generation.max_new_tokens", 256),
        ("generation.temperature", 1.0),
        ("log.plot", True),
        ("log.dir", "runs"),
        ("cluster.device", "auto"),
        ("models.actor.head", "lm"),
        ("models.actor.devices", None),
        ("models.actor.mesh.tp", 1),
        ("train.eval.every_steps", None),
        ("generation.stop_token_ids", []),
    ],
)
def test_a_reference_to_an_unset_key_gives_the_default_of_the_schema(
    folder: Path, reference, value
):
    (folder / "top.yaml").write_text(
        "extends: small\nmodels: {actor: {scratch: {rope_parameters: {x: "
        f"'${{{reference}}}'}}}}}}}}\n"
    )
    resolved = load_recipe("top.yaml")
    assert resolved.recipe.models["actor"].scratch["rope_parameters"]["x"] == value
    assert str(resolved.origin("models.actor.scratch.rope_parameters.x")) == "default"


def test_a_reference_to_an_unset_section_gives_an_empty_section(folder: Path):
    (folder / "top.yaml").write_text(
        "extends: small\nmodels: {actor: {scratch: {_replace_: true, model_type: llama, "
        "rope_parameters: '${log}'}}}\n"
    )
    assert load_recipe("top.yaml").recipe.models["actor"].scratch["rope_parameters"] == {}


@pytest.mark.parametrize(
    "reference",
    [
        "models.gone.head",
        "train.prompts",
        "models.actor.backend.args.lr",
        "gone",
        "datasets.train.args.x",
    ],
)
def test_a_reference_to_an_unknown_key_is_refused(folder: Path, reference):
    (folder / "top.yaml").write_text(f"extends: small\nseed: ${{{reference}}}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("top.yaml")
    assert [(p.code, p.where) for p in caught.value.problems] == [("R61", "top.yaml:2:7")]
