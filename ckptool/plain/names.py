"""Names of classes and functions: as the tables here spell them, and as they are shown."""

from __future__ import annotations

from typing import Any

from ckptool.nodes import Global
from ckptool.pickles.known import is_torch_name

_HOMES = {
    "__builtin__": "builtins",
    "pathlib._local": "pathlib",
    "numpy._core.multiarray": "numpy.core.multiarray",
    "numpy.core._multiarray_umath": "numpy.core.multiarray",
    "numpy._core.numeric": "numpy.core.numeric",
}


def canonical(name: Any) -> str:
    """A name as the tables here spell it: one home for a module that moved; the empty text for what is no name."""
    return f"{_HOMES.get(name.module, name.module)}.{name.name}" if type(name) is Global else ""


def shown(name: Global) -> Any:
    """A name of torch's as text, which says all there is to say; any other stays a name."""
    return str(name) if is_torch_name(name) else name
