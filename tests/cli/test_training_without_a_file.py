"""`rlcli train ALGORITHM --model X --data Y`: every algorithm, every layout of columns,
and the mistakes of a first day."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pyarrow
import pytest
import yaml
from chat_model import write_chat_model
from pyarrow import parquet

PAIRS = [{"prompt": f"{n}+1?", "chosen": f"{n + 1}", "rejected": "no idea"} for n in range(4)]
TALKS = [
    {
        "messages": [
            {"role": "user", "content": f"{n}+1?"},
            {"role": "assistant", "content": f"{n + 1}"},
        ]
    }
    for n in range(4)
]
SUMS = [{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(4)]
PROMPTS = [{"prompt": f"Tell me about {n}."} for n in range(4)]
ANSWERED = [{"prompt": f"{n}+1?", "completion": f"{n + 1}"} for n in range(4)]
JUDGED = [{**row, "label": n != 2} for n, row in enumerate(ANSWERED)]
WORDED = [{**row, "label": "good"} for row in ANSWERED]
SMALL = ("train.prompts_per_step=2", "generation.max_new_tokens=4", "log.plot=false")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def data(tmp_path):
    """Writes rows to a file in the working directory, and returns its name."""

    def write(rows, name="rows.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines))
        return name

    return write


# -- what goes wrong -------------------------------------------------------------------------------


def without(row, *keys):
    return {key: value for key, value in row.items() if key not in keys}


def renamed(row, **names):
    return {names.get(key, key): value for key, value in row.items()}


NO_REJECTED = [without(row, "rejected") for row in PAIRS]
PROMT = [renamed(row, prompt="promt") for row in ANSWERED]
REGECTED = [renamed(row, rejected="regected") for row in PAIRS]
EXERCISES = [renamed(row, question="exercise") for row in SUMS]
ASISTANT = [{"messages": [TALKS[0]["messages"][0], {"role": "asistant", "content": "1"}]}]

WRONG_ROWS = {
    "pairs for sft": ("sft", PAIRS, ["rlcli train dpo", "rlcli train reward"]),
    "conversations for dpo": ("dpo", TALKS, ["rlcli train sft"]),
    "answers for dpo": ("dpo", ANSWERED, ["rlcli train sft"]),
    "conversations for grpo": ("grpo", TALKS, ["rlcli train sft"]),
    "pairs for ppo": ("ppo", PAIRS, ["no answer", "--reward"]),
    "sums for a reward model": ("reward", SUMS, ["rlcli train grpo", "rlcli train sft"]),
    "prompts for sft": ("sft", PROMPTS, ["rlcli train grpo"]),
    "prompts without answers for grpo": ("grpo", PROMPTS, ["no answer", "--reward"]),
    "answers without a label for kto": ("kto", ANSWERED, ["rlcli train sft"]),
    "judged answers for dpo": ("dpo", JUDGED, ["rows of unpaired, for rlcli train kto"]),
    "a label in other words": ("kto", WORDED, ["rows.jsonl:1", "'label' is 'good', not true"]),
    "no rejected answers": ("dpo", NO_REJECTED, ["rejected"]),
    "a misspelt prompt": (
        "sft",
        PROMT,
        ["promt", "datasets.train.args.columns.prompt=promt"],
    ),
    "a misspelt answer": (
        "dpo",
        REGECTED,
        ["datasets.train.args.columns.negative=regected"],
    ),
    "an unusual name": (
        "grpo",
        EXERCISES,
        ["exercise", "datasets.train.args.columns.question="],
    ),
    "no rows": ("sft", [], ["rows.jsonl", "no rows"]),
    "a mixture of rows": ("sft", [*ANSWERED, *PAIRS], ["rows.jsonl:5", "'completion'", "chosen"]),
    "a misspelt role": (
        "sft",
        ASISTANT,
        ["message 2", "'asistant'", "did you mean assistant"],
    ),
    "lines of text": ("sft", ["Once upon a time", "there was"], ["rows.jsonl:1", "not JSON"]),
    "an object with a list of rows": (
        "sft",
        [json.dumps({"data": ANSWERED})],
        ["'data'", "list of rows"],
    ),
    "pairs that answer different prompts": (
        "dpo",
        [{"chosen": TALKS[0]["messages"], "rejected": TALKS[1]["messages"]}],
        ["chosen", "rejected", "before"],
    ),
    "pairs of texts with nothing in common": (
        "dpo",
        [{"chosen": "Yes, of course.", "rejected": "No, never."}],
        ["prompt"],
    ),
}


@pytest.mark.parametrize("case", WRONG_ROWS)
def test_rows_that_do_not_fit_are_one_error_that_says_what_fits(rlcli, chat_model, data, case):
    algorithm, rows, expected = WRONG_ROWS[case]
    code, _, err = rlcli(
        "train", algorithm, "--model", str(chat_model), "--data", data(rows), *SMALL
    )
    assert code == 4, err
    assert err.count("error[") == 1, err
    text = " ".join(err.split())
    assert [phrase for phrase in expected if phrase not in text] == []
    assert not Path("runs").exists()


WRONG_COMMANDS = {
    "a folder of texts": ("sft --model MODEL --data texts", 4, ["texts", ".txt", ".jsonl"]),
    "a text": ("sft --model MODEL --data texts/a.txt", 4, ["texts/a.txt", ".jsonl"]),
    "an empty folder": ("sft --model MODEL --data empty", 4, ["empty", ".jsonl"]),
    "a misspelt file": ("sft --model MODEL --data row.jsonl", 4, ["did you mean rows.jsonl"]),
    "a Hub dataset without its prefix": (
        "grpo --model MODEL --data openai/gsm8k",
        4,
        ["hf:openai/gsm8k"],
    ),
    "a dataset that cannot be reached": (
        "grpo --model MODEL --data hf:nobody/nothing",
        4,
        ["nobody/nothing", "--data FILE.jsonl"],
    ),
    "a name of a dataset": (
        "sft --model MODEL --data arithmetic",
        4,
        ["datasets.train=arithmetic"],
    ),
    "a model that is not there": ("sft --model nowhere --data rows.jsonl", 5, ["nowhere"]),
    "a model that cannot be reached": (
        "sft --model nobody/nothing --data rows.jsonl",
        5,
        ["nobody/nothing", "--model FOLDER"],
    ),
    "a folder without a model": ("sft --model empty --data rows.jsonl", 5, ["config.json"]),
    "a model without a tokenizer": (
        "sft --model mute --data rows.jsonl",
        5,
        ["tokenizer", "models.actor.tokenizer="],
    ),
    "no model": ("sft --data rows.jsonl", 2, ["--model"]),
    "no data": ("dpo --model MODEL", 2, ["--data"]),
    "no algorithm": ("--model MODEL --data rows.jsonl", 2, ["RECIPE", "rlcli train sft --model"]),
    "a misspelt algorithm": ("grop --model MODEL --data rows.jsonl", 2, ["did you mean grpo"]),
    "another word for an algorithm": ("rm --model MODEL --data rows.jsonl", 2, ["rm_arithmetic"]),
    "a misspelt option": ("sft --modle MODEL --data rows.jsonl", 2, ["did you mean --model"]),
    "a misspelt reward": (
        "grpo --model MODEL --data rows.jsonl --reward maths_reward",
        2,
        ["did you mean 'math_reward'"],
    ),
    "a reward for sft": (
        "sft --model MODEL --data rows.jsonl --reward math_reward",
        2,
        ["--reward", "grpo"],
    ),
    "a variable that is not set": ("sft --model MODEL --data=", 2, ["--data is empty"]),
    "the model twice": (
        "sft --model MODEL --data rows.jsonl models.actor.path=other",
        2,
        ["set twice"],
    ),
    "data for generated rows": (
        "ppo_math --data rows.jsonl",
        2,
        ["arithmetic", "{type: hf, args: {path: rows.jsonl}}"],
    ),
}


@pytest.mark.parametrize("case", WRONG_COMMANDS)
def test_a_wrong_command_is_one_error_that_says_what_fits(
    rlcli, chat_model, data, tmp_path, monkeypatch, case
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command, expected_code, expected = WRONG_COMMANDS[case]
    data(SUMS)
    data(["Once upon a time"], "texts/a.txt")
    (tmp_path / "empty").mkdir()
    mute = tmp_path / "mute"
    mute.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(chat_model / name, mute)
    words = command.replace("MODEL", str(chat_model)).split()
    code, _, err = rlcli("train", *words)
    assert code == expected_code, err
    assert err.count("error") == 1, err
    text = " ".join(err.split())
    assert [phrase for phrase in expected if phrase not in text] == []
    assert not Path("runs").exists()


def test_a_missing_field_proposes_the_arguments_that_name_the_columns(rlcli, chat_model, data):
    dataset = f"{{type: paired, args: {{path: {data(PAIRS)}}}}}"
    code, out, _ = rlcli("check", "dpo", "--model", str(chat_model), f"datasets.train={dataset}")
    assert code == 4
    settings = re.findall(r"datasets\.train\.args\.\w+=\w+", out)
    assert "datasets.train.args.positive_key=chosen" in settings
    words = [f"datasets.train={dataset}", *settings, "train.prompts_per_step=1"]
    assert rlcli("check", "dpo", "--model", str(chat_model), *words)[0] == 0


# -- what rows may look like -----------------------------------------------------------------------

USER, ASSISTANT = TALKS[0]["messages"]
NO = {"role": "assistant", "content": "no"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED, TOLD = "<bos><user>0+1?<assistant>", "1<eos>"
LAYOUTS = {
    "messages": ("sft", TALKS[0], [(ASKED, TOLD)]),
    "ShareGPT": (
        "sft",
        {"conversations": [{"from": "human", "value": "0+1?"}, {"from": "gpt", "value": "1"}]},
        [(ASKED, TOLD)],
    ),
    "prompt and completion": ("sft", {"prompt": "0+1?", "completion": "1"}, [(ASKED, TOLD)]),
    "messages and completion": (
        "sft",
        {"prompt": [USER], "completion": [ASSISTANT]},
        [(ASKED, TOLD)],
    ),
    "instruction and output": ("sft", {"instruction": "0+1?", "output": "1"}, [(ASKED, TOLD)]),
    "instruction, input and output": (
        "sft",
        {"instruction": "Add one.", "input": "0+1?", "output": "1"},
        [("<bos><user>Add one.\n\n0+1?<assistant>", TOLD)],
    ),
    "question and answer": ("sft", {"question": "0+1?", "answer": "1"}, [(ASKED, TOLD)]),
    "text": ("sft", {"text": "One and one."}, [("<bos>", "One and one.<eos>")]),
    "pairs": (
        "dpo",
        {"prompt": "0+1?", "chosen": "1", "rejected": "no"},
        [(ASKED, TOLD), (ASKED, "no<eos>")],
    ),
    "pairs of lists": (
        "dpo",
        {"prompt": "0+1?", "pos_answers": ["1"], "neg_answers": ["no"]},
        [(ASKED, TOLD), (ASKED, "no<eos>")],
    ),
    "pairs of messages": (
        "dpo",
        {"prompt": [SYSTEM, USER], "chosen": [ASSISTANT], "rejected": [NO]},
        [
            ("<bos><system>Be brief.<user>0+1?<assistant>", TOLD),
            ("<bos><system>Be brief.<user>0+1?<assistant>", "no<eos>"),
        ],
    ),
    "pairs of conversations": (
        "reward",
        {"chosen": [USER, ASSISTANT], "rejected": [USER, NO], "score_chosen": 5.0},
        [(ASKED, TOLD), (ASKED, "no<eos>")],
    ),
    "pairs of conversations with a prompt": (
        "dpo",
        {"prompt": "0+1?", "chosen": [USER, ASSISTANT], "rejected": [USER, NO]},
        [(ASKED, TOLD), (ASKED, "no<eos>")],
    ),
    "pairs of transcripts": (
        "reward",
        {"chosen": "Q: 0+1? A: 1", "rejected": "Q: 0+1? A: no"},
        [
            ("<bos><user>Q: 0+1? A:<assistant>", " 1<eos>"),
            ("<bos><user>Q: 0+1? A:<assistant>", " no<eos>"),
        ],
    ),
    "sums": ("grpo", SUMS[0], [(ASKED, "")]),
    "problem and solution": ("ppo", {"problem": "0+1?", "solution": "1"}, [(ASKED, "")]),
    "messages and answer": (
        "grpo",
        {"prompt": [SYSTEM, USER], "answer": "1"},
        [("<bos><system>Be brief.<user>0+1?<assistant>", "")],
    ),
    "prompts": ("ppo", {"prompt": "0+1?"}, [(ASKED, "")]),
}


def text_of(tokens, trained):
    return "".join(token["text"] for token in tokens if token["trained"] == trained)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_columns_of_common_layouts_are_found(rlcli, chat_model, data, layout):
    """what the model sees, and the part of it that is trained on"""
    algorithm, row, expected = LAYOUTS[layout]
    code, out, err = rlcli(
        "tokens", algorithm, "--model", str(chat_model), "--data", data([row]), "--json"
    )
    assert code == 0, err
    document = json.loads(out)
    assert [(text_of(s, False), text_of(s, True)) for s in document["sequences"]] == expected
    assert (document["row"], document["id"]) == (1, "rows:1")


def test_rules_and_rows_of_a_conversation_are_checked_as_the_template_writes_them(
    rlcli, chat_model, data
):
    rows = [{"prompt": [SYSTEM, USER, ASSISTANT, USER], "chosen": "1", "rejected": "no"}]
    options = ("--model", str(chat_model), "--data", data(rows), "train.prompts_per_step=1")
    code, out, _ = rlcli("check", "dpo", *options)
    assert code == 0
    assert "a prompt is a prefix of the prompt with its answer" in " ".join(out.split())
    assert "read as rows of paired (prompt_key: prompt, positive_key: chosen" in out


FORMATS = {
    "rows.json": lambda path: path.write_text(json.dumps(ANSWERED)),
    "rows.csv": lambda path: path.write_text("prompt,completion\n0+1?,1\n"),
    "rows.tsv": lambda path: path.write_text("prompt\tcompletion\n0+1?\t1\n"),
    "rows.parquet": lambda path: parquet.write_table(pyarrow.Table.from_pylist(ANSWERED), path),
    "rows": lambda path: (
        path.mkdir(),
        (path / "README.txt").write_text("These are rows."),
        (path / "train.jsonl").write_text(json.dumps(ANSWERED[0])),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_every_format_are_read(rlcli, chat_model, tmp_path, name):
    FORMATS[name](tmp_path / name)
    code, out, err = rlcli("tokens", "sft", "--model", str(chat_model), "--data", name)
    assert code == 0, err
    assert out.splitlines()[1] == f"{ASKED}▐{TOLD}▌"


# -- the other verbs -------------------------------------------------------------------------------


JOB = ("launch=slurm", "--dry-run")


def test_the_printed_command_keeps_profiles_and_overrides(rlcli, chat_model, data, tmp_path):
    options = ("--model", str(chat_model), "--data", data(ANSWERED, "my rows.jsonl"))
    code, _, err = rlcli("train", "sft", *options, "--with", "gpu1", "seed=7", *JOB)
    assert code == 0, err
    keep = next(line for line in err.splitlines() if line.startswith("keep it: "))
    words = shlex.split(keep)[3:]
    assert rlcli(*words)[0] == 0
    text = (tmp_path / "my_sft.yaml").read_text()
    assert text in err
    assert yaml.safe_load(text) == {
        "extends": ["sft", "profiles/gpu1"],
        "models": {"actor": {"path": str(chat_model)}},
        "datasets": {"train": {"args": {"path": "my rows.jsonl"}}},
        "seed": 7,
        "launch": {"type": "slurm"},
    }


def test_the_recipe_is_printed_only_for_short_options_and_unless_quiet(rlcli, chat_model, data):
    options = ("--model", str(chat_model), "--data", data(ANSWERED))
    keys = (f"models.actor.path={chat_model}", "datasets.train.args.path=rows.jsonl")
    assert "keep it" in rlcli("train", "sft", *options, *JOB)[2]
    assert "keep it" not in rlcli("train", "sft", *keys, *JOB)[2]
    assert "keep it" not in rlcli("train", "sft", *options, *JOB, "--quiet")[2]


def test_a_recipe_that_cannot_be_extended_from_here_is_trained_without_advice(
    rlcli, chat_model, data, tmp_path, monkeypatch
):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.yaml").write_text("extends: sft\n")
    (tmp_path / "here").mkdir()
    options = ("--model", str(chat_model), "--data", str(tmp_path / data(ANSWERED)))
    monkeypatch.chdir(tmp_path / "here")
    code, _, err = rlcli("train", "../there/mine.yaml", *options, *JOB)
    assert (code, "keep it" in err) == (0, False)


def test_a_section_takes_no_model(rlcli):
    code, _, err = rlcli("show", "train", "--model", "o/m")
    assert (code, "recipe 'train' not found" in err) == (2, True)


def test_short_options_are_overrides_in_every_verb_that_takes_a_recipe(rlcli, chat_model, data):
    options = ("--model", str(chat_model), "--data", data(SUMS), "--reward", "code_reward")
    shown = rlcli("show", "ppo", *options, "--origins")[1]
    lines = [line for line in shown.splitlines() if "command line" in line]
    assert [line.split()[:2] for line in lines[:2]] == [
        ["path:", "rows.jsonl"],
        ["path:", str(chat_model)],
    ]
    assert {tuple(line.split()[:2]) for line in lines[2:]} == {("type:", "code_reward")}


def test_short_options_are_known_to_all_verbs_about_recipes(rlcli, chat_model, data):
    options = ("--model", str(chat_model), "--data", data(SUMS))
    code, out, _ = rlcli("explain", "ppo", "models.actor.path", *options)
    assert (code, "command line" in out) == (0, True)
    assert rlcli("validate", "reward", *options)[0] == 0
    assert rlcli("plan", "grpo", *options)[0] == 0


def test_a_path_that_looks_like_a_number_or_a_list_is_a_path(rlcli, data):
    for name in ("2024", "[1]", "true", "'a'"):
        shown = rlcli("show", "sft", "--model", "o/m", "--data", data(ANSWERED, name), "--json")
        assert json.loads(shown[1])["recipe"]["datasets"]["train"]["args"]["path"] == name


def test_the_model_of_a_recipe_with_a_copy_is_the_one_that_is_trained(rlcli):
    shown = json.loads(rlcli("show", "ppo_gsm8k", "--model", "o/m", "--json")[1])["recipe"]
    assert shown["models"]["actor"]["path"] == "o/m"
    assert shown["models"]["critic"]["init"] == "actor"
    assert shown["datasets"]["train"]["args"]["path"] == "hf:openai/gsm8k"


def test_the_short_options_are_completed(rlcli, data, tmp_path):
    (tmp_path / "model").mkdir()
    data(SUMS)
    assert rlcli("__complete", "fish", "train", "sft", "--mo")[1].startswith("--model\t")
    assert rlcli("__complete", "fish", "train", "sft", "--model", "m")[1] == "model/\n"
    assert rlcli("__complete", "fish", "plan", "sft", "--data", "r")[1] == "rows.jsonl\n"
    assert "math_reward" in rlcli("__complete", "fish", "train", "ppo", "--reward", "m")[1].split()
