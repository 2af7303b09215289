"""What `make house` counts; what must stay so is in tests/lint.py."""

from __future__ import annotations

from pathlib import Path

from tests.support.house import Contract, House


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
