"""What holds for every recipe, and for every text that is not a recipe."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlcli.cli.main import main
from rlcli.errors import RlcliError
from rlcli.recipe.parsing.merge import merge
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.reader import parse
from rlcli.recipe.parsing.tree import plain
from rlcli.recipe.parsing.write import to_yaml
from rlcli.recipe.resolve import load_recipe

# -- layers ----------------------------------------------------------------------------------------

LISTS = st.lists(st.integers(-3, 3), max_size=3)
LAYERS = st.dictionaries(
    st.sampled_from("abc"),
    LISTS
    | st.integers(0, 3)
    | st.dictionaries(st.sampled_from("xyz"), st.integers(0, 3), min_size=1, max_size=3),
    max_size=3,
)


def merged_layers(*values):
    """The merge of plain values as layers, lowest first."""
    problems = Problems()
    tree = None
    for value in values:
        tree = merge(tree, parse(to_yaml(value) if value else "{}", "l.yaml", problems), problems)
    assert problems.reported == []
    return plain(tree)


@given(LAYERS, LAYERS)
def test_a_replaced_section_keeps_nothing_from_lower_layers(lower, upper):
    marked = {k: {"_replace_": True, **v} if isinstance(v, dict) else v for k, v in upper.items()}
    assert merged_layers(lower, marked) == {**lower, **upper}


@given(LISTS, LISTS, LISTS)
def test_appended_lists_are_joined_in_order(lower, first, second):
    appended = ({"a": {"_append_": items}} for items in (first, second))
    assert merged_layers({"a": lower}, *appended) == {"a": lower + first + second}
    assert merged_layers({"a": lower}, {"a": {"_append_": []}}) == {"a": lower}
    assert merged_layers({"a": {"_append_": first}}) == {"a": first}


@given(LAYERS, LAYERS, LAYERS)
def test_merging_plain_layers_is_associative(lowest, two, three):
    assert merged_layers(merged_layers(lowest, two), three) == merged_layers(lowest, two, three)
    assume(not replaces_a_mapping(lowest, two, three))
    assert merged_layers(lowest, two, three) == merged_layers(lowest, merged_layers(two, three))


def replaces_a_mapping(lowest, two, three):
    """Whether `two` has a value other than a mapping where both others have a mapping."""
    shared = lowest.keys() & two.keys() & three.keys()
    return any(
        isinstance(lowest[k], dict) and isinstance(three[k], dict) and not isinstance(two[k], dict)
        for k in shared
    )


def test_a_mapping_replaced_by_another_value_is_not_merged_again():
    """This is why layers are merged one after the other, from the lowest."""
    assert merged_layers({"a": {"y": 0}}, {"a": []}, {"a": {"x": 0}}) == {"a": {"x": 0}}


@given(LAYERS, LAYERS)
def test_merging_a_layer_twice_equals_merging_it_once(lower, upper):
    assert merged_layers(lower, upper, upper) == merged_layers(lower, upper)


@given(LAYERS)
def test_merging_does_not_modify_its_inputs(layer):
    problems = Problems()
    tree = parse(to_yaml({"k": layer}), "l.yaml", problems)
    before = copy.deepcopy(plain(tree))
    merge(tree, tree, problems)
    assert plain(tree) == before


# -- any text --------------------------------------------------------------------------------------


def outcome(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["validate", *arguments])
    return int(ended.value.code or 0), capsys.readouterr().err


@given(
    st.one_of(
        st.binary(max_size=120),
        st.text(max_size=120).map(lambda t: t.encode("utf-8", "surrogatepass")),
    )
)
def test_any_bytes_are_refused_with_a_message(folder: Path, capsys, raw):
    (folder / "any.yaml").write_bytes(raw)
    code, output = outcome(capsys, "any.yaml")
    assert code == 2
    assert output.startswith("error[R")
    assert "Traceback" not in output


@given(st.text(max_size=30), st.text(max_size=20))
def test_any_override_and_profile_is_refused_with_a_message(
    folder: Path, capsys, override, profile
):
    code, output = outcome(capsys, f"--with={profile}", "small.yaml", "--", f"seed{override}")
    assert code == 2
    assert "Traceback" not in output


YAMLISH = st.lists(
    st.sampled_from(
        [
            "a",
            "models",
            ":",
            " ",
            "\n",
            "\n  ",
            "- ",
            "[",
            "]",
            "{",
            "}",
            "&x ",
            "*x",
            "!t ",
            "'",
            '"',
            "|\n",
            "#",
            "${seed}",
            "${",
            "1",
            "null",
            ",",
            "_append_",
            "_replace_: true",
            "extends",
            "?",
        ]
    ),
    max_size=30,
).map("".join)


@given(YAMLISH)
def test_any_yaml_over_a_recipe_is_accepted_or_refused_with_a_message(folder: Path, capsys, text):
    (folder / "any.yaml").write_text(text)
    code, output = outcome(capsys, "small.yaml", "--with=any.yaml")
    assert code in (0, 2), output
    assert "Traceback" not in output


# -- any recipe ------------------------------------------------------------------------------------

VALUES = {
    "seed": st.integers(0, 2**63 - 1),
    "train.prompts_per_step": st.integers(64, 10**6),
    "train.shuffle": st.booleans(),
    "train.max_tokens_per_microbatch": st.integers(16384, 10**9),
    "generation.temperature": st.floats(1e-6, 1e6, allow_nan=False),
    "generation.top_p": st.floats(1e-6, 1),
    "generation.stop_token_ids": st.lists(st.integers(0, 10**6), max_size=3),
    "ppo.kl_ctl": st.floats(0, 1e3),
    "models.actor.backend.args.lr": st.floats(1e-9, 1),
    "models.ref.devices": st.just("0"),
    "log.plot": st.booleans(),
    "log.trackers": st.lists(st.sampled_from(["tensorboard", "wandb"]), unique=True),
    "launch.step_deadline": st.floats(1e-3, 1e9),
    "checkpoint.every_steps": st.none() | st.integers(1, 10**6),
    "checkpoint.best_metric": st.text(
        st.characters(exclude_categories=("Cs", "Cc", "Cf", "Cn", "Zl", "Zp")),
        min_size=1,
        max_size=20,
    ),
}


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_a_written_recipe_is_read_back_unchanged(folder: Path, chosen):
    document: dict = {"extends": "ppo_math"}
    for key, value in chosen.items():
        *above, last = key.split(".")
        section = document
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
    (folder / "layer.yaml").write_text(to_yaml(document), encoding="utf-8")
    resolved = load_recipe("layer.yaml")
    (folder / "whole.yaml").write_text(resolved.to_yaml(), encoding="utf-8")
    again = load_recipe("whole.yaml")
    assert again.recipe == resolved.recipe
    assert again.to_yaml() == resolved.to_yaml()


SENSITIVE = """\
extends: small
name: safe
models:
  actor:
    scratch: null
    path: owner/model
    tokenizer: builtin:arithmetic
