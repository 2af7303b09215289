"""Counts how the package is built: `python -m tests.support.house [FOLDER]`, or `make house`.

Everything is read from the source, nothing is imported. The counts of 0.1.0 and the goals stand beside today's; `-v`
lists what is behind them. `tests/test_house.py` holds the limits that stay.

How it counts:
- An import counts wherever it stands, at the top or inside a function; under `TYPE_CHECKING` only where the row says
  so.
- `from ckptool.a import b` is an import of `ckptool.a.b` where that is a module, else of `ckptool.a`.
- "Imported from one place" counts importing modules, for types too; an `__init__` that re-exports a submodule is one
  place.
- Names of verbs may repeat across layers and do not count as repeated basenames; in 0.1.0 they were 14 of the 22.
- A module's header is its docstring and imports, with the blank lines between, up to its first other statement.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ckptool.commands import VERBS, function_name

PACKAGE = "ckptool"
NOT_ENTRIES = ("__init__.py", "__main__.py", "py.typed")
LONG = 40  # lines of a function
WIDE = 120  # columns
HARNESS = {
    "cli": ("training",),
    "verbs": ("_training", "eval", "prove", "prune", "resume", "train", "training"),
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


@dataclass(frozen=True)
class Function:
    """A function or method, and how many lines it takes without its decorators."""

    module: str
    name: str
    lines: int


class House:
    """The package in a folder, counted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules = {module.name: module for module in sorted(_modules(folder), key=lambda module: module.name)}

    @cached_property
    def lines(self) -> int:
        return sum(module.lines for module in self.modules.values())

    @cached_property
    def entries(self) -> list[str]:
        entries = (entry for entry in (self.folder / PACKAGE).iterdir() if entry.name not in NOT_ENTRIES)
        return sorted(entry.name for entry in entries if entry.suffix == ".py" or (entry / "__init__.py").exists())

    @cached_property
    def header_lines(self) -> int:
        return sum(_header_lines(module.tree) for module in self.modules.values())

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> the modules of the package that it imports when it runs, at the top or inside functions."""
        return {name: self._imports(module, types=False) for name, module in self.modules.items()}

    @cached_property
    def imported_once(self) -> dict[str, str]:
        """Module -> the only module that imports it."""
        importers = defaultdict(set)
        for name, module in self.modules.items():
            for target in self._imports(module, types=True) - {name}:
                importers[target].add(name)
        return {name: min(found) for name, found in sorted(importers.items()) if len(found) == 1}

    def _imports(self, module: Module, types: bool) -> set[str]:
        """With those that only a checker of types sees, if it is for `types`."""
        blocks = () if types else filter(_is_for_types, module.nodes)
        left_out = {id(node) for block in blocks for node in ast.walk(block)}
        found = set()
        for node in module.nodes:
            if id(node) in left_out:
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {self._imported(node.module, alias.name) for alias in node.names}
        return found & self.modules.keys()

    def _imported(self, module: str, name: str) -> str:
        return f"{module}.{name}" if f"{module}.{name}" in self.modules else module

    @cached_property
    def circle(self) -> list[str]:
        """The largest set of modules that all reach each other through imports that run."""
        return sorted(max(_circles(self.imports), key=len))

    @cached_property
    def circle_of_types(self) -> list[str]:
        """The same with the imports for types alone: what must be read together to be understood."""
        edges = {name: self._imports(module, types=True) for name, module in self.modules.items()}
        return sorted(max(_circles(edges), key=len))

    @cached_property
    def verbs(self) -> set[str]:
        modules = (module for module in self.modules.values() if module.room == "verbs")
        named = {module.basename for module in modules if not module.basename.startswith("_")}
        return named | {function_name(name) for name, verb in VERBS.items() if not verb.in_python}

    @cached_property
    def repeated_basenames(self) -> dict[str, list[str]]:
        """Basename -> the modules that share it; `__init__` and the names of verbs do not count."""
        allowed = self.verbs | {"__init__"}
        homes = defaultdict(list)
        for module in self.modules.values():
            homes[module.basename].append(module.name)
        return {name: found for name, found in sorted(homes.items()) if len(found) > 1 and name not in allowed}

    @cached_property
    def repeated_classes(self) -> dict[str, list[str]]:
        """Class -> the modules that define one of that name, at their top."""
        homes = defaultdict(list)
        for module in self.modules.values():
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(module.name)
        return {name: found for name, found in sorted(homes.items()) if len(found) > 1}

    @cached_property
    def functions(self) -> list[Function]:
        """The longest first."""
        found = [
            Function(module.name, node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
            for module in self.modules.values()
            for node in module.nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        return sorted(found, key=lambda function: (-function.lines, function.module, function.name))

    @cached_property
    def long_functions(self) -> list[Function]:
        return [function for function in self.functions if function.lines > LONG]

    @cached_property
    def wide_lines(self) -> list[str]:
        return [
            f"{module.name}:{number}"
            for module in self.modules.values()
            for number, line in enumerate(module.text.splitlines(), 1)
            if len(line) > WIDE
        ]

    @cached_property
    def containers(self) -> set[str]:
        """The names of the containers: what the modules of `formats/` call `NAME`."""
        return {
            node.value.value
            for module in self.modules.values()
            for node in module.tree.body
            if module.room == "formats" and isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            if any(isinstance(target, ast.Name) and target.id == "NAME" for target in node.targets)
        }

    @cached_property
    def compared_with_containers(self) -> list[str]:
        """The places outside `formats/` that compare with a container's name: ==, !=, in, match."""
        return [
            f"{module.name}:{node.lineno} {value}"
            for module in self.modules.values()
            if module.room != "formats"
            for node in module.nodes
            if isinstance(node, ast.Compare | ast.MatchValue)
            for value in _strings(node)
            if value in self.containers
        ]

    @cached_property
    def harness_lines(self) -> int:
        """Lines of the training harness, of its verbs, commands and renderers."""
        return sum(module.lines for module in self.modules.values() if _is_harness(module))

    @cached_property
    def contract(self) -> Contract:
        return Contract((self.folder / "pyproject.toml").read_text(encoding="utf-8"))


