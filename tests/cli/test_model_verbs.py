"""`rlcli eval`, `generate` and `chat` on a tiny model, with the engine of a run."""

import errno
import io
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow.csv
import pytest
from chat_model import write_chat_model
from pyarrow import parquet

from rlcli.cli.eval import _print as print_evaluated
from rlcli.cli.eval import _print_json as print_as_json
from rlcli.launch.answering import Answerer
from rlcli.observe.responses import Moments
from rlcli.observe.samples import read_samples
from rlcli.recipe.resolve import load_recipe
from rlcli.runtime.evaluation import Evaluated

ROWS = [{"question": f"What is {n}+{n}?", "answer": f"#### {2 * n}"} for n in range(1, 6)]


def test_sums_over_responses_have_no_standard_error_and_are_no_prompts(capsys):
    scores = {"reward": Moments.of([0.0, 1.0]), "out_of_tokens": Moments.of_sum(5.0, 8)}
    evaluated = Evaluated(scores, {}, [], seconds=1.0, version=0)
    trained = SimpleNamespace(described="runs/one")
    recipe = load_recipe(
        "grpo_guess",
        ["generation.responses_per_prompt=4", "train.eval.dataset=held_out"],
    ).recipe
    print_evaluated(trained, recipe, evaluated, [])
    out = capsys.readouterr().out
    assert "rows     2 of arithmetic, 4 episodes to each" in out
    assert out.splitlines()[-1].split() == ["out_of_tokens", "0.625", "-"]
    print_as_json(trained, recipe, evaluated, [])
    results = json.loads(capsys.readouterr().out)["results"]
    assert results["reward"] == {"mean": 0.5, "standard_error": 0.5, "prompts": 2}
    assert results["out_of_tokens"] == {"mean": 0.625, "standard_error": None, "prompts": None}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A chat model, one without a chat template, and one that samples uniformly."""
    home = tmp_path_factory.mktemp("models")
    write_chat_model(home / "chat")
    write_chat_model(home / "plain", chat=False)
    write_chat_model(home / "wild", uniform=True)
    return home


@pytest.fixture
def rlcli(rlcli, tmp_path, models):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello."}\n')
    for folder in models.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    return rlcli


def parsed(answer):
    code, out, err = answer
    assert (code, err) == (0, "")
    return json.loads(out)


# -- eval ------------------------------------------------------------------------------------------


def test_results_of_eval_match_the_saved_responses(rlcli, tmp_path):
    arguments = ("--dataset", "rows.jsonl", "-n", "4", "--max-new-tokens", "5", "--rows", "3")
    document = parsed(
        rlcli("eval", "chat", *arguments, "--save", "out.jsonl", "--show", "1", "--json")
    )
    samples = read_samples(tmp_path / "out.jsonl")
    assert [(s.id, s.number) for s in samples] == [
        (f"rows:{row}", n) for row in (1, 2, 3) for n in range(4)
    ]
    results = document["results"]
    assert set(results) >= {
        "accuracy",
        "reward",
        "pass@2",
        "pass@4",
        "majority@4",
        "response_length",
    }
    assert all(measure["prompts"] == 3 for measure in results.values())
    cut_off = [sample.finish == "length" for sample in samples]
    assert results["no_eos_fraction"]["mean"] == pytest.approx(sum(cut_off) / 12)
    assert all(sample.logprob < 0 for sample in samples)
    assert len(document["samples"]) == 4
    assert document["samples"][0]["response"] == samples[0].response
    assert document["generation"]["temperature"] == 1


def test_saved_responses_replace_an_older_file(rlcli, tmp_path):
    (tmp_path / "out.jsonl").write_text("of an earlier evaluation\n")
    arguments = ("--dataset", "rows.jsonl", "--max-new-tokens", "3", "--rows", "2")
    assert rlcli("eval", "chat", *arguments, "--save", "out.jsonl")[0] == 0
    assert [sample.id for sample in read_samples(tmp_path / "out.jsonl")] == ["rows:1", "rows:2"]
    assert not list(tmp_path.glob(".out*")), "no temporary file stays"


@pytest.mark.parametrize(
    "words",
    [
        ("--save", "x.jsonl"),
        ("--dataset", "rows.jsonl"),
        ("--samples", "8"),
        ("--temperature", "0"),
    ],
)
def test_tasks_of_lm_eval_refuse_what_they_would_ignore(rlcli, words):
    code, _, err = rlcli("eval", "missing", "--tasks", "hellaswag", *words)
    assert (code, f"{words[0]} has no effect on --tasks" in err) == (2, True)
    assert "no effect" not in rlcli("eval", "missing", "--tasks", "hellaswag", "--rows", "4")[2]


@pytest.mark.parametrize(
    ("file", "code", "words"),
    [
        ("missing/out.jsonl", 6, "error[F75] missing/out.jsonl: not writable: No such file"),
        (".", 6, "error[F75] .: not writable: it is a folder"),
        ("/dev/null", 6, "error[F75] /dev/null: not writable: not an ordinary file"),
        ("rows.jsonl", 2, "--save would replace the rows of --dataset rows.jsonl"),
    ],
)
def test_eval_samples_nothing_that_it_cannot_save(rlcli, tmp_path, monkeypatch, file, code, words):
    def refuse(*_):
        raise AssertionError("it was sampled before the file was checked")

    monkeypatch.setattr("rlcli.launch.evaluation.examine", refuse)
    rows = (tmp_path / "rows.jsonl").read_text()
    exit_code, out, err = rlcli("eval", "chat", "--dataset", "rows.jsonl", "--save", file)
    assert (exit_code, out) == (code, "")
    assert words in err
    assert "give another --save FILE" in err
    assert (tmp_path / "rows.jsonl").read_text() == rows


def test_an_evaluation_fails_if_its_responses_cannot_be_saved(rlcli, tmp_path, monkeypatch):
    def disk_is_full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("rlcli.observe.samples.replace_file", disk_is_full)
    arguments = ("--dataset", "rows.jsonl", "--max-new-tokens", "3", "--rows", "2")
    code, out, err = rlcli("eval", "chat", *arguments, "--save", "out.jsonl")
    assert (code, out) == (6, "")
    assert "out.jsonl: not writable: No space left on device" in err


def test_eval_works_in_a_folder_without_write_permission(rlcli, tmp_path, monkeypatch):
    access = os.access  # root may write everywhere, so permissions alone would show nothing
    monkeypatch.setattr(os, "access", lambda at, mode: Path(at) != tmp_path and access(at, mode))
    arguments = ("--dataset", "rows.jsonl", "--max-new-tokens", "3", "--rows", "2")
    code, out, err = rlcli("eval", "chat", *arguments)
    assert (code, err) == (0, "")
    assert "accuracy" in out


def test_eval_prints_a_table(rlcli):
    code, out, err = rlcli("eval", "chat", "--dataset", "rows.jsonl", "--max-new-tokens", "5")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["accuracy", "0.000", "0.000"] in lines
    assert "rows     5 of rows.jsonl, one response to each, greedy, up to 5 tokens" in out
    assert "rows:1  (answer: 2)" in out
    assert "  --- response: reward 0" in out
    assert [word[0] for word in lines if word and word[0] in ("accuracy", "reward", "response")][
        :2
    ] == ["accuracy", "reward"]


def test_eval_accepts_overrides_of_its_recipe(rlcli):
    document = parsed(
        rlcli(
            "eval",
            "chat",
            "--dataset",
            "rows.jsonl",
            "--json",
            "generation.max_new_tokens=2",
            "datasets.held_out.args.max_rows=2",
            "generation.min_new_tokens=2",
        )
    )
    assert document["results"]["response_length"] == {"mean": 2, "standard_error": 0, "prompts": 2}


def test_a_python_file_may_be_the_reward(rlcli, tmp_path):
    (tmp_path / "half.py").write_text("def score(response, answer):\n    return int(answer) / 2\n")
    arguments = ("--dataset", "rows.jsonl", "--max-new-tokens", "3", "--rows", "3")
    document = parsed(rlcli("eval", "chat", *arguments, "--reward", "half.py", "--json"))
    assert [sample["reward"] for sample in document["samples"]] == [1, 2]
    assert document["results"]["reward"]["mean"] == 2
    code, out, err = rlcli("eval", "chat", *arguments, "--reward", "missing.py")
    assert (code, out) == (4, "")
    assert "missing.py" in err


def test_eval_accepts_a_dataset_component(rlcli):
    held_out = "{type: arithmetic, args: {held_out: true, problems: 3}}"
    document = parsed(
        rlcli("eval", "plain", "--dataset", held_out, "--max-new-tokens", "3", "--json")
    )
    assert document["dataset"] == {"type": "arithmetic", "args": {"held_out": True, "problems": 3}}
    assert document["results"]["accuracy"]["prompts"] == 3


def test_eval_uses_the_held_out_rows_of_a_recipe(rlcli):
    document = parsed(
        rlcli(
            "eval",
            "plain",
            "--dataset",
            "ppo_math",
            "--rows",
            "2",
            "--max-new-tokens",
            "3",
            "--json",
        )
    )
    assert document["dataset"]["args"]["held_out"] is True
    assert document["generation"]["max_new_tokens"] == 3


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nothing", "--dataset", "rows.jsonl"), 2, "no folder nothing"),
        (
            (".", "--dataset", "rows.jsonl"),
            5,
            "neither a run, nor a checkpoint, nor a model's folder",
        ),
        (("mute", "--dataset", "rows.jsonl"), 5, "tokenizer"),
        (("chat",), 2, "no rows are named"),
        (("chat", "--dataset", "arithmetik"), 2, "did you mean arithmetic?"),
        (("chat", "--dataset", "nothing.jsonl"), 2, "no rows 'nothing.jsonl'"),
        (("chat", "--dataset", "sft_math"), 2, "evaluates on no dataset"),
        (("chat", "--dataset", "sft_math#train"), 2, "no prompts to answer in its dataset train"),
        (("chat", "--dataset", "ppo_math#other"), 2, "name one: --dataset ppo_math#train"),
        (("chat", "--dataset", "ppo_math#other"), 2, "has no dataset 'other'"),
        (("chat", "--dataset", "{type: "), 2, "is never closed"),
        (
            ("chat", "--dataset", "{type: prompt_only, args: {path: prompts.jsonl}}"),
            4,
            "have no answer",
        ),
        (("chat", "--dataset", "rows.jsonl", "--max-new-tokens", "600"), 2, "512"),
        (("chat", "--dataset", "rows.jsonl", "--reward", "math_rewart"), 2, "math_reward"),
    ],
)
def test_eval_refuses_invalid_arguments(rlcli, tmp_path, models, arguments, code, words):
    shutil.copytree(
        models / "chat",
        tmp_path / "mute",
        ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"),
    )
    exit_code, out, err = rlcli("eval", *arguments)
    assert (exit_code, out) == (code, "")
    assert words in err
    assert err.startswith("error[")
    assert "Traceback" not in err


@pytest.fixture
def run_of(tmp_path, models):
    """Makes a run of a recipe, whose model is not trained; returns its folder's name."""

    def make(recipe, *settings, model="plain"):
        (tmp_path / "run/models").mkdir(parents=True)
        (tmp_path / "run/models/actor").symlink_to(models / model)
        resolved = load_recipe(recipe, settings)
        (tmp_path / "run/recipe.resolved.yaml").write_text(resolved.to_yaml())
        return "run"

    return make


