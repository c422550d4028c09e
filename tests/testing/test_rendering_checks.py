"""What a row holds is in its tokens, as transformers renders it: faulty datasets are reported."""

import itertools
import os

import pytest

from rlcli.testing.contract import Violation
from rlcli.testing.dataset import DatasetContract
from rlcli.testing.dataset_checks.trial import Trial
from rlcli.testing.tokenizer import byte_tokenizer

CHAT = '''\
"""Conversations, with a fault."""

from dataclasses import dataclass, replace

from rlcli.api.data import register_dataset
from rlcli.datasets.chat import Chat


@register_dataset("NAME")
@dataclass(kw_only=True)
class Faulty(Chat):
    """Chat, changed in one method."""

    def {signature}
        {body}
'''
PROMPT_ANSWER = CHAT.replace("datasets.chat", "datasets.prompt_answer").replace(
    "Chat", "PromptAnswer"
)
MATH_PROMPTS = CHAT.replace("datasets.chat", "datasets.math_prompts").replace("Chat", "MathPrompts")
PAIRED = CHAT.replace("datasets.chat", "datasets.paired").replace("Chat", "Paired")
MIXTURE = CHAT.replace("datasets.chat", "datasets.mixture").replace("Chat", "Mixture")
NUMBERS = itertools.count()
READ = "_read(self, fields):"
PLANNED = "__post_init__(self):"
FAULTS = {
    "tools are ignored": (
        CHAT,
        READ,
        'return super()._read({**fields, "tools": None})',
        "test_every_field_matters",
        "samples are the same whatever is in the field tools of its rows",
    ),
    "texts of messages are changed": (
        CHAT,
        READ,
        'changed = [{**m, "content": (m.get("content") or "x").replace("2", "3")} '
        'for m in fields["messages"]]; return super()._read({**fields, "messages": changed})',
        "test_conversations_are_rendered_as_by_transformers",
        "by transformers' apply_chat_template",
    ),
    "a user's message is trained on": (
        CHAT,
        "preview(self, index):",
        "usual = super().preview(index); "
        "return replace(usual, trained=[[True] * len(usual.trained[0])])",
        "test_only_responses_are_trained_on",
        "is trained on, which is not a message of the assistant",
    ),
    "the token before a response is trained on": (
        CHAT,
        "preview(self, index):",
        "usual = super().preview(index); flags = usual.trained[0]; "
        "return replace(usual, trained=[[a or b for a, b in zip(flags, [*flags[1:], False])]])",
        "test_only_responses_are_trained_on",
        "'<assistant>4<eos>' is trained on, which is not a message of the assistant",
    ),
    "markers change what is trained on": (
        CHAT,
        "preview(self, index):",
        "usual = super().preview(index); flags = usual.trained[0]; "
        "last = [flag and 2 * place > len(flags) for place, flag in enumerate(flags)]; "
        "return replace(usual, trained=[last]) if self._speaker._by_markers else usual",
        "test_masks_do_not_depend_on_markers",
        "with a template that marks what the assistant wrote",
    ),
    "what follows the first mark is the answer": (
        MATH_PROMPTS,
        READ,
        'parts = str(fields["answer"]).split("####"); '
        'return super()._read({**fields, "answer": "####" + parts[min(1, len(parts) - 1)]})',
        "test_final_answers",
        "answer is '42' of a row, and '42\\n6*7=42' when its answer is",
    ),
    "the sign of an answer is lost": (
        MATH_PROMPTS,
        READ,
        'question, answer = super()._read(fields); return question, answer.removeprefix("-")',
        "test_final_answers",
        "answer is '3' of both '-3' and '3'",
    ),
    "a prompt within answers is cut": (
        PAIRED,
        READ,
        "prompt, pairs = super()._read(fields); "
        "return prompt if self.prompt_key else prompt[:4], pairs",
        "test_prompts_within_answers_mean_the_same",
        "with answers that begin with the prompt and ' ', row 0: packed_input_ids",
    ),
    "one dataset after the other": (
        MIXTURE,
        PLANNED,
        "super().__post_init__(); self._plan.sort()",
        "test_proportions_hold_within_a_pass",
        "long has 100 of 400 rows, but 100 of the first 200",
    ),
    "the first rows fill up a pass": (
        MIXTURE,
        PLANNED,
        "super().__post_init__(); names = [name for name, *_ in self._plan]; "
        "self._plan = [(name, names[:index].count(name) % len(self._sources[name]), 0) "
        "for index, name in enumerate(names)]",
        "test_parts_of_a_pass_are_drawn_from_all_rows",
        "all are their first rows",
    ),
    "prompts lack what begins a response": (
        PROMPT_ANSWER,
        "preview(self, index):",
        "usual = super().preview(index); start = usual.trained[0].index(True) - 1; "
        "drop = lambda row: [*row[:start], *row[start + 1:]]; "
        "return replace(usual, sequences=[drop(usual.sequences[0])], "
        "trained=[drop(usual.trained[0])]) if self.util.tokenizer.chat_template else usual",
        "test_prompts_are_rendered_as_by_transformers",
        "by transformers' apply_chat_template",
    ),
}

PARAMETERS = {
    "test_prompts_are_rendered_as_by_transformers": [None],
    "test_prompts_within_answers_mean_the_same": [" "],
}


@pytest.fixture
def trial_of(tmp_path, monkeypatch):
    project = tmp_path / "project"
    (project / "datasets").mkdir(parents=True)
    (project / "pyproject.toml").write_text("[tool.rlcli]\n")
    monkeypatch.setenv("RLCLI_PROJECT", str(project))

    def make(template, signature, body):
        name = f"faulty_{next(NUMBERS)}"
        source = template.replace("{signature}", signature).replace("{body}", body)
        (project / "datasets" / f"{name}.py").write_text(source.replace("NAME", name))
        return Trial(name, {}, tmp_path, byte_tokenizer(chat=True))

    return make


@pytest.mark.parametrize("fault", FAULTS)
def test_a_dataset_whose_tokens_are_not_those_of_its_rows_is_reported(trial_of, fault):
    template, signature, body, check, finding = FAULTS[fault]
    trial = trial_of(template, signature, body)
    with pytest.raises(Violation) as caught:
        getattr(DatasetContract(), check)(trial, *PARAMETERS.get(check, []))
    assert finding in caught.value.finding


def test_a_byte_order_mark_that_becomes_a_part_of_a_column_is_reported(trial_of, monkeypatch):
    trial = trial_of(PROMPT_ANSWER, "preview(self, index):", "return super().preview(index)")
    DatasetContract().test_formats_mean_the_same(trial)
    usual = os.fdopen

    def keeps_the_mark(handle, mode, **how):
        return usual(handle, mode, **({**how, "encoding": "utf-8"} if "encoding" in how else how))

    monkeypatch.setattr(os, "fdopen", keeps_the_mark)
    with pytest.raises(Violation) as caught:
        DatasetContract().test_formats_mean_the_same(trial)
    assert "byte order mark" in caught.value.finding


def test_a_dataset_without_a_chat_template_need_not_use_it(trial_of):
    trial = trial_of(
        PROMPT_ANSWER, "__post_init__(self):", "self.chat = False; super().__post_init__()"
    )
    DatasetContract().test_prompts_are_rendered_as_by_transformers(trial, None)
