"""Reports contradictions between sections, unless they only follow from a problem reported
earlier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlcli.recipe.expansion.rollouts import as_rollout
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.removal import place_of, removed_at
from rlcli.recipe.parsing.tree import (
    KeyPath,
    MappingNode,
    Mark,
    at,
    dotted,
    key_mark,
    keys_at,
    nearest,
)
from rlcli.recipe.parsing.unresolved import Unresolved
from rlcli.recipe.schema import Recipe
from rlcli.spelling import name_instead


@dataclass
class Notes:
    """A recipe, and where to report its problems."""

    recipe: Recipe
    tree: MappingNode
    problems: Problems
    unresolved: Unresolved
    positions: Mapping[str, int] = field(default_factory=dict)
    """Positions of models of roles that start from another recipe, once that is loaded."""
    told: set[tuple[object, ...]] = field(default_factory=set)
    """What `note_once` has reported."""
    unable: dict[str, dict[KeyPath, str]] = field(default_factory=dict)
    """Role → call → a verb for what the call asks of the role's backend, which cannot do it."""
    strays: dict[str, list[KeyPath]] = field(default_factory=dict)
    """Name that no role has → the calls of it."""
    removed: set[str] = field(default_factory=set)
    """Roles that null removes, reported where a call names them."""
    missed: set[str] = field(default_factory=set)
    """Calls that null removes, although others read what they made."""

    def note(
        self,
        code: str,
        message: str,
        path: KeyPath,
        hint: str | None = None,
        needs: Iterable[KeyPath] = (),
        same: str | None = None,
    ) -> bool:
        """Point at a value, or at the key if the value is a mapping or a default. `needs`: what the
        verdict depends on in addition to the value itself; if any of it is in doubt, so is the
        verdict. Problems with the same `same` are reported once per place in a file, which aliases
        may have carried to several calls. Returns whether the verdict stands."""
        if self.unresolved.about(path) or self.unresolved.about_absence(self.tree, path):
            return False
        if any(self.is_doubtful(needed) for needed in needs):
            return False
        self.problems.add(code, message, self.mark(path), hint, same=same)
        return True

    def note_once(
        self,
        same: tuple[object, ...],
        code: str,
        message: str,
        path: KeyPath,
        hint: str | None,
        needs: Iterable[KeyPath],
    ) -> None:
        """Like `note`, for a value shared by several calls: reported only for the first of them."""
        if same not in self.told and self.note(code, message, path, hint, needs):
            self.told.add(same)

    def is_doubtful(self, path: KeyPath) -> bool:
        """Whether a value is known not to be what its user intended."""
        return self.unresolved.about_part(path) or self.unresolved.about_absence(self.tree, path)

    def mark(self, path: KeyPath) -> Mark:
        """Where a value is written."""
        node = nearest(self.tree, path)
        key = key_mark(self.tree, path)
        return key if key is not None and isinstance(node, MappingNode) else node.mark

    def written(self, path: KeyPath) -> KeyPath:
        """The key that a user sets: that of a rollout's role is below its `rollout`."""
        section = as_rollout(path)
        return section if at(self.problems.written, section[:3]) is not None else path

    def key(self, path: KeyPath) -> str:
        """That key as it is written on the command line."""
        return dotted(self.written(path))

    def is_set(self, path: KeyPath) -> bool:
        """Whether some layer sets a value."""
        return at(self.tree, path) is not None

    def first_set(self, *paths: KeyPath) -> KeyPath:
        """The first of several values set by a layer, as the place to point at for a contradiction;
        else the last."""
        return next((path for path in paths if self.is_set(path)), paths[-1])

    def unknown(
        self, kind: str, name: str, section: KeyPath, path: KeyPath, instead: str | None = None
    ) -> None:
        """Report a name missing from a section of names. `instead`:
        what helps if a layer removed it."""
        if self.unresolved.about((*section, name)):
            return
        if removed := removed_at(self.problems.written, (*section, name)):
            self.note("R71", f"the {kind} {name} is removed {place_of(removed)}", path, instead)
        else:
            hint = name_instead(name, keys_at(self.tree, section))
            self.note("R71", f"no {kind} is named {name!r}", path, hint)


def in_words(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
