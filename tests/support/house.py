"""Counts how the package is built, beside what it was and is to be: `python -m tests.support.house [-v]`, `make house`.

Everything is read from the source, but for the walks, which are run; `-v` lists what is behind the counts. What is
reached stays: REACHED, which `make lint` holds to. The numbers of 0.1.0 and of the package before it was halved are
kept here.

How it counts:
- Lines are those of `*.py`. The path of a verb is what a command line goes through beside the work on checkpoints: the
  rooms and modules of PATH, wherever they lie.
- "A verb, whole" is the path of a verb divided by the number of verbs, as in the 510 of before; "its own file" is
  `verbs/` alone. "What says" of it are declarations (decorator, signature and docstring of the function; types of
  parameters), the dataclasses of reports with their views, functions that give lines and tables, schemas in YAML, and
  what `render/` has beside the writers (WRITERS); divided by the number of verbs, too.
- A walk is a command line on small files, profiled in a fresh process: functions of the package that are called, but
  for those without a name and by imports; the files they stand in, the most of them on the stack, and the lines of all
  modules of the package that are imported.
- Locals that say nothing are assignments and parameters with one of the names in VAGUE, in which somebody new cannot
  tell an archive from a list of notes. A set of what was met before may be `known`.
- Private functions and methods "called once" are those whose name stands once in their module; a body is the lines
  below the docstring.
- Designs that stand several times are named in DESIGNS, and are there as long as a module defines them; loops over
  blocks are modules outside of the rooms of bytes that import what blocks are made with.
- An import counts wherever it stands, at the top or inside a function, but not under `TYPE_CHECKING`;
  `from ckptool.a import b` is an import of `ckptool.a.b` where that is a module, else of `ckptool.a`.
- Names of verbs may repeat across layers and do not count as repeated basenames.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ckptool.commands import VERBS

PACKAGE = "ckptool"
NOT_ENTRIES = ("__init__.py", "__main__.py", "py.typed")
SHORT = 5  # lines of a body
WIDE = 120  # columns
VAGUE = {"found", "made", "whole", "done", "given", "told", "kept", "known", "own", "alike"}
PATH = ("cli", "verbs", "reports", "analysis", "render", "errors", "commands", "facts", "options")
WRITERS = ("__init__", "html", "json", "lines", "markdown")  # of every report alike
BYTES = ("bridge", "checkpoint", "formats", "output", "pickles")
BLOCKS = {"CHUNK", "chunks", "blocks", "BlockReader"}
# Module and what it defines.
DESIGNS = {
    "engines that match names": "steps.steps_of ready.paired suggest.suggest",
    "ways of joining ranks": "pieces.Joiner",
    "JSON languages for trees": "bundle_json",  # and `old_records`, which reads those of 0.1.0 for one release
}


class Aim(NamedTuple):
    """A count in 0.1.0, before the package was halved, the bound and the goal of that; None: nobody has counted."""

    first: int | None = None
    before: int | None = None
    bound: int | None = None
    goal: int | None = None


AIMS = {
    "lines of the package": Aim(37_479, 69_966, 48_000, 42_000),
    "  modules": Aim(237, 349, 235, 200),
    "the path of a verb: lines": Aim(None, 19_900, 14_400, 12_400),
    "  a verb, whole, mean": Aim(None, 510, 360, 260),
    "  its own file, mean": Aim(),
    "  what says, mean": Aim(None, 187, 94),
    "walk of strip-module: functions": Aim(None, 360, 150, 60),
    "  files": Aim(None, 54, 25, 15),
    "  frames deep": Aim(None, 23, 15),
    "  lines imported": Aim(None, 20_808, 9_000),
    "walk of convert ZERO_FOLDER: functions": Aim(None, 481, 200),
    "  its files": Aim(None, 66, 30),
    "  its frames deep": Aim(None, 32, 18),
    "  its lines imported": Aim(None, 30_898, 13_000),
    "private, called once, short": Aim(None, 537, 150),
    "engines that match names": Aim(None, 8, 1),
    "loops over blocks": Aim(None, 14, 1),
    "ways of joining ranks": Aim(None, 4, 1),
    "JSON languages for trees": Aim(None, 4, 1),
    "lines of tests": Aim(None, 68_102, 40_000, 30_000),
    "entries at the top": Aim(29, 13, 15),
    "largest circle of imports (files)": Aim(41, 5, 3),
    "lines over 120 columns": Aim(865, 3, 0),
    "lines of README.md": Aim(None, 250, 260),
    "layers of the import contract": Aim(21, 10, 10),
    "names of several things": Aim(),
    "locals that say nothing": Aim(),
}
# What may not get worse any more. Lower them when you can; the path of a verb was 14,400 before 0.2.0 brought `browse`,
# `doctor --fix`, clusters, progress and the diff of a screen, for which the bound of the package was raised, too.
REACHED = {
    "  modules": 235,
    "the path of a verb: lines": 14_400,
    "  a verb, whole, mean": 360,
    "  what says, mean": 94,
    "private, called once, short": 80,
    "engines that match names": 2,
    "loops over blocks": 0,
    "ways of joining ranks": 1,
    "JSON languages for trees": 1,
    "largest circle of imports (files)": 3,
    "lines over 120 columns": 0,
    "lines of README.md": 260,
    "layers of the import contract": 11,
    "names of several things": 0,
    "locals that say nothing": 60,
}


@dataclass(frozen=True)
class Module:
    """One file of the package: its dotted name, its text, its syntax tree."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def basename(self) -> str:
        return self.path.stem

    @property
    def room(self) -> str:
        """The entry below `ckptool/` that it is in."""
        return self.name.split(".")[1] if "." in self.name else ""

    @cached_property
    def defined(self) -> set[str]:
        """What stands at its top; of a package, what its `__init__` takes from its modules, too."""
        names = {node.name for node in self.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        return names | {self.name.rpartition(".")[2]}

    @cached_property
    def called_once(self) -> list[str]:
        """Private functions and methods with short bodies whose name stands once in the module."""
        names = Counter(getattr(node, "id", getattr(node, "attr", "")) for node in self.nodes)
        private = (node for node in self.nodes if isinstance(node, ast.FunctionDef) and re.match("_[^_]", node.name))
        bodies = {node.name: node.body[_has_docstring(node) :] for node in private if names[node.name] == 1}
        return [f"{self.name}.{name}" for name, body in bodies.items() if body and _lines(body[0], body[-1]) <= SHORT]

    @cached_property
    def vague(self) -> list[str]:
        """The places where a variable or parameter is called what anything could be called."""
        named = [node for node in self.nodes if isinstance(node, ast.arg | ast.Name)]
        stored = [node for node in named if isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store)]
        names = ((node.arg if isinstance(node, ast.arg) else node.id, node.lineno) for node in stored)
        return [f"{self.name}:{line} {name}" for name, line in names if name in VAGUE]

    @cached_property
    def saying(self) -> int:
        """The lines that declare a verb, are its report, or make words of it."""
        if self.room == "render":
            return 0 if self.basename in WRITERS else self.lines
        return sum(map(_saying, self.tree.body)) if self.room in ("verbs", "reports", "analysis") else 0


