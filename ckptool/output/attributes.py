"""Owner, group, permissions, access lists and extended attributes of a file, which stay when it is replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

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
    mine = os.fstat(fd)
    lost = [] if status.st_gid == mine.st_gid or _given(fd, -1, status.st_gid) else [f"its group ({status.st_gid})"]
    lost += _copy_extended(old, fd)
    mode = stat.S_IMODE(status.st_mode)
    if lost or status.st_uid != mine.st_uid:
        mode &= ~(stat.S_ISUID | stat.S_ISGID)  # which would hand somebody else's rights on
    os.fchmod(fd, mode)
    # Last: afterwards it may not be ours to change.
    if status.st_uid != mine.st_uid and not _given(fd, status.st_uid, -1):
        lost.insert(0, f"its owner ({status.st_uid})")
    return lost


def _given(fd: int, owner: int, group: int) -> bool:
    try:
        os.fchown(fd, owner, group)
    except OSError:
        return False
    return True


def _copy_extended(old: str, fd: int) -> list[str]:
    """Copies extended attributes, access lists among them; takes off an access list that came from the folder."""
    if not hasattr(os, "listxattr"):
        return []
    names, own = _names(old), _names(fd)
    lost = [name for name in names if name not in _OF_THE_CONTENTS and not _copied(old, fd, name)]
    if ACCESS_LIST in own and ACCESS_LIST not in names:
        try:
            os.removexattr(fd, ACCESS_LIST)
        except OSError:
            lost.append(ACCESS_LIST)
    return ["its access list" if name == ACCESS_LIST else f"the attribute {name}" for name in lost]


def _names(place: str | int) -> list[str]:
    try:
        return os.listxattr(place)
    except OSError:  # a file system that has none
        return []


def _copied(old: str, fd: int, name: str) -> bool:
    try:
        value = os.getxattr(old, name)
        if name not in _names(fd) or os.getxattr(fd, name) != value:
            os.setxattr(fd, name, value)
    except OSError:
        return False
    return True


def attribute_notes(target: str, lost: Iterable[str]) -> tuple[Note, ...]:
    """A note of what could not be kept, if anything."""
    found = list(dict.fromkeys(lost))
    if not found:
        return ()
    message = f"{target} was replaced by a file that you own: {listed(found)} could not be kept"
    return (Note("attributes-lost", message),)
