"""`run_checks` for the toy interface of the fixture `project`, and what comes of it."""

import textwrap

from rlcli.testing.runner import Options, run_checks
from rlcli.testing.subjects import subjects


class Diary:
    """A watcher that records every event."""

    def __init__(self):
        self.begun, self.ended, self.components = [], [], []

    def limited(self, words, seconds): ...

    def component(self, subject, checks):
        self.components.append((subject.name, checks))

    def begin(self, words):
        self.begun.append(words)

    def end(self, check):
        self.ended.append(check)

    def done(self, tested):
        self.components.append("done")

    def interrupted(self, words):
        self.components.append(f"interrupted: {words}")


def own_tests(project, text):
    file = project / "tests" / "interfaces" / "test_toy_checked.py"
    file.parent.mkdir(parents=True)
    file.write_text(textwrap.dedent(text))
    return file


def run(*arguments, name="toy-checked", diary=None, **options):
    return run_checks(subjects("interface", name, arguments), diary or Diary(), Options(**options))


def outcomes(tested):
    return {check.words: check.outcome for check in tested.checks}


def failure(tested, words):
    return next(check.failure for check in tested.checks if check.words == words)
