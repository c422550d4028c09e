"""The core contains no name of an algorithm, component or batch key:
it uses tables and declarations."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from rlcli.api.key_meaning import MEANINGS
from rlcli.recipe.schema import SECTIONS, Call

ROOT = Path(__file__).resolve().parents[2]
ASKED = ("api", "testing", "ops")
"""Rooms that may: the tables, the contracts that test components,
and maths over named quantities."""
FILES = [path.relative_to(ROOT / "rlcli") for path in sorted((ROOT / "rlcli").rglob("*.py"))]
CORE = [str(file) for file in FILES if file.parts[0] not in ASKED]

COMPONENTS = {
    path.stem
    for kind in ("interfaces", "backends", "datasets")
    for path in (ROOT / kind).glob("[!_]*.py")
}
ALGORITHMS = {"ppo", "grpo", "gspo", "dpo", "sft", "reinforce"}
"""Not allowed in a key such as `ppo.kl_ctl`. Prose, which has blanks,
may mention them as examples."""
LANGUAGE = {*get_args(Call.model_fields["call"].annotation), *SECTIONS, "null"}
"""Words of every recipe: its calls, its sections, and YAML's null."""
NAMES = (COMPONENTS | set(MEANINGS)) - LANGUAGE
OTHERWISE = {
    ("cli/chat.py", "chat"),
    ("cli/explain.py", "values"),
    ("cli/main.py", "chat"),
    ("cli/tokens.py", "prompt_only"),
    ("launch/playing.py", "chat"),
    ("recipe/introspection/json_schema.py", "reference"),
    ("recipe/prompt_format.py", "chat"),
}
"""Fields of JSON output, a verb and an argument that happen to have the name of a key or a
component."""


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every string except docstrings."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value


def compared_types(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that a `.type` is compared with,
    as in `role.backend.type == "inference"`."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.left, ast.Attribute)
            and node.left.attr == "type"
        ):
            yield from (pair for side in node.comparators for pair in texts(side))


def names_in(file: str) -> list[tuple[str, int, str]]:
    """(file, line, name) of all names that a file of `rlcli/` should not contain."""
    tree = ast.parse((ROOT / "rlcli" / file).read_text(encoding="utf-8"))
    matches = [pair for pair in texts(tree) if pair[1] in NAMES]
    matches += [pair for pair in compared_types(tree) if pair[1] in COMPONENTS]
    matches += [
        pair
        for pair in texts(tree)
        if " " not in pair[1] and ALGORITHMS & set(re.split(r"\W", pair[1]))
    ]
    return [(file, line, text) for line, text in matches if (file, text) not in OTHERWISE]


def test_the_core_contains_no_name_of_a_component_or_key():
    assert len(CORE) > 100
    assert [name for file in CORE for name in names_in(file)] == []


def test_only_one_table_names_backends():
    """Of all rooms, including those that may name keys."""
    backends = {path.stem for path in (ROOT / "backends").glob("[!_]*.py")} - LANGUAGE
    trees = {
        str(file): ast.parse((ROOT / "rlcli" / file).read_text(encoding="utf-8")) for file in FILES
    }
    assert {
        file for file, tree in trees.items() for _, text in texts(tree) if text in backends
    } == {"api/default_backends.py"}


def test_the_lists_of_names_contain_current_components_and_keys():
    """The lists above contain the current components and keys."""
    assert {"fsdp", "ppo_actor", "math_prompts", "packed_input_ids", "rewards"} <= NAMES
    assert {"fsdp", "inference", "null"} <= COMPONENTS
    tree = ast.parse("if role.backend.type == 'inference': pass")
    assert list(compared_types(tree)) == [(1, "inference")]
