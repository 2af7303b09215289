"""What `import ckptool` offers, and what it costs."""

import ast
import copy
import errno
import inspect
import multiprocessing
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ckptool
from ckptool import errors
from ckptool.errors import CkptoolError, FileProblem
from ckptool.facts import Report, facts_of, schema_of
from ckptool.verbs import _save, _schema
from tests.support.files import saved
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
        assert pickle.loads(pickle.dumps(value)) is value  # executors take them
    assert set(ckptool.__all__) <= set(dir(ckptool))


def test_type_checkers_see_the_same_names() -> None:
    """`python -m docs.stub` writes the file; another Python may print types otherwise."""
    stub = import_module("docs.stub")
    assert sys.version_info[:2] != (3, 11) or stub.STUB.read_text(encoding="utf-8") == stub.stub()
    tree = ast.parse(stub.STUB.read_text(encoding="utf-8"))
    imported = [alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert {*ckptool.__all__} <= {*imported, *(node.name for node in tree.body if isinstance(node, ast.FunctionDef))}


TYPED = """
reveal_type(ckptool.cast("a.pt", "b.pt", dtype="bf16").summary)
reveal_type(ckptool.cast(given, dtype="bf16"))
reveal_type(ckptool.cast(ckptool.open("a.pt"), torch.bfloat16))
reveal_type(ckptool.cast(given, "b.pt", dtype="bf16"))
reveal_type(ckptool.rename(given, "a => b", "b.pt"))
reveal_type(ckptool.rename(ckptool.open("a.pt"), rules_file="rules.yaml"))
reveal_type(ckptool.warm_start("a.pt", model).share)
reveal_type([report.fine for report in ckptool.verify(Path().glob("*.pt"), jobs=2)])
reveal_type(ckptool.average([model, model], "mean.pt").output)
reveal_type(ckptool.inspect("a.pt").tensors)
"""
WRITTEN = "ckptool.verbs._save.Written"
REVEALED = f"str;dict[Any, Any];Any;{WRITTEN};{WRITTEN};ckptool.checkpoint.Checkpoint;float;list[bool | Any];str;"
REVEALED += "tuple[ckptool.analysis.inspect.TensorRow, ...] | Any"


@pytest.mark.soak
def test_scripts_as_the_documents_have_them_are_typed(tmp_path: Path) -> None:
    home = Path(__file__).parents[1]
    texts = [(home / name).read_text(encoding="utf-8") for name in ("README.md", "docs/python.md")]
    blocks = re.findall("```python\n(.*?)```", "".join(texts), re.DOTALL)
    head = "from pathlib import Path\n\nimport torch\n\nimport ckptool\n\n"
    head += "given: dict[str, torch.Tensor] = {}\nmodel = torch.nn.Linear(1, 1)\n"
    for number, text in enumerate([*blocks, head + TYPED]):
        (tmp_path / f"script_{number}.py").write_text(text)
    config = f"--config-file={home / 'pyproject.toml'}"
    command = [sys.executable, "-m", "mypy", config, "--cache-dir", tmp_path / "cache", *sorted(tmp_path.glob("*.py"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=home, check=False)
    assert not re.search("error: ", done.stdout), done.stdout
    assert ";".join(re.findall('is "(.*)"', done.stdout)) == REVEALED


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
    told = re.findall(r"(?m)^    (\w+): ", function.__doc__ or "")
    assert len(told) == len({*told}), "a parameter is explained twice"


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


# What a layer above does ----------------------------------------------------------------------------------------------


def reports() -> set[type]:
    """The classes of reports that commands give as answers."""
    return {_schema.Schema, *(kind for kind, _ in _schema._reports().values())}


@looped("kind", sorted(reports(), key=str), ids=lambda kind: kind.__name__)
def test_every_report_is_told_in_every_form(kind: type) -> None:
    assert kind.told is not Report.told and facts_of(kind) and schema_of(kind)


def unnamed(value: Any, json: Any) -> set[str]:
    """The keys in JSON of an object, and of those in it, that are none of its attributes."""
    if isinstance(json, list) and isinstance(value, (list, tuple)):
        return set().union(*map(unnamed, value, json))
    if not isinstance(json, dict) or isinstance(value, dict):
        return set()
    keys = {f"{type(value).__name__}.{key}" for key in json if not hasattr(value, key)}
    return keys.union(*(unnamed(getattr(value, key, None), each) for key, each in json.items()))


def test_what_is_in_json_are_attributes(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    tree = {"sd": model.state_dict(), "odd": torch.eye(2).to_sparse(), "epoch": 3, "tags": ["a", {"b": 1}]}
    file = saved(tree, tmp_path / "a.pt")
    answers: list[Report] = [
        ckptool.inspect(file, stats=True), ckptool.show(file, at="sd/0.weight"), ckptool.show(file, at="tags"),
        ckptool.diff(file, {**tree, "epoch": 4, "new": torch.ones(1)}), ckptool.diff(f"{file}#sd", tree["sd"]),
        ckptool.verify(f"{file}#sd", digest=True, finite=True), ckptool.doctor(file), ckptool.scan(tmp_path),
        ckptool.spec(model), ckptool.warm_start(f"{file}#sd", torch.nn.Linear(2, 2)), ckptool.layouts("vit-timm"),
        ckptool.cast(file, tmp_path / "b.pt", dtype="bf16"), ckptool.find_rules(tree["sd"], model),
    ]  # fmt: skip
    for answer in answers:
        assert not unnamed(answer, {key: each for key, each in answer.to_dict().items() if key != "schema"})


def test_what_is_imported_by_its_name_is_there() -> None:
    sources = "".join(path.read_text() for path in Path(ckptool.__file__).parent.rglob("*.py"))
    named = set(re.findall(r'import_module\("(ckptool\.[\w.]+)"\)\.(\w+)', sources))
    assert len(named) > 6 and all(hasattr(import_module(module), name) for module, name in named)


# Standard errors -----------------------------------------------------------------------------------------------------


STANDARD: dict[str, type[Exception]] = {
    **dict.fromkeys(("FileProblem", "DiskFull", "FileChanged"), OSError),
    **dict.fromkeys(("FileMissing", "BrokenLink"), FileNotFoundError),
    **dict.fromkeys(("NoCheckpointInside", "IsAFolder"), IsADirectoryError),
    "NoPermission": PermissionError,
    "NotAFolder": NotADirectoryError,
    "OutputExists": FileExistsError,
    "Truncated": EOFError,
    "MissingExtra": ImportError,
    "MissingKey": KeyError,
    "UsageError": ValueError,
    "LimitExceeded": MemoryError,
}


def test_every_error_survives_copies_and_other_processes() -> None:
    assert len(CLASSES) > 25
    for kind in CLASSES:
        assert issubclass(kind, STANDARD.get(kind.__name__, Exception))
        error: Any = kind("what 'it' is", "why", "fix")
        if isinstance(error, FileProblem):
            error.about(errno.ENOENT, "a.pt")
        for other in (error, copy.copy(error), pickle.loads(pickle.dumps(error)), error.within("b.pt: what")):
            assert type(other) is kind and "what 'it' is\nwhy\nfix" in str(other)
            if isinstance(error, FileProblem):
                assert (other.errno, other.filename) == (errno.ENOENT, "a.pt")
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(FileNotFoundError) as raised:
        pool.apply(ckptool.inspect, ["/nowhere/a.pt"])
    assert raised.value.errno == errno.ENOENT


def test_errors_of_functions_name_functions(tmp_path: Path) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "ckptool.lora_merge(BASE, ADAPTER, out=OUT)": lambda: ckptool.lora_convert({"a": numpy.ones(2)}, to="peft"),
        "ckptool.layouts()": lambda: ckptool.translate({"a": numpy.ones(2)}, rules_file="unknown"),
        "ckptool.bundle(members={NAME: FILE}, out=OUT)": lambda: ckptool.bundle(from_folder=tmp_path),
    }
    for text, call in calls.items():
        with pytest.raises(ckptool.CkptoolError, match=re.escape(text)):
            call()


def test_functions_raise_what_open_raises(tmp_path: Path) -> None:
    missing, there = tmp_path / "missing.pt", saved({"w": [1]}, tmp_path / "a.pt")
    one = "open inspect show convert slim strip_module load".split()
    for name in one:
        with pytest.raises(FileNotFoundError) as raised:
            getattr(ckptool, name)(
                missing, *([tmp_path / "o.pt"] if name in ("convert", "slim", "strip_module") else [])
            )
        assert isinstance(raised.value, CkptoolError), name
        assert (raised.value.errno, raised.value.filename) == (errno.ENOENT, str(missing)), name
    with pytest.raises(FileNotFoundError):
        ckptool.diff(there, missing)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        ckptool.load(tmp_path)
    with pytest.raises(NotADirectoryError):
        ckptool.inspect(there / "below.pt")
    (tmp_path / "link.pt").symlink_to(missing)
    with pytest.raises(FileNotFoundError):
        ckptool.inspect(tmp_path / "link.pt")


WITHOUT = """
import sys
sys.modules["torch"] = None
import ckptool
assert not {"numpy", "ckptool.bridge"} & sys.modules.keys()
import inspect, numpy, pydoc
pydoc.render_doc(ckptool)
assert {name for name, _ in inspect.getmembers(ckptool)} >= {*ckptool.__all__}
for name in ckptool.__all__:
    assert hasattr(ckptool, name), name
space = {}
exec("from ckptool import *", space)
assert {*ckptool.__all__} <= {*space}
numpy.savez("a.npz", a=numpy.zeros(3))
calls = {name: (lambda name=name: space[name]({}, "a.pt")) for name in ("load_into", "save_for_cpu")}
calls["Run"] = lambda: ckptool.Run("run")
calls |= {"spec": lambda: ckptool.spec("torch.nn:Linear"), "open": lambda: ckptool.open("a.npz")["a"].torch()}
for name, call in calls.items():
    for error in (ImportError, ckptool.CkptoolError):
        try:
            call()
        except error as raised:
            assert raised.code == "missing-extra" and "pip install 'ckptool[torch]'" in str(raised), str(raised)
        else:
            raise AssertionError(name)
    assert name in pydoc.render_doc(space[name])
assert isinstance(ckptool.Run, type)
"""


def test_without_torch_every_name_is_there_and_says_what_it_needs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_error_of_ours_is_not_told_in_the_words_of_another(tmp_path: Path) -> None:
    """Where a standard error is caught, and made one of ours, such an error itself stays what it is."""
    file = saved({"w": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "made.pt").touch()
    with pytest.raises(FileExistsError, match="already exists") as raised:
        ckptool.convert(file, tmp_path / "made.pt")
    assert (raised.value.errno, type(raised.value).__name__) == (errno.EEXIST, "OutputExists")
    for call in (
        lambda: ckptool.cast(file, tmp_path / "o.pt", dtype="f99"),
        lambda: ckptool.remap(file, tmp_path / "o.pt", to="moon"),
        lambda: ckptool.rename(file, ["w"], tmp_path / "o.pt"),
    ):
        with pytest.raises(ValueError) as refused:
            call()
        assert isinstance(refused.value, errors.UsageError) and refused.value.what, refused.value
    exists = errors.OutputExists("a.pt exists already", "It was left as it is.")
    from ckptool.checkpoint.paths import file_problem
    from ckptool.output.durable import write_problem

    assert file_problem(exists, "a.pt", "write") is exists is write_problem(exists, "a.pt")
