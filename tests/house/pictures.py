"""Draws the live view of the run that comes with rlcli, as a terminal shows it, for the README.

python tests/house/pictures.py
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from rlcli.observe.live import LiveDisplay
from rlcli.observe.metrics import read_metrics
from rlcli.observe.page.rendering import DEMO
from rlcli.observe.replay import replay

PICTURE = Path(__file__).parents[2] / "docs/pictures/live.svg"
STEPS, SHOWN = 20, 15
"""Steps of the run, and how many of them the picture shows."""
COLUMNS = 80


def live_view() -> str:
    """The live view in the middle of the run, as SVG."""
    console = Console(file=io.StringIO(), width=COLUMNS, record=True, force_terminal=True)
    records = [record for record in read_metrics(DEMO / "metrics.jsonl") if record["step"] <= SHOWN]
    display = LiveDisplay(console, clock=lambda: 0.0)
    display._progress = replay(records, STEPS, until=0.0)
    display._progress.end(0.0)
    console.print("$ rlcli train ppo_math")
    console.print(display.picture())
    picture = console.export_svg(title="rlcli", unique_id="live")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # loads nothing


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(live_view(), encoding="utf-8")
