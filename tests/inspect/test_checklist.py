"""What `rlcli check` finds in models, tokenizers and rows, each with a single problem."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from rlcli.api.data import Preview
from rlcli.inspect.checklist import preflight
from rlcli.inspect.findings import exit_code, share
from rlcli.inspect.row_checks import RowLimits, check_ends, check_mask
from rlcli.inspect.rows import open_dataset, open_tokenizer
from rlcli.recipe.resolve import load_recipe

SPECIAL = ["<pad>", "<s>", "</s>", "<user>", "<bot>", "<end>"]
LETTERS = [*SPECIAL, *sorted(map(chr, range(10, 127)))]
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '<user>' if m.role != 'assistant' else '<bot>' }}{{ "
    "m.content }}</s>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
SFT = """\
extends: base/sft
models: {actor: {path: model}}
datasets: {train: {type: prompt_answer, args: {path: train.jsonl}}}
train: {steps: 1, prompts_per_step: 1}
"""
PPO = """\
extends: base/ppo
models: {actor: {path: model}}
datasets:
  train: {type: math_prompts, args: {path: train.jsonl}}
  held_out: {type: math_prompts, args: {path: held_out.jsonl}}
generation: {max_new_tokens: 16}
train: {steps: 1, prompts_per_step: 1, eval: {dataset: held_out}}
"""
DPO = """\
extends: base/dpo
models: {actor: {path: model}}
datasets: {train: {type: paired, args: {path: train.jsonl}}}
train: {steps: 1, prompts_per_step: 1}
"""
GOOD = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(9)]
SUMS = [{"question": f"{n}+1?", "answer": f"it is #### {n + 1}"} for n in range(9)]


def model_folder(
    folder: Path, *, template: str | None = None, named: dict | None = None, **config
) -> Path:
    """Write a model folder with one token per character, and `<s>` in front;
    `named` are special tokens by name."""
    folder.mkdir(parents=True, exist_ok=True)
    characters = Tokenizer(
        models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="<pad>")
    )
    characters.add_special_tokens(SPECIAL)
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    characters.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    characters.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **(named or {})}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    model = {
        "model_type": "llama",
        "vocab_size": len(LETTERS),
        "max_position_embeddings": 128,
        **sizes,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(model))
    save_file(
        {"model.embed_tokens.weight": np.zeros((len(LETTERS), 8), np.float32)},
        folder / "model.safetensors",
    )
    return folder


def write_rows(file: Path, rows: list) -> Path:
    """One line per row: rows as JSON, texts unchanged."""
    file.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return file


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Runs the checks of a recipe in an empty folder;
    returns the last finding about each subject."""
    monkeypatch.chdir(tmp_path)

    def run(recipe=SFT, rows=GOOD, held_out=SUMS, overrides=(), looked_at=200, **model):
        model_folder(tmp_path / "model", **model)
        write_rows(tmp_path / "train.jsonl", rows)
        write_rows(
            tmp_path / "held_out.jsonl",
            [{**row, "question": "now " + row["question"]} for row in held_out],
        )
        (tmp_path / "mine.yaml").write_text(recipe)
        run.findings = list(preflight(load_recipe("mine.yaml", list(overrides)), looked_at))
        return {finding.about: finding for finding in run.findings}

    return run


def levels(findings, but=()):
    return {
        about: finding.level
        for about, finding in findings.items()
        if about not in ("GPU checks", "devices", *but)
    }


@pytest.mark.parametrize("template", [None, CHAT])
def test_a_valid_recipe_passes_all_checks(check, template):
    findings = check(template=template)
    assert set(levels(findings).values()) == {"ok"}
    assert exit_code(check.findings) == 0
    assert findings["train"].says == "9 rows of prompt_answer"
    assert "stop token </s> is trained" in findings["train begin/end"].says
    assert findings["train lengths"].says.startswith("min ")
    assert ("train template" in findings) == (template is not None)


def test_a_valid_recipe_with_a_reward_passes_all_checks(check):
    findings = check(PPO, SUMS, template=CHAT)
    assert set(levels(findings).values()) == {"ok"}
    assert "gold answers accepted 9/9, wrong ones refused 9/9" in findings["reward_inf reward"].says
    assert findings["held-out rows"].says == "held_out shares no prompt with train"


def test_rows_to_check_are_spread_evenly(check):
    assert check(looked_at=4)["train"].says == "9 rows of prompt_answer; checked 4, spread evenly"


