"""The site of `make docs`: what is generated, that every link leads somewhere, and that a browser needs no network."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ckptool.analysis.findings import known_errors, recognised
from ckptool.cli.parser import typed_parameters
from ckptool.commands import VERBS, function_of
from ckptool.verbs._schema import schema
from tests.support.looped import looped

HOME = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generated", HOME / "docs" / "generated.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=HOME, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def reference(generated: ModuleType) -> dict[str, str]:
    pages: dict[str, str] = generated.pages()
    return pages


def test_every_known_message_has_a_page_that_is_titled_with_it(
    generated: ModuleType, reference: dict[str, str]
) -> None:
    assert {id(recognised(message)) for message in generated.MESSAGES} == {id(known) for known in known_errors()}
    for message in generated.MESSAGES:
        text = reference[f"errors/{generated.slug(message)}.md"]
        assert f"title: {json.dumps(message)}\n" in text and f"# {generated.code_span(message)}\n" in text
        known = recognised(message)
        assert known is not None and known.finding.what in text
        assert all(str(fix) in text for fix in known.commands(message))


@looped("name", VERBS, at_once=13)
def test_the_page_of_a_command_has_all_that_its_parser_knows(name: str, reference: dict[str, str]) -> None:
    text = reference[f"reference/{VERBS[name].function}.md"]
    for parameter in typed_parameters(function_of(name)):
        assert parameter.option.hidden or all(flag in text for flag in parameter.option.flags), parameter
    assert any(each.schema in text for each in schema().schemas if name in each.verbs)


def test_the_site_asks_nobody_for_anything(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    for page in pages:
        loaded = re.findall(r'<(?:script|img|iframe|link|source)[^>]*?(?:src|href)="([^"]*)"', page.read_text())
        assert not [each for each in loaded if re.match(r"(https?:)?//", each)], page


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize(
    ("typed", "page"),
    [("size mismatch for fc.weight", "errors/runtimeerror-error-s"), ("strip-module", "reference/strip_module")],
)
def test_search_works_in_a_browser_from_the_disk(typed: str, page: str, site: Path) -> None:
    words = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--dump-dom"]
    address = f"{(site / 'index.html').as_uri()}?q={typed.replace(' ', '+')}"
    log = ["--enable-logging=stderr", f"--user-data-dir={site}/profile"]
    done = subprocess.run([*words, *log, address], capture_output=True, text=True, check=False, timeout=120)
    assert "CONSOLE" not in done.stderr
    results = re.findall(r'href="([^"]*)" class="md-search-result__link"', done.stdout)
    assert any(page in each for each in results), results
