"""Names of classes and functions: as the tables here spell them, and as they are shown."""

from __future__ import annotations

from typing import Any

from ckptool.checkpoint.nodes import Global
from ckptool.pickles.known import is_torch_name


def shown(name: Global) -> Any:
    """A name of torch's as text, which says all there is to say; any other stays a name."""
    return str(name) if is_torch_name(name) else name
