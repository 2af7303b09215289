"""The judgement on what loading a tree with `pickle` would run, used by `scan`, `inspect`, `load` and every writer.

Everything in a tree is one of three. *Inert*: in the table of `known`, used as the table says, and with only inert
contents. *Custom*: an object of somebody's own class, made without arguments, filled with a state of plain values,
tensors and further such objects; loading it imports the class and sets the state. *Unknown*: anything else, wherever
it hides: calls, constructor arguments, names by themselves, names of Python's own modules or of a known library that
are not listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint, Composite, Note
from ckptool.checkpoint.nodes import MISSING, Global, Object, OrderedDict, Set
from ckptool.checkpoint.paths import literal
from ckptool.checkpoint.tree import Path, address, module_state_dict, tensors
from ckptool.commands import OUT, OUT_SAFETENSORS, arg, command, input_of
from ckptool.errors import UnsafeObject, listed
from ckptool.pickles.known import NOWHERE, Kind, is_own, kind_of

CUSTOM, UNKNOWN = "custom", "unknown"
CALLED, MADE, NAMED = "called", "made", "named"

Trail = tuple[Any, Any] | None  # where something is: the trail of its container, and its key or index there


class NameUse(NamedTuple):
    """A name that is not inert where it is.

    how: `called` (a call, or a class with arguments), `made` (an object), `named` (by itself).
    trail: the nearest place that has an address.
    """

    verdict: str
    how: str
    name: str
    trail: Trail

    @property
    def path(self) -> tuple[Any, ...]:
        """The keys and indices that lead to it from the root."""
        keys = []
        trail = self.trail
        while trail is not None:
            trail, key = trail
            keys.append(key)
        return tuple(reversed(keys))


def uses(root: Any) -> Iterator[NameUse]:
    """Everything in a tree that is not inert, in order; each object once, or twice if it is also an argument."""
    # Each part with its place and its role; nothing recurses. Not written with `visit`, since a part is looked at again
    # where it is also an argument.
    seen: tuple[set[int], set[int]] = (set(), set())  # as a value, as an argument
    judged: set[tuple[int, int, bool]] = set()  # arguments, the index from which they are a state, and the role
    stack: list[_Step] = [(root, None, False)]
    while stack:
        node, trail, argument = stack.pop()
        if type(node) is Global:
            if (kind := kind_of(node)) is None or not kind.stands:
                yield NameUse(UNKNOWN, NAMED, str(node), trail)
            continue
        if type(node) not in _LOOKED_INTO or id(node) in seen[argument] or id(node) in seen[True]:
            continue
        seen[argument].add(id(node))
        node = node.made if type(node) is Composite else node
        if type(node) is not Object:
            stack += reversed(_container_steps(node, trail, argument))
            continue
        yield from _class_uses(node, trail, argument)
        steps: list[_Step] = []
        cls = _class_of(node.fn)
        kind = kind_of(cls)
        if type(node.fn) is not Global and kind is None and not is_own(cls):
            steps.append((node.fn, trail, True))
        state_at = kind.state_at if kind is not None else NOWHERE
        if (call := (id(node.args), state_at, argument)) not in judged:  # many calls may share one tuple
            judged.add(call)
            for index, arg in enumerate(node.args if isinstance(node.args, tuple) else (node.args,)):
                if type(arg) in _LOOKED_INTO:
                    steps.append((arg, trail, argument or index < state_at))
        steps.append((node.kwargs, trail, True))
        steps += _container_steps(node.items or {}, trail, argument)
        steps += _container_steps(node.elements or (), trail, argument)
        steps.append((node.state, trail, argument))
        stack += reversed(steps)


def is_inert(root: Any) -> bool:
    """True if nothing that loading the tree does is unknown or somebody's own."""
    return next(uses(root), None) is None


def is_quiet(node: Object) -> bool:
    """True if an object itself is inert, whatever it contains."""
    return next(_class_uses(node, None, False), None) is None


_LOOKED_INTO = frozenset({dict, OrderedDict, list, tuple, Set, Object, Composite, Global})

_Step = tuple[Any, Trail, bool]  # a value, where it is, and whether it is an argument of a call


