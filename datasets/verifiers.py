"""Tasks of a taskset of verifiers, as prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

from rlcli.api.data import register_dataset
from rlcli.api.limits import Limits, check_arguments
from rlcli.errors import DataError

from ._made_prompts import MadePrompt, MadePrompts
from ._messages import Message, Prompt


@register_dataset("verifiers")
@dataclass(kw_only=True)
class VerifiersTasks(MadePrompts):
    """Tasks of verifiers, for the environment `verifiers`, which plays them."""

    REQUIRES: ClassVar[tuple[str, ...]] = ("verifiers>=0.4,<0.5",)
    NEEDS_TEMPLATE: ClassVar[bool] = True
    LIMITS: ClassVar[Limits] = {"first": {"ge": 0}, "rows": {"ge": 1}}

    taskset: dict[str, Any]
    """The installed taskset and its settings, such as `{id: gsm8k-v1, split: train}`: as in
    `environment_args` of the environment."""

    first: int = 0
    """Number of the first task, from 0. Held-out rows are others of the same taskset, or those of
    another split."""

    rows: int | None = None
    """Maximum number of tasks; null: all that there are."""

    _tasks: list[Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_arguments(self)
        if not isinstance(self.taskset.get("id"), str):
            raise ValueError("taskset has no id; it names an installed taskset: {id: gsm8k-v1}")
        end = None if self.rows is None else self.first + self.rows
        self._tasks = list(islice(self._all(), self.first, end))
        if not self._tasks:
            name = self.taskset["id"]
            raise DataError(f"the taskset {name} has no task from number {self.first} on")

    def __len__(self) -> int:
        return len(self._tasks)

    def _all(self) -> Any:
        """The tasks. Raises ValueError if verifiers refuses the taskset or its settings."""
        from verifiers.v1 import load_taskset, taskset_config_type

        try:
            config = taskset_config_type(self.taskset["id"]).model_validate(self.taskset)
            tasks = load_taskset(config)
        except (ImportError, AttributeError, TypeError) as error:
            raise ValueError(f"verifiers cannot load the taskset: {error}") from error
        if self.rows is None and not tasks.bounded:
            raise ValueError("the taskset has no end; set rows")
        return iter(tasks)

    def _make(self, index: int) -> MadePrompt:
        data = self._tasks[index].data
        return MadePrompt(
            id=f"{self.taskset['id']}:{data.idx}",
            content=_prompt(data),
            metadata={"verifiers": data.model_dump(mode="json")},
        )


def _prompt(data: Any) -> Prompt:
    """The messages that an episode usually begins with. Raises DataError if there are none."""
    messages: list[Message] = []
    if data.system_prompt:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    for message in () if isinstance(data.prompt, str | None) else data.prompt:
        messages.append({"role": message.role, "content": _text(message.content)})
    if not messages:
        raise DataError(f"the task {data.idx} has no prompt")
    return messages


def _text(content: Any) -> str:
    """The content of a message, with the types of what is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(getattr(part, "text", f"[{part.type}]") for part in content)