def test_the_first_rows_of_a_generated_dataset_are_checked():
    resolved = load_recipe("sft_math")
    opened = open_dataset(resolved, "train")
    assert [row.id for row in opened.sample(3)] == [
        opened.preview(number).id for number in range(3)
    ]
    findings = {finding.about: finding for finding in preflight(resolved, 5)}
    assert findings["train"].says == "40 000 rows of arithmetic_demonstrations; checked the first 5"


# -- rows ------------------------------------------------------------------------------------------


def test_bad_rows_are_reported_with_their_lines(check):
    finding = check(rows=[*GOOD, "not json", {"prompt": "x"}])["train"]
    assert (finding.level, finding.exit_code, finding.code) == ("FAIL", 4, "F31")
    assert list(finding.details) == ["train.jsonl:10"]
    assert "2 rows are bad; the others: line 11" in finding.says
    finding = check(rows=[*GOOD, "not json"], overrides=["datasets.train.args.bad_rows=skip"])[
        "train"
    ]
    assert finding.level == "warn"
    assert list(finding.details) == ["train.jsonl:10: not JSON: Expecting value at column 1"]


def test_rows_that_are_too_long_are_reported(check):
    rows = [*GOOD, {"prompt": "x" * 60, "answer": "y"}]
    finding = check(rows=rows, overrides=["datasets.train.args.max_length=20"])["train"]
    assert (finding.level, finding.code, finding.exit_code) == ("FAIL", "F30", 4)
    dropped = ["datasets.train.args.max_length=20", "datasets.train.args.overlong=drop"]
    finding = check(rows=rows, overrides=dropped)["train lengths"]
    assert finding.level == "warn"
    assert "1 row (10 %) longer than 20 tokens: dropped (overlong: drop)" in finding.says
    assert "max 63 tokens" in finding.details[0]


def test_rows_beyond_the_positions_of_the_model_are_reported(check):
    finding = check(PPO, SUMS, max_position_embeddings=20)["train lengths"]
    assert (finding.level, finding.exit_code) == ("FAIL", 4)
    assert "9 rows (100 %) with 16 new tokens go beyond the model's 20 positions" in finding.says


def test_rows_that_exceed_the_kv_cache_are_reported(check):
    finding = check(PPO, SUMS, overrides=["models.actor.backend.args.kv_cache_tokens=20"])[
        "train lengths"
    ]
    assert (finding.level, finding.exit_code) == ("FAIL", 4)
    assert (
        "the longest row with 16 new tokens takes up to 21 tokens; the KV cache has room for 20"
        in finding.says
    )


def test_rows_that_exceed_a_microbatch_are_reported(check):
    assert (
        check(PPO, SUMS, overrides=["train.max_tokens_per_microbatch=21"])["train lengths"].level
        == "ok"
    )
    finding = check(PPO, SUMS, overrides=["train.max_tokens_per_microbatch=20"])["train lengths"]
    assert finding.level == "FAIL"
    assert "takes up to 21 tokens; a micro-batch holds 20" in finding.says


def test_repeated_and_leaked_prompts_are_reported(check):
    findings = check(PPO, [*SUMS, {"question": "now  0+1?", "answer": "1"}, SUMS[3]])
    assert findings["train repeats"].level == findings["held-out rows"].level == "warn"
    assert list(findings["train repeats"].details) == ["train.jsonl:11 repeats train.jsonl:4"]
    assert findings["held-out rows"].says == "1 of 9 prompts of held_out are in train too"
    assert list(findings["held-out rows"].details) == ["held_out.jsonl:1 is train.jsonl:10"]


def limits(**changes):
    return RowLimits(
        **{
            "stop_ids": frozenset({2}),
            "new_tokens": 0,
            "responses": 1,
            "positions": None,
            "microbatch": 999,
            **changes,
        }
    )


def answered(mask, ids=None):
    return Preview(
        id="r", where="rows.jsonl:1", sequences=[ids or list(range(len(mask)))], trained=[mask]
    )


def test_a_mask_without_trained_tokens_is_reported():
    finding = check_mask("train", [answered([False, False])] * 2)
    assert (finding.level, finding.exit_code) == ("FAIL", 4)
    assert finding.says == "2 of 2 checked rows train on 0 tokens"
    assert check_mask("train", [answered([False, False]), answered([False, True])]).level == "warn"


def test_a_mask_that_trains_all_tokens_is_reported():
    assert check_mask("train", [answered([True, True])]).level == "warn"
    assert (
        check_mask("train", [answered([False, True, True, True])]).says
        == "75 % of the tokens are trained on"
    )