def test_a_run_without_prompts_is_evaluated_on_the_rows_that_its_hint_names(rlcli, run_of):
    run = run_of("sft_math")
    code, out, err = rlcli("eval", run)
    assert (code, out) == (2, "")
    assert "recipe.resolved.yaml" not in err, "its rows of training hold their answers"
    assert "--dataset ppo_math" in err
    rows = ("--dataset", "ppo_math", "--rows", "2", "--max-new-tokens", "3")
    assert parsed(rlcli("eval", run, *rows, "--json"))["results"]["accuracy"]["prompts"] == 2


def test_other_rows_are_asked_and_judged_like_those_of_the_run(rlcli, run_of, tmp_path):
    (tmp_path / "half.py").write_text("def score(response, answer):\n    return int(answer) / 2\n")
    (tmp_path / "other.csv").write_text("question,answer\nWhat is 7+7?,14\n")
    rows = {"path": "rows.jsonl", "system": "Be brief.", "template": "{question} Say it."}
    run = run_of(
        "grpo",
        "models.actor.path=chat",
        f"datasets.train={json.dumps({'type': 'math_prompts', 'args': rows})}",
        "graph.reward_inf.interface={type: function_reward, args: {path: half.py}}",
        "generation.max_new_tokens=3",
        model="chat",
    )
    document = parsed(rlcli("eval", run, "--dataset", "other.csv", "--json"))
    assert document["dataset"]["args"] == {**rows, "path": "other.csv"}
    assert "What is 7+7? Say it." in document["samples"][0]["prompt"]
    assert document["generation"]["max_new_tokens"] == 3
    assert document["results"]["reward"]["mean"] == 7
    arguments = ("--dataset", "other.csv", "--reward", "math_reward", "--json")
    assert parsed(rlcli("eval", run, *arguments))["results"]["reward"]["mean"] == 0


