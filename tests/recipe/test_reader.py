"""What the reader accepts, what it refuses, and where."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rlcli.errors import RecipeError
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.reader import decode, parse, read_file
from rlcli.recipe.parsing.tree import Mark, at, key_mark, plain
from rlcli.recipe.resolve import load_recipe


def read(text: str):
    problems = Problems()
    problems.add_source("r.yaml", text)
    node = parse(text, "r.yaml", problems)
    return node, [(p.code, p.where) for p in problems.reported]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("+1", 1),
        ("-0.0", -0.0),
        ("0", 0),
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("null", None),
        ("none", "none"),
        ("12:30:45", "12:30:45"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("2026-13-45", "2026-13-45"),
        ("0o17", "0o17"),
        ("0x1F", "0x1F"),
        ("017", "017"),
        ("1_000", "1_000"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("é 🎉 漢字", "é 🎉 漢字"),
        ("{{7*7}}x", None),
    ],
)
def test_scalars_are_those_of_the_yaml_1_2_core(text, value):
    node, problems = read(f"k: {text}\n")
    if value is None and text.startswith("{{"):
        assert problems
        return
    assert problems == []
    assert plain(node) == {"k": value}
    assert type(plain(node)["k"]) is type(value)


@pytest.mark.parametrize("text", [".nan", ".inf", "-.INF", "1.0e+400"])
def test_numbers_must_be_finite(text):
    assert read(f"a: 1\nk: {text}\n")[1] == [("R34", "r.yaml:2:4")]


@pytest.mark.parametrize("digits", [20, 400, 4301])
def test_integers_beyond_64_bits_are_refused(digits):
    assert read("k: " + "9" * digits)[1] == [("R35", "r.yaml:1:4")]


def test_every_key_and_value_keeps_its_location():
    node, _ = read("a:\n  b: [x, {c: 1}]\n\n# note\nd: &x\n  é: 2\ne: *x\n")
    assert at(node, ("a", "b", 1, "c")).mark == Mark("r.yaml", 2, 14)
    assert key_mark(node, ("a", "b", 1, "c")) == Mark("r.yaml", 2, 11)
    assert at(node, ("d", "é")).mark == Mark("r.yaml", 6, 6)
    assert at(node, ("e", "é")).mark == Mark("r.yaml", 6, 6)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", ("R05", "r.yaml:3:1")),
        ("m:\n  a: 1\n  a: 3\n", ("R05", "r.yaml:3:3")),
        ("b: &b {x: 1}\na:\n  <<: *b\n", ("R05", "r.yaml:3:3")),
        ("a:\n\tb: 1\n", ("R06", "r.yaml:2:1")),
        ("a: b: c\n", ("R07", "r.yaml:1:5")),
        ("a: 1\nb: [1,\n", ("R07", "r.yaml:2:4")),
        ("a: 'x\n", ("R07", "r.yaml:1:4")),
        ("a: !!python/object/apply:os.system [touch canary]\n", ("R08", "r.yaml:1:4")),
        ("a: !x 1\n", ("R08", "r.yaml:1:4")),
        ("a: 1\n---\nb: 2\n", ("R03", "r.yaml:2:1")),
        ("a: &a [*a]\n", ("R11", "r.yaml:1:8")),
        ("a: *nowhere\n", ("R07", "r.yaml:1:4")),
        ("1: a\n", ("R41", "r.yaml:1:1")),
        ("true: a\n", ("R41", "r.yaml:1:1")),
        ("null: a\n", ("R41", "r.yaml:1:1")),
        ("[1, 2]: a\n", ("R41", "r.yaml:1:1")),
        ("{a: 1}: a\n", ("R41", "r.yaml:1:1")),
        ("a: x\x07y\n", ("R21", "r.yaml:1:5")),
        ("a: x\x00\n", ("R21", "r.yaml:1:5")),
        ("a: x\x85y\n", ("R21", "r.yaml:1:5")),
        ("a: 'x\u202ey'\n", ("R22", "r.yaml:1:6")),
        ("a\u200bb: 1\n", ("R22", "r.yaml:1:1")),
        ("a\u00a0b: 1\n", ("R22", "r.yaml:1:1")),
    ],
)
def test_invalid_yaml_is_refused_with_its_location(text, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read(text)[1] == [problem]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "location", "message"),
    [
        ("a:\n  b: 3\n   c: 2\n", "r.yaml:3:4", "wrong indentation"),
        ("a:\n  b: 3\n c: 2\n", "r.yaml:3:2", "wrong indentation"),
        ("a:\n  b: 'x'\n\n    c: 1\n", "r.yaml:4:5", "wrong indentation"),
        ("a:\n  - b: 1\n    c: 2\n   d: 3\n", "r.yaml:4:4", "wrong indentation"),
        ("a:\r  b: 3\r   c: 2\r", "r.yaml:3:4", "wrong indentation"),
        ("a: 1\nb 2\nc: 3\n", "r.yaml:2:1", "a key without a colon"),
        ("a:\n  b 2\n  c: 3\n", "r.yaml:2:3", "a key without a colon"),
        ("a:\n  b 2  # why\n  c: 3\n", "r.yaml:2:3", "a key without a colon"),
        ("a: [1,\n  2]\n  c: 3\n", "r.yaml:3:3", "wrong indentation"),
        ("a: 1\nb:2\n", "r.yaml:2:1", "no space after the colon"),
        ("a: it: is\n", "r.yaml:1:6", "a second colon"),
        ("a: 'it's'\n", "r.yaml:1:8", "text after the end"),
        ("a:\n  b: 1\n  - c\n", "r.yaml:3:3", "did not find expected key"),
    ],
)
def test_text_that_is_not_yaml_has_the_place_and_the_cause_of_the_mistake(text, location, message):
    problems = Problems()
    assert parse(text, "r.yaml", problems) is None
    [problem] = problems.reported
    assert problem.where == location
    assert message in problem.what


def test_invalid_values_are_left_out_and_marked_as_invalid():
    node, problems = read("a: 1\nb: {c: .nan, 1: x}\nd: !t [1]\n")
    assert [code for code, _ in problems] == ["R34", "R41", "R08"]
    assert plain(node) == {"a": 1, "b": {"c": None}, "d": None}
    assert not at(node, ("b",)).valid
    assert not at(node, ("b", "c")).valid
    assert not at(node, ("d",)).valid
    assert node.valid


def test_several_structural_problems_are_reported_together():
    assert [code for code, _ in read("a: 1\na: 2\n1: x\nb: !t y\nc: .nan\n")[1]] == [
        "R05",
        "R41",
        "R08",
        "R34",
    ]


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (bomb(10), "R10"),
        ("a: " + "[" * 40 + "]" * 40, "R14"),
        ("a: " + "[" * 200_000, "R14"),
        ("a: " + "{x: " * 100_000, "R14"),
        ("a: [" + "x, " * 60_000 + "]", "R10"),
        ("a: &x 1\nb: [" + "*x, " * 200 + "]", "R10"),
        ("a: [" + ", ".join(f"&a{i} 1" for i in range(1100)) + "]", "R10"),
        (
            (
                "x: &x [[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]\na: "
                "[[[[[[[[[[[[[[[[*x]]]]]]]]]]]]]]]]\n"
            ),
            "R14",
        ),
    ],
)
def test_bombs_are_refused_quickly(text, code):
    start = time.process_time()
    node, problems = read(text)
    assert node is None
    assert problems[0][0] == code
    assert time.process_time() - start < 2


def test_nesting_up_to_the_limit_is_accepted():
    assert read("a: " + "[" * 31 + "]" * 31)[1] == []


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"a: 1\nb: caf\xe9\n", ("R18", "r.yaml:2:7")),
        ("a: 1\n".encode("utf-16"), ("R19", None)),
    ],
)
def test_encodings_other_than_utf_8_are_refused(raw, problem):
    problems = Problems()
    assert decode(raw, "r.yaml", problems) is None
    assert [(p.code, p.where) for p in problems.reported] == [problem]


def test_a_byte_order_mark_is_skipped():
    assert decode(b"\xef\xbb\xbfa: 1", "r.yaml", Problems()) == "a: 1"


def test_unusable_files_are_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "large.yaml").write_bytes(b"a: 1\n" * 300_000)
    (tmp_path / "folder.yaml").mkdir()
    for name, code in [
        ("fifo.yaml", "R57"),
        ("large.yaml", "R16"),
        ("folder.yaml", "R57"),
        ("none.yaml", "R51"),
        ("x" * 300, "R59"),
        ("a\0b", "R59"),
    ]:
        problems = Problems()
        assert read_file(Path(os.path.join(tmp_path, name)), name, problems) is None
        assert [p.code for p in problems.reported] == [code], name


def test_a_file_without_permission_is_refused(tmp_path: Path, monkeypatch):
    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "r.yaml").write_text("a: 1")
    monkeypatch.setattr(os, "open", refuse)
    problems = Problems()
    assert read_file(tmp_path / "r.yaml", "r.yaml", problems) is None
    assert [p.code for p in problems.reported] == ["R58"]


@pytest.mark.parametrize(
    "name", ["with space.yaml", "it's.yaml", "$HOME.yaml", "-rf.yaml", "é漢.yaml", "a\nb.yaml"]
)
def test_unusual_file_names_are_accepted(folder: Path, name):
    (folder / "small.yaml").rename(folder / name)
    assert load_recipe(folder / name, ["name=x"]).recipe.train.steps == 3


@pytest.mark.parametrize(
    ("text", "content"),
    [("- a\n", "a list"), ("hello\n", "text"), ("", "nothing"), ("# x", "nothing")],
)
def test_a_top_level_that_is_not_a_mapping_is_refused(folder: Path, text, content):
    (folder / "bad.yaml").write_text(text)
    with pytest.raises(RecipeError, match=f"found {content}") as caught:
        load_recipe("bad.yaml")
    assert caught.value.problems[0].code == "R02"
