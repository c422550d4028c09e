"""Generated problems: correct answers, disjoint splits, and pairs."""

import re

import pytest
import torch

from rlcli.api.config import DatasetAbstraction, EnvironmentAbstraction
from rlcli.api.data import DatasetUtility
from rlcli.api.environment import call_tool
from rlcli.api.tool_formats import tool_format
from rlcli.datasets import _arithmetic
from rlcli.errors import DataError, UsageError
from rlcli.interfaces._plain_turns import PlainTurns
from rlcli.registry import load, make_dataset, make_environment

TOKENIZER = load("datasets", "arithmetic").make_tokenizer()


def dataset(name="arithmetic", **args):
    return make_dataset(
        DatasetAbstraction(name, {"problems": 200, **args}), DatasetUtility(1, 0, 1, TOKENIZER)
    )


def expression_of(question):
    """The arithmetic of a question, parsed independently of the code that wrote it."""
    if question.startswith("What is"):
        return question[len("What is ") : -1]
    gain = ("buys", "finds", "gets", "wins", "makes", "picks")
    start = re.search(r"has (\d+)", question)[1]
    changes = re.findall(r"(\w+(?: away)?) (\d+)", question.split(",", 1)[1])
    return start + "".join(("+" if verb in gain else "-") + number for verb, number in changes)


def total(expression):
    return sum(int(term) for term in re.findall(r"[+-]?\d+", expression))


@pytest.mark.parametrize("held_out", [False, True])
def test_answers_are_correct(held_out):
    data = dataset(held_out=held_out)
    for sample in (data[i] for i in range(len(data))):
        assert total(expression_of(sample.metadata["question"][0])) == int(
            sample.metadata["answer"][0]
        )


def test_splits_share_no_problem_in_any_wording():
    train, held_out = (
        {expression_of(data[i].metadata["question"][0]) for i in range(len(data))}
        for data in (dataset(problems=3000), dataset(problems=400, held_out=True))
    )
    assert not train & held_out


def test_both_wordings_and_all_requested_levels_occur():
    data = dataset(levels=(1, 3))
    counts = {
        len(re.findall(r"[+-]", expression_of(data[i].metadata["question"][0]))) for i in range(200)
    }
    assert counts == {1, 3}
    symbols = sum(data[i].metadata["question"][0].startswith("What is") for i in range(200))
    assert 60 < symbols < 140


def test_demonstrations_mask_the_prompt_and_end_the_answer():
    sample = dataset("arithmetic_demonstrations", hasty=(0.0,), levels=(3,))[5]
    tokens, mask = sample.data["packed_input_ids"], sample.data["prompt_mask"]
    prompt, answer = TOKENIZER.decode(tokens[mask]), TOKENIZER.decode(tokens[~mask])
    assert prompt == f"<bos>{sample.metadata['question'][0]}\n"
    assert answer.endswith(f"#### {sample.metadata['answer'][0]}<eos>")
    assert answer.count("\n") == 3
    assert mask.dtype == torch.bool


def test_hasty_demonstrations_stop_after_the_first_line():
    data = dataset("arithmetic_demonstrations", hasty=(0.65,), levels=(4,), problems=1000)
    short = sum(
        TOKENIZER.decode(data[i].data["packed_input_ids"]).count("\n") == 2 for i in range(1000)
    )
    assert 600 < short < 700
    with pytest.raises(UsageError, match="between 0 and 1"):
        dataset("arithmetic_demonstrations", hasty=(0.1, 0.1, 1.5))


@pytest.mark.parametrize(
    ("environment", "call"),
    [("calculator", '{"name": "calculate", "arguments": {"expression": "SUM"}}'),
     ("python", '{"name": "run", "arguments": {"program": "print(SUM)"}}')],
)  # fmt: skip
def test_demonstrations_of_a_tool_mask_what_it_returns(environment, call):
    sample = dataset("tool_demonstrations", calls=1.0, environment=environment)[7]
    tokens, mask = sample.data["packed_input_ids"], sample.data["prompt_mask"]
    question, answer = sample.metadata["question"][0], sample.metadata["answer"][0]
    expected = call.replace("SUM", expression_of(question))
    assert TOKENIZER.decode(tokens[mask]) == f"<bos>{question}\n{answer}\n"
    assert TOKENIZER.decode(tokens[~mask]) == f"{expected}<eos>#### {answer}<eos>"


def test_demonstrations_are_the_episodes_that_they_prepare_for():
    """Token by token: what follows the call is what an episode appends."""
    sample = dataset("tool_demonstrations", calls=1.0)[7]
    tokens, mask = sample.data["packed_input_ids"].tolist(), sample.data["prompt_mask"].tolist()
    first = mask.index(False)
    end = mask.index(True, first)
    turns = PlainTurns(TOKENIZER, tokens[:first])
    text = turns.append_sampled(tokens[first:end])
    (call,) = tool_format(TOKENIZER).parse(text).calls
    calculator = make_environment(EnvironmentAbstraction("calculator"))
    result = call_tool(calculator, call.name, call.arguments)
    turns.append_messages([{"role": "tool", "content": result}])
    assert turns.ids == tokens[: mask.index(False, end)]