def test_a_run_is_evaluated_from_any_folder(rlcli, run_of, tmp_path, monkeypatch):
    (tmp_path / "half.py").write_text("def score(response, answer):\n    return int(answer) / 2\n")
    held_out = {"type": "math_prompts", "args": {"path": "rows.jsonl"}}
    run = tmp_path / run_of(
        "grpo",
        "models.actor.path=chat",
        f"datasets.train={json.dumps(held_out)}",
        f"datasets.held_out={json.dumps(held_out)}",
        "train.eval.dataset=held_out",
        "graph.reward_inf.interface={type: function_reward, args: {path: half.py}}",
        "generation.max_new_tokens=3",
    )
    (run / "environment.json").write_text(json.dumps({"working_directory": str(tmp_path)}))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for rows in ((), ("--dataset", str(tmp_path / "rows.jsonl"))):
        document = parsed(rlcli("eval", os.path.relpath(run), *rows, "--rows", "2", "--json"))
        assert document["dataset"]["args"]["path"] == str(tmp_path / "rows.jsonl")
        assert document["results"]["reward"]["mean"] > 0


@pytest.mark.parametrize("rows", ["rows.csv", "rows.parquet", "folder"])
def test_rows_are_read_in_the_formats_of_training(rlcli, tmp_path, rows):
    table = pyarrow.Table.from_pylist(ROWS[:2])
    parquet.write_table(table, tmp_path / "rows.parquet")
    pyarrow.csv.write_csv(table, tmp_path / "rows.csv")
    (tmp_path / "folder").mkdir()
    parquet.write_table(table, tmp_path / "folder/rows.parquet")
    arguments = ("--dataset", rows, "--max-new-tokens", "2", "--json")
    assert parsed(rlcli("eval", "chat", *arguments))["results"]["accuracy"]["prompts"] == 2


