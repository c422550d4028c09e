"""The kind of rows, judged by the names of their columns, and the dataset that reads them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

Setting = Callable[[str, str], str]
"""(field, column) → how that is set on the command line."""

PROMPT = ("prompt", "instruction", "question", "problem", "query", "input")
ANSWER = ("answer", "completion", "response", "output", "solution")
MESSAGES = ("messages", "conversations", "conversation")
LABEL = ("label", "desirable")


@dataclass(frozen=True)
class RowColumns:
    """The columns of one sort of rows."""

    kind: str
    """The dataset that reads them."""
    usual: Mapping[str, tuple[str, ...]]
    """Field → names that its column usually has."""
    absent: tuple[str, ...] = ()
    """Fields that the dataset otherwise needs, and that such rows do not have."""

    @property
    def names(self) -> set[str]:
        """By which a user may name its columns."""
        synonyms = (name for names in self.usual.values() for name in names)
        return {*self.usual, *synonyms, *OPTIONAL.get(self.kind, ())}

    def fields_of(self, named: Mapping[str, str]) -> dict[str, str] | None:
        """Field → its column, for columns that the user names by the field or by another usual
        name of it; None if a name is that of no field, or of several, or two are of the same."""
        fields: dict[str, str] = {}
        for name, column in named.items():
            meant = [field for field, usual in self.usual.items() if name in usual]
            if name in (*self.usual, *OPTIONAL.get(self.kind, ())):
                meant = [name]
            if len(meant) != 1 or meant[0] in fields:
                return None
            fields[meant[0]] = column
        return fields

    def columns_of(self, columns: Collection[str], named: Mapping[str, str]) -> dict[str, str]:
        """Field → its column: the one that the user names, or the first with a usual name.
        Fields without a column are left out."""
        located = dict(self.fields_of(named) or {})
        for field, usual in self.usual.items():
            candidates = [name for name in usual if name in columns]
            if field not in located and candidates:
                located[field] = candidates[0]
        return located

    def fits(self, columns: Collection[str], named: Mapping[str, str]) -> bool:
        """Whether the rows have a column for each field, and all names of the user are of
        fields."""
        return self.fields_of(named) is not None and not self.missing(columns, named)

    def missing(self, columns: Collection[str], named: Mapping[str, str]) -> list[str]:
        """The fields without a column."""
        located = self.columns_of(columns, named)
        return [field for field in self.usual if field not in located]

    def arguments(
        self, columns: Collection[str], named: Mapping[str, str]
    ) -> dict[str, str | None]:
        """The arguments that name the columns to the dataset."""
        located = self.columns_of(columns, named)
        keys: dict[str, str | None] = {f"{field}_key": located[field] for field in located}
        return keys | {f"{field}_key": None for field in self.absent}


OPTIONAL = {"chat": ("tools",), "paired": ("margin",)}
"""Optional fields of some kinds, used if rows have them."""

LAYOUTS = (
    RowColumns("chat", {"messages": MESSAGES}),
    RowColumns(
        "paired",
        {
            "prompt": PROMPT,
            "positive": ("pos_answers", "chosen"),
            "negative": ("neg_answers", "rejected"),
        },
    ),
    RowColumns("paired", {"positive": ("chosen",), "negative": ("rejected",)}, absent=("prompt",)),
    RowColumns(
        "prompt_answer",
        {"prompt": ("instruction",), "context": ("input", "context"), "answer": ANSWER},
    ),
    RowColumns("prompt_answer", {"prompt": ("prompt", "instruction"), "answer": ANSWER[:4]}),
    RowColumns(
        "math_prompts", {"question": ("question", "problem"), "answer": ("answer", "solution")}
    ),
    RowColumns("prompt_answer", {"prompt": PROMPT, "answer": ANSWER}),
    RowColumns(
        "math_prompts",
        {
            "question": PROMPT,
            "answer": ("answer", "solution", "ground_truth", "reward_model.ground_truth"),
        },
    ),
    RowColumns("prompt_only", {"prompt": PROMPT}),
    RowColumns("plain_text", {"text": ("text", "content")}),
    RowColumns("unpaired", {"prompt": PROMPT, "answer": ANSWER, "label": LABEL}),
    RowColumns("unpaired", {"answer": MESSAGES, "label": LABEL}, absent=("prompt",)),
    RowColumns(
        "unpaired",
        {
            "prompt": PROMPT,
            "positive": ("pos_answers", "chosen"),
            "negative": ("neg_answers", "rejected"),
        },
        absent=("answer", "label"),
    ),
    RowColumns(
        "unpaired",
        {"positive": ("chosen",), "negative": ("rejected",)},
        absent=("prompt", "answer", "label"),
    ),
)
"""The first that fits wins; so rows are read as unpaired only by those who ask for it."""

LEARNED_BY = {
    "chat": ("sft",),
    "prompt_answer": ("sft",),
    "plain_text": ("sft",),
    "paired": ("dpo", "reward"),
    "math_prompts": ("grpo", "ppo"),
    "prompt_only": ("grpo", "ppo"),
    "unpaired": ("kto",),
}
"""Dataset → the recipes that learn from its rows."""


def columns_of_row(row: Mapping[str, Any]) -> list[str]:
    """The names of a row's fields, and of those in an object: `reward_model.ground_truth`; each
    once, though a row may have a field of that name too."""
    objects = {name: value for name, value in row.items() if isinstance(value, dict)}
    nested = (f"{name}.{key}" for name, value in objects.items() for key in value)
    return list(dict.fromkeys([*row, *nested]))


def with_nested(row: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The row with fields of its objects as its own, if they are among these names."""
    nested = {}
    for name in set(names) - row.keys():
        outer, _, inner = name.partition(".")
        if isinstance(row.get(outer), dict) and inner in row[outer]:
            nested[name] = row[outer][inner]
    return row | nested