@pytest.mark.parametrize(("equal", "count"), [([], 0), ([1], 1), ([0, 2], 2)])
def test_pairs_whose_two_answers_are_the_same_are_reported(check, equal, count):
    rows = [
        {"prompt": f"{n}+1?", "pos_answers": [str(n + 1)], "neg_answers": ["no"]} for n in range(9)
    ]
    for n in equal:
        rows[n]["neg_answers"] = rows[n]["pos_answers"]
    findings = check(DPO, rows)
    if not equal:
        assert "train pairs" not in findings
        return
    finding = findings["train pairs"]
    assert (finding.level, finding.code) == ("warn", "F31")
    assert finding.says.startswith(f"in {count} of 9 checked rows")
    assert finding.details[0].endswith(f"train.jsonl:{equal[0] + 1}")


def test_the_mask_of_prompts_is_not_checked():
    assert check_mask("train", [Preview(id="p", sequences=[[1, 2]])]) is None


@pytest.mark.parametrize(
    ("ids", "mask", "level", "says"),
    [
        (
            [1, 7, 8, 2],
            [False, False, True, True],
            "ok",
            "one <s> in front; the stop token </s> is trained",
        ),
        ([1, 1, 8, 2], [False, False, True, True], "FAIL", "begin with <s> twice"),
        ([7, 8, 2], [False, True, True], "warn", "lack <s>, which the tokenizer adds"),
        ([1, 7, 8], [False, False, True], "FAIL", "do not train the stop token </s>"),
        ([1, 7, 8, 2], [False, True, True, False], "FAIL", "do not train the stop token </s>"),
        ([1, 7, 2, 16], [False, True, True, True], "ok", "the stop token </s> is trained"),
    ],
)
def test_first_and_last_tokens_are_checked(tmp_path, ids, mask, level, says):
    tokenizer = open_tokenizer(str(model_folder(tmp_path / "model"))).tokenizer
    finding = check_ends("train", tokenizer, [answered(mask, ids)], limits())
    assert finding.level == level
    assert says in finding.says


def test_a_prompt_that_ends_with_eos_is_reported(check):
    closed = CHAT.replace("<bot>{% endif %}", "<bot></s>{% endif %}")
    finding = check(PPO, SUMS, template=closed)["train begin/end"]
    assert finding.level == "FAIL"
    assert "9 of 9 checked prompts end with the end-of-sequence token" in finding.says


def test_answers_that_are_longer_than_a_response_are_reported(check):
    rows = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(9)]
    rows[4]["answer"] = "12345"
    assert "train answers" not in check(PPO, rows)
    finding = check(PPO, rows, overrides=["generation.max_new_tokens=5"])["train answers"]
    assert (finding.level, finding.code) == ("warn", "F30")
    assert finding.says.startswith("1 answer (11 %) take")
    assert finding.details[0].endswith("train.jsonl:5")


def test_responses_too_short_for_what_the_model_was_taught_are_reported(check, tmp_path):
    (tmp_path / "taught.yaml").write_text(SFT)
    recipe = PPO.replace("path: model", "path: recipe:taught#actor")
    settings = ["datasets.train.args.question_key=prompt"]
    rows = [{"prompt": f"{n}+1?", "answer": "it is ten"} for n in range(9)]
    assert "responses" not in check(recipe, rows, overrides=settings)
    finding = check(recipe, rows, overrides=[*settings, "generation.max_new_tokens=9"])["responses"]
    assert (finding.level, finding.code) == ("warn", "F30")
    assert finding.says == (
        "9 answers that taught trains on (100 %) take more than the 9 tokens of a response, its "
        "end included"
    )


def test_too_few_rows_for_a_step_are_reported(check):
    finding = check(overrides=["train.prompts_per_step=10"])["train"]
    assert (finding.level, finding.code, finding.exit_code) == ("FAIL", "F80", 4)
    assert (
        finding.says
        == "dataset train has 9 rows, fewer than one step takes: prompts_per_step is 10"
    )


def test_an_empty_file_is_reported(check):
    finding = check(rows=[])["train"]
    assert (finding.level, finding.code, finding.exit_code) == ("FAIL", "F80", 4)


# -- templates and tokenizers ----------------------------------------------------------------------


def test_a_template_that_writes_bos_twice_is_reported(check):
    finding = check(template="{{ bos_token }}" + CHAT)["train begin/end"]
    assert (finding.level, finding.exit_code) == ("FAIL", 4)
    assert "9 of 9 checked rows begin with <s> twice" in finding.says


def test_a_prompt_that_is_not_a_prefix_of_its_answer_is_reported(check):
    odd = CHAT.replace("{% endif %}", "think:{% endif %}")
    finding = check(template=odd)["train template"]
    assert finding.level == "warn"
    assert finding.says.startswith(
        "the prompt is not a prefix of the prompt with its answer in 9 of 9 checked rows"
    )
    assert "think:" in finding.details[1]