def test_eval_plays_the_episodes_of_a_run(rlcli, run_of):
    run = run_of("grpo_guess")
    document = parsed(rlcli("eval", run, "--rows", "4", "--show", "4", "-n", "2", "--json"))
    results = document["results"]
    assert results["turns"] == {"mean": 3, "standard_error": None, "prompts": None}, "of episodes"
    assert results["reward"]["prompts"] == 4
    rewards = [sample["reward"] for sample in document["samples"]]
    assert results["reward"]["mean"] == pytest.approx(sum(rewards) / 8)
    assert min(rewards) == pytest.approx(-0.3), "no turn of it says a number"
    turns = document["samples"][0]["turns"]
    assert [turn["sampled"] for turn in turns] == [True, False, True, False, True]
    assert turns[1]["text"] == "not a number\n"


def test_eval_judges_episodes_like_the_recipe(rlcli, run_of):
    run = run_of("grpo_calculator", "generation.max_new_tokens=8")
    arguments = ("--rows", "2", "--show", "1")
    code, out, err = rlcli("eval", run, *arguments)
    assert (code, err) == (0, "")
    assert "2 of arithmetic, one episode to each, greedy, up to 8 tokens" in out
    assert {"accuracy", "tool_calls"} <= {line.split()[0] for line in out.splitlines() if line}
    rows = ("--dataset", "rows.jsonl")
    assert "turns" in parsed(rlcli("eval", run, *arguments, *rows, "--json"))["results"]