def test_other_demonstrations_of_a_tool_answer_at_once():
    data = dataset("tool_demonstrations", calls=0.25, problems=400)
    answered = [data[i].data["prompt_mask"].diff().count_nonzero() == 1 for i in range(400)]
    assert 270 < sum(answered) < 330


def test_the_tokenizer_encodes_any_text_and_splits_digits():
    text = "Natalia sold 48/2 = <<48/2=24>>24 clips. Ünï\n#### 72"
    assert TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False).input_ids) == text
    assert len(TOKENIZER("1234", add_special_tokens=False).input_ids) == 4


def test_more_problems_than_exist_are_refused(monkeypatch):
    monkeypatch.setattr(_arithmetic, "PATIENCE", 200)
    with pytest.raises(DataError, match="no new problem of level 1"):
        dataset(problems=20_000, levels=[1], held_out=True)[19_999]


@pytest.mark.parametrize(
    "wrong", [{"problems": 0}, {"problems": -1}, {"levels": []}, {"levels": [2, 0]}]
)
def test_an_invalid_number_of_problems_or_level_is_refused(wrong):
    with pytest.raises(UsageError, match=r"problems: .* greater than or equal to 1|levels is"):
        dataset(**wrong)


def pairs_of(**args):
    """(question, right answer, preferred text, rejected text) of every pair."""
    data = dataset("arithmetic_pairs", **args)
    for sample in (data[i] for i in range(len(data))):
        question, answer = sample.metadata["question"][0], sample.metadata["answer"][0]
        tokens = sample.data["packed_input_ids"].split(sample.flat_seqlens("packed_input_ids"))
        masks = sample.data["prompt_mask"].split(sample.flat_seqlens("prompt_mask"))
        texts = [
            TOKENIZER.decode(t[~m]).removesuffix("<eos>")
            for t, m in zip(tokens, masks, strict=True)
        ]
        yield from ((question, answer, *two) for two in zip(texts[::2], texts[1::2], strict=True))


def wrong_lines(text):
    lines = text.split("\n")[:-1]
    return [line for line in lines if total(line.split("=")[0]) != int(line.split("=")[1])]


@pytest.mark.parametrize("held_out", [False, True])
def test_the_first_answer_of_a_pair_is_correct_and_the_second_is_wrong(held_out):
    kinds = {"hasty": 0, "slipped": 0}
    for question, answer, chosen, rejected in pairs_of(held_out=held_out, pairs_per_problem=2):
        lines = len(re.findall(r"[+-]", expression_of(question)))
        assert chosen.endswith(f"#### {answer}")
        assert wrong_lines(chosen) == []
        assert chosen.count("\n") == lines
        is_hasty = rejected.count("\n") < lines
        kinds["hasty" if is_hasty else "slipped"] += 1
        if is_hasty:
            assert rejected.split("\n")[0] == chosen.split("\n")[0]
        else:
            assert len(wrong_lines(rejected)) == 1
            assert not rejected.endswith(f"#### {answer}")
            assert rejected.split("#### ")[1] == rejected.split("\n")[-2].split("=")[1]
    assert 150 < kinds["hasty"] < 250


def test_the_share_of_hasty_answers_is_as_requested():
    for share in (0.0, 1.0):
        are_hasty = [rejected.count("\n") == 1 for *_, rejected in pairs_of(hasty=share)]
        assert set(are_hasty) == {share == 1.0}
    with pytest.raises(UsageError, match="a hasty answer to a problem of one operation is correct"):
        dataset("arithmetic_pairs", levels=(1, 2))


def judged_answers(**args):
    """(question, right result, the text of the answer, whether it is desirable) of every row."""
    data = dataset("arithmetic_unpaired", **args)
    for sample in (data[i] for i in range(len(data))):
        answer = sample.data["packed_input_ids"][~sample.data["prompt_mask"]]
        text = TOKENIZER.decode(answer).removesuffix("<eos>")
        question, result = sample.metadata["question"][0], sample.metadata["answer"][0]
        yield question, result, text, bool(sample.data["desirable"][0])


def test_desirable_answers_are_complete_and_right_and_the_others_are_not():
    rows = list(judged_answers())
    for question, result, text, is_desirable in rows:
        is_complete = text.count("\n") == len(re.findall(r"[+-]", expression_of(question)))
        is_right = wrong_lines(text) == [] and text.endswith(f"#### {result}")
        assert (is_complete and is_right) == is_desirable
    desirable = sum(flag for *_, flag in rows)
    assert 0.4 * len(rows) < desirable < 0.6 * len(rows)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_of_desirable_answers_is_as_requested(share):
    assert {flag for *_, flag in judged_answers(desirable=share)} == {share == 1.0}
