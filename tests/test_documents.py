"""The site of `make docs`, the verb of docs/adding.md, and YAML wherever it stands."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
import torch
import yaml

from ckptool.analysis.findings import known_errors, recognised, table
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


# docs/adding.md ------------------------------------------------------------------------------------------------------


def grown(home: Path, file: str, table: str, at: str, *, after: bool = False) -> Callable[..., str]:
    """A copy of the package with the file of an example of the page, and its line in a table at this text; gives what
    runs it."""
    blocks = re.findall(r"```py\n(.*?)```", (HOME / "docs" / "adding.md").read_text(), re.DOTALL)
    name = Path(file).stem.replace("_", "-")
    number = next(number for number, block in enumerate(blocks) if block.startswith(f'"""`{name}`'))
    shutil.copytree(HOME / "ckptool", home / "ckptool", ignore=shutil.ignore_patterns("__pycache__"))
    (home / "ckptool" / file).write_text(blocks[number])
    rows, line = home / "ckptool" / table, blocks[number + 1]
    text = rows.read_text()
    assert at in text
    rows.write_text(text.replace(at, at + line if after else line + at, 1))

    def run(*words: str, code: int = 0) -> str:
        environment = {**os.environ, "PYTHONPATH": str(home)}
        program = [sys.executable, *words] if words[0] == "-c" else [sys.executable, "-m", "ckptool", *words]
        ended = subprocess.run(program, cwd=home, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == code, ended.stderr
        return ended.stdout or ended.stderr

    return run


def test_a_layout_is_one_file_and_one_line(tmp_path: Path) -> None:
    run = grown(tmp_path, "formats/layouts/row_files.py", "formats/__init__.py", '    Format("folder", "members"')
    whole = {"w": torch.arange(20.0).reshape(5, 4), "b": torch.arange(5)}
    folder = tmp_path / "saved"
    folder.mkdir()
    for rank, rows in enumerate((slice(0, 2), slice(2, 4), slice(4, 5))):
        torch.save({name: tensor[rows].clone() for name, tensor in whole.items()}, folder / f"rows_{rank}_of_3.pt")
    assert "row-files" in run("inspect", "saved") and "rows by rank" in run("inspect", "saved", "--json")
    run("convert", "saved", "-o", "joined.pt")
    joined = torch.load(tmp_path / "joined.pt")
    assert list(joined) == list(whole) and all(torch.equal(joined[name], whole[name]) for name in whole)
    (folder / "rows_1_of_3.pt").rename(folder / "rows_3_of_3.pt")
    assert "in excess of the 3" in run("inspect", "saved", code=2)
    (folder / "rows_3_of_3.pt").unlink()
    assert "lacks the files of 1 rank of 3: rank 1" in run("inspect", "saved", code=2)


def test_a_verb_is_one_file_and_one_line(tmp_path: Path) -> None:
    run = grown(tmp_path, "verbs/count.py", "commands.py", "[look takes]\n", after=True)
    torch.save({"a": torch.ones(3), "b": {"c": torch.ones(2, dtype=torch.float16)}}, tmp_path / "m.pt")

    assert run("count", "m.pt") == "m.pt: 2 tensors, 16 B\n"
    assert run("count", "m.pt#b", "m.pt", "-q", "--dtype", "f16") == "1\n1\n"
    assert "error[no-match]: m.pt has no tensors of the dtype i8" in run("count", "m.pt", "--dtype", "i8", code=1)
    assert "--dtype DTYPE" in run("count", "--help") and "Count the tensors" in run("--help")
    assert "--dtype" in run("--complete", "fish", "ckptool count --d")
    found = json.loads(run("count", "m.pt", "--json"))
    assert found == {"schema": "ckptool.count/2", "file": "m.pt", "tensors": 2, "bytes": 16}
    document = json.loads(run("schema", "count"))
    jsonschema.Draft202012Validator(document).validate(found)
    assert document["$defs"]["count"]["properties"]["bytes"] == {
        "type": "integer",
        "description": "of their values, in bytes",
    }
    assert run("-c", "import ckptool; print(ckptool.count('m.pt').tensors)") == "2\n"


# YAML, which both parsers of PyYAML read alike -----------------------------------------------------------------------


OTHERS = {"build", "dist", "node_modules", "runs"}
BLOCK = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def texts() -> Iterator[tuple[str, str]]:
    """Every YAML file of the project, and every YAML example in its pages."""
    for folder, below, names in os.walk(HOME):
        below[:] = [name for name in below if name not in OTHERS and (not name.startswith(".") or name == ".ci")]
        for path in (Path(folder, name) for name in names):
            if path.suffix in (".yaml", ".yml"):
                yield str(path), path.read_text()
            elif path.suffix == ".md":
                yield from ((f"{path}: {text[:40]!r}", text) for text in BLOCK.findall(path.read_text()))


@pytest.mark.skipif(not hasattr(yaml, "CSafeLoader"), reason="this PyYAML has no libyaml")
def test_both_parsers_read_the_same() -> None:
    found = dict(texts())
    assert len(found) > 45
    for name, text in found.items():
        # repr: NaN is not equal to itself
        one, other = (list(yaml.load_all(text, loader)) for loader in (yaml.SafeLoader, yaml.CSafeLoader))
        assert repr(one) == repr(other), name


def test_the_parser_in_python_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("findings", "error_texts")
    quick = [table(name) for name in names]
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    table.cache_clear()
    assert [table(name) for name in names] == quick
