"""What tests have done in other processes, which import this and nothing else."""

import os
import signal
import time


def worked(item: int) -> int:
    if item == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if item == 4:
        raise FileNotFoundError(2, "not there", "name")
    if item == 5:
        raise ExceptionOfTests(1, 2)
    return item * 10


class ExceptionOfTests(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__("odd")


class ThrownAway:
    """Is told to end where Python drops what is raised."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100):
            pass


def throwing_away(item: int) -> int:
    ThrownAway()
    time.sleep(1)
    return item
