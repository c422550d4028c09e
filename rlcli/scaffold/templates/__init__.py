"""The templates and their rendering."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def render(template: str, **words: str) -> str:
    """Render a template of this folder; a missing variable is an error."""
    from jinja2 import Environment, StrictUndefined

    text = (HERE / template).read_text(encoding="utf-8")
    return (
        Environment(undefined=StrictUndefined, keep_trailing_newline=True)
        .from_string(text)
        .render(**words)
    )
