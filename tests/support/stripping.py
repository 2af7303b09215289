"""What the tests of prefixes and of rules share: a value without its prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptool.conventions.state_dicts import model_state_dicts
from ckptool.transforms.rename import strip
from tests.support.files import opened


def stripped(value: Any, folder: Path, *prefixes: str, **options: Any) -> Any:
    checkpoint = opened(value, folder)
    return strip(checkpoint, model_state_dicts(checkpoint), prefixes, **options).checkpoint.tree