def closest_nested(name: str, columns: Sequence[str]) -> str | None:
    """A hint for a field of an object that a user has named: the one that was probably meant, if
    there is one."""
    near = get_close_matches(name, columns, 1, cutoff=0.75) if "." in name else []
    return f"did you mean {near[0]}?" if near else None


def layout_of(
    columns: Collection[str], kinds: Collection[str], named: Mapping[str, str]
) -> RowColumns | None:
    """The layout of rows with these columns, among those of some datasets; None if none fits. One
    that has all fields that the user names is not passed over, because it lacks a column, for one
    with fewer fields, which knows the names only as other words for its own."""
    allowed = [layout for layout in LAYOUTS if layout.kind in kinds]
    literal = [layout for layout in allowed if named and set(named) <= set(layout.usual)]
    fullest = max((len(layout.usual) for layout in literal), default=0)
    return next(
        (
            layout
            for layout in allowed
            if layout.fits(columns, named) and (layout in literal or len(layout.usual) >= fullest)
        ),
        None,
    )


def completion(
    columns: Collection[str], kinds: Collection[str], named: Mapping[str, str], setting: Setting
) -> str:
    """What to do about rows in which the columns that the user names are not all that is needed, or
    do not belong together."""
    accepting = [
        layout
        for layout in LAYOUTS
        if layout.kind in kinds
        and layout.fields_of(named) is not None
        and layout.missing(columns, named)
    ]
    if accepting:
        nearest = min(accepting, key=lambda layout: len(layout.missing(columns, named)))
        lacking = nearest.missing(columns, named)
        settings = " ".join(setting(field, "COLUMN") for field in lacking)
        return f"rows of {nearest.kind} also have {' and '.join(lacking)}: set {settings} too"
    sets = [" and ".join(layout.usual) for layout in LAYOUTS if layout.kind in kinds]
    return f"name the columns of fields that belong together: {'; '.join(dict.fromkeys(sets))}"


def remedy(columns: Sequence[str], kinds: Collection[str], setting: Setting) -> str | None:
    """What to do with rows of these columns, which lack a field of the datasets `kinds`; None if
    nothing is likely."""
    layout = layout_of(columns, kinds, {})
    if layout is not None:
        located = layout.columns_of(columns, {}).items()
        settings = [setting(*column) for column in located]
        return f"set {' '.join(settings)}; a dataset of type hf finds the columns itself"
    candidates = list(_candidates(columns, kinds))
    if not candidates:  # a dataset of a project
        return None
    nearest = max(candidates, key=lambda candidate: candidate.rank)
    others = [layout for layout in LAYOUTS if layout.fits(columns, {})]
    most = max((len(layout.usual) for layout in others), default=0)
    if others and most >= nearest.present:
        fullest = [layout.kind for layout in others if len(layout.usual) == most]
        return _for_other_algorithms(fullest)
    return _naming(columns, nearest, setting) if nearest.present else None


@dataclass(frozen=True)
class _Candidate:
    """A layout that rows may have been meant to have."""

    layout: RowColumns
    located: dict[str, str]
    """Field → its column."""
    slips: dict[str, str]
    """Field → the column whose name is probably a misspelling of one of its names."""

    @property
    def present(self) -> int:
        return len(self.located) + len(self.slips)

    @property
    def rank(self) -> tuple[int, int]:
        """The more fields are present, and the fewer are missing, the likelier it is."""
        return self.present, self.present - len(self.layout.usual)


def _candidates(columns: Sequence[str], kinds: Collection[str]) -> list[_Candidate]:
    return [
        _Candidate(layout, layout.columns_of(columns, {}), _slips(columns, layout))
        for layout in LAYOUTS
        if layout.kind in kinds
    ]


def _slips(columns: Sequence[str], layout: RowColumns) -> dict[str, str]:
    taken = layout.columns_of(columns, {})
    free = [column for column in columns if column not in taken.values()]
    slips: dict[str, str] = {}
    for field, usual in layout.usual.items():
        near = [match for name in usual for match in get_close_matches(name, free, 1, cutoff=0.75)]
        if field not in taken and near:
            slips[field] = near[0]
            free.remove(near[0])
    return slips


def _for_other_algorithms(kinds: Sequence[str]) -> str:
    recipes = dict.fromkeys(recipe for kind in kinds for recipe in LEARNED_BY[kind])
    commands = " or ".join(f"rlcli train {recipe}" for recipe in recipes)
    types = " or ".join(dict.fromkeys(kinds))
    return f"these are rows of {types}, for {commands}"


def _naming(columns: Sequence[str], nearest: _Candidate, setting: Setting) -> str:
    """How to name the columns of the fields that are missing."""
    named = dict(nearest.slips)
    taken = {**nearest.located, **named}
    free = [column for column in columns if column not in taken.values()]
    missing = [field for field in nearest.layout.usual if field not in taken]
    if len(missing) == 1 and len(free) == 1:
        named[missing.pop()] = free[0]
    if missing:
        names = [" or ".join(nearest.layout.usual[field][:2]) for field in missing]
        example = setting(missing[0], "COLUMN")
        return (
            f"rows of {nearest.layout.kind} also have {' and '.join(names)}; if a column of "
            f"another name holds that, set {example}"
        )
    return _proposal(setting, named)


def _proposal(setting: Setting, named: Mapping[str, str]) -> str:
    """Settings that name columns which are probably those of some fields. `named`: field → its
    column."""
    meant = " and ".join(f"{column} is the {field}" for field, column in named.items())
    settings = [setting(*column) for column in named.items()]
    return f"if {meant}, set {' '.join(settings)}"
