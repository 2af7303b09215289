"""Whether weights fit the model that they are for, as stock `load_state_dict(strict=True)` would say; and what makes them fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import Composite, TensorEntry
from ckptool.checkpoint.commands import FILE, OUT, OUT_PT, Advice, Command, command
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.checkpoint.state_dicts import COUNTER, StateDict, without_wrappers, wrappers
from ckptool.errors import counted, form, listed, printable
from ckptool.reports.findings import Finding, Found
from ckptool.reports.layouts import not_tensors
from ckptool.reports.targets import CHECKPOINT, SPEC, Target
from ckptool.reports.torch_versions import accepted, also_newer

TRIED = 8  # names of the model by which prefixes are looked for
_SAYS = "Missing key(s) in state_dict: … Unexpected key(s) in state_dict: …"
_AVERAGES = ("ema", "swa", "average", "shadow")


@dataclass(frozen=True, slots=True)
class Fit:
    """Names that the model misses and those that it does not have, after what torch's own modules make good; shapes that differ."""

    names: Mapping[str, str]  # as the model would see them -> keys of the checkpoint
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    shapes: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        return not (self.missing or self.extra)

    @property
    def matched(self) -> int:
        return len(self.names) - len(self.extra)


def fit(root: StateDict, target: Target, names: Mapping[str, str]) -> Fit:
    """How the keys of `root` fit, called as `names` says (name -> key)."""
    theirs = _expected(target)
    pairs = {name: names[name] for name in theirs if name in names}
    missing = [name for name in theirs if name not in pairs]
    free = {name: key for name, key in names.items() if name not in theirs}
    found = accepted(pairs, missing, free, root.node.metadata if isinstance(root.node, OrderedDict) else None)
    used = {*found.pairs.values(), *found.dropped}
    pairs |= found.pairs
    extra = [name for name, key in free.items() if key not in used]
    if target.kind == CHECKPOINT:
        extra = [name for name in extra if name not in also_newer(extra, theirs, target.metadata)]
    done = {*found.pairs, *found.supplied}
    shapes = [name for name, key in pairs.items() if not _same_shape(root.node[key], target, name)]
    return Fit(names, tuple(name for name in missing if name not in done), tuple(extra), tuple(shapes))


def _expected(target: Target) -> list[str]:
    """The names of the model: its tensors, and what its modules save beside them."""
    extra = [name for name in target.values or () if name not in target.tensors and name.endswith("_extra_state")]
    return [*target.tensors, *extra]


def _same_shape(value: Any, target: Target, name: str) -> bool:
    expected = target.tensors.get(name)
    if expected is None or not isinstance(value, (TensorEntry, Composite)):
        return True
    return value.shape == expected.shape or (value.shape, expected.shape) == ((1,), ())  # a number, before torch 0.4


def best_root(roots: Sequence[StateDict], target: Target) -> StateDict | None:
    """The set of weights that fits a model best; the first of those that fit alike."""
    best: tuple[int, StateDict] | None = None
    for root in roots:
        way = find_way(root, target)
        score = way.fit.matched - len(way.fit.missing) - len(way.fit.extra) - len(way.fit.shapes)
        if best is None or score > best[0]:
            best = score, root
    return best[1] if best else None


# Prefixes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """Steps that make the names fit: each a finding with its commands, and how the weights fit after them. unwraps: wrappers go."""

    fit: Fit
    steps: tuple[Found, ...] = ()
    unwraps: bool = False


def find_way(root: StateDict, target: Target) -> Way:
    """How the keys of the checkpoint become those of the model, by prefixes alone."""
    keys = [key for key in root.node if type(key) is str]
    way = Way(fit(root, target, {key: key for key in keys}))
    if way.fit.is_exact:
        return way
    bare = {without_wrappers(key): key for key in keys}
    if any(map(wrappers, keys)) and len(bare) == len(keys):
        unwrapped = fit(root, target, bare)
        if unwrapped.matched > way.fit.matched:
            way = Way(unwrapped, (), True)
    way = _without_counter(root, target, way)
    if way.fit.is_exact:
        return way
    return _by_prefix(root, target, way) or _by_adding(root, target, way) or way


def _without_counter(root: StateDict, target: Target, way: Way) -> Way:
    if COUNTER not in way.fit.extra:
        return way
    names = {name: key for name, key in way.fit.names.items() if name != COUNTER}
    what = f"{COUNTER} counts the models of an average; {printable(target.name)} has no such entry"
    finding = Finding("averaged-counter", what, f'Unexpected key(s) in state_dict: "{COUNTER}"')
    return Way(
        fit(root, target, names), (*way.steps, (finding, (command("edit", FILE, drop=COUNTER, out=OUT),))), way.unwraps
    )


def _by_prefix(root: StateDict, target: Target, way: Way) -> Way | None:
    """The prefix that the model's names have in the checkpoint, with what else is there left out."""
    found: list[tuple[bool, bool, int, str, Way]] = []
    for prefix in _prefixes(list(target.tensors), list(way.fit.names)):
        inside = {name[len(prefix) :]: key for name, key in way.fit.names.items() if name.startswith(prefix)}
        found_fit = fit(root, target, inside)
        if found_fit.matched <= way.fit.matched or 2 * found_fit.matched < len(target.tensors):
            continue
        rest = len(way.fit.names) - len(inside)
        what = f"its keys begin with {printable(prefix)}, those of {printable(target.name)} do not"
        commands: tuple[Command, ...] = (command("strip-module", FILE, prefix=prefix, out=OUT),)
        if rest:
            what = f"the model's keys begin with {printable(prefix)}; {rest:,} others are beside them"
            commands = (command("convert", FILE, only=f"{prefix}*", out=OUT), *commands)
        step = Finding("prefix", what, _SAYS), commands
        average = any(word in prefix.lower() for word in _AVERAGES)
        found.append((bool(found_fit.missing), average, rest, prefix, Way(found_fit, (*way.steps, step), way.unwraps)))
    return min(found, key=lambda each: each[:4])[4] if found else None


