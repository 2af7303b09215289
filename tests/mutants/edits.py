"""Edits of operators, constants and branches, drawn with a seed."""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SEED = 12
COUNT = 300
FEWEST = 6  # of a room
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    getattr(ast, old): getattr(ast, new)
    for old, new in (
        pair.split(":")
        for pair in (
            "Lt:LtE LtE:Lt Gt:GtE GtE:Gt Eq:NotEq NotEq:Eq Is:IsNot IsNot:Is In:NotIn NotIn:In And:Or Or:And Add:Sub "
            "Sub:Add Mult:Add FloorDiv:Mult Mod:FloorDiv Continue:Break"
        ).split()
    )
}


@dataclass(frozen=True)
class Edit:
    """Bytes of a file that become others.

    function: its qualified name.  lines: the first and the last of its body.  first: the column where that begins.
    start, end: in the file.
    """

    path: str
    function: str
    lines: tuple[int, int]
    first: int
    line: int
    start: int
    end: int
    old: str
    new: str

    @property
    def room(self) -> str:
        parts = Path(self.path).parts
        return parts[1] if len(parts) > 2 else "."

    def made(self, data: bytes) -> bytes:
        """The file with the edit. Raises `LookupError` if it is no longer the file that the edit is of."""
        if data[self.start : self.end] != self.old.encode():
            raise LookupError(f"{self.path}:{self.line} is not {self.old!r}")
        return data[: self.start] + self.new.encode() + data[self.end :]


def drawn(root: Path) -> list[Edit]:
    """The edits of the package in a checkout: for each room as many as it has lines."""
    found: dict[str, list[Edit]] = {}
    lines: dict[str, int] = {}
    for path in sorted((root / "ckptool").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        edits = list(edits_of(name, path.read_bytes()))
        room = Edit(name, "", (0, 0), 0, 0, 0, 0, "", "").room
        found.setdefault(room, []).extend(edits)
        lines[room] = lines.get(room, 0) + len(path.read_bytes().splitlines())
    total = sum(lines.values())
    return [
        edit
        for room, edits in sorted(found.items())
        for edit in random.Random(f"{SEED} {room}").sample(
            edits, min(len(edits), max(FEWEST, round(COUNT * lines[room] / total)))
        )
    ]


def placed(listed: list[Edit], root: Path) -> list[Edit | None]:
    """The edits as they are in a checkout whose code has moved since: in the function of that name, of the same file or
    else of the same room, where the same text stands nearest. None for one whose code is no longer there."""
    known: dict[tuple[str, str, str, str], list[Edit]] = {}
    for path in sorted((root / "ckptool").rglob("*.py")):
        for edit in edits_of(path.relative_to(root).as_posix(), path.read_bytes()):
            known.setdefault((edit.room, edit.function, edit.old, edit.new), []).append(edit)

    def place(edit: Edit) -> Edit | None:
        same = known.get((edit.room, edit.function, edit.old, edit.new), [])
        below = edit.line - edit.lines[0]
        return min(same, key=lambda e: (e.path != edit.path, abs(e.line - e.lines[0] - below)), default=None)

    return [place(edit) for edit in listed]


def edits_of(name: str, data: bytes) -> Iterator[Edit]:
    """Every edit in a file's functions; not in annotations, defaults and decorators, which run at import."""
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def walk(node: ast.AST, function: str, lines: tuple[int, int], first: int) -> Iterator[Edit]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{function}.{node.name}" if function else node.name
            if not isinstance(node, ast.ClassDef):
                begin = node.body[len(node.body) > 1 and _is_text(node.body[0])]
                lines, first = (_first_line(begin), node.end_lineno or 0), begin.col_offset
            for statement in node.body:
                yield from walk(statement, inner, lines, first)
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from walk(node.value, function, lines, first)
            return
        new = changed(node) if lines[1] else None
        if new is not None:
            start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
            end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            old = data[start:end].decode()
            yield Edit(name, function, lines, first, node.lineno, start, end, old, new)  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.JoinedStr):  # what a message says
                yield from walk(child, function, lines, first)
        if isinstance(node, (ast.If, ast.IfExp)):
            test = node.test
            start, end = starts[test.lineno - 1] + test.col_offset, starts[test.end_lineno - 1] + test.end_col_offset  # type: ignore[operator]
            old = data[start:end].decode()
            yield Edit(name, function, lines, first, test.lineno, start, end, old, f"(not ({old}))")

    yield from walk(ast.parse(data), "", (0, 0), 0)


def changed(node: ast.AST) -> str | None:
    """The text of a node with another operator or constant; None for one that has none."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPPED:
        return f"({ast.unparse(ast.Compare(node.left, [SWAPPED[type(node.ops[0])]()], node.comparators))})"  # type: ignore[list-item]
    if isinstance(node, ast.BoolOp):
        return f"({ast.unparse(ast.BoolOp(SWAPPED[type(node.op)](), node.values))})"  # type: ignore[arg-type]
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED and not any(map(_text, (node.left, node.right))):
        return f"({ast.unparse(ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right))})"  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"bool({ast.unparse(node.operand)})"
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return str(not node.value if type(node.value) is bool else int(node.value) + 1)
    return "break" if isinstance(node, ast.Continue) else None


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _first_line(node: ast.stmt) -> int:
    """Where a statement begins; of a class or function, with its decorators."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def _text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
