"""How often the master of a job asks the shared file system about the answers of its nodes."""

import os

import pytest

from rlcli.launch.slurm import launcher
from rlcli.launch.slurm.agent import SEEN_WITHIN, answer_file
from rlcli.launch.slurm.launcher import LIST_SECONDS, Answers

NODES = 512


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(launcher.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def listings(monkeypatch):
    """One entry for each listing of the folder."""
    counted, list_folder = [], os.listdir
    monkeypatch.setattr(
        launcher.os, "listdir", lambda folder: counted.append(folder) or list_folder(folder)
    )
    return counted


def ask_all(answers):
    return [node for node in range(NODES) if answers.is_overdue(node)]


def test_answers_cost_one_listing_per_second_and_none_once_complete(tmp_path, clock, listings):
    answers = Answers(tmp_path)
    for node in range(NODES - 1):
        answer_file(tmp_path, node).touch()
    for _ in range(5):
        assert ask_all(answers) == []
        clock[0] += LIST_SECONDS / 5
    assert len(listings) == 1
    answer_file(tmp_path, NODES - 1).touch()
    for _ in range(100):
        clock[0] += LIST_SECONDS
        assert ask_all(answers) == []
    assert len(listings) == 2


def test_a_node_without_a_visible_answer_becomes_overdue(tmp_path, clock):
    answers = Answers(tmp_path)
    for node in range(NODES - 1):
        answer_file(tmp_path, node).touch()
    assert ask_all(answers) == []
    clock[0] += SEEN_WITHIN + 1
    assert ask_all(answers) == [NODES - 1]
    answer_file(tmp_path, NODES - 1).touch()
    clock[0] += LIST_SECONDS
    assert ask_all(answers) == []
