"""Noting what is wrong between sections, unless it only follows from something that was noted before."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping as ReadMapping

from rlcli.recipe.doubts import Doubts
from rlcli.recipe.problems import Problems
from rlcli.recipe.removal import place_of, removed_at
from rlcli.recipe.schema import Recipe
from rlcli.recipe.suggest import close_to
from rlcli.recipe.tree import Mapping, Mark, Path, at, key_mark, nearest


class Notes:
    """A recipe, and where to note what is wrong with it."""

    def __init__(
        self,
        recipe: Recipe,
        tree: Mapping,
        problems: Problems,
        doubts: Doubts,
        positions: ReadMapping[str, int] | None = None,
    ):
        self.recipe = recipe
        self.tree = tree
        self.problems = problems
        self.doubts = doubts
        self.positions = positions or {}
        """Of the models of roles that start from another recipe, where that is loaded."""
        self.told: set[tuple[object, ...]] = set()

    def note(
        self,
        code: str,
        what: str,
        path: Path,
        hint: str | None = None,
        needs: Iterable[Path] = (),
        same: str | None = None,
    ) -> None:
        """Point at a value, or at the key if the value is a mapping or a default. `needs`: what the judgement rests on
        beside the value itself; if any of it is in doubt, so is the judgement. Problems that are the `same` are told
        once for one place in a file, which aliases may have carried to several calls."""
        if self.doubts.about(path) or self.doubts.about_absence(self.tree, path):
            return
        if any(self.is_doubtful(one) for one in needs):
            return
        self.problems.add(code, what, self.mark(path), hint, same=same)

    def note_once(
        self, same: tuple[object, ...], code: str, what: str, path: Path, hint: str | None, needs: Iterable[Path]
    ) -> None:
        """As `note`, for what several calls share by one value: it is told for the first of them."""
        if same not in self.told:
            known = len(self.problems.found)
            self.note(code, what, path, hint, needs)
            if len(self.problems.found) > known:
                self.told.add(same)

    def is_doubtful(self, path: Path) -> bool:
        """Whether a value is not what its user meant, as far as is known."""
        return self.doubts.about_part(path) or self.doubts.about_absence(self.tree, path)

    def mark(self, path: Path) -> Mark:
        """Where a value is written."""
        node = nearest(self.tree, path)
        key = key_mark(self.tree, path)
        return key if key is not None and isinstance(node, Mapping) else node.mark

    def is_set(self, path: Path) -> bool:
        """Whether some layer sets a value."""
        return at(self.tree, path) is not None

    def first_set(self, *paths: Path) -> Path:
        """The first of several values that some layer sets, where a contradiction can be pointed at; else the last."""
        return next((path for path in paths if self.is_set(path)), paths[-1])

    def unknown(self, what: str, name: str, section: Path, path: Path, instead: str | None = None) -> None:
        """A name that a section of names does not have. `instead`: what helps if a layer removed it."""
        if self.doubts.about(section):
            return
        node = at(self.tree, section)
        known = list(node.entries) if isinstance(node, Mapping) else []
        near = close_to(name, known)
        hint = f"did you mean {near}?" if near else f"there is {', '.join(known) or 'none'}"
        if removed := removed_at(self.problems.written, (*section, name)):
            self.note("R71", f"the {what} {name} is removed {place_of(removed)}", path, instead)
        else:
            self.note("R71", f"no {what} is named {name!r}", path, hint)
