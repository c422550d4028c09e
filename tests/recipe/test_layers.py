"""Layers: where they are found, properties of merging, overrides, and the origin of every value."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.errors import RecipeError
from rlcli.recipe.parsing.merge import merge, spell_out_types
from rlcli.recipe.parsing.overrides import parse_overrides
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.reader import parse
from rlcli.recipe.parsing.tree import default_mark, is_default, leaves, node_of, plain
from rlcli.recipe.parsing.write import to_yaml
from rlcli.recipe.resolve import load_recipe


def lay(*texts: str):
    """The plain value of layers, lowest first."""
    problems = Problems()
    tree = None
    for text in texts:
        tree = merge(
            tree, spell_out_types(parse(textwrap.dedent(text), "l.yaml", problems)), problems
        )
    assert [p.code for p in problems.reported] == []
    return plain(tree)


def test_mappings_merge_and_the_rest_is_replaced():
    assert lay("a: {x: 1, y: [1, 2]}\nb: 2", "a: {y: [3], z: 4}") == {
        "a": {"x": 1, "y": [3], "z": 4},
        "b": 2,
    }
    assert lay("a: {x: 1}", "a: 5") == {"a": 5}
    assert lay("a: 5", "a: {x: 1}") == {"a": {"x": 1}}
    assert lay("a: {x: 1}", "a: null") == {"a": None}


def test_replace_and_append_markers_are_applied():
    assert lay("a: {x: 1}", "a: {_replace_: true, y: 2}") == {"a": {"y": 2}}
    assert lay("a: [1]", "a: {_append_: [2, 3]}", "a: {_append_: [4]}") == {"a": [1, 2, 3, 4]}
    assert lay("b: 1", "a: {_append_: [2]}") == {"b": 1, "a": [2]}


def test_a_list_that_no_layer_sets_is_appended_to_its_default(folder: Path):
    (folder / "more.yaml").write_text("log: {trackers: {_append_: [wandb]}}\n")
    (folder / "none.yaml").write_text("log: {trackers: []}\n")

    def trackers(*layers: str, override: str = "log.trackers={_append_: [mlflow]}"):
        return load_recipe("small", [override], [*layers]).recipe.log.trackers

    assert trackers() == ["tensorboard", "mlflow"]
    assert trackers("more.yaml") == ["tensorboard", "wandb", "mlflow"]
    assert trackers("none.yaml") == ["mlflow"]
    assert trackers("none.yaml", "more.yaml", override="log.trackers=null") == ["tensorboard"]
    assert load_recipe(
        "small", ["checkpoint.roles={_append_: [actor]}"]
    ).recipe.checkpoint.roles == ["actor"]


@pytest.mark.parametrize(
    "override", ["seed=", "seed=  ", "log={dir: }", "generation.stop_token_ids=[1, {a: }]"]
)
def test_an_empty_override_is_refused_and_an_explicit_null_accepted(folder: Path, override):
    with pytest.raises(RecipeError) as caught:
        load_recipe("small", [override])
    assert [(problem.code, problem.where) for problem in caught.value.problems] == [
        ("R40", "command line")
    ]
    load_recipe(
        "small", ["models.actor.devices=null", 'log.dir="logs"', "generation.stop_token_ids=[]"]
    )


@pytest.mark.parametrize(
    ("lower", "upper", "code"),
    [
        ("a: 1", "a: {_append_: [2]}", "R37"),
        ("a: [1]", "a: {_append_: 2}", "R37"),
        ("a: [1]", "a: {_append_: [2], b: 1}", "R37"),
        ("a: {x: 1}", "a: {_replace_: yes}", "R37"),
        ("a: [1]", "a: [{_append_: [1]}]", "R42"),
    ],
)
def test_markers_without_a_meaning_are_refused(folder: Path, lower, upper, code):
    section = "models: {{actor: {{scratch: {{rope_parameters: {{{}}}}}}}}}\n"
    (folder / "lower.yaml").write_text("extends: small\n" + section.format(lower))
    (folder / "upper.yaml").write_text("extends: lower\n" + section.format(upper))
    with pytest.raises(RecipeError) as caught:
        load_recipe("upper.yaml")
    assert [problem.code for problem in caught.value.problems] == [code]


def test_a_marker_at_the_top_level_is_refused(refusal):
    assert refusal("extends: small\n_replace_: true\n") == [("R42", "bad.yaml:2:1")]


def test_a_component_with_another_type_loses_its_arguments():
    base = "models: {a: {backend: {type: fsdp, args: {lr: 1}}}}"
    assert lay(base, "models: {a: {backend: {args: {eps: 2}}}}")["models"]["a"]["backend"][
        "args"
    ] == {
        "lr": 1,
        "eps": 2,
    }
    assert lay(base, "models: {a: {backend: {type: fsdp, args: {eps: 2}}}}")["models"]["a"][
        "backend"
    ] == {
        "type": "fsdp",
        "args": {"lr": 1, "eps": 2},
    }
    assert lay(base, "models: {a: {backend: inference}}")["models"]["a"]["backend"] == {
        "type": "inference"
    }


def test_text_names_the_type_of_a_component():
    assert lay("launch: local", "launch: {max_restarts: 2}") == {
        "launch": {"type": "local", "max_restarts": 2}
    }
    assert lay("name: local") == {"name": "local"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["x", "y", "1.10", "on"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)
MAPPINGS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


@given(st.lists(MAPPINGS, min_size=3, max_size=5), st.data())
def test_layering_is_associative(tmp_path_factory, mappings, data):
    """However layers are grouped into files that extend each other, the result is the same."""
    from rlcli.recipe.parsing.layers import collect

    root = tmp_path_factory.mktemp("layers")
    for number, mapping in enumerate(mappings):
        (root / f"l{number}.yaml").write_text(to_yaml(mapping) if mapping else "{}")
    names = [f"l{number}" for number in range(len(mappings))]
    cut = data.draw(st.integers(1, len(names) - 1))
    (root / "flat.yaml").write_text(to_yaml({"extends": names}))
    (root / "low.yaml").write_text(to_yaml({"extends": names[:cut]}))
    (root / "high.yaml").write_text(to_yaml({"extends": names[cut:]}))
    (root / "grouped.yaml").write_text("extends: [low, high]")

    def total(name):
        problems = Problems()
        tree = None
        for layer in collect(root / name, problems):
            tree = merge(tree, layer.tree, problems)
        assert problems.reported == []
        return plain(tree)

    assert total("flat.yaml") == total("grouped.yaml")


@given(MAPPINGS)
def test_merging_with_an_empty_layer_or_itself_changes_nothing(mapping):
    text = to_yaml(mapping) if mapping else "{}"
    assert lay(text, "{}") == lay(text) == lay(text, text) == lay("{}", text)


@given(MAPPINGS, MAPPINGS)
def test_every_value_of_the_upper_layer_wins(lower, upper):
    problems = Problems()
    trees = [parse(to_yaml(m) if m else "{}", "l.yaml", problems) for m in (lower, upper)]
    merged = plain(merge(*trees, problems))
    for path, node in leaves(trees[1]):
        value = merged
        for name in path:
            value = value[name]
        if plain(node) != {}:
            assert value == plain(node)


# -- finding layers --------------------------------------------------------------------------------


def test_layers_are_ordered_lowest_first_and_shared_layers_occur_once(folder: Path):
    (folder / "a.yaml").write_text("extends: small\nseed: 2\n")
    (folder / "sub").mkdir()
    (folder / "sub" / "b.yaml").write_text("seed: 3\n")
    (folder / "top.yaml").write_text("extends: [a.yaml, small, sub/b]\n")
    resolved = load_recipe("top")
    assert [layer.label for layer in resolved.layers] == [
        "small.yaml",
        "a.yaml",
        "sub/b.yaml",
        "top.yaml",
    ]
    assert resolved.recipe.seed == 3
    assert resolved.recipe.name == "top"


def test_built_in_layers_are_found_from_anywhere(folder: Path):
    (folder / "mine.yaml").write_text("extends: sft_math\nseed: 9\n")
    resolved = load_recipe("mine.yaml")
    assert [layer.label for layer in resolved.layers] == [
        "base/sft.yaml",
        "sft_math.yaml",
        "mine.yaml",
    ]


@pytest.mark.parametrize(
    ("ref", "code"),
    [
        ("none", "R51"),
        ("../small", "R55"),
        ("/etc/passwd", "R55"),
        ("~/x", "R55"),
        ("file:///etc/x", "R55"),
        ("https://x.org/a.yaml", "R55"),
        ("sub/../../small", "R55"),
        ("${env:HOME}", "R55"),
        ("[1]", "R37"),
        ("{a: 1}", "R37"),
        ("''", "R37"),
        ("bad", "R52"),
        ("linked", "R55"),
    ],
)
def test_invalid_layer_references_are_refused(folder: Path, refusal, ref, code):
    (folder.parent / f"{folder.name}-outside.yaml").write_text("seed: 1\n")
    (folder / "linked.yaml").symlink_to(folder.parent / f"{folder.name}-outside.yaml")
    reported = refusal(f"extends: {ref}\n")
    assert [c for c, _ in reported] == [code]
    assert reported[0][1].startswith("bad.yaml:1:1")


@pytest.mark.parametrize("length", [2, 5])
def test_a_cycle_of_layers_is_reported_once(folder: Path, length):
    for number in range(length):
        (folder / f"c{number}.yaml").write_text(f"extends: c{(number + 1) % length}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("c0.yaml")
    assert len(caught.value.problems) == 1
    assert " → ".join(f"c{n % length}.yaml" for n in range(length + 1)) in caught.value.what


def test_a_missing_layer_is_reported_with_its_chain(folder: Path):
    (folder / "a.yaml").write_text("extends: b\n")
    (folder / "b.yaml").write_text("\nextends: [gone]\n")
    with pytest.raises(RecipeError, match=r"a\.yaml → b\.yaml → gone") as caught:
        load_recipe("a.yaml")
    assert caught.value.where == "b.yaml:2:11"
    assert "pulled in by a.yaml:1" in str(caught.value)


# -- overrides -------------------------------------------------------------------------------------


def test_overrides_win_over_all_layers(folder: Path):
    resolved = load_recipe(
        "small.yaml",
        [
            "train.steps=7",
            "models.actor.scratch.rope_parameters.x=a=b",
            "launch=local",
            "launch.max_restarts=2",
            "graph.sft_train.inputs=[packed_input_ids, prompt_mask]",
            "models.actor.backend.args={lr: 1e-3}",
        ],
    )
    recipe = resolved.recipe
    assert recipe.train.steps == 7
    assert recipe.models["actor"].scratch == {
        "model_type": "llama",
        "rope_parameters": {"x": "a=b"},
    }
    assert (recipe.launch.type, recipe.launch.max_restarts) == ("local", 2)
    assert str(resolved.origin("train.steps")) == "command line"


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["train.steps=1", "train.steps=2"], "R05"),
        (["train={steps: 1}", "train.steps=2"], "R05"),
        (["launch=local", "launch.type=inline"], "R05"),
        (["steps"], "R42"),
        (["=3"], "R41"),
        (["a..b=3"], "R41"),
        (["train.steps=[1"], "R07"),
        (["train.steps=.nan"], "R34"),
        (["seed=\x1b[31m"], "R21"),
        (["extends=x"], "R42"),
        (["train.stpes=1"], "R42"),
        (["train.steps=no"], "R37"),
        (["train={}"], "R42"),
    ],
)
def test_invalid_overrides_are_refused(folder: Path, overrides, code):
    with pytest.raises(RecipeError) as caught:
        load_recipe("small.yaml", overrides)
    assert [(p.code, p.where) for p in caught.value.problems] == [(code, "command line")]
    assert "\x1b" not in str(caught.value)


def test_a_hash_or_colon_in_an_override_is_text(folder: Path):
    assert load_recipe("small.yaml", ["log.dir=runs #1: x"]).recipe.log.dir == "runs #1: x"


# -- origins ---------------------------------------------------------------------------------------


def test_the_origin_of_every_value_is_where_it_was_written(folder: Path):
    (folder / "top.yaml").write_text(
        "extends: small\nblock: {steps: 9}\ntrain:\n  steps: ${block.steps}\n"
    )
    resolved = load_recipe("top.yaml", ["seed=4"])
    lines = {name: (folder / name).read_text().splitlines() for name in ("top.yaml", "small.yaml")}
    for key, origin in resolved.origins.items():
        if origin == "command line" or is_default(origin):
            continue
        file, line, column = origin.rsplit(":", 2)
        rest = lines[file][int(line) - 1][int(column) - 1 :]
        value = resolved.tree
        for name in key.split("."):
            value = value.get(name)
        written = plain(value)
        assert rest.startswith("[" if isinstance(written, list) else str(written)), key
    assert str(resolved.origin("train.steps")) == "top.yaml:2:16"
    assert str(resolved.origin("train.shuffle")) == "default"


def test_history_lists_every_value_that_a_key_had(folder: Path):
    (folder / "mid.yaml").write_text(
        "extends: small\nblock: {n: 9}\ntrain: {steps: '${block.n}'}\n"
    )
    (folder / "top.yaml").write_text("extends: mid\nblock: {n: 10}\n")
    history = load_recipe("top.yaml", ["block.n=11"]).history("train.steps")
    assert [(str(s.mark), s.value, s.via) for s in history] == [
        ("small.yaml:14:10", 3, None),
        ("mid.yaml:3:16", "${block.n}", None),
        ("mid.yaml:2:12", 9, "block.n"),
        ("top.yaml:2:12", 10, "block.n"),
        ("command line", 11, "block.n"),
    ]


def test_a_file_may_have_any_name(folder: Path):
    (folder / "my recipe.yaml").write_text("extends: small\n")
    assert load_recipe("my recipe.yaml").recipe.name == "my_recipe"


def test_recipes_named_in_another_script_have_different_names(folder: Path):
    def name(stem: str) -> str:
        (folder / f"{stem}.yaml").write_text("extends: small\n")
        return load_recipe(f"{stem}.yaml").recipe.name

    stems = ("обучение", "обучение2", "学習", "学習2", "2")
    assert len({name(stem) for stem in stems}) == len(stems)
    assert [name("2"), name("_"), name("modèle")] == ["2", "recipe", "mod_le"]
    assert name("\u0439") == name("\u0438\u0306"), "it is the same letter"


@pytest.mark.parametrize(
    ("first", "second", "args"),
    [
        ("type=other", "args.size=3", {"size": 3}),
        ("={_replace_: true, type: other}", "args.size=3", {"size": 3}),
        ("={_replace_: true, args: {size: 3}}", "type=other", {"size": 3}),
        ("args={_replace_: true, size: 3}", "type=other", {"size": 3}),
        ("args.size=3", "args.levels=[1]", {"problems": 5, "size": 3, "levels": [1]}),
    ],
)
def test_the_order_of_overrides_means_nothing(first: str, second: str, args: dict[str, object]):
    below = {"datasets": {"train": {"type": "arithmetic", "args": {"problems": 5}}}}
    overrides = [f"datasets.train.{text}".replace(".=", "=") for text in (first, second)]
    for order in (overrides, overrides[::-1]):
        tree = node_of(below, default_mark())
        for override in parse_overrides(order, Problems()):
            tree = merge(tree, override, Problems())
        assert plain(tree)["datasets"]["train"]["args"] == args


def test_a_component_with_another_type_keeps_the_block_below_what_was_set_on_top_of_it():
    base = "graph: {a: {interface: {type: gae, args: '${ppo}'}}}\nppo: {kl_ctl: 0.1}"
    mine = "graph: {a: {interface: {args: {gae_lambda: 0.9}}}}"
    changed = lay(base, mine, "graph: {a: {interface: est}}")
    assert changed["graph"]["a"]["interface"] == {"type": "est", "args": "${ppo}"}