class House:
    """The package in a folder, counted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules = {module.name: module for module in sorted(_modules(folder), key=lambda module: module.name)}

    @cached_property
    def entries(self) -> list[str]:
        entries = (entry for entry in (self.folder / PACKAGE).iterdir() if entry.name not in NOT_ENTRIES)
        return sorted(entry.name for entry in entries if entry.suffix == ".py" or (entry / "__init__.py").exists())

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> the modules of the package that it imports when it runs, at the top or inside functions."""
        return {name: self._imports(module) for name, module in self.modules.items()}

    def _imports(self, module: Module) -> set[str]:
        types = (
            node for node in module.nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        left_out = {id(node) for block in types for node in ast.walk(block)}
        found = set()
        for node in module.nodes:
            if id(node) in left_out:
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= names & self.modules.keys() or {node.module}
        return found & self.modules.keys()

    @cached_property
    def circle(self) -> list[str]:
        """The largest set of modules that all reach each other through imports that run."""
        return sorted(max(_circles(self.imports), key=len))

    @cached_property
    def path(self) -> list[Module]:
        """What a command line goes through."""
        return [each for each in self.modules.values() if each.room in PATH or each.basename == "commands"]

    @cached_property
    def repeated_names(self) -> dict[str, list[str]]:
        """Basename, or class at the top of a module -> the modules that share it."""
        verbs = {module.basename for module in self.modules.values() if module.room == "verbs"}
        verbs |= {verb.function for verb in VERBS.values()} | {"__init__"}
        files, classes = defaultdict(list), defaultdict(list)
        for module in self.modules.values():
            if module.basename not in verbs:
                files[module.basename].append(module.name)
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    classes[node.name].append(module.name)
        return {name: found for homes in (files, classes) for name, found in sorted(homes.items()) if len(found) > 1}

    @cached_property
    def wide_lines(self) -> list[str]:
        return [
            f"{module.name}:{number}"
            for module in self.modules.values()
            for number, line in enumerate(module.text.splitlines(), 1)
            if len(line) > WIDE
        ]

    @cached_property
    def loops_over_blocks(self) -> list[str]:
        def loops(node: ast.AST) -> bool:
            return isinstance(node, ast.ImportFrom) and not BLOCKS.isdisjoint(alias.name for alias in node.names)

        modules = (module for module in self.modules.values() if module.room not in BYTES)
        return [module.name for module in modules if any(map(loops, module.tree.body))]

    def designs(self, what: str) -> list[str]:
        """Those of a kind that are there."""
        wanted = [name.rpartition(".") for name in DESIGNS[what].split()]
        ends = {(module or name, name) for module, _, name in wanted}
        return [
            f"{module.name}.{name}"
            for module in self.modules.values()
            for end, name in sorted(ends)
            if module.name.endswith(f".{end}") and name in module.defined
        ]

    @cached_property
    def contract(self) -> Contract:
        return Contract((self.folder / "pyproject.toml").read_text(encoding="utf-8"))


class Contract:
    """The rules on imports in `pyproject.toml`. Read as text: Python 3.10 has no reader of TOML."""

    def __init__(self, text: str) -> None:
        contracts = re.split(r"^\[\[tool\.importlinter\.contracts\]\]$", text, flags=re.M)[1:]
        layers = next(contract for contract in contracts if re.search(r'^type = "layers"', contract, re.M))
        found = re.search(r"^layers = \[(.*?)\]$", layers, re.M | re.S)
        lines = found[1].splitlines() if found else []
        self.layers = [text for line in lines for text in re.findall(r'"([^"]*)"', line.split(" #")[0])]

    @property
    def any_direction(self) -> list[str]:
        return [layer for layer in self.layers if ":" in layer]


def _modules(folder: Path) -> Iterator[Module]:
    for path in (folder / PACKAGE).rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        yield Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path, path.read_text(encoding="utf-8"))


