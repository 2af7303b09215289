"""Which loops were left by `break` or `return`, and which by an exception: a generator is closed alike in both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from textwrap import indent

import pytest

from ckptool.training.stopping import left_by_break, loop_frame

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
}


@pytest.mark.parametrize("leave", LEAVE)
def test_a_loop_that_is_left(leave: str) -> None:
    found: list[bool] = []

    def counted() -> Iterator[int]:
        loop = loop_frame()
        try:
            yield from range(5)
        except GeneratorExit:
            found.append(left_by_break(loop))
            raise

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
            names = {"counted": counted, "around": around, "suppress": suppress}
            exec("def work():\n" + indent(text, "    "), names)
            with suppress(ValueError, IndexError, NameError, SystemExit):
                names["work"]()
            if found != [LEAVE[leave]]:
                wrong.append((name, place, list(found)))
            found.clear()
    assert wrong == []
