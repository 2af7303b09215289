"""Facts for people and programs: reports, and the lines and tables that they are told in.

A report is a dataclass that is its own schema: its fields and public properties are its JSON, their types carry units,
and `told` gives the lines that people see. The writers (terminal, JSON, Markdown, HTML) stand in `render`, each once.
Every text of a line or table is escaped by them, so a name in a file is given as it is.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field as field
from dataclasses import replace as replace
from functools import cached_property, partial
from importlib import import_module
from reprlib import recursive_repr
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Union

from ckptool.errors import Command, escaped

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, eq=True, repr=True, frozen=False, **options):  # noqa: A002 (as it is called there)
        """`dataclasses.dataclass` in a third of its time, most of which goes into compiling the methods of each class
        in every process: here only `__init__` is compiled. That nobody assigns to a field of a `frozen` class is left
        to type checkers."""
        methods = {"__repr__": repr and _repr, "__eq__": eq and _eq, "__hash__": eq and frozen and _hash}

        def decorate(kind):
            for name in methods:
                if methods[name] and name not in vars(kind):
                    setattr(kind, name, methods[name])
            return dataclasses.dataclass(kind, eq=False, repr=False, **options)

        return decorate

    def _eq(self, other):
        return _values(self) == _values(other) if type(self) is type(other) else NotImplemented

    def _hash(self):
        return hash(_values(self))

    @recursive_repr()
    def _repr(self):
        shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def _values(self):
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self) if field.compare)


# Numbers for people ---------------------------------------------------------------------------------------------------

_SIZES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))
BAR = 12  # characters


def size(nbytes: int) -> str:
    """Bytes for people, three digits: `44.7 MB` (10^6), `512 B`."""
    return next((f"{_three_digits(nbytes / n)} {unit}" for n, unit in _SIZES if nbytes >= n * 0.9995), f"{nbytes} B")


def short(count: int) -> str:
    """A count for people: `950`, `78.2k`, `11.2M`."""
    return next((f"{_three_digits(count / n)}{unit}" for n, unit in _COUNTS if count >= n * 0.9995), str(count))


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def number(value: float | int | None) -> str:
    """A number for people, five significant digits; `–` for none."""
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def percent(share: float) -> str:
    """A share for people, three digits: `3.49%`; only all is `100%`."""
    return f"{100 * share if share >= 1 else min(100 * share, 99.9):.3g}%"


def age(seconds: float) -> str:
    """A time in the largest unit that fits: `3 d`, `5 min`."""
    units = (f"{int(seconds / length):,} {unit}" for length, unit in _AGES if seconds >= length)
    return next(units, f"{max(0, int(seconds))} s")


def bar(part: int, total: int, width: int = BAR) -> str:
    """A bar as long as `part` is of `total`, in eighths of a character."""
    eighths = round(part * width * 8 / total) if total else 0
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def bars(parts: Sequence[int], height: int, width: int = 1) -> list[str]:
    """A bar for each part, side by side, `height` lines high; the largest fills them."""
    eighths = [-(-part * height * 8 // max(*parts, 1)) for part in parts]
    steps = " ▁▂▃▄▅▆▇█"
    return [
        "".join(steps[min(max(level - 8 * row, 0), 8)] * width for level in eighths) for row in reversed(range(height))
    ]


# Lines and tables -----------------------------------------------------------------------------------------------------


class Marked(str):
    """A piece of a line that stands out.  mark: the method of `Style` that makes it so."""

    __slots__ = ("mark",)
    mark: str

    def __new__(cls, text: str, mark: str) -> Marked:
        marked = super().__new__(cls, text)
        marked.mark = mark
        return marked


_MARKS = ("bold", "dim", "red", "green", "yellow", "blue", "cyan")
bold, dim, red, green, yellow, blue, cyan = (partial(Marked, mark=mark) for mark in _MARKS)


class Verbatim(str):
    """A text whose lines stay as they are, empty ones, too."""

    __slots__ = ()


MORE = f"  … {{}} more ({Command(('--json',), 'to_dict()')} lists them)"


class Table(NamedTuple):
    """Rows of cells under a title.
    heads: names of the columns, above them; the title stands in the place of an empty first one.
    right: the columns that are aligned to the right.  indent: columns before each row.
    limit: that many rows are shown, or one more rather than a line that says so; `more` says how many are left out.
    hang: where it is given, the widest of the columns before the last, whose cells go on below themselves where a line
    is too long for the terminal."""

    rows: Sequence[Sequence[str]]
    title: str = ""
    heads: Sequence[str] = ()
    right: Sequence[int] = ()
    indent: int = 2
    limit: int | None = None
    more: str = MORE
    hang: int | None = None

    def cells(self) -> tuple[list[Sequence[str]], int]:
        """The rows that are shown, and how many are left out."""
        cut = self.limit is not None and len(self.rows) > self.limit + 1
        rows = list(self.rows[: self.limit] if cut else self.rows)
        return rows, len(self.rows) - len(rows)


@dataclass(frozen=True, slots=True)
class Note:
    """Something about a file that its user should know, escaped.
    code: explained by `ckptool explain CODE`.  fix: the command that fixes it, as argv."""

    code: str
    message: str
    fix: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", escaped(self.message))


# A line; a line in pieces; a table; a note; or a function of the terminal's columns (None: lines of any length).
# An empty text separates what is before and after it: none begins or ends the output, none follows another.
# None is nothing at all.
Part = str | Table | Note | Callable[[int | None], Iterable[Any]] | tuple[str, ...] | None
Told = Iterable[Part]

# Units ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Unit:
    """What JSON has of the values of a type.  json: in the place of a value, of the type that `schema` says.
    about: said of it in the schema."""

    about: str = ""
    json: Callable[[Any], Any] | None = None
    schema: Mapping[str, Any] | None = None


WHOLE = "(the whole file)"
TEXT = Unit()
Bytes = Annotated[int, Unit("in bytes")]
Seconds = Annotated[float, Unit("in seconds")]
LIVE = "only in Python"  # of a field: Annotated[T, LIVE] is not in JSON


class Fact(NamedTuple):
    """A field or property of a report or a row.  kind: its type, with what it is annotated with."""

    kind: Any
    unit: Unit


_FACTS: dict[Any, Mapping[str, Fact]] = {}


def facts_of(kind: Any) -> Mapping[str, Fact]:
    """The facts of a dataclass or named tuple: its fields, then its public properties, by name."""
    if kind in _FACTS:
        return _FACTS[kind]
    hints = typing.get_type_hints(kind, include_extras=True)
    names = getattr(kind, "_fields", None) or [field.name for field in dataclasses.fields(kind)]
    facts = {name: hints[name] for name in names}
    for name, value in vars(kind).items():
        getter = value.fget if isinstance(value, property) else getattr(value, "func", None)  # of a cached property
        if isinstance(value, (property, cached_property)) and not name.startswith("_"):
            is_live = "LIVE" in str(getter.__annotations__["return"])  # may name types that are not imported
            if not is_live:
                facts[name] = typing.get_type_hints(getter, include_extras=True)["return"]
    public = {name: hint for name, hint in facts.items() if LIVE not in typing.get_args(hint)}
    return _FACTS.setdefault(kind, {name: Fact(hint, _unit(hint)) for name, hint in public.items()})


def _unit(hint: Any) -> Unit:
    """The unit of a type; of `Bytes | None` that of `Bytes`."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Annotated:
        return next((argument for argument in arguments[1:] if isinstance(argument, Unit)), TEXT)
    inner = arguments if typing.get_origin(hint) in (Union, UnionType) else ()
    return next((unit for unit in map(_unit, inner) if unit is not TEXT), TEXT)


