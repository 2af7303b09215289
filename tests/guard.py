"""A plugin of pytest: what each test costs in processor time, its processes included.

At the end of a run it prints the sum and the tests that are long, and keeps all of them in `build/test_times.tsv`.
One above LIMIT seconds fails, unless it is marked as `long`, with the reason, or not for every run (`soak`, `engines`).
Seconds are those of a usual machine: a slower one, or one whose cores share what they have with others at work, has as
many more as it needs longer for a loop, which is measured again and again.
"""

import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import pytest

LONG, LIMIT = 1.0, 3.0
ROOM = 4 / 3  # beyond the limit before a test fails, as what is measured is never the same twice
EXEMPT = ("long", "soak", "engines")
LOOPS, USUAL = 1_000_000, 0.0125  # and the seconds that they take
OFTEN = 60  # tests
TIMES = Path(__file__).parents[1] / "build" / "test_times.tsv"


def slowness() -> float:
    """How much longer than usual a loop takes now, at least 1."""
    start = time.process_time()
    for _ in range(LOOPS):
        pass
    return max(1.0, (time.process_time() - start) / USUAL)


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.is_blocked("guard"):
        config.pluginmanager.register(Guard(), "guard")


class Guard:
    """Measures in the process that runs the tests, and sums up in the one that prints."""

    def __init__(self) -> None:
        self.measured = [slowness()]
        self.tests = 0
        self.started = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.of_workers: list[tuple[float, float]] = []  # seconds, slowness
        self.before = 0.0

    @property
    def slowness(self) -> float:
        return median(self.measured)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
        """Adds to the report what its phase cost; for all of them but a fixture's that many tests share."""
        report: pytest.TestReport = yield  # type: ignore[assignment]
        now = _spent()
        seconds, self.before = (now - self.before) / self.slowness, now
        report.user_properties.append(("processor", (report.when, seconds)))
        exempt = any(item.get_closest_marker(name) for name in EXEMPT)
        exempt = exempt or "CKPTOOL_SOAK" in os.environ  # five times as many examples
        exempt = exempt or sys.dont_write_bytecode  # where every process compiles whatever it imports
        if report.when == "call" and report.passed and seconds > LIMIT * ROOM and not exempt:
            report.outcome = "failed"
            report.longrepr = (
                f"{seconds:.1f} s of processor time: at most {LIMIT:.0f}, or mark it as long or soak (tests/guard.py)"
            )
        return report  # type: ignore[return-value]

    def pytest_runtest_logstart(self) -> None:
        self.tests += 1
        if not self.tests % OFTEN and not self.of_workers:
            self.measured.append(slowness())
        self.before = _spent()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """What a worker, or this process, sends."""
        costs: dict[str, Any] = dict(report.user_properties)
        when, seconds = costs.get("processor", (None, 0))
        if when == report.when:
            self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + seconds

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        sent: dict[str, Any] = getattr(session.config, "workeroutput", {})
        sent["processor"] = _spent(), self.slowness

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output: dict[str, Any] = getattr(node, "workeroutput", {})
        self.of_workers += [output["processor"]] if "processor" in output else []

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        ranked = sorted(self.seconds.items(), key=lambda each: -each[1])
        if not ranked:
            return
        with suppress(OSError):  # somebody else's checkout
            TIMES.parent.mkdir(exist_ok=True)
            TIMES.write_text("".join(f"{seconds:.3f}\t{name}\n" for name, seconds in ranked))
        own = resource.getrusage(resource.RUSAGE_SELF)  # and not its workers, whether they have been waited for or not
        spent = [*self.of_workers, (own.ru_utime + own.ru_stime if self.of_workers else _spent(), self.slowness)]
        terminalreporter.section("processor time")
        for name, seconds in ranked:
            if seconds > LONG:
                terminalreporter.write_line(f"{seconds:6.1f} s  {name}")
        terminalreporter.write_line(
            f"{sum(seconds for seconds, _ in spent):.0f} s of processor time, "
            f"{sum(seconds / slow for seconds, slow in spent):.0f} of a usual machine; "
            f"{time.monotonic() - self.started:.0f} s in all"
        )


def _spent() -> float:
    """Seconds of this process and its children, but for the beginnings of those that many tests share."""
    programs = sys.modules.get("tests.support.programs")
    taken, at_first = programs.spent() if programs else (0, 0)
    return sum(os.times()[:4]) + taken - at_first
