"""The files in a run's folder that the run itself wrote. No other is ever changed or deleted: it is named, and the run does not begin."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ckptool.errors import CkptoolError, Conflict, listed, printable
from ckptool.files import read_small_text
from ckptool.training import configfile
from ckptool.training.config import Config
from ckptool.training.layout import CHECKPOINTS, CONFIG, HISTORY, METRICS
from ckptool.training.store import Lines, read_json

_ID = re.compile(r"# ckptool run ([0-9a-f]{32})\n")
_SIDECAR = re.compile(r"step-\d{8,}\.json")


def run_of(text: str) -> str | None:
    """The id of the run whose configuration a text is; None for a text that says of none."""
    found = _ID.search(text)
    return found[1] if found else None


def named(number: str, config: Config) -> str:
    """A configuration as it lies in the folder of its run."""
    return f"# ckptool run {number}\n{configfile.written(config)}"


def left_behind(folder: str) -> list[str]:
    """The files of a run that was begun and never saved, last of all its configuration, which says of which run the others are.

    Raises `Conflict` for files of these names that no run wrote, or that were changed since.
    """
    number = _written_by(os.path.join(folder, CONFIG))
    history = [os.path.join(folder, HISTORY)]
    ours = number is not None and all(is_of(path, "run", number) for path in history if os.path.lexists(path))
    metrics = ours and os.path.lexists(history[0]) and is_of(os.path.join(folder, METRICS), "step")
    found = {METRICS: metrics, HISTORY: ours, CONFIG: number is not None}
    place = os.path.join(folder, CHECKPOINTS)
    sidecars = sorted(filter(_SIDECAR.fullmatch, os.listdir(place))) if os.path.isdir(place) else []
    of_run = {
        os.path.join(CHECKPOINTS, name): number is not None
        and (read_json(os.path.join(place, name)) or {}).get("run") == number
        for name in sidecars
    } | found
    there = {name: known for name, known in of_run.items() if os.path.lexists(os.path.join(folder, name))}
    if foreign := [name for name, known in there.items() if not known]:
        raise not_ours(folder, foreign)
    return [os.path.join(folder, name) for name in there]


def refuse_others(folder: str) -> None:
    """Raises `Conflict` where the history or the metrics of a run that is there are files of something else."""
    wrong = [
        name for name, key in ((HISTORY, "event"), (METRICS, "step")) if not is_of(os.path.join(folder, name), key)
    ]
    if wrong:
        raise not_ours(folder, wrong)


def not_ours(folder: str, names: Sequence[str]) -> Conflict:
    several = len(names) > 1
    return Conflict(
        f"{printable(folder)} holds {listed([printable(name) for name in names])}, which this run did not write",
        f"It would overwrite {'them' if several else 'it'}. Nothing was changed.",
        f"Give the run a folder of its own: --set run=OTHER; or move {'them' if several else 'it'} away",
    )


def is_of(path: str, key: str, value: str | None = None) -> bool:
    """True unless a file has lines, and none of them is one of a run's: with this key, and this value where one is given."""
    if not os.path.lexists(path) or (os.path.isfile(path) and not os.path.getsize(path)):
        return True
    try:
        lines = list(Lines(path).read())
        torn = read_small_text(path, "lines", 1 << 20) if not lines else ""
    except CkptoolError:
        return False
    if lines:
        return any(key in line and value in (None, line[key]) for line in lines)
    return torn.startswith('{"') and "\n" not in torn  # a run was killed in its first line


def _written_by(path: str) -> str | None:
    """The id of the run that wrote a configuration just as it is; None for one that a person wrote, or changed."""
    try:
        text = read_small_text(path, "a configuration", configfile.MAX_FILE)
        number = run_of(text)
        return number if number and named(number, configfile.parsed(text, path)) == text else None
    except CkptoolError:
        return None
