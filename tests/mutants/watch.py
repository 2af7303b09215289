"""A plugin of pytest for the run that finds which tests run which function: numbers the tests, and keeps how each
went."""

import json
import os
from collections.abc import Iterator

import pytest

from tests.mutants import seen

TESTS = "MUTANTS_TESTS"  # the file for the results
REPORTS = pytest.StashKey[list[pytest.TestReport]]()
NUMBER = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for number, item in enumerate(items):
        item.stash[NUMBER] = number


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    os.environ[seen.TEST] = str(item.stash[NUMBER])
    before = os.times()
    try:
        return (yield)
    finally:
        del os.environ[seen.TEST]
        seconds = sum(os.times()[:4]) - sum(before[:4])
        passed = not any(report.failed or report.skipped for report in item.stash.get(REPORTS, []))
        with open(os.environ[TESTS], "a") as file:
            file.write(json.dumps([item.stash[NUMBER], item.nodeid, round(seconds, 3), passed]) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    item.stash.setdefault(REPORTS, []).append(report)
    return report  # type: ignore[return-value]
