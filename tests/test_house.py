"""What `make house` counts, and that what was reached stays (tests/lint.py)."""

from pathlib import Path

from tests.support.house import AIMS, WALKS, Contract, House, counts, lost, walked


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


def test_names_designs_and_what_says_are_counted(tmp_path: Path) -> None:
    house = small_house(
        tmp_path,
        formats__npy="from ckptool.checkpoint.blocks import CHUNK\n",
        transforms__bake="from ckptool.checkpoint.blocks import CHUNK\n",
        verbs__slim='@verb("change")\ndef slim(\n    file: File,\n) -> Written:\n    """Help."""\n    _one(file)\n'
        "def _one(file):\n    return file\n\n\nclass Slimmed(Report):\n    def told(self):\n        return ()\n",
        render__slim="class Same: ...\n",
        render__lines="class Same: ...\n",
        names__pieces="class Joiner: ...\n",
        render__page="",
        cli__page="",
    )
    assert house.entries == ["cli", "formats", "names", "render", "transforms", "verbs"]
    assert house.repeated_names == {
        "page": ["ckptool.cli.page", "ckptool.render.page"],
        "Same": ["ckptool.render.lines", "ckptool.render.slim"],
    }
    assert house.loops_over_blocks == ["ckptool.transforms.bake"]
    assert house.designs("ways of joining ranks") == ["ckptool.names.pieces.Joiner"]
    assert {module.name: module.saying for module in house.path if module.saying} == {
        "ckptool.render.slim": 1,
        "ckptool.verbs.slim": 8,
    }
    assert house.modules["ckptool.verbs.slim"].called_once == ["ckptool.verbs.slim._one"]
    assert [row.split(":")[0] for row in lost(house, {"names of several things": 1, "entries at the top": 6})] == [
        "names of several things"
    ]


def test_contract_is_read_from_its_text() -> None:
    contract = Contract(
        """
[[tool.importlinter.contracts]]
type = "layers"
layers = [
    "(ckptool.cli) : ckptool.verbs",
    "ckptool.errors",  # "low"
]
"""
    )
    assert contract.layers == ["(ckptool.cli) : ckptool.verbs", "ckptool.errors"]
    assert contract.any_direction == ["(ckptool.cli) : ckptool.verbs"]


def test_every_row_is_counted() -> None:
    house = House(Path(__file__).parents[1])
    walk = next(iter(WALKS.items()))
    ((functions, files, deep, lines),) = walked(house.folder, dict([walk])).values()
    assert functions > files > 10 and deep > 10 and lines > 5_000
    assert {*counts(house), *(f"{start}functions" for start in WALKS)} <= {*AIMS}
