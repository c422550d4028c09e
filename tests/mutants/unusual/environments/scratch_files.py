"""Keeps a text in a temporary file."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rlcli.api.environment import Environment, register_environment


@dataclass(kw_only=True)
class ScratchFiles(Environment):
    """A notebook."""

    REPRODUCIBLE: ClassVar[bool] = True

    _folder: Any = field(init=False, repr=False, default=None)

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        self._folder = tempfile.TemporaryDirectory()
        return None

    def write(self, text: str) -> str:
        """Write a text into the notebook."""
        with self._file.open("a", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(text)
        return "written"

    def read(self) -> str:
        """Read the notebook."""
        with self._file.open("a+", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.seek(0)
            return file.read()

    @property
    def _file(self) -> Path:
        return Path(self._folder.name) / "notebook"

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()


register_environment("scratch_files", ScratchFiles)
