"""Signals: the first asks for a stop, the second forces it."""

import os
import signal

import pytest

from rlcli.errors import Stopped
from rlcli.launch.stopping import StopSignals, heeded, passed_on
from rlcli.processes import STOP_SIGNALS


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 75),
        (signal.SIGHUP, 75),
        (signal.SIGUSR1, 75),
        (signal.SIGUSR2, 75),
    ],
)
def test_the_first_signal_asks_for_an_orderly_stop(number, code):
    messages = []
    with StopSignals(messages.append) as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        assert stop.exit_code == code
    assert number.name in messages[0]


def test_a_second_signal_ends_the_run_at_once():
    with StopSignals(lambda text: None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Stopped, match="SIGTERM") as raised:
            os.kill(os.getpid(), signal.SIGTERM)
        assert raised.value.exit_code == 128 + 15
        assert stop.requested is signal.SIGINT


def test_signal_handlers_are_restored_afterwards():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignals(lambda text: None):
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


@pytest.mark.parametrize("first", [lambda number: number, passed_on])
def test_a_signal_received_directly_and_passed_on_counts_once(first):
    second = passed_on if first(signal.SIGTERM) == signal.SIGTERM else lambda number: number
    with StopSignals(lambda text: None) as stop:
        os.kill(os.getpid(), first(signal.SIGTERM))
        assert stop.requested is signal.SIGTERM
        os.kill(os.getpid(), second(signal.SIGTERM))
        with pytest.raises(Stopped):
            os.kill(os.getpid(), first(signal.SIGTERM))
        os.kill(os.getpid(), second(signal.SIGTERM))  # does not interrupt the cleanup


@pytest.mark.parametrize("came_before", [False, True])
def test_a_signal_passed_on_after_the_end_of_the_run_is_ignored(came_before):
    with StopSignals(lambda text: None):
        if came_before:
            os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), passed_on(signal.SIGTERM))


def test_a_third_signal_does_not_wait_for_the_cleanup():
    child = os.fork()
    if child == 0:
        with StopSignals(lambda text: None):
            for _ in range(3):
                try:
                    os.kill(os.getpid(), signal.SIGTERM)
                except Stopped:
                    continue
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_repeated_signals_of_terminals_and_schedulers_count_once(number):
    messages = []
    with StopSignals(messages.append) as stop:
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop.exit_code == 75
    assert messages == [f"{number.name}: finishing this step, then saving."]


def test_a_signal_on_another_node_counts_once():
    elsewhere = [None]
    with StopSignals(lambda text: None) as stop:
        stop.also_heed(lambda: elsewhere[0])
        assert not stop()
        elsewhere[0] = int(signal.SIGTERM)
        assert stop()
        assert stop()
        assert (stop.requested, stop.exit_code) == (signal.SIGTERM, 75)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_signals_that_nohup_and_the_background_of_a_script_ignore_stay_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert number not in heeded()
        with StopSignals(lambda text: None) as stop:
            os.kill(os.getpid(), number)
            assert not stop()
    finally:
        signal.signal(number, before)