class Contract:
    """The rules on imports in `pyproject.toml`. Read as text: Python 3.10 has no reader of TOML."""

    def __init__(self, text: str) -> None:
        self.contracts = re.split(r"^\[\[tool\.importlinter\.contracts\]\]$", text, flags=re.M)[1:]
        layers = next(contract for contract in self.contracts if re.search(r'^type = "layers"', contract, re.M))
        self.layers = _list(layers, "layers")
        self.ignores = _list(layers, "ignore_imports")
        self.silenced = text.count('unmatched_ignore_imports_alerting = "none"')

    @property
    def any_direction(self) -> list[str]:
        return [layer for layer in self.layers if ":" in layer]


def _modules(folder: Path) -> Iterator[Module]:
    for path in (folder / PACKAGE).rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        yield Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path, path.read_text(encoding="utf-8"))


def _header_lines(tree: ast.Module) -> int:
    end = 0
    for place, node in enumerate(tree.body):
        docstring = not place and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (docstring or isinstance(node, ast.Import | ast.ImportFrom) or _is_for_types(node)):
            break
        end = node.end_lineno or end
    return end


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _strings(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


def _is_harness(module: Module) -> bool:
    return module.room == "training" or module.basename in HARNESS.get(module.room, ())


def _list(contract: str, key: str) -> list[str]:
    found = re.search(rf"^{key} = \[(.*?)\]$", contract, re.M | re.S)
    lines = found[1].splitlines() if found else []
    return [text for line in lines for text in re.findall(r'"([^"]*)"', line.split(" #")[0])]


def _circles(edges: dict[str, set[str]]) -> Iterator[set[str]]:
    """The strongly connected components. Slow and short: what reaches what, then who reaches each other."""
    reached = {start: _reached(start, edges) for start in edges}
    for start, found in reached.items():
        yield {start} | {other for other in found if start in reached[other]}


def _reached(start: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = edges[waiting.pop()] - found
        found |= new
        waiting.extend(new)
    return found


def table(house: House) -> list[tuple[str, str, str, str]]:
    """The rows: what is counted, in 0.1.0, the goal, now."""
    contract = house.contract
    once_lines = sum(house.modules[name].lines for name in house.imported_once)
    longest = house.functions[0].lines
    return [
        ("lines", "37,479", "34,000", f"{house.lines:,}"),
        ("modules", "237", "150", str(len(house.modules))),
        ("entries at the top", "29", "12", str(len(house.entries))),
        ("lines of module headers", "4,083", "3,000", f"{house.header_lines:,}"),
        ("modules imported from one place", "52", "15", str(len(house.imported_once))),
        ("  their lines", "8,487", "", f"{once_lines:,}"),
        ("basenames used more than once", "8", "0", str(len(house.repeated_basenames))),
        ("class names defined more than once", "15", "0", str(len(house.repeated_classes))),
        ("layers of the import contract", "21", "10", str(len(contract.layers))),
        ("  with ':' (any direction)", "3", "0", str(len(contract.any_direction))),
        ("  ignored imports", "5", "2", str(len(contract.ignores))),
        ("  contracts that hide stale ignores", "4", "0", str(contract.silenced)),
        ("largest circle of imports (files)", "41", "6", str(len(house.circle))),
        ("  with imports for types", "75", "6", str(len(house.circle_of_types))),
        ("longest function (lines)", "223", "", str(longest)),
        ("functions over 40 lines", "22", "22", f"{len(house.long_functions)} of {len(house.functions):,}"),
        ("lines over 120 columns", "865", "0", str(len(house.wide_lines))),
        ("comparisons with a container's name", "21", "0", str(len(house.compared_with_containers))),
        ("lines of the harness", "5,292", "4,500", f"{house.harness_lines:,}"),
    ]


def details(house: House) -> Iterator[str]:
    """What stands behind the counts, where a count above zero asks which."""
    by_room = Counter[str]()
    for module in house.modules.values():
        by_room[module.room] += module.lines
    yield from _named("rooms", (f"{room or '(top)'} {lines:,}" for room, lines in by_room.most_common()))
    once = ((house.modules[name].lines, name, by) for name, by in house.imported_once.items())
    yield from _named("imported from one place", (f"{name} ({lines}) by {by}" for lines, name, by in sorted(once)))
    yield from _named("basenames", (f"{name}: {', '.join(at)}" for name, at in house.repeated_basenames.items()))
    yield from _named("classes", (f"{name}: {', '.join(at)}" for name, at in house.repeated_classes.items()))
    yield from _named("circle", house.circle if len(house.circle) > 1 else ())
    yield from _named("long functions", (f"{at.lines} {at.module}.{at.name}" for at in house.long_functions))
    yield from _named("wide lines", house.wide_lines)
    yield from _named("container names", house.compared_with_containers)


def _named(title: str, items: Iterator[str] | list[str] | tuple[str, ...]) -> Iterator[str]:
    found = list(items)
    if found:
        yield f"\n{title}"
        yield from (f"  {item}" for item in found)


def main(arguments: list[str]) -> None:
    folders = [Path(word) for word in arguments if not word.startswith("-")]
    house = House(folders[0] if folders else Path(__file__).parents[2])
    print(f"{'':<38}{'0.1.0':>8}{'goal':>8}{'now':>14}")
    for name, first, goal, now in table(house):
        print(f"{name:<38}{first:>8}{goal:>8}{now:>14}")
    if "-v" in arguments:
        print(*details(house), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