def _has_docstring(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)


def _lines(first: ast.AST, last: ast.AST) -> int:
    return int(last.end_lineno - first.lineno + 1)  # type: ignore[attr-defined]


def _saying(node: ast.stmt) -> int:
    """How many lines of a statement at the top of a module declare a verb, are its report, or make words of it."""
    if isinstance(node, ast.ClassDef):
        of = {word for each in (*node.decorator_list, *node.bases) for word in re.findall(r"\w+", ast.unparse(each))}
        return _lines((node.decorator_list or [node])[0], node) if {"dataclass", "NamedTuple", "Report"} & of else 0
    if isinstance(node, ast.FunctionDef):
        if any(ast.unparse(each).startswith("verb(") for each in node.decorator_list):
            return _lines(node.decorator_list[0], node.body[0]) if _has_docstring(node) else 0
        returned = ast.unparse(node.returns) if node.returns else ""
        return _lines(node, node) if re.search(r"\b(?:Told|Part|Lines?|Table)\b", returned) else 0
    return _lines(node, node) if isinstance(node, ast.Assign) and "Annotated" in ast.unparse(node.value) else 0


def _circles(edges: dict[str, set[str]]) -> Iterator[set[str]]:
    """The strongly connected components. Slow and short: what reaches what, then who reaches each other."""
    reached: dict[str, set[str]] = {start: set() for start in edges}
    for start, found in reached.items():
        waiting = [start]
        while waiting:
            new = edges[waiting.pop()] - found
            found |= new
            waiting.extend(new)
    for start, found in reached.items():
        yield {start} | {other for other in found if start in reached[other]}


# Walks ----------------------------------------------------------------------------------------------------------------

WALK = """
import json, os, sys
root, answer, *words = sys.argv[1:]
os._exit = sys.exit
sys.path.insert(0, root)
package = os.path.join(root, "ckptool", "")
functions, deepest, depth, importing = set(), 0, 0, 0
def profile(frame, event, argument):
    global deepest, depth, importing
    code = frame.f_code
    if event in ("call", "return") and code.co_filename.startswith(package):
        step = 1 if event == "call" else -1
        if code.co_name == "<module>":
            importing += step
        elif code.co_name[0] != "<":
            depth += step
            deepest = max(deepest, depth)
            if not importing:
                functions.add(code)
from ckptool.__main__ import main
sys.argv = ["ckptool", *words]
sys.setprofile(profile)
try:
    code = main()
except SystemExit as error:
    code = error.code
sys.setprofile(None)
files = {each.__file__ for name, each in list(sys.modules.items()) if name.split(".")[0] == "ckptool"}
lines = sum(open(file, encoding="utf-8").read().count("\\n") for file in files)
counts = len(functions), len({each.co_filename for each in functions}), deepest, lines, code
json.dump(counts, open(answer, "w"))
"""
WALKS = {
    "walk of strip-module: ": ["strip-module", "a.pt", "-o", "b.pt"],
    "walk of convert ZERO_FOLDER: ": ["convert", "global_step1", "-o", "out.safetensors"],
}


