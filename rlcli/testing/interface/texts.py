"""What a reward gives to texts, the form of a correct response, and batches of texts."""

from __future__ import annotations

import ast
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice, pairwise, zip_longest
from typing import Any, Literal

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.interface import ANSWER_FORMS, Example, ModelInterface
from rlcli.api.key_meaning import PROMPT_MASK, SEQUENCES
from rlcli.testing.batches import PAIRS, Lengths
from rlcli.testing.class_source import source_of
from rlcli.testing.contract import Violation
from rlcli.testing.interface.training_trial import overrides, place_of_call

ANSWERS = ("7", "3", "3/4", "-5", "1,000", "0.25")
"""Gold answers of rows, all of different value."""

TEXTS = (
    "7",
    "It is 12.5 km, or is it 12.5 km?",
    "<think>6 + 1</think>\n<answer>7</answer>",
    "\\boxed{3} and \\boxed{4}",
    '{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}',
    "def add(a, b):  \n\treturn a + b\n\nprint(add(1, 2))",
    "One. Two! Three? " * 8,
    "Ab ab ab AB ab",
)
"""Responses as rules of all kinds tell them apart."""
NONSENSE = (
    "",
    " ",
    "\n\n\n",
    "####",
    "#### ",
    "\\boxed{",
    "\\boxed{}",
    "}{",
    "\\boxed{" * 300,
    "####" * 300,
    "((((((" * 50,
    "\x00",
    "\x1b[31m",
    "\u202e8",
    "８",
    "é" * 500,
    "🙂" * 100,
    "#### ٣",
    "#### 1/0",
    "#### nan",
    "#### inf",
    "#### -",
    "#### 1e999",
    "#### " + "9" * 5000,
    "The answer is",
    "The answer is .",
    "answer: " * 200,
    "a" * 20000,
    "$" * 99,
    "#### \\frac{1}{0}",
    "#### None",
    "#### {answer}",
    "<think>",
    "%s %d {0} {}",
    "'; DROP TABLE rows; --",
)
"""What models write before they have been trained, and what breaks parsers."""
UNSCORED = -math.inf
"""Of a text that cannot be scored: less than anything else."""
LONGEST_LITERAL = 40
MOST_LITERALS = 16

RIGHT_AND_WRONG: tuple[Literal["right"], Literal["wrong"]] = ("right", "wrong")
Rows = Sequence[tuple[str, Sequence[str]]]
"""(prompt, responses) of each sample."""
Gold = Callable[[str], str]
"""A row's answer → the text of a correct response to it."""


def scores(interface: ModelInterface, texts: Sequence[str], answers: Sequence[str]) -> list[float]:
    """What each text earns as a response to a row with its answer; UNSCORED if it cannot be
    scored."""
    rewards = list(interface.score_texts(list(texts), list(answers)))
    where = place_of_call(interface, "score_texts")
    if len(rewards) != len(texts):
        raise Violation(
            f"score_texts returns {len(rewards)} rewards for {len(texts)} responses",
            "one reward for each response, in their order",
            where,
        )
    for text, reward in zip(texts, rewards, strict=True):
        if reward is not None and not math.isfinite(reward):
            raise Violation(f"{text[:40]!r} earns {reward:g}", "a reward is a number", where)
    return [UNSCORED if reward is None else reward for reward in rewards]


def accepted_form(interface: ModelInterface, answers: Sequence[str]) -> str | None:
    """The form in which a reward accepts most gold answers, and tells most of them from others;
    None if it accepts none in any form."""
    others = [*answers[1:], *answers[:1]]

    nothing = scores(interface, [""] * len(answers), answers)

    def accepted(form: str) -> tuple[int, int]:
        gold, wrong = (
            scores(interface, [form.replace("{answer}", text) for text in fillings], answers)
            for fillings in (answers, others)
        )
        is_accepted = list(map(operator.gt, gold, nothing))
        is_distinct = map(operator.gt, gold, wrong)
        return sum(map(operator.and_, is_accepted, is_distinct)), sum(is_accepted)

    counts = {form: accepted(form) for form in ANSWER_FORMS}
    best = max(counts, key=lambda form: counts[form])
    return best if any(counts[best]) else None


def reads_answers(interface: ModelInterface) -> bool:
    """Whether its rows have a short answer, as those of most rewards do: it scores texts, and does
    not show right and wrong responses to rows of its own."""
    tells_apart = any(example.keys() >= {*RIGHT_AND_WRONG} for example in interface.EXAMPLES)
    return overrides(interface, "score_texts") and not tells_apart


@dataclass(frozen=True)
class AskedRow:
    """A row, and responses to its prompt that are tried in turn."""

    fields: Mapping[str, Any]
    prompt: str
    responses: Sequence[str]


def rows_of_answers(answers: Sequence[str], gold: Gold) -> list[AskedRow]:
    """Rows with an answer. Of the responses one is correct, one has another answer, one has none,
    and one has it without the form; text in a prompt is never an answer."""
    return [
        AskedRow(
            {"answer": answer},
            f"Is it {gold(answer)} or not?\n",
            (gold(answer), gold(wrong), "", f"Perhaps {answer}"),
        )
        for answer, wrong in pairwise((*answers, answers[0]))
    ]