def _by_adding(root: StateDict, target: Target, way: Way) -> Way | None:
    """The prefix that the model's names have and the checkpoint's do not."""
    for prefix in _prefixes(list(way.fit.names), list(target.tensors)):
        names = {prefix + name: key for name, key in way.fit.names.items()}
        made = fit(root, target, names)
        if made.matched > way.fit.matched and 2 * made.matched >= len(names):
            what = f"the keys of {printable(target.name)} begin with {printable(prefix)}, the others do not"
            add = command("add-module", FILE, prefix="" if prefix == "module." else prefix, out=OUT)
            return Way(made, (*way.steps, (Finding("prefix", what, _SAYS), (add,))), way.unwraps)
    return None


def _prefixes(names: Sequence[str], longer: Sequence[str]) -> list[str]:
    """The prefixes under which the first few of `names` stand among `longer`."""
    found: dict[str, None] = {}
    for name in names[:TRIED]:
        for other in longer:
            if other.endswith("." + name):
                found[other[: -len(name)]] = None
    return list(found)


# What is left --------------------------------------------------------------------------------------------------------


def of_target(root: StateDict, target: Target, way: Way) -> Iterator[Found]:
    """The steps of a way, and what does not fit after them."""
    yield from way.steps
    odd = set(not_tensors(root))
    missing = [name for name in way.fit.missing if not (name in way.fit.names and way.fit.names[name] in odd)]
    extra = [name for name in way.fit.extra if way.fit.names[name] not in odd]  # those are told already
    if tied := _tied(missing, target, way) if not extra else []:
        missing = [name for name in missing if name not in tied]
        yield _tied_weights(tied, target)
    if missing or extra:
        yield _keys_differ(missing, extra, target, way, root)
    if way.fit.shapes:
        yield _shape_mismatch(root, target, way)


def _tied(missing: Sequence[str], target: Target, way: Way) -> list[str]:
    """Names that the model has for tensors of which the checkpoint has another name."""
    groups: dict[str, list[str]] = {}
    for expected in target.tensors.values():
        groups.setdefault(expected.tied_to or expected.name, []).append(expected.name)
    there = {name for names in groups.values() if any(name in way.fit.names for name in names) for name in names}
    return [name for name in missing if name in there]


def _tied_weights(tied: Sequence[str], target: Target) -> Found:
    names = listed([printable(name) for name in tied], 3)
    what = f"{names}: tied in {printable(target.name)} to a tensor that the file has under its other name"
    says = f'Missing key(s) in state_dict: "{printable(tied[0])}"'
    if target.kind == SPEC:
        return Finding("tied-weights", what, says, advice="safetensors.torch.load_model(model, FILE) loads it."), ()
    write = command("warm-start", FILE, against=target.name, out=OUT_PT)
    return Finding("tied-weights", what, says, advice="Or in Python: safetensors.torch.load_model(model, FILE)"), (
        write,
    )


def _keys_differ(missing: Sequence[str], extra: Sequence[str], target: Target, way: Way, root: StateDict) -> Found:
    parts = [
        f"{len(names):,} {form(len(names), 'is', 'are')} {word} ({listed([printable(key) for key in names], 2)})"
        for word, names in (("missing", missing), ("unexpected", extra))
        if names
    ]
    what = f"of {counted(len(target.tensors), 'key')} of {printable(target.name)} {' and '.join(parts)}"
    if way.fit.matched <= len(way.fit.shapes):
        return Finding(
            "keys-differ", what, _SAYS, advice="No tensor of the file fits the model: it is of another one."
        ), ()
    skip = "skip" if way.fit.shapes else ""
    plan = command("warm-start", FILE, against=target.name, on_mismatch=skip)
    return Finding("keys-differ", what, _SAYS, advice=Advice("What fits, and rules for other names: ", plan)), ()


def _shape_mismatch(root: StateDict, target: Target, way: Way) -> Found:
    told = [
        f"{printable(name)} {_shape(root.node[way.fit.names[name]])} against {_shape(target.tensors[name])}"
        for name in way.fit.shapes
        if name in way.fit.names
    ]
    count = len(way.fit.shapes)
    what = f"{counted(count, 'tensor has', 'tensors have')} another shape than in {printable(target.name)}: {listed(told, 3)}"
    says = "size mismatch for …: copying a param with shape … from checkpoint"
    if target.kind == SPEC or way.fit.matched <= count:  # a spec has no values to fill up with
        return Finding("shape-mismatch", what, says), ()
    start = command("warm-start", FILE, against=target.name, on_mismatch="skip", out=OUT)
    advice = f"It takes what fits, and the values of {printable(target.name)} for the rest."
    return Finding("shape-mismatch", what, says, advice=advice), (start,)


def _shape(tensor: Any) -> str:
    return str(list(tensor.shape)) if tensor.shape is not None else "[?]"
