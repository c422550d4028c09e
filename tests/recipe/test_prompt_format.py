"""What a question to a trained model has around it."""

import pytest

from rlcli.recipe.prompt_format import PromptFormat, prompt_format
from rlcli.recipe.resolve import load_recipe


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ({"type": "plain_text", "args": {"path": "texts.jsonl"}}, PromptFormat(chat=False)),
        (
            {"type": "hf", "args": {"path": "texts.jsonl", "kind": "plain_text"}},
            PromptFormat(chat=False),
        ),
        ({"type": "hf", "args": {"path": "rows.jsonl"}}, PromptFormat()),
        (
            {"type": "prompt_answer", "args": {"path": "rows.jsonl", "template": "Q: {question}"}},
            PromptFormat("Q: {question}"),
        ),
    ],
    ids=["plain_text", "hf of texts", "hf", "prompt_answer"],
)
def test_a_question_is_written_as_the_rows_of_training_are(dataset, expected):
    recipe = load_recipe("sft_math").recipe
    trained_on = type(recipe.datasets[recipe.train.dataset])(**dataset)
    with_rows = recipe.model_copy(update={"datasets": {recipe.train.dataset: trained_on}})
    assert prompt_format(with_rows) == expected
