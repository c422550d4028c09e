"""One way to go on with a word that is being typed; apart, so that most completions load nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """One way to go on."""

    text: str
    """The whole word as it would then read."""
    doc: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether a space may follow: not after a section, a key or a folder."""
        return not self.text.endswith((".", "=", "/"))
