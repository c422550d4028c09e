"""Batches of texts for rewards that read them, and the form of a correct response."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, Literal

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.interface import Example
from rlcli.api.key_meaning import SEQUENCES
from rlcli.testing.batches import Lengths
from rlcli.testing.class_source import source_of

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
LONGEST_LITERAL = 40
MOST_LITERALS = 16

RIGHT_AND_WRONG: tuple[Literal["right"], Literal["wrong"]] = ("right", "wrong")
Rows = Sequence[tuple[str, Sequence[str]]]
"""(prompt, responses) of each sample."""


def responses_of(example: Example) -> list[str]:
    """What one of the EXAMPLES of a reward shows, the right one first."""
    told_apart = [example[kind] for kind in RIGHT_AND_WRONG if kind in example]
    return [*told_apart, *example.get("rewards", {})]


def rows_batch(tokenizer: Any, texts: Rows, rows: Sequence[Mapping[str, Any]]) -> SequenceSample:
    """`text_batch` of samples with these rows, whose fields are its metadata; None for a field that
    a row lacks."""
    batch = text_batch(tokenizer, texts, [None] * len(rows))
    names = dict.fromkeys(name for row in rows for name in row)
    batch.metadata |= {name: [row.get(name) for row in rows] for name in names}
    return batch


def text_batch(tokenizer: Any, rows: Rows, answers: Sequence[Any]) -> SequenceSample:
    """`packed_input_ids` and `prompt_mask` of texts, each response ending with the end token;
    metadata `answer`."""
    tokens: list[int] = []
    mask: list[bool] = []
    lengths: list[list[int]] = []
    for prompt, responses in rows:
        lengths.append([])
        for response in responses:
            asked = tokenizer(prompt, add_special_tokens=False).input_ids
            answered = [
                *tokenizer(response, add_special_tokens=False).input_ids,
                tokenizer.eos_token_id,
            ]
            tokens += [*asked, *answered]
            mask += [True] * len(asked) + [False] * len(answered)
            lengths[-1].append(len(asked) + len(answered))
    return SequenceSample.from_default(
        ids=[f"s{i}" for i in range(len(rows))],
        seqlens={"packed_input_ids": lengths, "prompt_mask": lengths},
        data={
            "packed_input_ids": torch.tensor(tokens, dtype=torch.int64),
            "prompt_mask": torch.tensor(mask, dtype=torch.bool),
        },
        metadata={"answer": list(answers), "batch_index": list(range(len(rows)))},
    )


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
