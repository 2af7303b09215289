"""What signals do to a run: the first one asks, and only a person's second one means at once."""

from __future__ import annotations

import os
import signal

import pytest

from ckptool.training.stopping import stopping


def test_the_first_signal_is_the_one_that_is_answered() -> None:
    """A scheduler signals all processes of a job, and torchrun passes on the one that it got: that is no second
    wish."""
    with stopping() as stop:
        assert (stop.asked, stop.exit_code) == (False, 0)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.asked, stop.exit_code) == (True, 143)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_person_who_asks_twice_is_obeyed_at_once(first: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stopping():
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_only_the_signals_that_are_named_are_caught_and_no_hang_up_that_is_ignored() -> None:
    before, ignored = signal.getsignal(signal.SIGUSR1), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping(["TERM", "HUP"]) as stop:
            assert signal.getsignal(signal.SIGUSR1) is before
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, ignored)
