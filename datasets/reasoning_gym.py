"""Problems of reasoning-gym's tasks: logic, arithmetic, puzzles and games, as many as needed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from rlcli.api.config import stable_seed
from rlcli.api.data import register_dataset
from rlcli.api.limits import Limits, check_arguments
from rlcli.errors import DataError

from ._made_prompts import MadePrompt, MadePrompts

CHUNK = 512
"""Problems that the library makes with one seed."""
CANDIDATES = 32
"""Problems of which a row is the first in its split, which each is with probability 1/2."""
NUMBERED = ("seed", "size")
"""Settings of a task that rows have already."""
BY_HASH = (
    "isomorphic_strings",
    "knight_swap",
    "list_functions",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
"""Tasks whose problems depend on the order of sets, and so on Python's hash seed."""


@register_dataset("reasoning_gym")
@dataclass(kw_only=True)
class ReasoningGymProblems(MadePrompts):
    """Problems of a task of reasoning-gym, for the environment `reasoning_gym`, which scores the
    answers. The train and held-out splits share no question."""

    REQUIRES: ClassVar[tuple[str, ...]] = ("reasoning-gym>=0.1.25,<0.2",)
    DRAWN: ClassVar[bool] = True
    LIMITS: ClassVar[Limits] = {"problems": {"ge": 1, "le": 10_000_000}}
    TRIED_ON: ClassVar[dict[str, Any]] = {"args": {"task": "chain_sum", "problems": 12}}

    task: str
    """Name of the task, such as chain_sum or countdown."""

    config: dict[str, Any] = field(default_factory=dict)
    """Settings of the task, such as `{min_terms: 3}`; those that are left out have the library's
    defaults."""

    problems: int = 4096
    """Number of problems."""

    held_out: bool = False
    """Use questions of the held-out split instead of the training split. A hash assigns each
    question to one of them."""

    seed: int = 0
    """Seed of the problems drawn."""

    template: str = "{question}\n\nWrite the answer between <answer> and </answer>.\n"
    """The prompt; `{question}` stands for the question."""

    def __post_init__(self) -> None:
        check_arguments(self)
        if "{question}" not in self.template:
            raise ValueError(f"template is {self.template!r}; it must contain {{question}}")
        if numbered := [name for name in NUMBERED if name in self.config]:
            raise ValueError(f"config has {numbered[0]}; set seed and problems of the dataset")
        if self.task in BY_HASH and not os.environ.get("PYTHONHASHSEED", "").isdecimal():
            raise ValueError(
                f"the problems of {self.task} depend on Python's hash seed: set the environment "
                "variable PYTHONHASHSEED to a number, so that they can be repeated"
            )
        self._chunk = lru_cache(maxsize=2)(self._open_chunk)
        self._chunk(0)

    def __len__(self) -> int:
        return self.problems

    def _make(self, index: int) -> MadePrompt:
        entry = self._entry(index)
        split = "held-out" if self.held_out else "train"
        about = {"task": self.task, "config": self.config, "entry": repr(_plain(entry))}
        return MadePrompt(
            id=f"{self.task}-{split}-{self.seed}:{index}",
            content=self.template.replace("{question}", entry["question"]),
            metadata={"reasoning_gym": about},
        )

    def _entry(self, index: int) -> Mapping[str, Any]:
        """A problem of the split, as the library describes it. Raises DataError."""
        for number in range(index * CANDIDATES, (index + 1) * CANDIDATES):
            chunk, position = divmod(number, CHUNK)
            entry: Mapping[str, Any] = self._chunk(chunk)[position]
            if _is_held_out(entry["question"]) == self.held_out:
                return entry
        split = "held-out" if self.held_out else "training"
        raise DataError(
            f"{self.task} has too few questions for this config: none of {CANDIDATES} is in the "
            f"{split} split",
            hint="choose a config with which there are more",
        )

    def _open_chunk(self, chunk: int) -> Any:
        """The problems of a chunk, which the library makes as they are read. Raises ValueError for
        a task or config that it does not accept."""
        from reasoning_gym import create_dataset

        seed = stable_seed("reasoning_gym", self.seed, chunk) % (1 << 31)
        try:
            return create_dataset(self.task, seed=seed, size=CHUNK, **self.config)
        except Exception as error:  # an assertion, or whatever its constructor raises
            raise ValueError(f"reasoning-gym refuses the task or its config: {error}") from error


def _is_held_out(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] % 2 == 1


def _plain(value: Any) -> Any:
    """The same in values that a literal of Python can express, without those of NumPy."""
    if isinstance(value, dict):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_plain, value))
    return value.item() if hasattr(value, "item") else value
