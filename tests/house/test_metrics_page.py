"""docs/metrics.md names metrics and settings as they are."""

from __future__ import annotations

import re
from pathlib import Path

from rlcli import registry
from rlcli.api.metrics import metric_for
from rlcli.recipe.introspection.fields import fields_under
from rlcli.recipe.introspection.metrics import all_metrics
from rlcli.recipe.schema import SECTIONS

HOME = Path(__file__).parents[2]
PAGE = (HOME / "docs" / "metrics.md").read_text()
QUOTED = set(re.findall(r"`([^`\n]+)`", PAGE))
METRICS = [metric.name for metric in all_metrics()]


def test_every_metric_on_the_page_is_one_that_runs_report():
    roles = r"(actor|critic|reward|eval|staleness)/\w+"
    named = {text for text in QUOTED if re.fullmatch(roles, text)}
    assert len(named) > 20
    assert {name for name in named if metric_for(name, METRICS) is None} == set()


def test_every_setting_on_the_page_exists():
    keys = {key for section in SECTIONS for key, _ in fields_under(section)}
    arguments = {
        argument.name
        for name in registry.names("interfaces")
        for argument in registry.signature("interfaces", name).arguments
    }
    short = {name.split("/")[-1] for name in METRICS}
    recipes = {file.stem for file in (HOME / "recipes").glob("*.yaml")}
    words = {text for text in QUOTED if re.fullmatch(r"[a-z]+(_[a-z]+)+", text)}
    assert words - arguments - short - recipes == set()
    dotted = {text.split(":")[0] for text in QUOTED if re.match(r"(train|generation)\.", text)}
    assert len(dotted) > 5
    assert dotted - keys == set()
