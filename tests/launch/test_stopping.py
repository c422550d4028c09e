"""Signals: the first asks, the second does not."""

import os
import signal

import pytest

from rlcli.errors import Stopped
from rlcli.launch.stopping import SIGNALS, StopSignals


@pytest.mark.parametrize(("number", "code"), [
    (signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGUSR2, 75),
])  # fmt: skip
def test_the_first_signal_asks_for_an_orderly_stop(number, code):
    said = []
    with StopSignals(said.append) as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        assert stop.exit_code == code
    assert number.name in said[0]


def test_the_second_one_ends_the_run_now():
    with StopSignals(lambda text: None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Stopped, match="SIGTERM") as raised:
            os.kill(os.getpid(), signal.SIGTERM)
        assert raised.value.exit_code == 128 + 15
        assert stop.requested is signal.SIGINT


def test_afterwards_signals_are_what_they_were():
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignals(lambda text: None):
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
