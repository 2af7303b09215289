"""Bundles: several models, optimizers and plain values in one checkpoint, a dictionary of their names.

A member is what one entry of the dictionary holds. Members may share storages (they are then tied, as in any tree),
never containers: each can be written to a file of its own, and comes back from it as it was.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckptool.checkpoint import Checkpoint, Storage, TensorEntry
from ckptool.checkpoint.blocks import sha256_of
from ckptool.checkpoint.nodes import OrderedDict, same_kind
from ckptool.checkpoint.progress import over
from ckptool.checkpoint.tree import rebuild, storages, tensors
from ckptool.commands import NAME, OUT, Slot, arg, command, input_of
from ckptool.conventions.state_dicts import PLAIN, StateDict, find_state_dicts, is_optimizer, kinds_of
from ckptool.errors import Ambiguous, Conflict, Unsupported, UsageError, counted, is_text, listed
from ckptool.facts import size
from ckptool.formats import DEFAULT, WRITERS

LONGEST_NAME = 200  # bytes: with a suffix it has to be the name of a file
_NAME = (
    "A member can become a file of its name, on any system: visible text of at most "
    f'{LONGEST_NAME} bytes without / \\ : * ? " < > |, that does not begin with a dash, nor begin or end with a dot or '
    "a space, and is no device of Windows; or a number. Nothing was written."
)
_NO_FILE = re.compile(r'[/\\:*?"<>|\x00-\x1f\x7f]')
_DEVICES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])(\..*)?", re.IGNORECASE)  # of Windows
CONTAINERS = tuple(each.name for each in WRITERS if each.keeps_tree and not each.writes_folder)
MAX_PLAIN = 1 << 16  # characters of JSON; a longer value gets a file of its own
_MAX_PARTS, _MAX_DEPTH = 10_000, 50


def container_of(checkpoint: Checkpoint) -> str:
    """The container of a checkpoint, if it can hold a bundle; else torch's."""
    return checkpoint.container if checkpoint.container in CONTAINERS else DEFAULT


def refuse_container(what: str, name: str, example: str) -> None:
    """Raises `UsageError` for a container that cannot hold plain values."""
    if name not in CONTAINERS:
        why = f"It is {' or '.join(CONTAINERS)}: those also hold values other than tensors."
        raise UsageError(f"{what} {name}", why, f"For example: {example}")


# Names ---------------------------------------------------------------------------------------------------------------


def check_names(names: Iterable[Any], among: Iterable[Any] = ()) -> None:
    """Raises `Conflict` for names that cannot be file names everywhere, or that some file system takes for the same.

    among: names already in use, which only must not clash with these.
    """
    fix = f"Give it another name; in a bundle: {arg(rename={Slot('OLD'): Slot('NEW')})}"
    taken: dict[str, Any] = {_folded(name): name for name in among}
    for name in names:
        if type(name) is str and is_text(name) and name.isprintable() and not _NO_FILE.search(name):
            is_bare = name == name.strip(" .") and not name.startswith("-") and not _DEVICES.fullmatch(name)
            fits = is_bare and 0 < len(name.encode()) <= LONGEST_NAME
        else:
            fits = type(name) is int and name >= 0
        if not fits:
            raise Conflict(f"a member cannot be called {_quoted(name)}", _NAME, fix)
        if (folded := _folded(name)) in taken:
            what = f"two members are called {_quoted(name)}"
            if (other := taken[folded]) != name:
                what = f"{_quoted(other)} and {_quoted(name)} are the same name where case or Unicode form is ignored"
            raise Conflict(what, "One member would replace the other. Nothing was written.", fix)
        taken[folded] = name


