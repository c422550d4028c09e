"""How a recipe writes a question as a prompt: what its training rows have around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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

    kinds = handled_as(dataset)
    kind = kinds[0] if len(kinds) == 1 else dataset.type
    written = declared("datasets", kind, "PROMPT")
    if written is not None:
        return PromptFormat(str(written), chat=False)
    types = {"template": str, "system": str, "chat": bool}
    settings: dict[str, Any] = {}
    for name, type_ in types.items():
        value = argument_of("datasets", dataset, name)
        if isinstance(value, type_):
            settings[name] = value
    return PromptFormat(**settings)
