"""What a disk may hold after the power is lost: any of what was written since the last sync."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


def after_power_loss(
    before: dict[str, bytes], trace: list[tuple[Any, ...]], stop: int, chosen: random.Random
) -> dict[str, bytes]:
    """What the disk may hold when power is lost before operation `stop`.

    Of the writes to a file since its last sync any may be missing; of the changes of names since the folder's last
    sync, any of the later ones (each folder by itself). A file keeps its contents under whatever names it has.
    """
    files = {number: File(bytearray(data), []) for number, data in enumerate(before.values())}
    now: dict[str, int] = dict(zip(before, files, strict=True))  # name -> file, as processes see it; folders are -1
    now |= {name.rpartition("/")[0]: -1 for name in before if "/" in name}
    safe = dict(now)  # the same on the disk
    changes: dict[str, list[Callable[[dict[str, int]], object]]] = {}  # of the names in a folder, since it was synced
    for kind, name, *about in trace[:stop]:
        waiting = changes.setdefault(name.rpartition("/")[0] or ".", [])
        if kind == "create" and name not in now:
            files[len(files)] = File(bytearray(), [])
            now[name] = len(files) - 1
            waiting.append(partial(_set, name, now[name]))
        elif kind in ("write", "size"):
            files[now[name]].pending.append((kind, *about))
        elif kind == "sync" and now.get(name, -1) >= 0:
            files[now[name]].settle()
        elif kind == "sync":
            for change in changes.pop(name, []):
                change(safe)
        elif kind == "mkdir":
            now[name] = -1
            waiting.append(partial(_set, name, -1))
        elif kind in ("unlink", "rmdir"):
            del now[name]
            waiting.append(partial(_drop, name))
        elif kind == "link":
            now[about[0]] = now[name]
            waiting.append(partial(_set, about[0], now[name]))
        elif kind in ("rename", "exchange"):
            table = {name: about[0]} | ({about[0]: name} if kind == "exchange" else {})
            _move(table, now)
            waiting.append(partial(_move, table))
    for waiting in changes.values():
        for change in waiting[: chosen.randrange(len(waiting) + 1)]:
            change(safe)
    folders = {name for name, number in safe.items() if number == -1} | {""}
    return {
        name: files[number].some(chosen)
        for name, number in safe.items()
        if number >= 0 and name.rpartition("/")[0] in folders
    }


def _set(name: str, number: int, names: dict[str, int]) -> None:
    names[name] = number


def _drop(name: str, names: dict[str, int]) -> None:
    names.pop(name, None)


def _move(table: dict[str, str], names: dict[str, int]) -> None:
    """Renames, all at once, files and folders with what is in them; what had the new names is gone."""
    moved = {}
    for name in list(names):
        for old, new in table.items():
            if name == old or name.startswith(f"{old}/"):
                moved[new + name[len(old) :]] = names.pop(name)
                break
    for name in list(names):
        if any(name == new or name.startswith(f"{new}/") for new in table.values()):
            del names[name]
    names.update(moved)


@dataclass
class File:
    """Bytes that are on the disk, and what was done to them since."""

    data: bytearray
    pending: list[tuple[Any, ...]]

    def settle(self) -> None:
        for operation in self.pending:
            _apply(self.data, operation)
        self.pending.clear()

    def some(self, chosen: random.Random) -> bytes:
        data = bytearray(self.data)
        share = chosen.choice([0, 0.3, 0.7, 1])
        for operation in self.pending:
            if chosen.random() < share:
                _apply(data, operation)
        return bytes(data)


def _apply(data: bytearray, operation: tuple[Any, ...]) -> None:
    if operation[0] == "size":
        del data[operation[1] :]
        data.extend(bytes(operation[1] - len(data)))
    else:
        _, at, new = operation
        data.extend(bytes(max(0, at - len(data))))
        data[at : at + len(new)] = new
