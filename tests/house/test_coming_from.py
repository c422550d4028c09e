"""docs/coming-from.md says what the tables of the code say, and its commands exist."""

from __future__ import annotations

import re

import pytest
from coming_from import COMMANDS, METRICS, PAGE, WORDS, page, words_here

from rlcli.api.metrics import metric_for
from rlcli.cli.main import VERBS, main
from rlcli.recipe.introspection.metrics import all_metrics

OURS = [command for *_, commands in COMMANDS for command in commands.split("; ")]


def test_the_page_is_written_from_the_tables_as_they_are():
    assert PAGE.read_text() == page(), "run: python tests/house/coming_from.py"


@pytest.mark.long
@pytest.mark.parametrize("framework", WORDS)
def test_every_word_of_a_framework_on_the_page_is_translated(framework):
    words = WORDS[framework].split()
    assert [word for word in words if word not in words_here()] == []
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("command", OURS)
def test_our_commands_on_the_page_are_accepted(command, capsys):
    _, verb, *arguments = command.split()
    assert verb in [name for verbs in VERBS.values() for name in verbs]
    if verb == "train":
        named = {"M": "owner/model", "D": "hf:owner/data"}
        with pytest.raises(SystemExit) as ended:
            main(["validate", *(named.get(word, word) for word in arguments)])
        assert not ended.value.code, capsys.readouterr().err


def test_the_error_on_the_page_is_the_one_that_is_printed(capsys):
    command, error, hint = re.search(r"\$ rlcli (.*)\n(.*)\n(.*)\n", page()).groups()
    with pytest.raises(SystemExit):
        main(command.split())
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert {error.strip(), hint.strip()} <= set(lines)


def test_our_metrics_on_the_page_are_ones_that_runs_report():
    names = [metric.name for metric in all_metrics()]
    assert [ours for ours, *_ in METRICS if metric_for(ours, names) is None] == []
