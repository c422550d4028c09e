"""The JSON Schema of recipes: it accepts and refuses the same as rlcli, and documents every key."""

from __future__ import annotations

import pytest
from jsonschema import Draft202012Validator

from rlcli import registry
from rlcli.errors import RecipeError, UsageError
from rlcli.recipe.introspection.json_schema import recipe_schema, schema_of
from rlcli.recipe.parsing.finding import recipe_names
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.reader import parse
from rlcli.recipe.parsing.tree import plain
from rlcli.recipe.resolve import load_recipe


@pytest.fixture(scope="module")
def validator():
    schema = recipe_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def read(text: str):
    problems = Problems()
    tree = parse(text, "x.yaml", problems)
    assert problems.reported == []
    return plain(tree)


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_and_layer_is_valid(validator, name):
    errors = [
        (list(e.absolute_path), e.message)
        for e in validator.iter_errors(read(recipe_names()[name].read_text()))
    ]
    assert errors == []


@pytest.mark.parametrize("name", ["ppo_math", "sft_math"])
def test_a_resolved_recipe_is_valid(validator, name):
    assert validator.is_valid(load_recipe(name).to_json())


GOOD = [
    "extends: base/ppo",
    "extends: [base/ppo, more.yaml]",
    "launch: local",
    "launch: {type: local, max_restarts: 2}",
    "models: {actor: {backend: fsdp}}",
    "models: {actor: {backend: null}}",
    "models: {actor: {backend: {args: {lr: 1}}}}",
    "models: {actor: {path: 17}}",
    "models: {_replace_: true, actor: {init: x}}",
    "models: '${shared}'",
    "models: {actor: {backend: {type: fsdp, args: '${optimizer}'}}}",
    "datasets: {train: math-prompts}",
    "datasets: {train: '${data}'}",
    (
        "graph: {x: {inputs: {_append_: [a]}, interface: {type: ppo-actor, args: "
        "{eps_clip: '${clip}'}}}}"
    ),
    "graph: {x: {interface: {type: ppo_actor, args: {generation: {top_k: 3}}}}}",
    "train: {steps: '${env:STEPS}', epochs: null}",
    "ppo: {kl_ctl: 0.1, generation: '${generation}'}",
    "mine: {anything: [1, {a: b}]}",
    "log: {dir: 'runs/${name}'}",
    "models: {critic: null}",
    "graph: {critic_inf: null, actor_train: {inputs: null, hooks: null, interface: {args: null}}}",
    "datasets: {held_out: null}",
    "train: {eval: {graph: {eval_gen: null}}}",
    "train: {eval: null, microbatches: null}",
    "generation: null",
    "ppo: null",
    "ppo: {kl_ctl: null, generation: null}",
    "mine: null",
]

BAD = [
    "sed: 1",
    "extends: {a: b}",
    "launch: slurrm",
    "launch: {type: locl}",
    "train: {stpes: 1}",
    "train: {steps: many}",
    "train: {steps: 0}",
    "train: {_replace_: false}",
    "seed: '1'",
    "name: a/b",
    "models: {actor: {backnd: fsdp}}",
    "models: {actor: {backend: fsdpp}}",
    "models: {actor: {head: valu}}",
    "models: {actor: {backend: {type: fsdp, args: {lrr: 1}}}}",
    "models: {actor: {backend: {args: {lrr: 1}}}}",
    "models: {actor: {backend: {type: fsdp, args: {lr: high}}}}",
    "models: {a/b: {}}",
    "graph: {x: {call: trian}}",
    "graph: {x: {interface: {type: ppo_actor, args: {generation: {top_kk: 3}}}}}",
    "graph: {x: {inputs: a}}",
    "datasets: {train: {type: arithmetic, args: {problems: many}}}",
    "ppo: {kl: 0.1}",
    "generation: {temperature: warm}",
    "train: {prompts_per_step: null}",
    "graph: null",
    "graph: {actor_train: {model: null}}",
    "graph: {actor_train: {interface: null}}",
    "graph: {actor_train: {inputs: [null]}}",
]


@pytest.mark.parametrize("text", GOOD)
def test_the_schema_accepts_valid_layers(validator, text):
    assert [error.message for error in validator.iter_errors(read(text))] == []