def _folded(name: Any) -> str:
    """A name as file systems that ignore case or normalise Unicode see it."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", str(name)).casefold())


def _quoted(name: Any) -> str:
    return ascii(name)[:200] if type(name) is str and not name.isascii() else repr(name)[:200]


# Putting together ----------------------------------------------------------------------------------------------------


def bundled(members: Mapping[Any, Any], like: Any = None, *, live: bool = False) -> Any:
    """The tree of a bundle: every member has containers of its own; shared storages stay shared.

    like: the tree of the bundle that this one replaces, whose type it keeps.  live: tensors stay the same objects.
    """
    leaf = None if live else lambda node: node.with_storage(node.storage)
    return same_kind(like, {name: rebuild(tree, leaf) for name, tree in members.items()})


def members_of(checkpoint: Checkpoint) -> dict[Any, Any]:
    """The members of a bundle, by name. Raises `UsageError` where the checkpoint is no dictionary of several parts."""
    tree, where = checkpoint.tree, checkpoint.source or "the checkpoint"
    if not isinstance(tree, dict):
        what = f"{where} is not a bundle: it is of type {type(tree).__name__}"
        raise UsageError(what, "A bundle is a dictionary of names.")
    if kind := one_thing(checkpoint):
        why = "Its entries are the tensors of one model or optimizer."
        fix = f"It can be a member: {command('bundle', members={NAME: input_of(checkpoint.source)}, out=OUT)}"
        raise UsageError(f"{where} is not a bundle, but {kind}", why, fix)
    return dict(tree)


def one_thing(checkpoint: Checkpoint) -> str:
    """What a dictionary is as a whole, such as `model weights`; empty where it holds several things."""
    roots = [root for root in find_state_dicts(checkpoint) if root.path == () and root.kind != PLAIN]
    return roots[0].detail or roots[0].kind if roots else ""


def changed(
    members: Mapping[Any, Any], drop: Sequence[str] = (), rename: Mapping[str, str] | None = None
) -> dict[Any, Any]:
    """The members without those that `drop` names, others renamed as `rename` says (old: new), in their order.

    Raises `UsageError` for a name that is not there, `Conflict` for a new one that is impossible or clashes.
    """
    dropped = [key_of(members, name) for name in drop]
    renamed = {key_of(members, old): new for old, new in (rename or {}).items()}
    if overlap := [name for name in dropped if name in renamed]:
        raise UsageError(f"{_quoted(overlap[0])} is to be dropped and renamed", "Only one can apply.")
    items = [(renamed.get(name, name), tree) for name, tree in members.items() if name not in dropped]
    check_names(renamed.values(), [name for name in members if name not in dropped and name not in renamed])
    return dict(items)


def key_of(members: Mapping[Any, Any], name: str) -> Any:
    """The key of the member called `name`; raises `UsageError` for none, `Ambiguous` for 0 and '0'."""
    keys = [key for key in members if str(key) == name]
    if len(keys) > 1:
        available = f"Available: {listed([repr(key) for key in keys])}."
        raise Ambiguous(f"{_quoted(name)} names {counted(len(keys), 'member')}", available)
    if not keys:
        available = f"Available: {listed(list(members), 12)}." if members else "There are no members."
        raise UsageError(f"there is no member {_quoted(name)}", available)
    return keys[0]


# What a member is ----------------------------------------------------------------------------------------------------


def table(tree: Mapping[Any, Any], origins: Mapping[Any, str]) -> list[dict[str, Any]]:
    """A row for each member. bytes: of its storages, each counted once, including those shared with another member.

    file: where it came from or went to, from `origins`; for a plain value, the value itself.
    """
    roots: dict[Any, list[StateDict]] = defaultdict(list)
    for root in find_state_dicts(Checkpoint(tree, "")):
        if root.path:
            roots[root.path[0]].append(root)
    rows = []
    for name, member in tree.items():
        plain, origin = is_plain(member), origins.get(name, "")
        kind = "tensor" if isinstance(member, TensorEntry) else listed(kinds_of(roots[name]), 3) or "other values"
        rows.append(
            {
                "name": str(name),
                "kind": "plain value" if plain else kind,
                "tensors": 0 if plain else sum(1 for _ in tensors(member)),
                "bytes": 0 if plain else sum(storage.nbytes for storage in storages(member)),
                "file": origin or (json.dumps(member)[:60] if plain else ""),
            }
        )
    return rows


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The members as a table for people."""
    cells = []
    for row in rows:
        sizes = (counted(row["tensors"], "tensor"), size(row["bytes"])) if row["tensors"] else ("", "")
        cells.append((row["name"], row["kind"], *sizes, row["file"]))
    widths = [max(map(len, column)) for column in list(zip(*cells, strict=True))[:4]]
    return ["  ".join([*map(str.ljust, row, widths), row[4]]).rstrip() for row in cells]


def is_plain(value: Any) -> bool:
    """True for a value that survives JSON: scalars, short lists and dictionaries of them, nothing in two places.

    Not for an optimizer, though one without state is no more than that.
    """
    nodes, seen = [(value, 0)], set[int]()
    for node, depth in nodes:  # what they contain is appended
        if len(nodes) > _MAX_PARTS or depth > _MAX_DEPTH or id(node) in seen:
            return False
        if type(node) in (list, dict):
            seen.add(id(node))
            nodes += [(part, depth + 1) for part in (node.values() if type(node) is dict else node)]
        elif node is not None and type(node) not in (bool, int, float, str):
            return False
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        same = len(text) <= MAX_PLAIN and is_text(text) and repr(json.loads(text)) == repr(value)
    except (TypeError, ValueError):
        return False
    return same and not is_optimizer(value)


# Ties across members -------------------------------------------------------------------------------------------------


def shared_members(tree: Mapping[Any, Any]) -> list[str]:
    """The members that share a storage with another one."""
    owners: dict[int, set[Any]] = defaultdict(set)
    for name, member in tree.items():
        for storage in storages(member):
            owners[id(storage)].add(name)
    sharing = set[Any]().union(*(names for names in owners.values() if len(names) > 1))
    return [str(name) for name in tree if name in sharing]


def refuse_unnamed(like: Any) -> None:
    """Raises `Unsupported` for attributes of the bundle's dictionary, which are in none of its members."""
    if isinstance(like, OrderedDict) and like.attributes:
        what = "the bundle's dictionary has attributes of its own, which no member's file can hold"
        raise Unsupported(what, f"They are: {listed(list(like.attributes))}.")


def equal(candidates: Sequence[tuple[Any, Storage]]) -> Iterator[list[Storage]]:
    """Groups of storages of one kind with the same sha256; one whose checksum no other has is not read."""
    by_kind: dict[Any, list[Storage]] = defaultdict(list)
    for kind, storage in candidates:
        by_kind[kind].append(storage)
    for group in by_kind.values():
        sums = Counter(storage.crc for storage in group)  # None: the container has no checksums
        by_digest: dict[bytes, list[Storage]] = defaultdict(list)
        for storage in over(group, lambda storage: storage.nbytes):
            if len(group) > 1 and (sums[storage.crc] > 1 or None in sums):
                by_digest[sha256_of(storage.data).digest()].append(storage)
        yield from (equals for equals in by_digest.values() if len(equals) > 1)