def test_a_reward_replaces_that_of_the_environment(rlcli, run_of):
    run = run_of("grpo_guess")
    arguments = ("--reward", "math_reward", "--rows", "2", "--json")
    assert parsed(rlcli("eval", run, *arguments))["results"]["accuracy"]["mean"] == 0


# -- generate --------------------------------------------------------------------------------------


def test_streamed_text_equals_the_returned_text(rlcli):
    arguments = ("--prompt", "Hello.", "--max-new-tokens", "12", "--temperature", "0.5")
    response = parsed(rlcli("generate", "chat", *arguments, "--json"))["responses"][0]
    code, out, _ = rlcli("generate", "chat", *arguments)
    assert code == 0
    assert response["finish"] in ("stop", "length")
    assert response["logprob"] < 0
    assert out == printable(response["text"]) + "\n"


def printable(text):
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def test_generate_applies_the_chat_template_unless_raw(rlcli):
    texts = [
        parsed(
            rlcli(
                "generate", "chat", "--prompt", prompt, *options, "--json", "--max-new-tokens", "6"
            )
        )["responses"][0]
        for prompt, options in (("Hi", ()), ("<user>Hi<assistant>", ("--raw",)), ("Hi", ("--raw",)))
    ]
    assert texts[0]["text"] == texts[1]["text"] != texts[2]["text"]


@pytest.mark.parametrize(
    ("model", "dataset", "prompt"),
    [
        ("plain", "arithmetic", "Hi\n"),
        ("plain",
         "{type: math_prompts, args: {path: rows.jsonl, template: 'Q: {question} A:', system: Be}}",
         "Be\n\nQ: Hi A:"),
        ("chat", "{type: math_prompts, args: {path: rows.jsonl, template: 'Q: {question}'}}",
         "<user>Q: Hi<assistant>"),
        ("chat", "{type: math_prompts, args: {path: rows.jsonl, chat: false}}", "Hi"),
        ("chat", "{type: mixture, args: {weights: {held_out: 1.0}}}", "Hi\n"),
    ],
)  # fmt: skip
def test_prompts_for_a_run_have_the_format_of_its_training_rows(
    rlcli, tmp_path, models, model, dataset, prompt
):
    (tmp_path / "run/models").mkdir(parents=True)
    (tmp_path / "run/models/actor").symlink_to(models / model)
    resolved = load_recipe("ppo_math", [f"datasets.train={dataset}"])
    (tmp_path / "run/recipe.resolved.yaml").write_text(resolved.to_yaml())
    (tmp_path / "rows.jsonl").unlink()  # the rows may be gone

    def answers(*arguments):
        response = parsed(rlcli("generate", "run", *arguments, "--json", "--max-new-tokens", "6"))[
            "responses"
        ][0]
        return response["text"], response["logprob"]

    assert (
        answers("--prompt", "Hi")
        == answers("--prompt", prompt, "--raw")
        != answers("--prompt", "Hi!", "--raw")
    )


def test_generate_answers_each_line_of_a_file(rlcli, tmp_path):
    (tmp_path / "ask.txt").write_text("One?\r\n\nTwo\u2028?\n")
    answer = rlcli(
        "generate", "plain", "--file", "ask.txt", "-n", "2", "--temperature", "1", "--json"
    )
    responses = parsed(answer)["responses"]
    assert [(r["prompt"], r["number"]) for r in responses] == [
        ("One?", 0),
        ("One?", 1),
        ("Two\u2028?", 0),
        ("Two\u2028?", 1),
    ]
    assert responses[0]["text"] != responses[1]["text"]
    code, out, _ = rlcli(
        "generate", "plain", "--file", "ask.txt", "-n", "2", "--max-new-tokens", "2"
    )
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("--- ")] == [
        "--- One?",
        "--- Two\\u2028?",
    ]
    assert out.count("[2 of 2]") == 2


def test_responses_end_with_any_end_token_of_the_model(rlcli, models, tmp_path):
    shutil.copytree(models / "wild", tmp_path / "ends")
    ends = {"eos_token_id": [*range(256)]}  # most of all tokens
    (tmp_path / "ends" / "generation_config.json").write_text(json.dumps(ends))
    arguments = ("--prompt", "x", "--max-new-tokens", "9", "--temperature", "1", "--json")
    [response] = parsed(rlcli("generate", "ends", *arguments))["responses"]
    assert (response["finish"], response["tokens"] < 9) == ("stop", True)