def test_a_template_with_another_stop_token_is_reported(check):
    finding = check(PPO, SUMS, template=CHAT.replace("</s>", "<end>"))["train template"]
    assert finding.level == "warn"
    assert finding.fix == "set generation.stop_token_ids=[5]"
    stops = ["generation.stop_token_ids=[5]"]
    assert (
        check(PPO, SUMS, template=CHAT.replace("</s>", "<end>"), overrides=stops)[
            "train template"
        ].level
        == "ok"
    )


def test_chat_without_a_template_is_reported(check):
    finding = check(overrides=["datasets.train.args.chat=true"])["train"]
    assert (finding.level, finding.exit_code, finding.code) == ("FAIL", 5, "F32")
    assert "chat: auto" in finding.fix


def test_a_tokenizer_larger_than_the_embedding_is_reported(check):
    findings = check(vocab_size=100)
    assert (
        findings["model actor"].level,
        findings["model actor"].code,
        exit_code(check.findings),
    ) == (
        "FAIL",
        "F32",
        5,
    )
    assert findings["tokenizer"].level == "FAIL"


def test_a_tokenizer_without_eos_is_reported(check):
    finding = check(named={"eos_token": None})["train"]
    assert (finding.level, finding.exit_code) == ("FAIL", 5)
    assert "no end-of-sequence token" in finding.says


