"""Which checkpoints are committed, and in which thread: parts come in any order, late, twice,
or not at all."""

import itertools
import threading

import pytest

from rlcli.checkpoint import completion as commits_module
from rlcli.checkpoint.commit import begin, seal
from rlcli.checkpoint.completion import MASTER, Commits, RunIdentity
from rlcli.checkpoint.verify import checkpoints_in, newest_verified
from rlcli.errors import NumericError, ResourceError
from rlcli.recipe.sections.checkpoint import Checkpoint

PARTS = (MASTER, 0, 1)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def commits(folder):
    return Commits(
        folder, RunIdentity("run", "digest", "1"), Checkpoint(keep_last=2), 2, lambda step: None
    )


def begun(commits, folder, step=1):
    """A checkpoint with a file for each part: part → its sealed files."""
    there = begin(folder, step, "run")
    commits.begin(step, there, {})
    for part in PARTS:
        (there / f"part{part}").write_text(f"{step} {part}")
    return {part: seal(there, [there / f"part{part}"]) for part in PARTS}


@pytest.mark.parametrize("order", list(itertools.permutations(PARTS)))
def test_the_last_part_commits_whichever_it_is(commits, folder, order):
    files = begun(commits, folder)
    for part in order:
        assert checkpoints_in(folder) == []
        commits.add(1, part, files[part])
    assert newest_verified(folder)[0].manifest.files.keys() == {f"part{part}" for part in PARTS}
    assert (commits.committed, commits.writing) == (1, None)
    assert [outcome.step for outcome in commits.outcomes()] == [1]
    assert commits.outcomes() == []


def test_parts_that_arrive_at_the_same_time_are_all_committed(commits, folder):
    for step in range(1, 6):
        files = begun(commits, folder, step)
        threads = [
            threading.Thread(target=commits.add, args=(step, part, files[part])) for part in PARTS
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert newest_verified(folder)[0].manifest.step == step
    assert [outcome.error for outcome in commits.outcomes()] == [None] * 5


def test_a_part_that_failed_gives_the_checkpoint_up(commits, folder):
    files = begun(commits, folder)
    commits.add(1, 0, files[0])
    commits.add(1, 1, failure=ResourceError("the disk is full", code="F28"))
    assert commits.writing == 1  # another part is still being written into the folder
    commits.add(1, MASTER, files[MASTER])
    assert [outcome.error.code for outcome in commits.outcomes()] == ["F28"]
    assert list(folder.iterdir()) == []


def test_a_number_that_is_not_finite_counts_more_than_a_disk(commits, folder):
    begun(commits, folder)
    commits.add(1, 0, failure=ResourceError("the disk is full"))
    commits.add(1, 1, failure=NumericError("a weight is not finite"))
    commits.add(1, MASTER)
    assert [type(outcome.error) for outcome in commits.outcomes()] == [NumericError]
    assert checkpoints_in(folder) == []


def test_late_and_repeated_parts_are_ignored(commits, folder):
    files = begun(commits, folder, 1)
    commits.add(1, 0, files[0])
    commits.add(1, 0, files[0])
    assert commits.writing == 1
    assert commits.give_up() == 1
    for part in PARTS:
        commits.add(1, part, files[part])
    assert checkpoints_in(folder) == []
    files = begun(commits, folder, 2)
    commits.add(1, 0, files[0])
    for part in PARTS:
        commits.add(2, part, files[part])
    assert newest_verified(folder)[0].manifest.step == 2


def test_a_commit_waits_for_ranks_only_after_the_part_of_the_master(commits, folder):
    files = begun(commits, folder)
    commits.add(1, 0, files[0])
    assert not commits.waits_for_ranks
    commits.add(1, MASTER, files[MASTER])
    assert commits.waits_for_ranks
    commits.add(1, 1, files[1])
    assert not commits.waits_for_ranks


def test_only_giving_up_waits_for_a_commit_in_progress(commits, folder, monkeypatch):
    files, go_on, begun_to = begun(commits, folder), threading.Event(), threading.Event()
    commit = commits_module.commit

    def slow(temporary, manifest):
        begun_to.set()
        go_on.wait(20)
        return commit(temporary, manifest)

    monkeypatch.setattr(commits_module, "commit", slow)
    for part in (0, 1):
        commits.add(1, part, files[part])
    threads = [threading.Thread(target=commits.add, args=(1, MASTER, files[MASTER]))]
    threads[0].start()
    begun_to.wait(20)
    assert (commits.outcomes(), commits.writing, checkpoints_in(folder)) == ([], 1, [])
    threads.append(threading.Thread(target=commits.give_up))
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert newest_verified(folder)[0].manifest.step == 1
    assert [outcome.step for outcome in commits.outcomes()] == [1]


def test_a_commit_that_is_interrupted_leaves_nothing_to_wait_for(commits, folder, monkeypatch):
    """The second Ctrl-C may arrive in its middle."""
    files = begun(commits, folder)

    def torn(temporary, manifest):
        raise KeyboardInterrupt

    monkeypatch.setattr(commits_module, "commit", torn)
    for part in (0, 1):
        commits.add(1, part, files[part])
    with pytest.raises(KeyboardInterrupt):
        commits.add(1, MASTER, files[MASTER])
    commits.give_up()
    assert (commits.outcomes(), commits.writing) == ([], None)


def test_a_step_without_the_metric_that_ranks_checkpoints_is_mentioned_once(folder):
    settings = Checkpoint(keep_best=1, best_metric="actor/losss")
    commits = Commits(folder, RunIdentity("run", "digest", "1"), settings, 1, lambda step: None)
    warnings = []
    for step in (1, 2, 3):
        metrics = {"total/tokens": 1.0} if step == 1 else {"actor/loss": 1.0, "actor/lr": 0.1}
        commits.begin(step, begin(folder, step, "run"), metrics)
        for writer in (MASTER, 0):
            commits.add(step, writer, [])
        warnings += [outcome.warnings for outcome in commits.outcomes()]
    warning = (
        "checkpoint.keep_best does not count step 2, which has no actor/losss; "
        "did you mean actor/loss?"
    )
    assert warnings == [(), (warning,), ()]
