"""What `import ckptool` offers, and what it costs."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy
import pytest

import ckptool
from ckptool import errors
from ckptool.checkpoint.protocols import provide
from ckptool.facts import Report, facts_of, schema_of
from ckptool.verbs import _save, _schema
from tests.support.looped import looped

VERBS = sorted(
    path.stem for path in (Path(ckptool.__file__).parent / "verbs").glob("*.py") if not path.stem.startswith("_")
)
LIVE = {"find_rules", "inspect_run", "layouts", "load_into", "open", "save_for_cpu"}  # beside `load`, `translate`, …
CLASSES = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.CkptoolError)
]


def test_all_is_sorted_and_there() -> None:
    assert ckptool.__all__ == sorted(set(ckptool.__all__))
    for name in ckptool.__all__:
        value = getattr(ckptool, name)
        assert inspect.getdoc(value), name
    assert set(ckptool.__all__) <= set(dir(ckptool))


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(ckptool.__file__).read_text(encoding="utf-8"))
    imported = [
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert set(ckptool.__all__) <= set(imported)


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ckptool.nothing


def test_importing_costs_nothing() -> None:
    heavy = ["torch", "numpy", "yaml", "rich", "typer", "safetensors", "ml_dtypes", "pydantic", "pickle"]
    code = f"import sys, ckptool; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_verb_without_torch(tmp_path: Path) -> None:
    """Looking at and rewriting a file imports neither torch nor anything that a pickle names."""
    from fixtures.make import make

    file = make("training_sgd.pt", tmp_path)
    code = f"""
import sys, ckptool
file, out = {str(file)!r}, {str(tmp_path / "out")!r}
ckptool.inspect(file, stats=True), ckptool.show(file + "#epoch"), ckptool.diff(file, file)
ckptool.strip_module(file, out + "1.pt", verify=True)
ckptool.add_module(file, out + "2.pt")
ckptool.rename(file, ["module.* => *"], out + "3.pt")
ckptool.remap(file, out + "4.pt", to="cpu")
ckptool.cast(file, out + "5.pt", dtype="bf16")
ckptool.edit(file, out + "6.pt", set={{"epoch": 1}})
ckptool.convert(file, out + "7.safetensors")
ckptool.convert(file, out + "8.safetensors", all=True)
ckptool.save({{"a": 1}}, out + "9.pt")
print([name for name in ("torch", "pickle", "rich", "typer") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stdout))
    assert "torch" not in loaded and not loaded & {"rich", "typer"}
    assert done.stderr == ""
    assert len(list(tmp_path.glob("out*"))) == 9


# Verbs ---------------------------------------------------------------------------------------------------------------


@looped("name", VERBS)
def test_verb(name: str) -> None:
    function = getattr(import_module(f"ckptool.verbs.{name}"), name)
    assert inspect.isfunction(function) and function.__module__ == f"ckptool.verbs.{name}"
    first = (inspect.getdoc(function) or "").splitlines()[0]
    assert re.match(r"[A-Z`].*[.:]", first), first
    assert inspect.unwrap(getattr(ckptool, name)) is function and name in ckptool.__all__


@looped("name", VERBS)
def test_help_shows_every_option(name: str) -> None:
    function = getattr(ckptool, name)
    shown = inspect.signature(function).parameters
    declared = re.search(r"Unpack\[(\w+)\]", str(function.__annotations__.get("options")))
    assert "options" not in shown
    options = vars(_save)
    for option in options[declared[1]].__annotations__ if declared else ():
        assert shown[option].kind is inspect.Parameter.KEYWORD_ONLY and not shown[option].default
        assert f"{option}: " in (function.__doc__ or "")


def test_every_public_function_is_a_verb() -> None:
    functions = [name for name in ckptool.__all__ if inspect.isfunction(getattr(ckptool, name))]
    assert sorted(functions) == sorted([*VERBS, *LIVE])


# Errors --------------------------------------------------------------------------------------------------------------


@looped("error", CLASSES)
def test_error(error: type[errors.CkptoolError]) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", error.code)
    assert error.exit_code == {errors.NoMatch: 1, errors.PlanRefused: 1, errors.NoneValid: 3}.get(error, 2)
    assert re.fullmatch(r"[A-Z].*\.", (error.__doc__ or "").splitlines()[0])
    one = error("what", "why", "fix")
    assert str(one) == "what\nwhy\nfix" and str(error("what")).splitlines()[0] == "what"
    moved = one.within("there")
    assert type(moved) is error and (moved.what, moved.why, moved.fix) == ("there: what", "why", "fix")
    assert moved.within("there") is moved


def test_codes_are_distinct() -> None:
    codes = [vars(error)["code"] for error in CLASSES if "code" in vars(error)]
    assert len(codes) == len(set(codes))


def test_lists_and_escapes() -> None:
    assert errors.listed([1, 2]) == "1, 2" and errors.listed(list(range(1005)), 2) == "0, 1 and 1,003 more"
    assert errors.printable("a\x1b[m\n\u202e\ud800é") == "a\\x1b[m\\n\\u202e\\ud800é"
    assert errors.is_text("é") and not errors.is_text("\ud800")


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("ckptool.load_into()", "missing-extra"),
        ("ckptool.save_for_cpu(None, 'out.pt')", "missing-extra"),
        ("ckptool.spec('torch.nn:Linear')", "missing-extra"),
        ("ckptool.open('model.npz')['a'].torch()", "missing-extra"),
    ],
)
def test_without_torch_the_error_says_which_extra_is_missing(call: str, code: str, tmp_path: Path) -> None:
    numpy.savez(tmp_path / "model.npz", a=numpy.zeros(3))
    program = f"""
import sys
sys.modules["torch"] = None
import ckptool
try:
    {call}
except ckptool.CkptoolError as error:
    print(error.code, error.fix)
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout == f"{code} pip install 'ckptool[torch]'\n"


# What a layer above does ----------------------------------------------------------------------------------------------


def reports() -> set[type]:
    """The classes of reports that commands give as answers."""
    return {_schema.Schema, *(kind for kind, _ in _schema._reports().values())}


@looped("kind", sorted(reports(), key=str), ids=lambda kind: kind.__name__)
def test_every_report_is_told_in_every_form(kind: type) -> None:
    assert kind.told is not Report.told and facts_of(kind) and schema_of(kind)


@pytest.mark.parametrize("name", ckptool.PROVIDERS)
def test_the_functions_of_a_noun_are_where_the_package_says(name: str) -> None:
    module, _, function = ckptool.PROVIDERS[name].partition(":")
    assert callable(getattr(import_module(f"ckptool.{module}"), function))


def test_a_type_without_a_renderer_is_named() -> None:
    with pytest.raises(TypeError, match="nothing gives dict the form 'text'"):
        provide("text", {})