def test_generate_reads_standard_input(rlcli, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Grüße,\nalle\r\n".encode())))
    [response] = parsed(rlcli("generate", "plain", "--json", "--max-new-tokens", "2"))["responses"]
    assert response["prompt"] == "Grüße,\nalle"


def test_a_model_sharded_over_ranks_generates_the_same(rlcli, models, tmp_path):
    from rlcli.checkpoint.convert import convert, plan_from_hf

    convert(plan_from_hf(models / "chat", tmp_path / "parts", ranks=2), lambda written: None)
    assert len(list((tmp_path / "parts").glob("shard-*.safetensors"))) == 2
    arguments = ("--prompt", "Hello.", "--max-new-tokens", "6", "--json")
    assert rlcli("generate", "parts", *arguments) == rlcli("generate", "chat", *arguments)


@pytest.mark.parametrize("options", [(), ("--json",), ("-n", "2")])
def test_control_characters_in_responses_are_escaped(rlcli, options):
    arguments = ("--prompt", "x", "--temperature", "1", "--max-new-tokens", "400", *options)
    code, out, _ = rlcli("generate", "wild", *arguments)
    assert code == 0
    assert all(c.isprintable() or c == "\n" for c in out)
    assert "x1b" in out or "u001b" in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nothing", "--prompt", "x"), 2, "no folder nothing"),
        (("checkpoints/step-000000000002", "--prompt", "x"), 2, "there are: 3"),
        (("runs/onne", "--prompt", "x"), 6, "did you mean one?"),
        (("chat", "--prompt", " "), 2, "a prompt is empty"),
        (("chat", "--file", "none.txt"), 4, "none.txt cannot be read"),
        (("chat", "--prompt", "x", "--top-p", "0"), 2, "top_p"),
        (("chat", "--prompt", "x" * 600), 5, "the model has 512 positions"),
    ],
)
def test_generate_refuses_invalid_arguments(rlcli, tmp_path, arguments, code, words):
    (tmp_path / "checkpoints/step-000000000003").mkdir(parents=True)
    (tmp_path / "runs/one").mkdir(parents=True)
    (tmp_path / "runs/one/status.json").write_text("{}")
    exit_code, out, err = rlcli("generate", *arguments)
    assert (exit_code, out) == (code, "")
    assert words in err


# -- chat ------------------------------------------------------------------------------------------


@pytest.fixture
def chat_with(rlcli, monkeypatch):
    """Enters lines into `rlcli chat`: (exit code, stdout, stderr)."""

    def say(*lines, model="chat", longest=8):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        return rlcli("chat", model, "--max-new-tokens", str(longest), "--temperature", "0")

    return say


@pytest.fixture
def heard_conversations(monkeypatch):
    """The conversations that the model received."""
    conversations = []
    tokens_of = Answerer.tokens_of

    def recorded(self, messages):
        conversations.append([(message["role"], message["content"]) for message in messages])
        return tokens_of(self, messages)

    monkeypatch.setattr(Answerer, "tokens_of", recorded)
    return conversations


def test_chat_keeps_the_conversation_until_reset(chat_with, heard_conversations):
    code, out, err = chat_with("one", "two", "/reset", "three")
    assert code == 0
    assert "Ctrl-D leaves" in err
    _, first, second, third = heard_conversations
    assert first == [("user", "one")]
    assert [role for role, _ in second] == ["user", "assistant", "user"]
    assert printable(second[1][1]) == out.splitlines()[0]
    assert third == [("user", "three")]


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(
    chat_with, heard_conversations, monkeypatch
):
    stream = Answerer.stream

    def interrupted(self, *arguments):
        pieces = stream(self, *arguments)
        yield next(pieces)
        raise KeyboardInterrupt

    monkeypatch.setattr(Answerer, "stream", interrupted)
    code, out, _ = chat_with("one", "two")
    assert code == 0
    assert out.splitlines()[0].endswith(" […]")
    assert printable(heard_conversations[2][1][1]) == out.splitlines()[0].removesuffix(" […]")