# Reports --------------------------------------------------------------------------------------------------------------


class Report:
    """The base of all that verbs answer: text, plain values, and a table for notebooks, whatever it is about.
    schema: name and version of its JSON, `scan/2`; by default that of the class.
    verdict: its attribute that answers yes or no where it has one, for which `bool` would be a guess."""

    __slots__ = ()
    schema: ClassVar[str] = ""
    verdict: ClassVar[str] = ""

    def told(self) -> Told:
        """What people see. Keyword arguments that are declared as options are those of the command's printing."""
        raise NotImplementedError

    def exit(self) -> int:
        """The exit code of the command that reports it: 1 where the verdict is no."""
        return int(not getattr(self, self.verdict)) if self.verdict else 0

    def to_dict(self) -> dict[str, Any]:
        """Everything in it as plain values of JSON: what `--json` prints."""
        return {"schema": f"ckptool.{schema_of(type(self))}", **import_module("ckptool.render.json").facts_json(self)}

    def __str__(self) -> str:
        """The text that the command prints, with the arguments of functions in place of its options."""
        style = import_module("ckptool.render.lines").PYTHON
        return str(import_module("ckptool.render.lines").text(self, style=style)).rstrip("\n")

    def __repr__(self) -> str:
        line = str(self).partition("\n")[0]
        return f"<{type(self).__name__} {line if len(line) <= 160 else line[:159] + '…'}>"

    def _repr_html_(self) -> str:
        return str(import_module("ckptool.render.html").report_html(self))

    def __bool__(self) -> bool:
        if self.verdict:
            name = type(self).__name__
            raise TypeError(f"a {name} is neither true nor false: ask for its .{self.verdict}, or whether it is None")
        return True


@dataclass(frozen=True, slots=True, repr=False)
class Page(Report):
    """A text that is printed as it is: a configuration, its schema."""

    schema = "text/2"

    text: str = ""

    def told(self) -> Told:
        yield Verbatim(self.text.rstrip("\n")) if self.text else None


def schema_of(kind: type[Report]) -> str:
    """The name and version of a report's JSON."""
    return vars(kind).get("schema") or f"{kind.__name__.lower()}/2"
