"""What `make house` counts, and that what was reached stays (tests/lint.py)."""

from pathlib import Path

from tests.support.house import AIMS, WALKS, House, counts, walked


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


def test_every_row_is_counted() -> None:
    house = House(Path(__file__).parents[1])
    walk = next(iter(WALKS.items()))
    ((functions, files, deep, lines),) = walked(house.folder, dict([walk])).values()
    assert functions > files > 10 and deep > 10 and lines > 5_000
    assert {*counts(house), *(f"{start}functions" for start in WALKS)} <= {*AIMS}
