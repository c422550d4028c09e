"""Words of other tools, and typos, get the nearest thing that rlcli has; hints work if followed."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from rlcli.cli.main import VERBS
from rlcli.cli.mistakes import _OPTIONS, _VERBS, unknown_verb
from rlcli.cli.sweeps import _tell_end as tell_end
from rlcli.cli.train import tell
from rlcli.errors import RecipeError, UnknownComponent
from rlcli.recipe.introspection.fields import fields_under
from rlcli.recipe.parsing.finding import profile_names
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.schema import SECTIONS
from rlcli.recipe.synonyms import ABSENT, SYNONYMS
from rlcli.registry import names, path_of
from rlcli.spelling import misspelt, nearest_name

ALL_VERBS = [name for verbs in VERBS.values() for name in verbs]
SOURCES = sorted((Path(__file__).parents[2] / "rlcli").rglob("*.py"))


@pytest.mark.parametrize(
    ("word", "names_there", "near"),
    [
        ("vllm", ["null", "fsdp", "sglang"], None),
        ("ppo", ["dpo", "gspo"], None),
        ("grpo", ["gspo", "rloo"], None),
        ("ppo", ["dpo", "ppo_actor"], "ppo_actor"),
        ("lora", ["lr", "dtype"], None),
        ("beta", ["eta", "head"], None),
        ("dtype", ["type"], None),
        ("evaluate", ["validate", "eval"], "eval"),
        ("async", ["async_grpo", "sync"], "async_grpo"),
        ("pairs", ["paired_rows", "arithmetic_pairs"], "arithmetic_pairs"),
        ("trian", ["train", "tail"], "train"),
        ("lst", ["ls", "logs"], "ls"),
        ("mni", ["min", "max"], "min"),
        ("cafe\u0301", ["caf\u00e9"], "caf\u00e9"),
        ("Train-Steps", ["train_steps"], "train_steps"),
        ("ppo.kl_clt", ["ppo", "ppo.kl_ctl"], "ppo.kl_ctl"),
        ("ppp", ["dpo", "ppo"], "ppo"),
        ("kl_cof", ["kl_in", "kl_ctl"], "kl_ctl"),
        ("kl_clt", ["kl_ctl", "kl_in"], "kl_ctl"),
    ],
)
def test_the_nearest_name_shares_more_than_letters(word: str, names_there: list[str], near: str):
    assert nearest_name(word, names_there) == near


def test_a_typo_begins_like_the_word():
    assert misspelt("dtype", ["type"]) is None
    assert misspelt("learning_rat", ["learning_rate"]) == "learning_rate"


@pytest.mark.parametrize(
    ("verb", "hint"),
    [
        ("run", "rlcli train"),
        ("runs", "rlcli status"),
        ("ps", "rlcli status"),
        ("init", "rlcli new"),
        ("kill", "rlcli stop"),
        ("evaluate", "eval"),
        ("predict", "rlcli generate"),
        ("metrics", "rlcli plot"),
        ("version", "rlcli --version"),
        ("list", "rlcli ls"),
        ("tail", "rlcli logs"),
        ("sft", "rlcli train"),
        ("models", "rlcli status"),
        ("install", "pip or uv"),
        ("login", "hf auth login"),
        ("sync", "rlcli track RUN"),
    ],
)
def test_a_verb_of_another_tool_gets_ours(rlcli, verb: str, hint: str):
    code, _, err = rlcli(verb)
    assert (code, hint in err) == (2, True), err


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        (("--gpus", "8"), "--with gpu8"),
        (("--resume", "x"), "rlcli resume RUN"),
        (("--wandb",), "write log.trackers=[wandb]"),
        (("--report_to", "wandb"), "write log.trackers=[wandb]"),
        (("--report_to=mlflow",), "write log.trackers=[mlflow]"),
        (("--swanlab",), "log.trackers=[trackio]"),
        (("--use-lora",), "no LoRA yet"),
        (("--vllm",), "--with sglang"),
        (("--lr", "1e-4"), "write models.actor.backend.args.lr=1e-4"),
        (("--epochs", "2"), "write train.epochs=2"),
        (("--device", "cuda"), "write cluster.device=cuda"),
        (("--config", "x"), "rlcli train RECIPE"),
    ],
)
def test_an_option_of_another_tool_gets_ours(rlcli, option: tuple[str, ...], hint: str):
    code, _, err = rlcli("train", "ppo_math", *option)
    assert (code, hint in err) == (2, True), err


@pytest.mark.parametrize(
    ("kind", "word", "component"),
    [
        ("backends", "tgi", "sglang"),
        ("backends", "ddp", "fsdp"),
        ("datasets", "gsm8k", "math_prompts"),
        ("datasets", "packed_rw_pair", "paired"),
        ("datasets", "rw-pair", "paired"),
        ("datasets", "sharegpt", "chat"),
        ("interfaces", "ppo", "ppo_actor"),
        ("interfaces", "orpo", "dpo"),
        ("interfaces", "kto-pair", "kto"),
        ("interfaces", "openai", "llm_judge"),
    ],
)
def test_a_component_of_another_framework_gets_ours(kind: str, word: str, component: str):
    assert component in names(kind)
    with pytest.raises(UnknownComponent, match=rf"'{word}'[;.] .*\b{component}\b"):
        path_of(kind, word)


def test_no_word_elsewhere_is_the_name_of_a_component_of_ours():
    from rlcli.registry import KINDS, signature

    for kind in KINDS:
        words: list[str] = []
        for name in names(kind):
            words += str(signature(kind, name).constants.get("ELSEWHERE", "")).split()
        assert len(words) == len(set(words))
        assert not set(words) & set(names(kind))


def test_no_word_has_two_meanings():
    for table in (_VERBS, _OPTIONS):
        words = " ".join(table).split()
        assert len(words) == len(set(words))
    assert not set(" ".join(_VERBS).split()) & set(ALL_VERBS)
    assert not ABSENT.keys() & SYNONYMS.keys()


def hints(source: str) -> list[str]:
    """The texts within the hints of a source file."""
    keywords = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.keyword)]
    parts = [part for node in keywords if node.arg == "hint" for part in ast.walk(node.value)]
    texts = [part.value for part in parts if isinstance(part, ast.Constant)]
    return [text for text in texts if isinstance(text, str)]


def commands(hint: str) -> list[list[str]]:
    return [match.split() for match in re.findall(r"\brlcli ((?:--)?[a-z]+(?: [a-z-]+)?)", hint)]


def test_every_command_in_a_table_exists():
    for hint in (*_VERBS.values(), *_OPTIONS.values()):
        for verb, *_ in commands(hint):
            assert verb in (*ALL_VERBS, "--version", "has"), hint


def test_every_key_in_a_table_exists():
    for hint in (*_OPTIONS.values(), *ABSENT.values()):
        for key in re.findall(r"[a-z]+\.[a-z_<>.]+(?==)", hint):
            fields = dict(fields_under(key.split(".")[0]))
            assert key.split(".")[0] in SECTIONS
            declared = key.replace("models.actor", "models.<role>")
            assert "args" in key or any(declared.endswith(name) for name in fields), key
        for profile in re.findall(r"--with ([a-z0-9]+)", hint):
            assert profile in profile_names()


def test_every_command_in_hints_and_quotes_of_the_sources_exists():
    texts = [file.read_text(encoding="utf-8") for file in SOURCES]
    quoted = [quote for text in texts for quote in re.findall(r"`(rlcli [^`\n]+)`", text)]
    named = [words[0] for text in texts for hint in hints(text) for words in commands(hint)]
    named += [words[0] for quote in quoted for words in commands(quote)]
    prose = {"itself", "that", "with"}  # `rlcli that can read it`
    verbs = {verb for verb in named if not verb.startswith("-")} - prose
    assert {"show", "ls", "train"} <= verbs
    assert verbs <= {*ALL_VERBS}


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("show", "trainn"), "did you mean train?"),
        (("show", "lr"), "rlcli show deepspeed"),
        (("show", "max_new_tokens"), "rlcli show generation"),
        (("show", "ppo_math", "actor"), "rlcli explain ppo_math actor"),
        (("explain", "ppo_math", "actor"), "did you mean models.actor?"),
        (("explain", "ppo_math", "kl"), "did you mean ppo.kl_ctl?"),
        (("explain", "gae"), "rlcli show gae"),
        (("plan", "ppo_math", "--gpus", "8"), "did you mean --devices?"),
        (("plan", "ppo_math", "--device-memory", "lots"), "for example 80"),
        (("eval", "model", "--data", "rows.jsonl"), "did you mean --dataset?"),
        (("ls", "models"), "rlcli ls families"),
        (("ls", "runs/"), "rlcli status"),
        (("ls", "rewards"), "rlcli ls interfaces"),
        (("new", "my-reward"), "rlcli new dataset my-reward"),
        (("ckpt", "list", "x"), "rlcli ckpt ls"),
        (("ckpt", "rm", "x"), "rlcli ckpt prune"),
        (("test", "mine.py"), "rlcli test reward function_reward path=mine.py"),
        (("test", "reward", "mine.py"), "rlcli test reward function_reward path=mine.py"),
    ],
)
def test_a_command_that_nearly_exists_gets_the_one_that_does(rlcli, words, hint: str):
    code, _, err = rlcli(*words)
    assert (code, hint in err) == (2, True), err


@pytest.mark.parametrize("memory", ["80GB", "80 GiB", "80g", "80"])
def test_the_memory_of_a_device_may_have_its_unit(rlcli, memory: str):
    code, out, err = rlcli("plan", "ppo_math", "--device-memory", memory)
    assert (code, "MiB" in out) == (0, True), err


def test_a_folder_of_runs_given_as_a_run_proposes_the_newest(rlcli, tmp_path):
    for run in ("runs/a/20260101-000000", "runs/a/20260102-000000"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "status.json").write_text("{}")
    code, _, err = rlcli("eval", "runs", "--dataset", "ppo_math")
    assert (code, "runs is a folder of runs" in err) == (5, True), err
    assert "the newest is runs/a/20260102-000000" in err


def test_commands_to_type_next_quote_the_folder_of_a_run(rlcli, tmp_path, capsys):
    folder = tmp_path / "my runs"
    outcome = SimpleNamespace(run_dir=folder)
    with patch("rlcli.observe.report.print_report"):
        stopped = SimpleNamespace(exit_code=75, outcome=outcome, steps_done=1, steps=2)
        assert tell(stopped, as_json=False) == 75
    assert "rlcli resume 'my runs'" in capsys.readouterr().err
    tell_end(SimpleNamespace(folder=folder, overviews=list), 0, False)
    assert "rlcli compare 'my runs'" in capsys.readouterr().err
    (folder / "step-000000000001").mkdir(parents=True)
    (folder / "step-000000000001/manifest.json").write_text("{}")
    words = ("ckpt", "prune", "my runs/step-000000000001", "--keep-last", "1")
    assert "prune 'my runs' --keep-last 1" in rlcli(*words)[2]


def test_a_python_file_given_as_a_reward_is_the_function_that_it_defines(rlcli, tmp_path):
    (tmp_path / "mine.py").write_text("def score(response):\n    return 1.0\n")
    code, out, err = rlcli("show", "grpo_math", "--reward", "mine.py", "--json")
    assert code == 0, err
    interface = json.loads(out)["recipe"]["graph"]["reward_inf"]["interface"]
    assert (interface["type"], interface["args"]["path"]) == ("function_reward", "mine.py")


def test_the_file_of_a_reward_may_have_any_name(rlcli, tmp_path):
    file = "re ward, [2] #1.py"
    (tmp_path / file).write_text("def score(response):\n    return 1.0\n")
    code, out, err = rlcli("show", "grpo_math", "--reward", file, "--json")
    assert code == 0, err
    interface = json.loads(out)["recipe"]["graph"]["reward_inf"]["interface"]
    assert interface["args"]["path"] == file


@pytest.mark.parametrize(
    ("override", "component"),
    [
        ("datasets.train=math_prompts", "math_prompts"),
        ("ppo.kl_clt=0.1", "ppo_actor"),
        ("models.ref.backend.args.dtpye=x", "inference"),
        ("train.stpes=1", "train"),
    ],
)
def test_the_command_that_lists_the_keys_works(rlcli, override: str, component: str):
    code, _, err = rlcli("validate", "ppo_math", override)
    assert code == 2
    assert f"List the keys: rlcli show {component}\n" in err
    assert rlcli("show", component)[0] == 0


@pytest.mark.parametrize("verb", ["zzz", "qqqq"])
def test_a_word_like_nothing_gets_no_guess(verb: str):
    assert unknown_verb("rlcli", verb, ALL_VERBS).hint == "rlcli --help lists them"


def test_a_key_is_never_said_to_be_called_what_it_is():
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", ["models.ref.backend=inference", "models.ref.backend.args.lr=1"])
    (problem,) = caught.value.problems
    assert "models.ref.backend.args.lr" not in (problem.hint or "")


def test_all_recipes_are_named_of_which_a_word_is_a_part(rlcli):
    """None of them is nearer than another."""
    code, _, err = rlcli("train", "gsm8k")
    assert code == 2
    assert "did you mean best_of_n_gsm8k, distill_gsm8k, grpo_gsm8k, ppo_gsm8k or sft_gsm8k?" in err


@pytest.mark.parametrize(
    "words",
    [
        ("resume", "ppo_math"),
        ("samples", "ppo_math"),
        ("chat", "ppo_math"),
        ("ckpt", "ls", "ppo_math"),
    ],
)
def test_a_recipe_without_runs_proposes_to_train_it(rlcli, words):
    code, _, err = rlcli(*words)
    assert (code, "there is no run 'ppo_math'" in err) == (6, True), err
    assert "start one: rlcli train ppo_math" in err


def test_a_file_given_as_a_reward_proposes_the_command_for_functions(rlcli):
    code, _, err = rlcli("test", "reward", "mine.py", "--data", "rows.jsonl")
    hint = "rlcli test reward function_reward path=mine.py function=NAME --data rows.jsonl"
    assert (code, hint in err) == (2, True), err
