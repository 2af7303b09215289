"""How a run is left: by `break` or `return`, which close a generator as an exception does; by a signal, of which the
first asks, and only a person's second means at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from textwrap import indent

import pytest

from ckptool.training.stopping import left_by_break, loop_frame, stopping

LOOPS = {
    "plain": "for i in counted():\n{body}",
    "enumerate": "for _, i in enumerate(counted()):\n{body}",
    "zip": "for _, i in zip(range(9), counted()):\n{body}",
    "a generator around it": "for i in around(counted()):\n{body}",
    "two around it": "for i in (j for j in around(counted())):\n{body}",
    "with around it": "with suppress(KeyError):\n    for i in counted():\n{body2}",
    "try around it": "try:\n    for i in counted():\n{body2}\nexcept ValueError:\n    i = None",
    "finally around it": "try:\n    for i in counted():\n{body2}\nfinally:\n    i = None",
    "a loop around it": "for _ in range(1):\n    for i in counted():\n{body2}",
    "else": "for i in counted():\n{body}\nelse:\n    i = None",
}
INSIDE = {
    "plain": "if i == 2:\n    {leave}",
    "with": "with suppress(KeyError):\n    if i == 2:\n        {leave}",
    "finally": "try:\n    if i == 2:\n        {leave}\nfinally:\n    j = i",
    "a loop": "for j in range(3):\n    pass\nif i == 2:\n    {leave}",
}
LEAVE = {
    "break": True,
    "return": True,
    "return i": True,
    "return str(i)": True,
    "raise ValueError": False,
    "int('x')": False,
    "[].pop()": False,
    "del undefined": False,
    "raise SystemExit": False,
    "for _ in failing(): pass": False,
}


def failing() -> Iterator[int]:
    raise ValueError
    yield 0


def watched() -> tuple[list[bool | None], Callable[[], Iterator[int]]]:
    """A generator, and what is said of how each loop over it was left before its end."""
    found: list[bool | None] = []

    def counted() -> Iterator[int]:
        loop = loop_frame()
        try:
            yield from range(5)
        except GeneratorExit:
            found.append(left_by_break(loop))
            raise

    return found, counted


@pytest.mark.parametrize("leave", LEAVE)
def test_a_loop_that_is_left(leave: str) -> None:
    found, counted = watched()

    def around(things: Iterator[int]) -> Iterator[int]:
        try:
            yield from things
        finally:
            things = iter(())

    wrong = []
    for name, loop in LOOPS.items():
        for place, inside in INSIDE.items():
            body = inside.format(leave=leave)
            text = loop.format(body=indent(body, "    "), body2=indent(body, "        "))
            names = {"counted": counted, "around": around, "suppress": suppress, "failing": failing}
            exec("def work():\n" + indent(text, "    "), names)
            with suppress(ValueError, IndexError, NameError, SystemExit):
                names["work"]()
            if found != [LEAVE[leave]]:
                wrong.append((name, place, list(found)))
            found.clear()
    assert wrong == []


@pytest.mark.parametrize("around", ["zip(counted(), range(2))", "zip(range(2), counted())", "islice(counted(), 2)"])
def test_a_loop_that_ends_with_what_is_around_it(around: str) -> None:
    found, counted = watched()
    exec(f"for each in {around}:\n    pass", {"counted": counted, "islice": islice})
    assert found == [None]


# Signals --------------------------------------------------------------------------------------------------------------


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
