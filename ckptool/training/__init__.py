"""The training harness: checkpoints, resuming them, and the proof that a run killed anywhere ends with the same bytes.

Read `loop.py` first: it has what happens, in order. State is what the next step cannot compute again; everything else
is a function of a seed and a place. The modules of this package import torch; the package itself does not, since
`inspect` and `scan` ask of every path whether it is a run.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from ckptool.errors import MissingExtra

CONFIG, HISTORY, METRICS, CHECKPOINTS = "run.yaml", "history.jsonl", "metrics.jsonl", "checkpoints"
LOOP = "loop"  # the key of run.yaml with the script whose loop `ckptool.Run` saves
CHANGED = "changed"  # the event of the history that holds a changed configuration


def is_run(path: str | os.PathLike[str]) -> bool:
    """True for the folder of a run, also of one that has never saved."""
    name = os.fspath(path)
    return os.path.isfile(os.path.join(name, CONFIG)) and os.path.isdir(os.path.join(name, CHECKPOINTS))


def check_harness() -> None:
    """Raises `MissingExtra` if torch or pydantic is not installed."""
    for name in ("torch", "pydantic"):
        if find_spec(name) is None:
            raise MissingExtra(f"training needs {name}, which is not installed", "", "pip install 'ckptool[torch]'")
