"""Processes of torch.distributed (gloo, on this machine), as torchrun starts them."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

from tests.support.forks import torchrun_places


def processes(count: int, *works: Callable[[int], Any]) -> None:
    """Runs each `work(rank)` in so many processes of its own, as torchrun starts them; fails with what any of them
    raised."""
    for work in works:
        together(count, work)


def together(count: int, work: Callable[[int], Any]) -> None:
    places = torchrun_places(count)
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()

    def one(rank: int) -> None:
        os.environ.update(places[rank])
        try:
            work(rank)
            told.put("")
        except BaseException:  # noqa: BLE001 (told to the test)
            told.put(traceback.format_exc())
            os._exit(1)  # the others would wait for it

    children = [context.Process(target=one, args=(rank,)) for rank in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join(90)
        if child.is_alive():
            child.kill()
    assert [told.get() for _ in range(count) if not told.empty()] == [""] * count
