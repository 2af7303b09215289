"""What is where in a run's folder. Imports nothing: `inspect` and `scan` ask of every path whether it is one."""

from __future__ import annotations

import os

CONFIG, HISTORY, METRICS = "run.yaml", "history.jsonl", "metrics.jsonl"
CHECKPOINTS = "checkpoints"
CHANGED = "changed"  # the event of the history that holds a configuration which was changed since


def is_run(path: str | os.PathLike[str]) -> bool:
    """True for the folder of a run, or of one that was begun and never saved."""
    name = os.fspath(path)
    return os.path.isfile(os.path.join(name, CONFIG)) and os.path.isdir(os.path.join(name, CHECKPOINTS))
