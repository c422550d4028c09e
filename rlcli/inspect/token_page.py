"""A row as one self-contained HTML page: what is trained on is green, ids appear on hover."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rlcli.errors import escape_control
from rlcli.inspect.token_marks import Token

STYLE = """
body { font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; }
h1 { font-size: 1.1rem; } h2 { font-size: 1rem; font-weight: 500; color: #555; }
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


def token_page(
    title: str, facts: Sequence[tuple[str, str]], sequences: Sequence[Sequence[Token]], follows: str
) -> str:
    """The page. `facts`: (name, value) pairs for the top; `follows`: shown after a prompt that
    awaits a response."""
    title, follows = _safe(title), _safe(follows)
    listed = "".join(f"<dt>{_safe(name)}</dt><dd>{_safe(value)}</dd>" for name, value in facts)
    parts = []
    for number, tokens in enumerate(sequences, start=1):
        if len(sequences) > 1:
            parts.append(f"<h2>sequence {number} of {len(sequences)}</h2>")
        body = "".join(_span(token) for token in tokens)
        tail = f'<span class="follows">{follows}</span>' if follows else ""
        parts.append(f"<pre>{body}{tail}</pre>")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n<dl>{listed}</dl>\n"
        + "\n".join(parts)
        + (
            "\n<p>Green is trained on, the rest is masked; blue tokens have a job of their "
            "own.</p></body></html>\n"
        )
    )


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
