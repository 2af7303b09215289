"""A plugin of pytest: tells coverage, here and in processes that are started, which test runs; keeps how each went."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import coverage
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    measuring = coverage.Coverage.current()
    os.environ["MUTANTS_TEST"] = item.nodeid
    if measuring is not None:
        measuring.switch_context(item.nodeid)
    before = os.times()
    try:
        return (yield)
    finally:
        seconds = sum(os.times()[:4]) - sum(before[:4])
        if measuring is not None:
            measuring.switch_context("")
        failed = any(report.failed for report in item.stash.get(REPORTS, []))
        with open(os.environ["MUTANTS_TESTS"], "a") as file:
            file.write(json.dumps([item.nodeid, round(seconds, 3), not failed]) + "\n")


REPORTS = pytest.StashKey[list[pytest.TestReport]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    item.stash.setdefault(REPORTS, []).append(report)
    return report  # type: ignore[return-value]


def pytest_unconfigure() -> None:
    """A worker's data: it does not end as other processes do."""
    measuring = coverage.Coverage.current()
    if measuring is not None:
        measuring.stop()
        measuring.save()