def walked(folder: Path, walks: Mapping[str, list[str]] = MappingProxyType(WALKS)) -> dict[str, list[int]]:
    """Beginning of a row -> functions, files, frames deep, lines imported."""
    import torch

    from tests.support.engine_folders import write_zero

    counts = {}
    with tempfile.TemporaryDirectory() as place:
        torch.save({"module.a.weight": torch.ones(2, 2), "module.a.bias": torch.ones(2)}, Path(place, "a.pt"))
        write_zero(Path(place, "global_step1"), 2, 2)
        for name, words in walks.items():
            command = [sys.executable, "-c", WALK, str(folder.resolve()), "counts.json", *words]
            ran = subprocess.run(command, cwd=place, capture_output=True, text=True, check=True)
            *counts[name], code = json.loads(Path(place, "counts.json").read_text())
            assert not code, ran.stderr
    return counts


# The table ------------------------------------------------------------------------------------------------------------


def counts(house: House) -> dict[str, Callable[[], int]]:
    """Aim -> how it is counted, but for the walks."""
    modules, path = house.modules.values(), house.path
    lines = sum(module.lines for module in path)
    schemas = sum(len(each.read_text().splitlines()) for each in (house.folder / PACKAGE).rglob("schemas.yaml"))

    def a_verb(lines: int) -> int:
        return round(lines / len(VERBS))

    return {
        "lines of the package": lambda: sum(module.lines for module in modules),
        "  modules": lambda: len(modules),
        "the path of a verb: lines": lambda: lines,
        "  a verb, whole, mean": lambda: a_verb(lines),
        "  its own file, mean": lambda: a_verb(sum(module.lines for module in path if module.room == "verbs")),
        "  what says, mean": lambda: a_verb(sum(module.saying for module in path) + schemas),
        "private, called once, short": lambda: sum(len(module.called_once) for module in modules),
        "loops over blocks": lambda: len(house.loops_over_blocks),
        "lines of tests": lambda: sum(
            len(each.read_text(encoding="utf-8").splitlines()) for each in (house.folder / "tests").rglob("*.py")
        ),
        "entries at the top": lambda: len(house.entries),
        "largest circle of imports (files)": lambda: len(house.circle),
        "lines over 120 columns": lambda: len(house.wide_lines),
        "lines of README.md": lambda: len((house.folder / "README.md").read_text(encoding="utf-8").splitlines()),
        "layers of the import contract": lambda: len(house.contract.layers) + 100 * len(house.contract.any_direction),
        "names of several things": lambda: len(house.repeated_names),
        "locals that say nothing": lambda: sum(len(module.vague) for module in house.modules.values()),
        **{what: lambda what=what: len(house.designs(what)) for what in DESIGNS},  # type: ignore[misc]
    }


def details(house: House) -> Iterator[str]:
    """What stands behind the counts, where a count above zero asks which."""
    by_room = Counter[str]()
    for module in house.modules.values():
        by_room[module.room] += module.lines
    behind = {
        "rooms": [f"{room or '(top)'} {lines:,}" for room, lines in by_room.most_common()],
        "what says": [f"{module.name} {module.saying}" for module in house.path if module.saying],
        "private, called once, short": [name for module in house.modules.values() for name in module.called_once],
        "loops over blocks": house.loops_over_blocks,
        **{what: house.designs(what) for what in DESIGNS},
        "largest circle of imports": house.circle if len(house.circle) > 1 else [],
        "lines over 120 columns": house.wide_lines,
        "names of several things": [f"{name}: {', '.join(at)}" for name, at in house.repeated_names.items()],
        "locals that say nothing": [at for module in house.modules.values() for at in module.vague],
    }
    for title, items in behind.items():
        if items:
            yield from ("", title, *(f"  {item}" for item in items))


def lost(house: House, reached: Mapping[str, int] = MappingProxyType(REACHED)) -> Iterator[str]:
    """What was reached and is not any more."""
    counted = counts(house)
    for name, most in reached.items():
        now = counted[name]()
        if now > most:
            yield f"{name.strip()}: {now}, and at most {most} was reached (python -m tests.support.house -v)"


def main(arguments: list[str]) -> None:
    folders = [Path(word) for word in arguments if not word.startswith("-")]
    house = House(folders[0] if folders else Path(__file__).parents[2])
    now = {name: count() for name, count in counts(house).items()}
    for start, numbers in walked(house.folder).items():
        rows = list(AIMS)[list(AIMS).index(start + "functions") :]
        now |= dict(zip(rows, numbers, strict=False))
    print(f"{'':<34}{'0.1.0':>9}{'before':>9}{'bound':>9}{'goal':>9}{'now':>9}")
    for name, row in AIMS.items():
        print(f"{name:<34}" + "".join(f"{'' if number is None else f'{number:,}':>9}" for number in (*row, now[name])))
    if "-v" in arguments:
        print(*details(house), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
