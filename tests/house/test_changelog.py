"""CHANGELOG.md follows Keep a Changelog, and has the version that is built."""

from __future__ import annotations

import re
from pathlib import Path

from rlcli import __version__

CHANGELOG = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
HEADING = re.compile(r"^## \[([^]]+)\](?: - (\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_unreleased_changes_come_first_then_the_version_that_is_built():
    versions = [match[1] for match in HEADING.finditer(CHANGELOG)]
    assert versions[:2] == ["Unreleased", __version__]
    assert len(versions) == CHANGELOG.count("\n## ")


def test_versions_are_dated_the_newest_first():
    dates = [match[2] for match in HEADING.finditer(CHANGELOG)]
    assert dates[0] is None
    assert all(dates[1:])
    assert dates[1:] == sorted(dates[1:], reverse=True)


def test_changes_have_the_kinds_of_keep_a_changelog():
    assert set(re.findall(r"^### (.*)$", CHANGELOG, re.MULTILINE)) <= KINDS


def test_no_entry_is_there_twice():
    entries = re.findall(r"^- (?:.+\n)(?:  .+\n)*", CHANGELOG, re.MULTILINE)
    assert len(entries) == len(set(entries))