def _container_steps(node: Any, trail: Trail, argument: bool) -> list[_Step]:
    if isinstance(node, dict):
        steps = [(key, trail, argument) for key in node if type(key) is not str and type(key) in _LOOKED_INTO]
        steps += [(value, (trail, key), argument) for key, value in node.items() if type(value) in _LOOKED_INTO]
        if isinstance(node, OrderedDict) and node.attributes:
            steps += _container_steps(node.attributes, trail, argument)
        return steps
    items = node.items if isinstance(node, Set) else node
    return [(item, (trail, index), argument) for index, item in enumerate(items) if type(item) in _LOOKED_INTO]


def _class_of(fn: Any) -> Any:
    """An object's callable, with a nested class as one name; protocols below 4 write it `getattr(Outer, "Inner")`."""
    inner: list[str] = []
    while isinstance(fn, Object) and fn.how == "call" and str(fn.fn) in ("__builtin__.getattr", "builtins.getattr"):
        match fn.args:
            case tuple((outer, str(part))) if part.isidentifier():
                fn = outer
                inner.append(part)
            case _:
                break
    return Global(fn.module, ".".join([fn.name, *reversed(inner)])) if inner and type(fn) is Global else fn


def _class_uses(node: Object, trail: Trail, argument: bool) -> Iterator[NameUse]:
    """The use of an object's class, whatever it contains. Arguments are used during a call, so they must be inert."""
    cls, bare = _class_of(node.fn), node.how == "new" and not node.args and not node.kwargs
    kind = kind_of(cls)
    fits = kind is not None and _is_as_listed(kind, node, bare)
    if kind is not None and fits and not kind.custom:
        return
    custom = fits or (bare and is_own(cls))
    verdict = CUSTOM if custom and not argument and _plain_slots(node) else UNKNOWN
    name = str(cls) if custom else node.name
    yield NameUse(verdict, MADE if bare and (custom or kind is None) else CALLED, name, trail)
    for method, contents in (("__setitem__", node.items), ("add" if node.adds else "extend", node.elements)):
        if custom and contents:
            yield NameUse(verdict, CALLED, f"{name}.{method}", trail)


def _is_as_listed(kind: Kind, node: Object, bare: bool) -> bool:
    """True if a listed name is used as the table says."""
    may_make = (bare and kind.empty) or (
        node.how != "persistent"
        and not node.kwargs
        and kind.called is not None
        and len(node.args) <= _MOST_ARGUMENTS
        and kind.called(node.args)
    )
    return (
        may_make
        and (kind.items or node.items is None)
        and (kind.elements or node.elements is None)
        and (kind.state or node.state is MISSING or not node.state)
        and (kind.filled is None or kind.filled(node))
        and _plain_slots(node)
    )


_MOST_ARGUMENTS = 32  # more than anything known takes: every one of each call is looked at


def _plain_slots(node: Object) -> bool:
    """True unless a state of slots names `__class__` or the like: those are set with `setattr`."""
    match node.state:
        case tuple((_, dict(slots))):
            return len(slots) <= _MOST_SLOTS and not any(type(name) is str and name.startswith("__") for name in slots)
    return True


_MOST_SLOTS = 64  # of one class: every one of each object is looked at


DISCARDED = "(created and discarded)"
PROGRAM = "code"  # where a file's program is shown
SETSTATE = ".__setstate__"
_CODE = {"torch-export": r"torch\.export\..*", "torch-package": r"torch\.package\..*"}  # what runs, as readers name it


def uses_of(checkpoint: Checkpoint) -> tuple[tuple[NameUse, str], ...]:
    """Everything in a checkpoint that is not inert, with the nearest address; last what loading throws away."""
    if "uses" not in checkpoint.kept:
        placed = [(use, address(use.path)) for use in uses(checkpoint.tree)]
        code = _CODE.get(checkpoint.container, r"__torch__\..*\.__setstate__")
        for use in uses(checkpoint.discarded):
            place = PROGRAM if re.fullmatch(code, use.name, re.DOTALL) else DISCARDED
            placed.append((use._replace(verdict=UNKNOWN), place))
        if checkpoint.extras:
            # Making an object of a class in a TorchScript file's program runs its `__setstate__` and nothing else.
            # Those of `torch.classes` are C++ classes, whose `__setstate__` is not in the program.
            placed = [
                (use, place)
                for use, place in placed
                if not use.name.startswith("__torch__.")
                or use.name.startswith("__torch__.torch.classes.")
                or SETSTATE in use.name
            ]
        checkpoint.kept["uses"] = tuple(placed)
    return checkpoint.kept["uses"]  # type: ignore[no-any-return]


