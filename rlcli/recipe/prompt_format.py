"""How a recipe writes a question as a prompt: what its training rows have around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlcli.recipe.components import argument_of, declared, handled_as, sources_of
from rlcli.recipe.schema import Recipe

QUESTION = "{question}"


@dataclass(frozen=True)
class PromptFormat:
    """A template around a question, and how it becomes tokens."""

    template: str = QUESTION
    system: str | None = None
    chat: bool | Literal["auto"] = "auto"
    """Whether the chat template is applied; auto: if there is one."""

    def prompt(self, question: str) -> str:
        """The user's message."""
        return self.template.replace(QUESTION, question)

    def text(self, question: str) -> str:
        """The whole prompt where no chat template is applied."""
        prompt = self.prompt(question)
        return prompt if self.system is None else f"{self.system}\n\n{prompt}"


def prompt_format(recipe: Recipe) -> PromptFormat:
    """The format of the rows that a recipe trains on. Of several datasets that are mixed,
    the first one's."""
    dataset = recipe.datasets[recipe.train.dataset]
    while (sources := sources_of(dataset)) and sources[0] in recipe.datasets:
        dataset = recipe.datasets[sources[0]]

    def argument(name: str) -> object:
        return argument_of("datasets", dataset, name)

    kinds = handled_as(dataset)
    kind = kinds[0] if len(kinds) == 1 else dataset.type
    written, template, system = (
        declared("datasets", kind, "PROMPT"),
        argument("template"),
        argument("system"),
    )
    if written is not None:
        return PromptFormat(str(written), chat=False)
    chat = argument("chat")
    return PromptFormat(
        template if isinstance(template, str) else QUESTION,
        system if isinstance(system, str) else None,
        chat if isinstance(chat, bool) else "auto",
    )
