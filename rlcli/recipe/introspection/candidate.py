"""A completion of a word being typed; in its own module,
so that most completions load nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """One possible completion."""

    text: str
    """The whole word after completion."""
    doc: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether a space may follow: not after a section, a key or a folder."""
        return not self.text.endswith((".", "=", "/"))