datasets:
  train: {type: arithmetic_demonstrations, args: {problems: 64}}
log:
  dir: runs/here
launch: local
cluster: {devices_per_node: 2, device: cpu}
"""


@given(st.integers(0, len(SENSITIVE) - 1), st.binary(max_size=1), st.booleans())
def test_one_changed_byte_alters_only_values_on_its_line(folder: Path, position, byte, insert):
    """A slip never changes a path, a name or a device unnoticed: it is refused,
    or its line shows it."""
    (folder / "m.yaml").write_text(SENSITIVE)
    before = load_recipe("m.yaml")
    raw = SENSITIVE.encode()
    (folder / "m.yaml").write_bytes(raw[:position] + byte + raw[position + (not insert) :])
    with suppress(RlcliError):
        after = load_recipe("m.yaml")
        line = raw[:position].count(b"\n") + 1
        touched = {f"m.yaml:{n}" for n in (line, line + 1)}
        old, new = dict(leaves_of(before.to_json())), dict(leaves_of(after.to_json()))
        for key in old.keys() | new.keys():
            if old.get(key) != new.get(key):
                places = {str(r.origin(key)).rpartition(":")[0] for r in (before, after)}
                assert places & touched, (key, old.get(key), new.get(key), places)


def leaves_of(value, path=()):
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves_of(item, (*path, key))
    else:
        yield path, value
