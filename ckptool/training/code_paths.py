"""Paths in a configuration: relative to the file that they are in, and from then on absolute.

They are the files of `file.py:NAME`, the `from` of a model, and arguments that begin with `./` or `../`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ckptool.analysis.targets import names_code
from ckptool.checkpoint.paths import absolute


def _names_file(text: str) -> bool:
    return names_code(text) and text.rpartition(":")[0].endswith(".py")


def rooted(value: Any, folder: str, place: tuple[Any, ...] = ()) -> Any:
    """A copy of a configuration's plain values with absolute paths; `place`: the keys that lead to `value`."""
    if isinstance(value, dict):
        return {key: rooted(item, folder, (*place, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [rooted(item, folder, (*place, index)) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    given = value.startswith(("./", "../")) if "args" in place else _names_file(value) or place[-1:] == ("from",)
    path, mark, address = value.partition("#")
    return absolute(os.path.join(folder, path)) + mark + address if given and path else value


def portable(value: Any) -> Any:
    """Plain values in which code is named without its folder, which is another on another machine."""
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    return os.path.basename(value) if isinstance(value, str) and _names_file(value) else value


def code_names(value: Any) -> Iterator[str]:
    """Every `file.py:NAME` and `module:NAME` in plain values."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from code_names(item)
    if isinstance(value, str) and names_code(value):
        yield value
