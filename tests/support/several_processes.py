"""Processes of torch.distributed (gloo, on this machine), as torchrun starts them."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any


def processes(count: int, *works: Callable[[int], Any]) -> None:
    """Runs each `work(rank)` in so many processes of its own, as torchrun starts them; fails with what any of them
    raised."""
    for work in works:
        together(count, work)


def together(count: int, work: Callable[[int], Any]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()

    def one(rank: int) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test")
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
