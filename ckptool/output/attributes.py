"""Owner, group, permissions, access lists and extended attributes of a file, which stay when it is replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from typing import Any

from ckptool.checkpoint import Note
from ckptool.errors import listed

ACCESS_LIST = "system.posix_acl_access"
_OF_THE_CONTENTS = {"security.ima", "security.evm"}  # signatures, which the new contents do not have


def keep_attributes(old: str, fd: int) -> list[str]:
    """Gives a new file or folder, open as `fd` and still ours, the attributes of `old`. Returns those that were lost.

    Where there is none, nothing is done. Raises `OSError` where not even the permissions can be set.
    """
    try:
        status = os.stat(old)
    except FileNotFoundError:
        return []
    mine, lost = os.fstat(fd), list[str]()

    def attempt(what: str, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except OSError:
            lost.append("its access list" if what == ACCESS_LIST else what)

    if status.st_gid != mine.st_gid:
        attempt(f"its group ({status.st_gid})", os.fchown, fd, -1, status.st_gid)
    names = _names(old)
    for name in names:
        if name not in _OF_THE_CONTENTS:
            attempt(name if name == ACCESS_LIST else f"the attribute {name}", _copy_attribute, old, fd, name)
    if ACCESS_LIST not in names and ACCESS_LIST in _names(fd):  # it came from the folder
        attempt(ACCESS_LIST, os.removexattr, fd, ACCESS_LIST)
    mode = stat.S_IMODE(status.st_mode)
    if lost or status.st_uid != mine.st_uid:
        mode &= ~(stat.S_ISUID | stat.S_ISGID)  # which would hand somebody else's rights on
    os.fchmod(fd, mode)
    if status.st_uid != mine.st_uid:  # last: afterwards it may not be ours to change
        attempt(f"its owner ({status.st_uid})", os.fchown, fd, status.st_uid, -1)
    return lost


def _names(place: str | int) -> list[str]:
    try:
        return os.listxattr(place)
    except (OSError, AttributeError):  # a file system, or a system, that has none
        return []


def _copy_attribute(old: str, fd: int, name: str) -> None:
    value = os.getxattr(old, name)
    if name not in _names(fd) or os.getxattr(fd, name) != value:
        os.setxattr(fd, name, value)


def attribute_notes(target: str, lost: Iterable[str]) -> tuple[Note, ...]:
    """A note of what could not be kept, if anything."""
    found = list(dict.fromkeys(lost))
    if not found:
        return ()
    message = f"{target} was replaced by a file that you own: {listed(found)} could not be kept"
    return (Note("attributes-lost", message),)
