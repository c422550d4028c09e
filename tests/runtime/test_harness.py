"""lm-eval's requests, answered by our engine as transformers would answer them. Skipped where
lm-eval is missing."""

import json
from types import SimpleNamespace

import pytest
import torch

from rlcli.testing.chat_model import write_chat_model

TASK = """\
task: halves
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("model"), positions=64)


@pytest.fixture(scope="module")
def lm(folder):
    pytest.importorskip("lm_eval")
    from rlcli.launch.answering import load_alone
    from rlcli.runtime.harness import EngineLM

    return EngineLM(load_alone(str(folder), dtype="float32"))


@pytest.fixture(scope="module")
def plain(folder):
    """(log-probs of the tokens that follow, whether each is the likeliest)
    by transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def scores(tokens):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1].double()
        following = torch.tensor(tokens[1:])
        return logits.log_softmax(-1).gather(1, following[:, None])[:, 0], logits.argmax(
            -1
        ) == following

    return scores


def requests(*arguments):
    return [SimpleNamespace(args=one) for one in arguments]


def test_loglikelihoods_are_those_of_transformers(lm, plain):
    pairs = [("Is it?", " Yes"), ("", "No"), ("A long way to go, and", " back again"), ("x ", "y")]
    found = lm.loglikelihood(requests(*pairs), disable_tqdm=True)
    bos = lm.prefix_token_id
    for (context, continuation), (logprob, is_greedy) in zip(pairs, found, strict=True):
        whole = (
            lm.tok_encode(context + continuation)
            if context
            else [bos, *lm.tok_encode(continuation, False)]
        )
        count = len(whole) - len(lm.tok_encode(context.rstrip()) if context else [bos])
        logprobs, likeliest = plain(whole)
        assert logprob == pytest.approx(float(logprobs[-count:].sum()), abs=1e-3)
        assert is_greedy == bool(likeliest[-count:].all())


def test_a_greedy_continuation_is_told(lm, plain):
    text = "Count"
    [answer] = lm.generate_until(
        requests((text, {"until": [], "max_gen_toks": 3, "do_sample": False}))
    )
    tokens = lm.tok_encode(text)
    for _ in range(3):
        tokens.append(
            max(range(len(lm.tokenizer)), key=lambda one: float(plain([*tokens, one])[0][-1]))
        )
    assert answer == lm.tokenizer.decode(tokens[-3:], skip_special_tokens=True)
    continuation = tokens[-3:]
    assert lm._loglikelihood_tokens([(None, tokens[:-3], continuation)])[0][1] is True
    other = [*continuation[:-1], (continuation[-1] + 1) % 256]
    assert lm._loglikelihood_tokens([(None, tokens[:-3], other)])[0][1] is False


def test_a_context_that_is_too_long_loses_its_beginning(lm, plain):
    tokens = lm.tok_encode("abcdefghij" * 10)
    [(logprob, _)] = lm._loglikelihood_tokens([(None, tokens[:-2], tokens[-2:])])
    assert logprob == pytest.approx(float(plain(tokens[-65:])[0][-2:].sum()), abs=1e-3)


def test_rolling_loglikelihoods_count_each_token_once(lm, plain):
    short, long = "Hello.", "To be or not to be, that is the question. " * 4
    found = lm.loglikelihood_rolling(requests((short,), (long,)), disable_tqdm=True)
    tokens = lm.tok_encode(short)
    assert found[0] == pytest.approx(float(plain([lm.prefix_token_id, *tokens])[0].sum()), abs=1e-3)
    tokens = lm.tok_encode(long)
    first, windows = (
        tokens[:64],
        [tokens[start - 1 : start + 64] for start in range(64, len(tokens), 64)],
    )
    windows[-1] = tokens[-65:]
    counts = [min(64, len(tokens) - start) for start in range(64, len(tokens), 64)]
    expected = float(plain([lm.prefix_token_id, *first])[0].sum())
    expected += sum(
        float(plain(window)[0][-count:].sum())
        for window, count in zip(windows, counts, strict=True)
    )
    assert found[1] == pytest.approx(expected, abs=1e-2)


def test_answers_stop_before_the_tasks_own_words(lm):
    free = lm.generate_until(
        requests(("Say", {"until": [], "max_gen_toks": 12, "do_sample": False}))
    )[0]
    stop = free[4:6]
    [answer] = lm.generate_until(
        requests(("Say", {"until": [stop], "max_gen_toks": 12, "do_sample": False}))
    )
    assert answer == free[: free.index(stop)]


def test_a_task_of_ones_own_by_the_command(lm, folder, tmp_path, capsys, monkeypatch):
    from rlcli.cli.main import main

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [
        {"question": f"Half of {2 * n} is", "choices": [f" {n}", f" {n + 1}"], "gold": 0}
        for n in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "halves.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(folder), "--tasks", str(tmp_path / "halves.yaml"), "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)["results"]["halves"]
    scores = lm.loglikelihood(
        requests(*[(row["question"], one) for row in rows for one in row["choices"]])
    )
    right = [scores[n][0] > scores[n + 1][0] for n in range(0, len(scores), 2)]
    assert found["acc"]["value"] == pytest.approx(sum(right) / len(right))
