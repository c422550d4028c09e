"""docs/components.md lists the words of documentation by which laws of interfaces are chosen."""

import re
from pathlib import Path

import pytest

from rlcli.testing.interface import credit, described_arguments, equal_weights, invariants, metrics

PAGE = Path(__file__).parents[2] / "docs/components.md"
HEADING = "## Documentation that is checked"
PATTERNS = {
    f"{module.__name__}.{name}": pattern
    for module in (credit, described_arguments, equal_weights, invariants, metrics)
    for name, pattern in vars(module).items()
    if isinstance(pattern, re.Pattern)
}


def phrases():
    """What the first column of the table quotes, or names as an argument."""
    section = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    return re.findall(r'"([^"]+)"|`(\w+_\w+)`', "\n".join(rows[1:]))


@pytest.mark.parametrize("name", PATTERNS)
def test_the_words_that_choose_a_law_are_on_the_page(name):
    assert any(PATTERNS[name].search("".join(phrase)) for phrase in phrases())


@pytest.mark.parametrize("quoted", [quoted for quoted, _ in phrases() if len(quoted.split()) > 1])
def test_the_words_on_the_page_choose_a_law(quoted):
    assert any(pattern.search(quoted) for pattern in PATTERNS.values())
