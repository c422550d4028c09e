"""Rows as one self-contained HTML page: what is trained on is green, ids appear on hover, and links
lead from row to row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rlcli.errors import escape_control
from rlcli.inspect.token_marks import Token

STYLE = """
body { font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; }
h1 { font-size: 1.1rem; } nav { position: sticky; top: 0; background: inherit; }
section { background: inherit; scroll-margin-top: 1rem; padding-bottom: 2rem; }
h2 { font-size: 1rem; font-weight: 500; color: #555; }
pre { font: 14px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
      background: #fafafa; border: 1px solid #ddd; border-radius: 4px; padding: .8rem; }
pre span { color: #777; } pre span:hover { outline: 1px solid #888; }
.trained { background: #c9efd0; color: #0b3d17 !important; }
.special { font-weight: 600; color: #3457a5; }
.follows { border-left: 3px solid #2b8a3e; padding-left: .4rem; color: #2b8a3e;
           font-style: italic; }
dt { font-weight: 600; float: left; clear: left; width: 6rem; } dd { margin-left: 6rem; }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #ddd; } h2 { color: #aaa; }
  pre { background: #1e2126; border-color: #333; } pre span { color: #999; }
  .trained { background: #1d4a2a; color: #c9efd0 !important; } .special { color: #8fb0f5; }
  .follows { color: #6fce85; }
}
"""


@dataclass(frozen=True)
class PageRow:
    """A row on the page."""

    number: int
    title: str
    facts: Sequence[tuple[str, str]]
    """Names and values that are shown above its tokens."""
    sequences: Sequence[Sequence[Token]]
    follows: str = ""
    """Shown after a prompt that awaits a response."""


def token_page(rows: Sequence[PageRow]) -> str:
    """The page of these rows."""
    title = _safe(rows[0].title)
    sections = "\n".join(_section(rows, index) for index in range(len(rows)))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{STYLE}</style></head>\n<body>\n{sections}\n"
        "<p>Green: trained on. Grey: masked. Blue: special tokens.</p></body></html>\n"
    )


def _section(rows: Sequence[PageRow], index: int) -> str:
    row = rows[index]
    listed = "".join(f"<dt>{_safe(name)}</dt><dd>{_safe(value)}</dd>" for name, value in row.facts)
    follows = f'<span class="follows">{_safe(row.follows)}</span>' if row.follows else ""
    parts = []
    for number, tokens in enumerate(row.sequences, start=1):
        if len(row.sequences) > 1:
            parts.append(f"<h2>sequence {number} of {len(row.sequences)}</h2>")
        parts.append(f"<pre>{''.join(map(_span, tokens))}{follows}</pre>")
    return (
        f'<section id="row{row.number}"><nav>{_links(rows, index)}</nav>'
        f"<h1>{_safe(row.title)}</h1>\n<dl>{listed}</dl>\n" + "\n".join(parts) + "</section>"
    )


def _links(rows: Sequence[PageRow], index: int) -> str:
    """Links to the row before and the row after."""
    links = []
    if index > 0:
        before = rows[index - 1].number
        links.append(f'<a href="#row{before}">← row {before}</a>')
    if index + 1 < len(rows):
        after = rows[index + 1].number
        links.append(f'<a href="#row{after}">row {after} →</a>')
    return " · ".join(links)


def _safe(text: str) -> str:
    """A text as HTML, its control characters escaped."""
    return escape(escape_control(text))


def _span(token: Token) -> str:
    names = [
        name for name, holds in (("trained", token.trained), ("special", token.special)) if holds
    ]
    kind = f' class="{" ".join(names)}"' if names else ""
    hint = f"{token.id}, trained on" if token.trained else f"{token.id}, masked"
    return f'<span{kind} title="{hint}">{escape(token.shown)}</span>'