def test_a_conversation_that_is_too_long_is_reported(chat_with):
    code, _, err = chat_with("x" * 600, "short")
    assert code == 0
    assert "the model has 512 positions" in err
    assert "/reset" in err


def test_an_answer_leaves_half_of_the_free_positions_to_later_turns(chat_with, monkeypatch):
    limits = []

    def short(self, prompt, settings, turn=0):
        limits.append((len(prompt), settings.max_new_tokens))
        yield "x" * 200

    monkeypatch.setattr(Answerer, "stream", short)
    _, _, err = chat_with("one", "two", "three", longest=200)
    assert all(longest == min(200, (513 - used) // 2) for used, longest in limits)
    assert limits[0][1] == 200 > limits[1][1] > limits[2][1]
    assert err.count("of 512 positions are taken") == 2


def test_what_looks_like_a_command_is_not_sent_to_the_model(chat_with, heard_conversations):
    code, _, err = chat_with("/help", "/reset", "/reset it", "/etc/hosts", " /help")
    assert code == 0
    assert "/help is not a command (available: /reset)" in err
    assert "/reset takes no text; begin the line with a blank" in err
    assert [said[-1] for said in heard_conversations[1:]] == [
        ("user", "/etc/hosts"),
        ("user", " /help"),
    ]


def test_chat_without_a_template_answers_each_line_as_a_prompt(chat_with, rlcli):
    code, out, err = chat_with("one", "x" * 600, "two", model="plain")
    assert code == 0
    notice, too_long = err.splitlines()
    assert "no chat template: each line is a prompt of its own" in notice
    assert "the model has 512 positions" in too_long
    assert "/reset" not in err
    options = ("--raw", "--max-new-tokens", "8")
    alone = [rlcli("generate", "plain", "--prompt", word, *options)[1] for word in ("one", "two")]
    assert out.rstrip("\n") == "".join(alone).rstrip("\n")


def test_chat_without_a_template_writes_prompts_like_training_rows(
    chat_with, rlcli, tmp_path, models
):
    (tmp_path / "run/models").mkdir(parents=True)
    (tmp_path / "run/models/actor").symlink_to(models / "plain")
    (tmp_path / "run/recipe.resolved.yaml").write_text(load_recipe("ppo_math").to_yaml())
    _, out, err = chat_with("3+4", model="run")
    assert "each line is a prompt of its own, written as '{question}\\n'" in err
    answer = rlcli("generate", "run", "--prompt", "3+4", "--max-new-tokens", "8")[1]
    assert out.rstrip("\n") == answer.rstrip("\n")


def test_a_chat_with_a_run_begins_with_its_system_prompt(chat_with, heard_conversations, run_of):
    rows = "{type: math_prompts, args: {path: rows.jsonl, system: Be brief.}}"
    run = run_of("grpo", "models.actor.path=chat", f"datasets.train={rows}", model="chat")
    assert chat_with("one", model=run)[0] == 0
    assert heard_conversations[1] == [("system", "Be brief."), ("user", "one")]


def test_chat_plays_the_environment_of_a_run_turn_by_turn(chat_with, run_of):
    code, out, err = chat_with("", "mine", model=run_of("grpo_guess"), longest=64)
    assert code == 0
    assert "playing with guess" in err
    assert "Enter alone plays the next row of held_out" in err
    labels = [line.split("  ")[2] for line in out.splitlines() if line.startswith("    ")]
    for_each = ["prompt", "turn 1", "observed", "turn 2", "observed", "turn 3"]
    assert [label for label in labels if label in for_each] == 2 * for_each
    assert out.count("What is my number from 1 to 7?") == 2
    assert out.count("reward -0.3") == 2


@pytest.mark.parametrize("model", ["chat", "plain"])
def test_chat_plays_a_named_environment(rlcli, monkeypatch, model):
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1?\n"))
    limits = ("--max-new-tokens", "4", "--temperature", "0")
    code, out, err = rlcli("chat", model, "--environment", "calculator", *limits)
    assert code == 0
    assert "playing with calculator.\nEach line is a question. " in err
    assert out.startswith("    turn 1    ")
    assert "turns 1" in out


def test_an_unknown_environment_is_refused(rlcli):
    code, _, err = rlcli("chat", "chat", "--environment", "calculater")
    assert code == 2
    assert "calculator" in err
