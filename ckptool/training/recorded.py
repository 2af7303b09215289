"""The configuration of a run as it was last changed, from what lies in its folder. Needs neither torch nor pydantic.

`run.yaml` is written once. Each change has a number; the history holds it, and so does the sidecar of every checkpoint that was saved
since: the highest number decides, so a history that was deleted takes nothing with it.
"""

from __future__ import annotations

import os
from typing import Any

from ckptool.training.layout import CHANGED, HISTORY
from ckptool.training.store import Lines, Store


def last_config(folder: str, number: str, config: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The number of the last change of a run, and the configuration since; 0, and the one that is given, where there was none."""
    revision, count = 0, 0
    for saved in Store(folder, number).all():
        facts = saved.sidecar or {}
        found, held = facts.get("revision"), facts.get("config")
        if isinstance(found, int) and isinstance(held, dict) and found > revision:
            revision, config = found, held
    for fact in Lines(os.path.join(folder, HISTORY)).read():
        if fact.get("event") == CHANGED and isinstance(fact.get("config"), dict):
            count += 1
            found = fact.get("revision", count)
            if isinstance(found, int) and found >= revision:
                revision, config = found, fact["config"]
    return revision, config