def test_further_stop_tokens_of_a_model_are_reported(check, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    finding = check(PPO, SUMS)["tokenizer"]
    assert (finding.level, finding.fix) == ("warn", "set generation.stop_token_ids=[5]")
    assert check(SFT)["tokenizer"].level == "ok"


def test_a_tokenizer_that_needs_transformers_is_noted(check):
    findings = check(named={"split_special_tokens": True})
    assert set(levels(findings).values()) == {"ok"}
    why = "read by transformers, not by its file alone: it splits special tokens"
    assert list(findings["tokenizer"].details) == [why]


def test_an_unusable_tokenizer_is_reported_once(check):
    check(PPO, SUMS, named={"eos_token": None})
    assert [finding.about for finding in check.findings if finding.level == "FAIL"] == ["train"]


def test_lengths_of_unused_datasets_are_not_checked(check):
    findings = check(PPO, SUMS, overrides=["train.eval.dataset=null"], max_position_embeddings=20)
    assert findings["train lengths"].level == "FAIL"
    assert findings["held_out lengths"].level == "ok"


def test_a_model_of_an_unknown_family_is_skipped(check):
    findings = check(model_type="no_such_family")
    assert findings["model actor"].level == "skip"
    assert findings["train"].level == "ok"


def test_a_pad_token_equal_to_eos_is_noted(check):
    assert "pad is the end of sequence" in check(named={"pad_token": None})["tokenizer"].says


def test_the_result_of_a_warm_start_is_checked_if_it_exists(check, tmp_path, monkeypatch):
    result = model_folder(tmp_path / "result", template=CHAT)
    asked = []

    def find_result(source, log_dir, role):
        asked.append((source.recipe.name, role))
        return result if len(asked) > 1 else None

    monkeypatch.setattr("rlcli.observe.results.find_result", find_result)
    (tmp_path / "first.yaml").write_text(SFT)
    recipe = PPO.replace("path: model", "path: recipe:first.yaml#actor")
    assert "train template" not in check(recipe, SUMS)
    assert asked == [("first", "actor")]
    assert "train template" in check(recipe, SUMS)


def test_unreadable_settings_of_a_model_are_reported(check, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text("[")
    findings = check(PPO, SUMS)
    assert (findings["model actor"].level, findings["model actor"].exit_code) == ("FAIL", 5)
    assert findings["train"].level == "FAIL"


# -- rewards ---------------------------------------------------------------------------------------


def test_gold_answers_that_the_reward_refuses_are_reported(check):
    rows = [*SUMS, {"question": "why?", "answer": "x" * 600}]
    finding = check(
        PPO, rows, overrides=["datasets.train.args.max_length=2000"], max_position_embeddings=4096
    )["reward_inf reward"]
    assert (finding.level, finding.exit_code) == ("FAIL", 4)
    assert finding.says.startswith("gold answers accepted 9/10")
    assert finding.details[0].startswith("train.jsonl:10: xxx")


def test_wrong_answers_that_the_reward_accepts_are_reported(check):
    rows = [{"question": "half?", "answer": "1/2"}, {"question": "a half?", "answer": "0.50"}]
    finding = check(PPO, rows)["reward_inf reward"]
    assert finding.level == "warn"
    assert "train.jsonl:1: expected 1/2, accepted 0.50" in finding.details


def test_rows_without_an_answer_are_reported(check):
    recipe = PPO.replace("train: {type: math_prompts", "train: {type: prompt_only")
    finding = check(recipe, [{"prompt": row["question"]} for row in SUMS])["reward_inf reward"]
    assert (finding.level, finding.code) == ("FAIL", "F31")
    assert "9 of 9 checked rows have no answer" in finding.says


def test_shares_have_one_decimal_only_near_0_and_100_percent():
    assert [share(n, 1000) for n in (0, 1, 99, 100, 500, 999, 1000)] == [
        "0 %",
        "0.1 %",
        "9.9 %",
        "10 %",
        "50 %",
        "99.9 %",
        "100 %",
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "level", "says"),
    [
        (
            "def score(response, answer):\n    return float(answer in response)\n",
            "ok",
            "from 1 to 1",
        ),
        (
            "def score(response, level):\n    return 1.0\n",
            "FAIL",
            "takes level, which the rows do not have",
        ),
        ("def score(response):\n    return 1 / 0\n", "FAIL", "ZeroDivisionError"),
        ("def score(response):\n    return 'good'\n", "FAIL", "is not a number"),
        (
            "def score(response, answer):\n    if answer in response:\n        return 1.0\n",
            "FAIL",
            "it returned None, which is not a number",
        ),
        ("def score(response):\n    return float(ord(response[0]))\n", "FAIL", "IndexError"),
    ],
)
def test_a_reward_function_of_the_user_is_tried_on_rows(tmp_path, monkeypatch, source, level, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(source)
    reward = "graph.reward_inf.interface={type: function_reward, args: {path: mine.py}}"
    findings = [
        finding
        for finding in preflight(load_recipe("ppo_math", [reward]), rows=3)
        if finding.about == "reward_inf reward"
    ]
    assert [(finding.level, says in finding.says) for finding in findings] == [(level, True)]


def test_a_reward_function_that_cannot_be_loaded_is_reported_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(\n")
    reward = "graph.reward_inf.interface={type: function_reward, args: {path: mine.py}}"
    failures = [
        finding
        for finding in preflight(load_recipe("ppo_math", [reward]), rows=3)
        if finding.level == "FAIL"
    ]
    assert [(finding.about, finding.code) for finding in failures] == [("arguments", "F51")]


def test_a_function_without_a_number_for_wrong_answers_is_reported_with_its_line(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    source = "\n\ndef score(response, answer):\n    if answer in response:\n        return 1.0\n"
    (tmp_path / "mine.py").write_text(source)
    reward = "graph.reward_inf.interface={type: function_reward, args: {path: mine.py}}"
    [finding] = [
        finding
        for finding in preflight(load_recipe("ppo_math", [reward]), rows=3)
        if finding.about == "reward_inf reward"
    ]
    assert list(finding.details) == [
        f"{tmp_path / 'mine.py'}:3",
        "the responses were the answers of other rows",
    ]


@pytest.mark.parametrize("base", ["TextReward", "ModelInterface"])
def test_an_exception_in_a_reward_of_the_user_has_its_line(tmp_path, monkeypatch, base):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "interfaces").mkdir()
    name = f"brevity_{base.lower()}"  # a process loads a component only once
    file = tmp_path / "interfaces" / f"{name}.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from rlcli.api.interface import ModelInterface, register_interface\n"
        "from .rewards._text_reward import TextReward\n"
        "@dataclass(kw_only=True)\n"
        f"class Brevity({base}):\n"
        "    READS = {'inference': ('packed_input_ids', 'prompt_mask')}\n"
        "    WRITES = {'inference': ('rewards',)}\n"
        "    def score(self, response, answer):\n"
        "        return 1.0 if answer in grop else 0.0\n"
        "    def inference(self, model, data, mb_spec):\n"
        "        return self.score('4', '4')\n"
        f"register_interface('{name}', Brevity)\n"
    )
    resolved = load_recipe("ppo_math", [f"graph.reward_inf.interface={name}"])
    [failed] = [
        finding for finding in preflight(resolved, rows=3) if finding.about == "reward_inf reward"
    ]
    assert (failed.code, failed.exit_code) == ("PROJECT", 2)
    assert failed.says == "NameError: name 'grop' is not defined"
    assert failed.details[0] == f"{file}:9"
    assert failed.fix.startswith(f"rlcli test interface {name}")
