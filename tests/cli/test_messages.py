"""Every kind of mistake on the command line: the exact message on stderr, and the exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlcli.cli.main import VERBS
from rlcli.cli.output import _error_lines, print_error
from rlcli.cli.verbs import command_of
from rlcli.errors import Problem, RecipeError, UsageError
from rlcli.recipe.resolve import load_recipe

WHOLE_VERBS = [
    " ".join([verb, *subcommand])
    for verbs in VERBS.values()
    for verb in verbs
    for subcommand in ([[name] for name in getattr(command_of(verb), "commands", ())] or [[]])
]
"""As they are typed, with the verbs of a verb: `train`, `ckpt ls`, …"""

REPOSITORY = Path(__file__).parents[2]

FILES = {
    "typo.yaml": "extends: ppo_math\nsed: 1\ntrain: {stpes: 1}\nlearning_rate: 1e-6\n",
    "type.yaml": "extends: ppo_math\ntrain: {steps: ten}\n",
    "twice.yaml": "extends: ppo_math\nseed: 1\nseed: 2\n",
    "broken.yaml": "extends: [ppo_math\n",
    "empty.yaml": "",
    "orphan.yaml": "extends: no_such_base\n",
    "circle.yaml": "extends: ./circle.yaml\n",
    "graph.yaml": "extends: ppo_math\ngraph: {actor_train: {inputs: [packed_inputs]}}\n",
    "component.yaml": "extends: ppo_math\ndatasets: {train: arithmetics}\n",
    "both.yaml": "extends: ppo_math\ntrain: {steps: 3, epochs: 2}\n",
    "reference.yaml": "extends: ppo_math\nseed: ${sead}\n",
    "model.yaml": "extends: ppo_math\nmodels: {actor: {path: ./gone}}\n",
}

MISTAKES = {
    "unknown-verb": "trian",
    "unknown-verb-nothing-near": "zzz",
    "a-recipe-instead-of-a-verb": "ppo_math",
    "a-file-instead-of-a-verb": "typo.yaml",
    "unknown-option-of-rlcli": "--verison",
    "option-without-its-value": "train ppo_math --run-dir",
    "flag-with-a-value": "ls --json=yes",
    "too-many-arguments": "ls datasets extra",
    "not-a-choice": "ls dataset",
    "not-a-choice-nothing-near": "ls thing",
    "not-a-number": "check ppo_math --rows many",
    "out-of-range": "check ppo_math --rows 0",
    "out-of-range-fraction": "generate model --prompt x --temperature -1",
    "not-a-probability": "generate model --prompt x --top-p 2",
    "not-a-fraction": "generate model --prompt x --temperature warm",
    "no-project": "--project gone ls",
    "not-a-project": "--project . ls",
    "no-recipe": "plan ppo_mth",
    "no-recipe-nothing-near": "plan zzz",
    "no-layer": "validate ppo_math --with h100x8",
    "no-component": "show interface ppo_acter",
    "not-an-override": "plan ppo_math steps",
    "same-key-twice": "plan ppo_math train.steps=1 train.steps=2",
    "key-on-the-command-line": "plan ppo_math ppo.kl_clt=0.1",
    "value-on-the-command-line": "plan ppo_math train.steps=many",
    "choice-on-the-command-line": "plan ppo_math launch=locl",
    "typo": "validate typo.yaml",
    "typo-when-training": "train typo.yaml",
    "type": "validate type.yaml",
    "twice": "validate twice.yaml",
    "broken": "validate broken.yaml",
    "empty": "validate empty.yaml",
    "orphan": "validate orphan.yaml",
    "circle": "validate circle.yaml",
    "graph": "validate graph.yaml",
    "component": "validate component.yaml",
    "both": "validate both.yaml",
    "reference": "validate reference.yaml",
    "model": "plan model.yaml",
    "devices": "plan ppo_math cluster.devices_per_node=2",
    "a-file-name-that-is-none": "plan a\\nb",
    "which-shell": "completion tcsh",
    "no-run": "resume runs/gone",
    "diff-with-nothing": "diff ppo_math gone",
    "cp-onto-a-file": "cp ppo_math typo.yaml",
    "no-key": "explain ppo_math ppo.kl_clt",
    "no-section": "schema trian",
    "no-row": "tokens sft_math --row -1",
}

LISTS = [
    (r"(available: )[^\n]*", r"\1<recipes>"),
    (r"(the (?:interface|backend|dataset)s are )[^\n]*", r"\1<names>; searched <folders>"),
    (r"(looked in )[^\n]*", r"\1<folders>"),
    (r"(valid here: )[^\n]*", r"\1<keys>"),
]
"""Lists that grow with every new component or recipe."""


@pytest.fixture
def mistake(rlcli, tmp_path):
    """Run a command line among FILES: (exit code, stdout, stderr without paths of this machine)."""
    for name, text in FILES.items():
        Path(name).write_text(text)

    def run(*arguments: str) -> tuple[int, str, str]:
        code, out, err = rlcli(*arguments)
        for folder, name in ((tmp_path.resolve(), "<here>"), (REPOSITORY, "<rlcli>")):
            err = err.replace(str(folder), name)
        for pattern, put in LISTS:
            err = re.sub(pattern, put, err)
        return code, out, err

    return run


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_of_each_mistake(mistake, pages, name):
    code, out, err = mistake(*(word.replace("\\n", "\n") for word in MISTAKES[name].split()))
    assert out == ""
    assert code in (2, 4, 5, 6)
    assert re.match(r"error\[(USAGE|PROJECT|MODEL|DATA|RESOURCE|[A-Z]\d\d)\]", err)
    assert "Traceback" not in err
    assert f"exit {code}\n{err}" == pages


@pytest.mark.parametrize("verb", WHOLE_VERBS)
def test_an_unknown_option_of_each_verb_is_refused(mistake, verb):
    code, out, err = mistake(*verb.split(), "--jsno")
    assert (code, out) == (2, "")
    hint = "rlcli chat --help lists them" if verb == "chat" else "did you mean --json?"
    assert err == f"error[USAGE]: rlcli {verb} has no option --jsno\n  hint: {hint}\n"


@pytest.mark.parametrize("verb", WHOLE_VERBS)
def test_a_verb_without_its_arguments_shows_an_example(mistake, verb):
    page = mistake(*verb.split(), "--help")[1]
    needs = re.match(rf"rlcli {verb} ([A-Z][A-Za-z.]*)", page)
    if needs is not None:
        code, out, err = mistake(*verb.split())
        assert (code, out) == (2, "")
        assert err.startswith(f"error[USAGE]: rlcli {verb} needs {needs[1].removesuffix('...')}")
        assert f"hint: for example: rlcli {verb} " in err


def test_with_json_problems_are_on_stdout_and_messages_on_stderr(mistake):
    code, out, err = mistake("validate", "typo.yaml", "--json")
    document = json.loads(out)
    assert (code, document["exit_code"], document["ok"]) == (2, 2, False)
    assert [p["where"] for p in document["problems"]] == [
        "typo.yaml:2:1",
        "typo.yaml:3:9",
        "typo.yaml:4:1",
    ]
    assert all(p["code"] and p["what"] and p["hint"] for p in document["problems"])
    assert err == mistake("validate", "typo.yaml")[2]


def test_usage_errors_are_printed_as_json(mistake):
    code, out, _ = mistake("plan", "--json")
    document = json.loads(out)
    assert code == document["exit_code"] == 2
    assert document["problems"][0]["code"] == "USAGE"


def test_colour_follows_force_color_and_no_color(capsys, monkeypatch):
    error = RecipeError(
        [Problem("R42", "unknown key x", "a.yaml:1:1", "did you mean y?", "    x: 1\n    ^")]
    )
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    print_error(error)
    plain = capsys.readouterr().err
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_error(error)
    coloured = capsys.readouterr().err
    assert coloured.startswith("\x1b[1;31merror[R42]\x1b[0m a.yaml:1:1")
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    print_error(error)
    assert capsys.readouterr().err == plain


def test_control_characters_never_reach_the_terminal(rlcli, capsys):
    print_error(UsageError("a\x1b[2Jb\x07", hint="c\x9bd"))
    assert not [sign for sign in capsys.readouterr().err if not sign.isprintable() and sign != "\n"]
    for arguments in (
        ["\x1b[2J"],
        ["plan", "\x1b[2J"],
        ["plan", "ppo_math", "\x1b=1"],
        ["plan", "--\x1b"],
    ):
        code, _, err = rlcli(*arguments)
        assert code == 2
        assert "\x1b" not in err


@pytest.mark.parametrize(
    "words",
    [
        "--project . validate sft_math -q",
        "validate --project=. sft_math --quiet",
        "validate sft_math -q --project .",
    ],
)
def test_common_options_may_be_before_or_after_the_verb(rlcli, words):
    Path("pyproject.toml").write_text("[tool.rlcli]\n")
    assert rlcli(*words.split()) == (0, "", "")


def test_the_json_option_may_be_before_the_verb(rlcli):
    code, out, _ = rlcli("--json", "validate", "sft_math")
    assert (code, json.loads(out)["ok"]) == (0, True)


def test_colour_options_override_the_environment(rlcli, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("FORCE_COLOR", "")
    assert "\x1b[1;31merror[R42]" in rlcli("validate", "sft_math", "--color", "seeed=1")[2]
    assert "\x1b" not in rlcli("--no-color", "validate", "sft_math", "seeed=1")[2]


def test_quiet_suppresses_hints(rlcli):
    assert "VS Code" in rlcli("schema", "--install", "--dry-run")[2]
    assert rlcli("schema", "--install", "--dry-run", "-q")[2] == ""


def test_the_help_verb_prints_help_pages(rlcli):
    assert rlcli("help", "cp") == rlcli("cp", "--help")
    assert rlcli("help") == rlcli("--help")


def test_errors_fit_the_terminal_with_hints_on_separate_lines(mistake):
    try:
        load_recipe("typo.yaml")
    except RecipeError as error:
        lines = list(_error_lines(error, 50))
    shown = [row for line in lines for row in line.splitlines()]
    assert all(len(row) <= 50 for row in shown)
    assert sum(row.startswith("  hint: ") for row in shown) == 3


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--seed 3", "write seed=3"),
        ("--train.steps=5", "write train.steps=5"),
        ("--bf16", "write models.actor.backend.args.dtype=bfloat16"),
        ("--learning-rate 1e-4", "write models.actor.backend.args.lr=1e-4"),
    ],
)
def test_a_key_written_as_an_option_gets_a_hint(rlcli, option, hint):
    code, _, err = rlcli("train", "sft_math", *option.split())
    assert (code, hint in err) == (2, True), err


def test_every_error_code_has_a_meaning(rlcli):
    """`rlcli explain R42` works for every code of an error."""
    sources = [
        path
        for root in ("rlcli", "interfaces", "backends", "datasets")
        for path in (REPOSITORY / root).rglob("*.py")
    ]
    quoted = {code for path in sources for code in re.findall(r'"([RF]\d\d)"', path.read_text())}
    for code in sorted(quoted - {"F16", "F32", "F64"} | {"F32"}):
        exit_code, out, _ = rlcli("explain", code)
        assert (exit_code, max(map(len, out.splitlines())) <= 80) == (0, True), out
    assert rlcli("explain", "R42")[1].startswith("R42  An unknown key.")
    assert rlcli("explain", "nothing")[0] == 2


def test_show_lists_the_keys_of_a_section(rlcli):
    code, out, _ = rlcli("show", "train")
    assert code == 0
    assert "  train.prompts_per_step  int >= 1 <= 10000000, required\n" in out
    assert "  train.eval.every_steps  int >= 1 <= 1000000000 | null = null\n" in out
    assert "  models.<role>.mesh.tp  int >= 1 <= 1000000000 = 1\n" in rlcli("show", "models")[1]
    assert (
        json.loads(rlcli("show", "cluster.device", "--json")[1])["keys"][0]["type"]
        == "auto | cpu | cuda"
    )
    assert "rlcli show train" in rlcli("validate", "sft_math", "train.stepz=3")[2]


@pytest.mark.parametrize("command", ["start -e flash-dpo-s1 -f try --mode slurm", "quickstart ppo"])
def test_commands_of_the_older_systems_lead_to_train(rlcli, command):
    code, _, err = rlcli(*command.split())
    assert code == 2
    assert "hint: rlcli train RECIPE" in err


def test_a_recipe_may_be_named_by_its_file_in_the_folder_of_recipes(rlcli):
    code, out, err = rlcli("validate", "recipes/ppo_math.yaml")
    assert (code, err) == (0, "")
    assert "ppo_math" in out
    code, _, err = rlcli("validate", "recipes/ppo_mth.yaml")
    assert code == 2
    assert "did you mean ppo_math?" in err
