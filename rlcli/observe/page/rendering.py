"""Renders a document as one HTML file that loads nothing, also if a model has written it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parent / "static"
SCRIPTS = (
    "uPlot.iife.min.js",
    "elements.js",
    "theme.js",
    "summary.js",
    "curves.js",
    "responses.js",
    "timeline.js",
    "time.js",
    "recipe.js",
    "page.js",
)
"""In the order in which the page has them: each uses those before it."""
STYLES = ("uPlot.min.css", "page.css")
DEMO = Path(__file__).parent / "demo"
"""The folder of a run that comes with rlcli."""
LARGEST = 5_000_000
"""Bytes of a page."""
ROOM = 200_000
"""Of these, for everything but the document."""


def render_page(document: Mapping[str, Any]) -> str:
    """The page of a document (`contents`). If it is too large, samples of some steps are left
    out, and the page says how many."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(STATIC), undefined=StrictUndefined, autoescape=True
    )
    scripts = [(STATIC / name).read_text(encoding="utf-8") for name in SCRIPTS]
    styles = [(STATIC / name).read_text(encoding="utf-8") for name in STYLES]
    return environment.get_template("page.html.j2").render(
        title=document["title"],
        policy=_policy(scripts, styles),
        scripts=scripts,
        styles=styles,
        document=_within(document, LARGEST - ROOM),
    )


def _policy(scripts: list[str], styles: list[str]) -> str:
    """The Content-Security-Policy: only these scripts run, and nothing is requested."""
    allowed = {
        "script-src": " ".join(map(_digest, scripts)),
        "style-src": " ".join(map(_digest, styles)),
    }
    return "; ".join(["default-src 'none'", *(f"{kind} {of}" for kind, of in allowed.items())])


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _within(document: Mapping[str, Any], most: int) -> str:
    """The compressed document, in base64 characters, with the samples of as many steps as have
    room: of every step, every second, every fourth…, and always of the first and the last."""
    samples = document["samples"]
    steps = sorted({sample["step"] for sample in samples})
    stride = 1
    while True:
        chosen = {*steps[::stride], *steps[-1:]}
        shown = [sample for sample in samples if sample["step"] in chosen]
        left_out = len(samples) - len(shown)
        packed = _packed({**document, "samples": shown, "samples_left_out": left_out})
        if len(packed) <= most or stride > len(steps):
            return packed
        stride *= 2


def _packed(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    compressed = gzip.compress(text.encode("utf-8", "backslashreplace"), mtime=0)
    return base64.b64encode(compressed).decode()
