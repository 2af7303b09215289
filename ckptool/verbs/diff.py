"""`diff`: what differs between two checkpoints."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Annotated, Any

from ckptool.analysis.diff import Diff
from ckptool.analysis.diff import diff as compare
from ckptool.checkpoint import Checkpoint, Composite, TensorEntry
from ckptool.checkpoint.files import Folder, Source, unchanged
from ckptool.checkpoint.pickled_modules import module_attributes
from ckptool.checkpoint.state_dicts import StateDict, find_state_dicts, is_optimizer, one_state_dict
from ckptool.checkpoint.tree import Path, walk
from ckptool.errors import listed, printable
from ckptool.formats import members
from ckptool.formats.opening import CheckpointLike, Opened, open_file
from ckptool.options import argument, option, several, verb
from ckptool.transforms.rename import strip
from ckptool.verbs._options import Texts


def _words(quiet: bool = False, as_json: bool = False) -> dict[str, Any]:
    return {"stat": as_json or not quiet}


@verb(("ckptool diff model.pt other.pt --ignore prefix,device", "what else differs"), words=_words)
def diff(
    left: Annotated[CheckpointLike, argument("A", "A checkpoint, or FILE#ADDRESS for a part of it.")],
    right: Annotated[CheckpointLike, argument("B", "Another.")],
    *,
    atol: Annotated[float, option("--atol X", "Absolute tolerance: values this close count as equal.", least=0)] = 0.0,
    rtol: Annotated[
        float, option("--rtol X", "Relative tolerance: the same, as a share of the value in B.", least=0)
    ] = 0.0,
    ignore: Annotated[
        str | Collection[str],
        option(
            "--ignore KIND",
            "device, dtype, order, prefix, strides, ties, requires_grad, metadata; separate several by commas.",
            several=True,
        ),
    ] = (),
    stat: bool = True,
    only: Annotated[
        Texts,
        option("--only PATTERN", "Compare only what matches; read nothing else. Repeatable.", several=True),
    ] = (),
    strict: Annotated[
        bool, option("--strict", "Another order of keys, or another _metadata, is a difference, too.")
    ] = False,
) -> Diff:
    """Compares two checkpoints of any containers: whole files with the same parts, else one set of model weights each.

    atol, rtol: values within `atol + rtol * |right|` count as equal.  ignore: `device`, `dtype`, `order`, `prefix`,
    `strides`, `ties`, `requires_grad`, `metadata`.  stat=False: tensor data is compared for equality only.  only:
    patterns for addresses, or for their ends (`fc.*`); nothing else is read, and `same` is about that part.  strict:
    another order of keys and another `_metadata` count. Raises `UsageError` where a file has several sets of weights
    and none was named, `NoMatch` for a pattern that matches nothing.
    """
    ignore = ignored(several(ignore))
    a, b = open_file(left), open_file(right)
    if _is_one_file(a, b):
        b = replace(b, checkpoint=a.checkpoint)  # then what is the same in it is known to be, unread
    parts, remarks = _comparable(a, b)
    bases = _base(a, parts[0]), _base(b, parts[1])
    if "prefix" in ignore:
        parts = _unwrapped(parts[0]), _unwrapped(parts[1])
    remarks += tuple(_not_joined(each) for each in (a, b) if each.at is None and members.beside(each.checkpoint))
    with unchanged(a.checkpoint.source, b.checkpoint.source):
        options: dict[str, Any] = {"atol": atol, "rtol": rtol, "statistics": stat, "strict": strict}
        found = compare(*parts, ignore=ignore, remarks=remarks, only=several(only), **options)
    return replace(found, bases=bases)


def _base(opened: Opened, part: Checkpoint) -> Path:
    """Where in a file the part lies that is compared; empty for all of it."""
    walked = () if opened.checkpoint.tree is part.tree else walk(opened.checkpoint.tree)
    return next((path for path, node in walked if node is part.tree), ())


def _is_one_file(a: Opened, b: Opened) -> bool:
    """True for one file or folder under two names; not where somebody puts another in its place meanwhile."""
    one, other = a.checkpoint.source, b.checkpoint.source
    if isinstance(one, Source) and isinstance(other, Source):
        return one.is_same(other)
    return isinstance(one, Folder) and isinstance(other, Folder) and os.path.samefile(one.path, other.path)


def ignored(words: Iterable[str]) -> list[str]:
    """The differences to ignore, one by one: a text may name several by commas."""
    return [name for word in words for part in word.split(",") if (name := part.strip())]


def _comparable(a: Opened, b: Opened) -> tuple[tuple[Checkpoint, Checkpoint], tuple[str, ...]]:
    """The two trees to compare: what was named, the whole files, or the weights in each."""
    left, right = a.taken, b.taken
    remarks: list[str] = []
    if _whole_module(left.tree) != _whole_module(right.tree):  # one of them by its state dict: so the other, too
        left, right = (_weights_of(one, remarks) if _whole_module(one.tree) else one for one in (left, right))
    if a.at is None and b.at is None and not _alike(left, right):
        left, right = _weights_of(left, remarks), _weights_of(right, remarks)
    elif a.at is None and b.at is not None and _holds_more(left, right):
        left = _weights_of(left, remarks)  # the counterpart of weights that were named
    elif b.at is None and a.at is not None and _holds_more(right, left):
        right = _weights_of(right, remarks)
    return (left, right), tuple(remarks)


def _whole_module(tree: Any) -> bool:
    return module_attributes(tree) is not None


def _named(checkpoint: Checkpoint) -> str:
    return str(checkpoint.source or "what is in memory")


def _weights_of(checkpoint: Checkpoint, remarks: list[str]) -> Checkpoint:
    """The one set of weights in a file; says in `remarks` which, where there was more."""
    root, remark = one_state_dict(checkpoint)
    remarks += [remark] if remark else []
    remarks += [f"compared {printable(root.address)} of {_named(checkpoint)}"] if root.path else []
    remarks += [f"compared the state dict of the {root.detail} in {_named(checkpoint)}"] if root.module else []
    tree = root.node if root.arrays is None else root.arrays
    if any(map(is_optimizer, tree.values())):  # what training needs lies among the weights, as torchtitan saves it
        names = [printable(str(key)) for key, value in tree.items() if not isinstance(value, (TensorEntry, Composite))]
        remarks.append(f"compared the weights of {_named(checkpoint)}, not {listed(names, 6)} beside them")
        tree = {key: value for key, value in tree.items() if isinstance(value, (TensorEntry, Composite))}
    return replace(checkpoint, tree=tree)


def _not_joined(opened: Opened) -> str:
    names = [printable(name) for name in members.beside(opened.checkpoint)]
    return f"compared the weights of {printable(opened.name)}, not {listed(names, 6)} beside them"


def _unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as `strip_module` leaves it: `_metadata` and the optimizer's names follow the keys."""
    roots = [root for root in find_state_dicts(checkpoint) if root.is_model and root.module is None]
    return strip(checkpoint, roots, partial=True).checkpoint if roots else checkpoint


def _alike(left: Checkpoint, right: Checkpoint) -> bool:
    """True unless one file is a bare set of weights and the other holds such sets among other things, or each has its
    only model under a name of its own, as two engines do (`module`, `model`): they have no part in common."""
    roots = [find_state_dicts(side) for side in (left, right)]
    one, other = ([root.path for root in side if root.is_model] for side in roots)
    return _is_flat(roots[0]) == _is_flat(roots[1]) and not (len(one) == len(other) == 1 and one != other)


def _holds_more(checkpoint: Checkpoint, weights: Checkpoint) -> bool:
    """True where one is a bare set of weights and the other is not."""
    return _is_flat(find_state_dicts(weights)) and not _is_flat(find_state_dicts(checkpoint))


def _is_flat(roots: list[StateDict]) -> bool:
    return len(roots) == 1 and roots[0].path == ()
