"""Plain values for a configuration, of YAML that people write and of what is given in Python; nothing else gets in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from ckptool.errors import UsageError, counted, printable

Place = tuple[Any, ...]
MAX_DEPTH, MAX_VALUES, MAX_BITS = 64, 100_000, 1_024  # that a configuration can have in earnest


class Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-3` is a number, which PyYAML takes for a text, and `2024-13-45` a text, of which it makes a date."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A value that its type cannot hold (an integer of 5,000 digits, `!!int x`) is an error with its line."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                problem=f"not a value of the kind {kind}: {str(node.value)[:40]}", problem_mark=node.start_mark
            ) from None


Loader.yaml_implicit_resolvers = {
    key: [(tag, pattern) for tag, pattern in value if not tag.endswith(":timestamp")]
    for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def loaded(text: str, where: str) -> tuple[Any, dict[Place, int]]:
    """The plain values of a YAML text, and the line of every key. Raises `UsageError`, which begins with `where` and the line."""
    try:
        root = yaml.compose(text, Loader=Loader)
        lines = dict(_lines(root)) if root is not None else {}
        return plain(yaml.load(text, Loader=Loader)), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        problem = getattr(error, "problem", None) or str(error)
        raise UsageError(f"{place}: not valid YAML: {printable(problem)}") from None
    except RecursionError:
        raise UsageError(f"{where}: values are nested too deep") from None


def _lines(node: yaml.Node, place: Place = ()) -> Iterator[tuple[Place, int]]:
    """The line of every key. Raises `MarkedYAMLError` for one that is there twice, of which YAML would take the last."""
    stack: list[tuple[yaml.Node, Place]] = [(node, place)]
    seen: set[int] = set()
    known: set[Place] = set()
    while stack:
        node, place = stack.pop()
        if id(node) in seen:
            continue  # an alias
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue  # which the loader refuses
                here = (*place, key.value)
                if here in known:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
                known.add(here)
                yield here, key.start_mark.line + 1
                stack.append((value, here))
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                yield (*place, index), value.start_mark.line + 1
                stack.append((value, (*place, index)))


def plain(value: Any, place: Place = ()) -> Any:
    """A copy of plain values: texts, numbers, lists, and dictionaries by text. Paths are texts; any other object is a `UsageError`."""
    return _plain(value, place, [MAX_VALUES])


def _plain(value: Any, place: Place, left: list[int]) -> Any:
    left[0] -= 1
    if left[0] < 0 or len(place) > MAX_DEPTH:
        raise UsageError(
            "the configuration is larger than one can be",
            f"It has more than {MAX_VALUES:,} values, or lists in lists {MAX_DEPTH} deep. Nothing was started.",
        )
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise UsageError(
            f"{printable(dotted(place))} is a number of {counted(value.bit_length(), 'bit')}", "No setting is so large."
        )
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, (*place, key), left) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, (*place, index), left) for index, item in enumerate(value)]
    raise UsageError(
        f"{printable(dotted(place)) or 'the configuration'} is {_described(value)}, and a configuration holds plain values",
        "It is written to run.yaml, from which the run goes on.",
        _instead(value),
    )


def _described(value: Any) -> str:
    kind = "the class" if isinstance(value, type) else "the function" if callable(value) else "an object of"
    return f"{kind} {printable(getattr(value, '__qualname__', None) or type(value).__qualname__)}"


def _instead(value: Any) -> str:
    """How a class or a function is named in a configuration."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not module or module == "builtins" or not name:
        return "Give texts, numbers, lists and dictionaries."
    if not name.isidentifier():
        return "Move it to the top of a file, and name it by that: file.py:NAME"
    if module == "__main__":
        import __main__

        module = os.path.basename(getattr(__main__, "__file__", "file.py"))
    return f"Name it by its place: '{printable(module)}:{name}'"


def dotted(place: Place) -> str:
    return ".".join(map(str, place))