def rows_of_examples(examples: Sequence[Example]) -> list[AskedRow]:
    """Rows of the EXAMPLES of a reward. Of eight responses two are shown there, a right and a wrong
    one where it tells them apart; the others are empty, because to judge a text may take long."""
    rows = []
    for example in examples:
        told_apart = [example[kind] for kind in RIGHT_AND_WRONG if kind in example]
        shown = [*told_apart, *example.get("rewards", {}), ""][:2]
        prompt = str(example["row"].get("prompt", ""))
        rows.append(AskedRow(example["row"], prompt, [*shown, *[""] * 6]))
    return rows


def batch_of_rows(
    tokenizer: Any, rows: Sequence[AskedRow], lengths: Lengths = PAIRS, seed: int = 0
) -> SequenceSample:
    """The rows in turn, with as many responses in each sample as there are `lengths`; those of
    length 0 are empty."""
    tried = list(islice(cycle(rows), len(lengths)))
    texts = []
    for first, (group, row) in enumerate(zip(lengths, tried, strict=True), start=seed):
        choices = islice(cycle(row.responses), first % len(row.responses), None)
        texts.append((row.prompt, [next(choices) if length else "" for _, length in group]))
    return rows_batch(tokenizer, texts, [row.fields for row in tried])


def text_batch(tokenizer: Any, texts: Rows, answers: Sequence[Any]) -> SequenceSample:
    """`rows_batch` of samples whose rows have an `answer` alone."""
    return rows_batch(tokenizer, texts, [{"answer": answer} for answer in answers])


def rows_batch(tokenizer: Any, texts: Rows, rows: Sequence[Mapping[str, Any]]) -> SequenceSample:
    """`packed_input_ids` and `prompt_mask` of texts, each response ending with the end token. The
    fields of their rows are metadata: None for a field that a row lacks, such as `answer`."""

    groups = [_encoded(tokenizer, *text) for text in texts]
    tokens = chain(*(tokens for tokens, _ in chain(*groups)))
    mask = chain(*(mask for _, mask in chain(*groups)))
    lengths = [[len(mask) for _, mask in group] for group in groups]
    names = dict.fromkeys(["answer", *(name for row in rows for name in row)])
    metadata = {name: [row.get(name) for row in rows] for name in names}
    return SequenceSample.from_default(
        ids=[f"s{number}" for number in range(len(rows))],
        seqlens=lengths,
        data={
            SEQUENCES: torch.tensor([*tokens], dtype=torch.int64),
            PROMPT_MASK: torch.tensor([*mask], dtype=torch.bool),
        },
        metadata={"batch_index": [*range(len(rows))], **metadata},
    )


def _encoded(
    tokenizer: Any, prompt: str, responses: Sequence[str]
) -> list[tuple[list[int], list[bool]]]:
    """The tokens of the prompt and each response, which ends with the end token, and whether they
    are of the prompt."""
    asked, *answered = (
        list(tokenizer(text, add_special_tokens=False).input_ids) for text in (prompt, *responses)
    )
    return [
        (
            [*asked, *tokens, tokenizer.eos_token_id],
            [True] * len(asked) + [False] * (len(tokens) + 1),
        )
        for tokens in answered
    ]


def texts_for(cls: type) -> list[str]:
    """TEXTS, and those that a component's file names, which its rules may look for: each of them,
    and any two in a row."""
    module = inspect.getmodule(cls)
    sources = [base for base in cls.__mro__ if inspect.getmodule(base) is module]
    named = dict.fromkeys(text for code in (*sources, module) for text in _literals(code))
    literals = list(named)[:MOST_LITERALS]
    around = [f"{first} a {second}" for first, second in pairwise((*literals, *literals[:1]))]
    return [*TEXTS, *literals, *around, " a ".join(literals)]


def _literals(code: Any) -> list[str]:
    """The short texts in the source of a class or module."""
    nodes = ast.walk(source_of(code))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and 0 < len(text) <= LONGEST_LITERAL]


def batch_of_texts(
    make_batch: Callable[[Lengths], SequenceSample], tokenizer: Any, texts: Sequence[str]
) -> SequenceSample:
    """A batch in which each text is a response and a prompt, of two responses a sample, and one
    response is empty."""
    encoded = tokenizer(list(texts), add_special_tokens=False).input_ids
    responses = [*([*ids, tokenizer.eos_token_id] for ids in encoded), []]
    pairs = zip_longest(responses[::2], responses[1::2], fillvalue=responses[0])
    prompts = reversed(encoded)
    rows = [[(prompt, r) for r in pair] for pair, prompt in zip(pairs, prompts)]  # noqa: B905
    batch = make_batch([[(len(p), len(r)) for p, r in group] for group in rows])
    tokens = [token for group in rows for p, r in group for token in (*p, *r)]
    batch.data[SEQUENCES] = torch.tensor(tokens, dtype=torch.int64)
    return batch
