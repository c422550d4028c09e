"""Signals: the first asks, the second does not."""

import os
import signal

import pytest

from rlcli.errors import Stopped
from rlcli.launch.stopping import StopSignals, heeded, passed_on
from rlcli.processes import STOP_SIGNALS


@pytest.mark.parametrize(("number", "code"), [
    (signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGUSR1, 75), (signal.SIGUSR2, 75),
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
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignals(lambda text: None):
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


@pytest.mark.parametrize("first", [lambda number: number, passed_on])
def test_one_that_comes_by_two_ways_is_one(first):
    other = passed_on if first(signal.SIGTERM) == signal.SIGTERM else lambda number: number
    with StopSignals(lambda text: None) as stop:
        os.kill(os.getpid(), first(signal.SIGTERM))
        assert stop.requested is signal.SIGTERM
        os.kill(os.getpid(), other(signal.SIGTERM))
        with pytest.raises(Stopped):
            os.kill(os.getpid(), first(signal.SIGTERM))
        os.kill(os.getpid(), other(signal.SIGTERM))  # does not end the clearing up


@pytest.mark.parametrize("came_before", [False, True])
def test_one_that_is_passed_on_when_the_run_is_over_disturbs_nothing(came_before):
    with StopSignals(lambda text: None):
        if came_before:
            os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), passed_on(signal.SIGTERM))


def test_a_third_one_does_not_wait_for_the_clearing_up():
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
def test_terminals_that_close_and_schedulers_say_so_several_times(number):
    said = []
    with StopSignals(said.append) as stop:
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop.exit_code == 75
    assert said == [f"{number.name}: finishing this step, then saving."]


def test_a_signal_on_another_node_counts_once():
    elsewhere = [None]
    with StopSignals(lambda text: None) as stop:
        stop.also_heed(lambda: elsewhere[0])
        assert not stop()
        elsewhere[0] = int(signal.SIGTERM)
        assert stop()
        assert stop()
        assert (stop.requested, stop.exit_code) == (signal.SIGTERM, 75)


def test_under_nohup_a_run_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in heeded()
        with StopSignals(lambda text: None) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)
