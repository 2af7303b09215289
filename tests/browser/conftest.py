"""One browser for all tests here, which are skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, missing


@pytest.fixture(scope="session")
def the_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if why := missing():
        pytest.skip(why)
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


@pytest.fixture
def browser(the_browser: Browser) -> Iterator[Browser]:
    """A browser whose console must have stayed silent, and which must have asked for nothing but the page."""
    yield the_browser
    assert the_browser.complaints() == []
    usual = ("file:", "blob:", "http://127.0.0.1", "chrome:")  # the last: of the page that a new tab has at first
    assert [url for url in the_browser.requests() if not url.startswith(usual)] == []
