"""How the package is built: what `make house` counts and what must stay so."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.house import Contract, House, table

# Lower them when you can, never raise them.
CIRCLE = 6
LAYERS = 10
ANY_DIRECTION = 0
REPEATED_CLASSES = 0
REPEATED_BASENAMES = 0


@pytest.fixture(scope="module")
def house() -> House:
    return House(Path(__file__).parents[1])


def test_no_large_circle_of_imports(house: House) -> None:
    assert len(house.circle) <= CIRCLE, house.circle


def test_import_contract_has_few_layers_and_one_direction(house: House) -> None:
    assert len(house.contract.layers) <= LAYERS
    assert len(house.contract.any_direction) <= ANY_DIRECTION, house.contract.any_direction


def test_one_name_one_thing(house: House) -> None:
    assert len(house.repeated_classes) <= REPEATED_CLASSES, house.repeated_classes
    assert len(house.repeated_basenames) <= REPEATED_BASENAMES, house.repeated_basenames


def small_house(folder: Path, **modules: str) -> House:
    """A package of these modules; `a__b` is the module `a/b.py`."""
    for name, text in modules.items():
        path = folder / "ckptool" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    return House(folder)


def test_imports_inside_functions_close_a_circle(tmp_path: Path) -> None:
    house = small_house(
        tmp_path,
        a="from ckptool import b\n",
        b="def late():\n    from ckptool.c import x\n",
        c="from ckptool.a import y\n",
        d="from ckptool import a\nif TYPE_CHECKING:\n    from ckptool import e\n",
        e="from ckptool.d import z\n",
    )
    assert house.circle == ["ckptool.a", "ckptool.b", "ckptool.c"]
    assert house.imported_once == {
        "ckptool.b": "ckptool.a",
        "ckptool.c": "ckptool.b",
        "ckptool.d": "ckptool.e",
        "ckptool.e": "ckptool.d",
    }


def test_names_headers_and_containers_are_counted(tmp_path: Path) -> None:
    house = small_house(
        tmp_path,
        formats__npy='"""Arrays."""\n\nimport os\n\nNAME = "npy"\nassert NAME == "npy"\n\n\nclass Same: ...\n',
        verbs__slim='def slim(name):\n    return name in ("npy", "other")\n',
        render__slim="class Same: ...\n",
        render__page="",
        cli__page="",
    )
    assert house.header_lines == 3
    assert house.entries == ["cli", "formats", "render", "verbs"]
    assert house.compared_with_containers == ["ckptool.verbs.slim:2 npy"]
    assert list(house.repeated_classes) == ["Same"]
    assert list(house.repeated_basenames) == ["page"]


def test_contract_is_read_from_its_text() -> None:
    contract = Contract(
        """
[[tool.importlinter.contracts]]
type = "layers"
layers = [
    "(ckptool.cli) : ckptool.verbs",
    "ckptool.errors",  # "low"
]
ignore_imports = ["ckptool.a -> ckptool.b",
]
unmatched_ignore_imports_alerting = "none"
"""
    )
    assert contract.layers == ["(ckptool.cli) : ckptool.verbs", "ckptool.errors"]
    assert (len(contract.any_direction), len(contract.ignores), contract.silenced) == (1, 1, 1)


def test_table_has_a_count_in_every_row(house: House) -> None:
    assert all(now for _, _, _, now in table(house))


# The tests themselves -------------------------------------------------------------------------------------------------

TESTS = {path: path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("*.py")}


def defined(path: Path) -> list[str]:
    return [node.name for node in ast.parse(TESTS[path]).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def test_no_test_imports_from_a_test_module() -> None:
    importing = re.compile(r"^ *(?:from|import) tests\.(?:\w+\.)*test_", re.MULTILINE)
    assert [path for path, text in TESTS.items() if importing.search(text)] == []


def test_helpers_of_tests_have_one_name_each() -> None:
    shared = [path for path in TESTS if "support" in path.parts or path.name == "conftest.py"]
    counts = Counter(name for path in shared for name in defined(path) if not name.startswith("_") and name != "main")
    assert [name for name, count in counts.items() if count > 1] == []


def test_files_of_tests_have_at_most_500_lines() -> None:
    assert {path.name for path, text in TESTS.items() if len(text.splitlines()) > 500} == set()


def test_tests_are_named_by_what_they_assert() -> None:
    assert [name for path in TESTS for name in defined(path) if re.match(r"test_rows?_\d", name)] == []