@pytest.mark.parametrize("text", BAD)
def test_the_schema_refuses_invalid_layers_as_the_loader_does(validator, text, tmp_path):
    assert not validator.is_valid(read(text))
    file = tmp_path / "bad.yaml"
    base = "" if text.startswith("extends") else "extends: ppo_math\n"
    file.write_text(base + text)
    with pytest.raises(RecipeError):  # and rlcli agrees
        load_recipe(file)


def fields(node, path=""):
    """(path, schema) of every key below a node that a recipe may write."""
    if isinstance(node, dict):
        for name, field in node.get("properties", {}).items():
            if name not in ("_replace_", "_append_"):
                yield f"{path}.{name}", field
        for key, value in node.items():
            yield from fields(value, path if key == "properties" else f"{path}.{key}")
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from fields(item, f"{path}[{index}]")


def test_every_key_has_a_description():
    schema = recipe_schema()

    def described(field):
        forms = [field, *field.get("anyOf", [])]
        refs = [
            schema["$defs"][form["$ref"].rpartition("/")[2]] for form in forms if "$ref" in form
        ]
        return any(
            "description" in form
            for form in [field, *(r for r in refs if r is not schema["$defs"]["reference"])]
        )

    documented = [
        (path, field)
        for path, field in fields(schema)
        if ".then." not in path and ".if." not in path
    ]
    assert len(documented) > 150
    assert [
        path for path, field in documented if not described(field) and ".else" not in path
    ] == []


def test_descriptions_come_from_the_source():
    definitions = recipe_schema()["$defs"]
    (argument,) = [a for a in registry.signature("backends", "fsdp").arguments if a.name == "lr"]
    assert definitions["backends.fsdp"]["properties"]["lr"]["description"] == " ".join(
        argument.doc.split()
    )
    assert definitions["backends.fsdp"]["properties"]["lr"]["default"] == argument.default


@pytest.mark.parametrize(
    "name", ["train", "train.eval", "models.actor.mesh", "ppo_actor", "ppo-actor", "fsdp", "ppo"]
)
def test_the_schema_of_a_section_or_component_stands_alone(name):
    schema = schema_of(name)
    Draft202012Validator.check_schema(schema)
    assert len(str(schema)) < len(str(recipe_schema()))
    assert Draft202012Validator(schema).is_valid({})
    assert not Draft202012Validator(schema).is_valid({"no_such_key": 1})


@pytest.mark.parametrize(
    ("name", "near"), [("trian", "train"), ("ppo_acter", "ppo_actor"), ("train.evl", None)]
)
def test_an_unknown_section_or_component_is_refused(name, near):
    with pytest.raises(UsageError) as caught:
        schema_of(name)
    assert caught.value.code == "R42"
    if near:
        assert near in str(caught.value.hint)


def test_components_and_blocks_of_the_project_are_in_the_schema(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCLI_PROJECT", raising=False)
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "broken_rows.py").write_text("def :\n")
    (tmp_path / "datasets" / "own_rows.py").write_text(
        "from dataclasses import dataclass\n"
        "from rlcli.api.data import DatasetUtility, register_dataset\n\n"
        "@dataclass\nclass OwnRows:\n"
        '    """Mine."""\n\n    util: DatasetUtility\n    rows: int = 3\n    """How many."""\n\n'
        'register_dataset("own_rows", OwnRows)\n'
    )
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.yaml").write_text(
        "n: 4\nshared: {rows: '${n}'}\ndatasets: {train: {type: own_rows, args: '${shared}'}}\n"
    )
    validator = Draft202012Validator(recipe_schema())
    assert validator.is_valid(read("datasets: {train: {type: own_rows, args: {rows: 2}}}"))
    assert not validator.is_valid(read("datasets: {train: {type: own_rows, args: {row: 2}}}"))
    assert not validator.is_valid(read("shared: {row: 2}"))
    assert validator.is_valid(read("n: 5"))
    assert not validator.is_valid(read("m: 5"))
    assert validator.is_valid(read("datasets: {train: {type: broken_rows, args: {row: 2}}}"))