def refuse_unknown(
    checkpoint: Checkpoint, keep_unknown: bool, *, as_it_is: bool = False, original: Checkpoint | None = None
) -> tuple[Note, ...]:
    """Raises `UnsafeObject` for unknown calls unless they are kept; otherwise the note on people's own classes.

    as_it_is: the file is copied, so what loading makes and throws away is kept too.
    original: the checkpoint as it was opened; its addresses are named where it has such calls.
    """
    unknown, paths = dict[str, str](), dict[Path, None]()
    count = 0
    for use, place in uses_of(checkpoint):
        if place == PROGRAM and not as_it_is:
            continue  # no writer writes programs
        if use.verdict == UNKNOWN and (not keep_unknown or (place == DISCARDED and not as_it_is)):
            count += 1
            paths[() if place in (DISCARDED, PROGRAM) else use.path] = None
            if len(unknown) < _NAMED_UNKNOWN:
                unknown.setdefault(f"{_VERBS[use.how]} {use.name}", place)
    if not count:
        return custom_notes(checkpoint)
    if original is not None:
        refuse_unknown(original, keep_unknown)
    names = [f"{what} at {place or 'the top'}" for what, place in unknown.items()]
    names += [f"{count - len(names):,} more"] if count > len(names) else []
    fix = f"Pass it on as is: {arg(keep_unknown=True)}"
    entries = dict(_entry(checkpoint.tree, path) for path in islice(paths, MANY))
    take = command("convert", input_of(checkpoint.source), out=OUT_SAFETENSORS)
    if DISCARDED in unknown.values() and not as_it_is:
        fix = f"Objects that loading creates and discards cannot be kept. Write only the weights: {take}"
    elif checkpoint.source is not None and any(map(module_state_dict, entries.values())):
        fix = f"Write only the weights: {take}. {fix}"
    elif checkpoint.source is not None and len(paths) < MANY:
        patterns = [literal(address(path)) for path, node in entries.items() if path and not next(tensors(node), ())]
        if len(patterns) == len(entries):  # all of it is in dictionary entries, and without tensors
            fix = f"Drop it: {command('edit', input_of(checkpoint.source), drop=patterns, out=OUT)}. {fix}"
    why = "Loading the file runs this; ckptool does not, nor does it pass it on unless told to. Nothing was written."
    raise UnsafeObject(f"{checkpoint.source or 'the checkpoint'} {listed(names)}", why, fix)


_VERBS = {CALLED: "calls", MADE: "makes", NAMED: "refers to"}
_NAMED_UNKNOWN, MANY = 6, 50  # names in an error; places that it looks at


def _entry(node: Any, path: Path) -> tuple[Path, Any]:
    """How far a path leads through dictionary entries only, and what is there."""
    for length, key in enumerate(path):
        mapping = node.items if isinstance(node, Object) else node
        if not isinstance(mapping, dict) or key not in mapping:
            return path[:length], node
        node = mapping[key]
    return path, node


def custom_notes(checkpoint: Checkpoint) -> tuple[Note, ...]:
    """The note on objects of people's own classes, for every file with some that is shown or written."""
    custom = dict.fromkeys((use.how, use.name) for use, _ in uses_of(checkpoint) if use.verdict == CUSTOM)
    names = [name for how, name in custom if how == MADE]
    if not names:
        return ()
    parts = (name.rpartition(".") for how, name in custom if how == CALLED)
    calls = [f"{method} of {cls}" for cls, _, method in parts]
    filled = f" and calls {listed(calls, 4)} with values from the file" if calls else ""
    what = f"on loading, pickle imports and creates {listed(names, 4)}{filled}; ckptool does not"
    return (Note("custom-class", what),)
