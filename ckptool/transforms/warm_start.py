"""A warm start: which tensor of a checkpoint goes under which name of a target, planned before anything is changed.

For the plan only names, shapes and dtypes are looked at; values, up to so many bytes, to say whether a smaller dtype
loses any. What is written then has the target's keys in its order, each tensor of its type, on the CPU; and an
optimizer's state, in which slots go where their parameters go.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ckptool.analysis.targets import Expected, Target, accepted, kind_by_name, tie_groups
from ckptool.analysis.warm_start import (
    AS_IT_IS,
    PADDED,
    REFUSED,
    RESIZED,
    SKIPPED,
    SLICED,
    Absent,
    DtypeChange,
    LeftOut,
    Loaded,
    LoadReport,
    Mismatch,
    OptimizerReport,
    Refusal,
    Suggestion,
    Tied,
    Typed,
    checked_share,
    little,
    unmet,
)
from ckptool.checkpoint import NO_FLAGS, Checkpoint, Composite, Flags, Note, Storage, Tensor, TensorEntry
from ckptool.checkpoint.compare import same_bytes
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.checkpoint.paths import selected
from ckptool.checkpoint.strided import row_major
from ckptool.checkpoint.tree import address, map_storages
from ckptool.commands import ADDRESS, FILE, OUT, Slot, arg, command, several
from ckptool.conventions.state_dicts import (
    COUNTER,
    StateDict,
    of_positions,
    optimizers,
    paired,
    without_wrappers,
    wrappers,
)
from ckptool.errors import Conflict, NoMatch, UsageError, counted, listed, printable
from ckptool.names.rule_files import renaming
from ckptool.names.rules import TAKEN_BEFORE, WHOLE_KEY, Rule, refuse_idle
from ckptool.names.steps import renamed
from ckptool.transforms.casting import EXACT, LOSSY, compact, conversion, converted, first_part, laid_over, losses
from ckptool.transforms.optimizers import Slots, first_names, in_model_order, parameters_of
from ckptool.transforms.resize import Resize, parse_resize, resized
from ckptool.transforms.suggest import suggest

ON_MISMATCH = ("error", "skip", "slice", "pad", "resize")
READ_FOR_LOSSES = 256 << 20  # bytes of tensors that get a smaller dtype, in all


class MatchOptions(NamedTuple):
    """The wishes for a plan. only, exclude: patterns for names of the target, or of the checkpoint after `rules`.

    on_mismatch: where shapes differ, `error`; `skip` keeps the target's tensor; `slice` takes the first part of a
    larger one; `pad` puts a smaller one into the first corner of the target's; `resize` computes one of the target's
    shape for the names that a pattern of `resize` matches, the first that does, whatever becomes of the others.
    min_loaded: the least share of values; None for `little`.  missing: patterns for the only names that may be missing.
    """

    rules: Sequence[Rule] = ()
    only: Sequence[str] = ()
    exclude: Sequence[str] = ()
    on_mismatch: str = "error"
    min_loaded: float | None = None
    strict: bool = False
    missing: Sequence[str] | None = None
    resize: Sequence[tuple[str, Resize]] = ()


def match_options(
    rename: str | Sequence[str] | Mapping[str, str] = (),
    rules_file: str | None = None,
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    missing: str | Sequence[str] | None = None,
    resize: str | Sequence[str] | Mapping[str, str] = (),
    on_mismatch: str = "error",
    min_loaded: float | None = None,
    strict: bool = False,
) -> MatchOptions:
    """The options from texts; the rules of a file come after those given. Raises `UsageError` for an invalid one."""
    rules = renaming(several(rename, " => "), rules_file)
    checked_share(min_loaded)
    allowed = None if missing is None else several(missing)
    ways = [_way(text) for text in several(resize, "=")]
    on_mismatch = "resize" if ways and on_mismatch == "error" else on_mismatch
    return MatchOptions(rules, several(only), several(exclude), on_mismatch, min_loaded, strict, allowed, ways)


def _way(text: str) -> tuple[str, Resize]:
    """The two sides of `PATTERN=HOW`."""
    found = re.fullmatch(r"(.+?)=(\w+(?:\(.*\))?)", text)
    if found is None:
        what = f"{arg('resize')} {text!r} is not of the form PATTERN=HOW"
        raise UsageError(what, "", f"For example: {arg(resize='pos_embed=bicubic(cls=1)')}")
    return found[1], parse_resize(found[2])


class Assignment(NamedTuple):
    """The tensor that is loaded under a name. part: the shape of the first corner to load; None for all of it.

    how: it is loaded, as in `Loaded`.
    """

    source: str
    tensor: Tensor
    part: tuple[int, ...] | None = None
    how: str = AS_IT_IS


class WarmStartPlan(NamedTuple):
    """`chosen`: the assignment of each name of the target that is loaded (tied names included); `report`: all of it."""

    chosen: dict[str, Assignment]
    report: LoadReport


def plan_warm_start(
    root: StateDict, source: str, target: Target, options: MatchOptions, remark: str = ""
) -> WarmStartPlan:
    """The plan of loading the tensors of `root` into `target`. source: the name of the checkpoint.

    Raises `NoMatch` for a rule or pattern that matches nothing, `Conflict` where two keys would become one,
    `UsageError` for an unknown `on_mismatch`.
    """
    if options.on_mismatch not in ON_MISMATCH:
        what = f"unknown {arg('on_mismatch')} {options.on_mismatch!r}"
        raise UsageError(what, f"Available: {', '.join(ON_MISMATCH)}.")
    wanted, groups = target.tensors, tie_groups(target.tensors.values()).values()
    tensors = {k: v for k, v in root.node.items() if type(k) is str and isinstance(v, (TensorEntry, Composite))}
    found = _matched(tensors, root.node, target, options)
    notes = [*_choices(root, remark, target), *found.notes]
    chosen, mismatched = _fitting(tensors, found, target, options, groups, notes)

    refused, tied, through = list[Refusal](), list[Tied](), set[str]()
    for names in groups:  # one name of a tied tensor stands for the others
        first, *others = [name for name in names if name in chosen] or [""]
        for other in others:
            if chosen[first].tensor.view != chosen[other].tensor.view:
                what = f"{printable(first)} and {printable(other)} are one tensor in the target, and "
                what += " and ".join(printable(chosen[name].source) for name in (first, other)) + " are two"
                refused.append(Refusal("ties-differ", what, f"Leave one out: {arg(exclude=other)}"))
        if first:
            through.update(name for name in names if name != first)
            chosen.update((name, chosen[first]) for name in names if name != first)
            tied += [Tied(name, first) for name in names if name != first and name not in found.excluded]
    # A misfit is reported under whatever name; a tensor that is loaded in part, once.
    mismatched = [each for each in mismatched if each.target not in through or each.done in (SKIPPED, REFUSED)]
    loaded = []
    for name in (name for name in wanted if name in chosen and name not in through):
        choice, expected = chosen[name], wanted[name]
        elements = expected.numel if choice.part is None else prod(choice.part)
        loaded.append(Loaded(choice.source, name, expected.kind, elements, choice.how))

    met = {*chosen, *found.supplied, *found.excluded, *(each.target for each in mismatched)}
    taken = {*found.pairs.values()}
    rest = [(key, name, tensors[key]) for key, name in found.names.items() if key not in taken]
    report = LoadReport(
        source=source,
        target=target.name,
        target_kind=target.kind,
        root=root.address,
        loaded=tuple(loaded),
        tied=tuple(tied),
        missing=tuple(Absent("", e.name, e.kind, e.dtype, e.shape) for name, e in wanted.items() if name not in met),
        unexpected=tuple(Absent(key, name, kind_by_name(key, t.dtype), t.dtype, t.shape) for key, name, t in rest),
        mismatched=tuple(mismatched),
        dtype_changes=tuple(_dtype_changes(loaded, chosen, target)),
        excluded=tuple(name for name in wanted if name in found.excluded and name not in chosen),
        elements=sum(each.elements for each in loaded),
        total=sum(expected.numel for expected in target.unique),
        normalised=tuple(notes),
        suggestions=_suggestions(tensors, found, target),
        refused=(),
        supplied=tuple(name for name in found.supplied if name not in chosen and name not in found.excluded),
    )
    skipped = (each.target for each in mismatched if (each.done, each.about) == (SKIPPED, "shape"))
    out = {*found.excluded, *skipped}
    asked = {expected.tied_to or name for name, expected in wanted.items() if name not in out}
    refused += _refusals(report, options, sum(wanted[name].numel for name in asked))
    return WarmStartPlan(chosen, replace(report, refused=tuple(refused)))


def _choices(root: StateDict, remark: str, target: Target) -> list[Note]:
    texts = [remark] if remark else []
    if root.path and not remark:
        texts.append(f"took {root.address}")
    if root.module is not None or root.detail:
        texts.append(f"they are those of a {root.detail}")
    return [Note("root", text) for text in (*texts, *(f"of the target: {text}" for text in target.remarks))]


# Names ---------------------------------------------------------------------------------------------------------------


class _Matched(NamedTuple):
    """Which key of the checkpoint is which name of the target. names: of each key that may be loaded, after the rules.

    pairs: name of the target -> key.  excluded: names that are not to be loaded.  supplied: those that torch's own
    modules give a value where an older file has none.  notes: what was done unasked.
    """

    names: dict[str, str]
    pairs: dict[str, str]
    excluded: set[str]
    supplied: list[str]
    notes: list[Note]


def _matched(tensors: Mapping[str, Tensor], node: Any, target: Target, options: MatchOptions) -> _Matched:
    """Pairs by the rules and equal names, then without the prefixes of wrappers, then as torch takes older names."""
    wanted, notes, excluded = target.tensors, list[Note](), set[str]()
    names, peeled = _renamed(tensors, options.rules)
    if COUNTER in names and COUNTER not in wanted and names[COUNTER] == COUNTER:
        del names[COUNTER]
        notes.append(Note("counter-left-out", f"{COUNTER} counts the models of an average; it is no weight"))
    keys = {name: key for key, name in names.items()}
    both = paired(keys, wanted, lambda name: f"Leave one out: {arg(exclude=keys[name])}")
    pairs = {goal: keys[name] for goal, name in both.items()}
    bare = [goal for goal, name in both.items() if goal != name]
    for word, side, some in (
        ("key", "checkpoint", [*peeled, *(pairs[goal] for goal in bare)]),
        ("name", "target", bare),
    ):
        prefixes = Counter(filter(None, map(wrappers, dict.fromkeys(some))))
        texts = (f"{prefix} taken off {counted(count, word)} of the {side}" for prefix, count in prefixes.items())
        notes += [Note("prefix", text) for text in texts]

    taken, free = {*pairs.values()}, dict[str, str]()
    for key, name in names.items():
        if key not in taken:
            free[without_wrappers(name)] = free[name] = key
    missing = [name for name in wanted if name not in pairs]
    metadata = node.metadata if isinstance(node, OrderedDict) else None
    older, supplied, dropped = accepted(pairs, missing, free, metadata)
    pairs |= older
    names = {key: name for key, name in names.items() if key not in dropped}
    if older:
        shown = listed([f"{key} → {name}" for name, key in older.items()], 2)
        notes.append(Note("older-names", f"names of an older torch taken as it takes them: {shown}"))
    if supplied:
        shown = listed(supplied, 2)
        notes.append(Note("supplied", f"an older torch did not save them, and torch supplies them: {shown}"))

    if options.only or options.exclude:  # patterns are for what the target calls it, or the rules where it has no name
        goals = {key: goal for goal, key in pairs.items()}
        ours = {key: goals.get(key, name) for key, name in names.items()}
        forms = {name: {name, without_wrappers(name)} for name in (*wanted, *ours.values())}
        every = dict.fromkeys(form for both in forms.values() for form in both)
        kept, left = selected(every, options.only), selected(every, (), options.exclude)
        excluded = {name for name, both in forms.items() if both.isdisjoint(kept) or not both <= left}
        names = {key: name for key, name in names.items() if ours[key] not in excluded}
        pairs = {goal: key for goal, key in pairs.items() if goal not in excluded}
    return _Matched(names, pairs, excluded, supplied, notes)


def _renamed(tensors: Mapping[str, Tensor], rules: Sequence[Rule]) -> tuple[dict[str, str], list[str]]:
    """Each key with its name by the first rule that matches it or its form without wrappers; the keys of the latter."""
    used: set[tuple[str, str]] = set()
    names, peeled = dict.fromkeys(tensors, ""), list[str]()
    found = renamed(rules, dict.fromkeys(form for key in tensors for form in (key, without_wrappers(key))))
    for key in tensors:
        forms = [form for form in (key, without_wrappers(key)) if form in found]
        form = min(forms, key=lambda form: rules.index(found[form][0]), default="")
        names[key] = found[form][1] if forms else key
        if forms:
            used.add(found[form][0].origin)
            peeled += [key] if form != key else []
    refuse_idle((rule for rule in rules if rule.origin not in used), TAKEN_BEFORE, f"{WHOLE_KEY} Nothing was changed.")
    counts = Counter(names.values())
    if clash := [f"{key} → {new}" for key, new in names.items() if counts[new] > 1]:
        what = f"{counted(len(clash), 'key')} would collide: {listed(clash)}"
        raise Conflict(what, "One of each would be lost. Nothing was changed.")
    return names, peeled


# Fit -----------------------------------------------------------------------------------------------------------------


def _fitting(
    tensors: Mapping[str, Tensor],
    found: _Matched,
    target: Target,
    options: MatchOptions,
    groups: Collection[list[str]],
    notes: list[Note],
) -> tuple[dict[str, Assignment], list[Mismatch]]:
    """What is loaded under each name, as it is, in part or resized, and all that is not as it is wanted.

    groups: names of the target that are one tensor.  notes: what is done to shapes unasked is added to them.
    """
    chosen: dict[str, Assignment] = {}
    mismatched: list[Mismatch] = []
    ways: dict[str, Resize | None] = {}
    for pattern, asked in reversed(options.resize):
        ways |= dict.fromkeys(selected(target.tensors, [pattern]), asked)
    for names in groups:  # one tensor is resized in one way
        ways |= dict.fromkeys(names, next(iter(filter(None, map(ways.get, names))), None))
    made: dict[Any, TensorEntry] = {}  # by resizing: what is tied in the checkpoint stays so
    for name in (name for name in target.tensors if name in found.pairs):
        key, expected, way = found.pairs[name], target.tensors[name], ways.get(name)
        tensor = tensors[key]
        about = _misfit(tensor, expected, (target.values or {}).get(name))
        if about == "shape" and isinstance(tensor, TensorEntry) and (tensor.shape, expected.shape) == ((1,), ()):
            tensor, about = replace(tensor, shape=(), stride=()), ""  # as torch before 0.4 saved numbers
            notes.append(Note("zero-dim", f"{key} [1] taken as []"))
        if not about and (way is None or not (way.old or way.new)):  # 14x20 to 20x14 has as many tokens
            chosen[name] = Assignment(key, tensor)
            continue
        about, how, done = about or "shape", "", SKIPPED if options.on_mismatch == "skip" else REFUSED
        if about == "shape" and way is not None and isinstance(tensor, TensorEntry):
            done, how, shape = RESIZED, way.text, expected.shape or ()
            one = made.setdefault((tensor.view, shape, way), resized(tensor, shape, way, name))
            chosen[name] = Assignment(key, one, how=done)
        elif about == "shape" and (part := _part(tensor, expected, options.on_mismatch)) is not None:
            done = SLICED if options.on_mismatch == "slice" else PADDED
            chosen[name] = Assignment(key, tensor, part, done)
        have, want = Typed(tensor.dtype, tensor.shape), Typed(expected.dtype, expected.shape)
        mismatched.append(Mismatch(key, name, expected.kind, about, have, want, done, how))
    return chosen, mismatched


def _misfit(tensor: Tensor, expected: Expected, there: Any) -> str:
    """The aspect in which a tensor does not fit; empty if it fits. there: the target's own tensor, if it has one."""
    if tensor.shape is None or expected.shape is None:
        fits = isinstance(tensor, Composite) and isinstance(there, Composite) and _has_same_parts(tensor, there)
        return "" if fits else "kind"
    if conversion(tensor.dtype, expected.dtype) is None:
        return "dtype"
    if isinstance(tensor, Composite) and tensor.dtype is not expected.dtype:
        return "dtype"
    return "" if tensor.shape == expected.shape else "shape"


def _has_same_parts(a: Composite, b: Composite) -> bool:
    """True for two nested tensors whose parts have the same sizes; those are data themselves, and few."""
    parts, others = list(a.parts()), list(b.parts())
    if (a.kind, a.dtype, len(parts)) != (b.kind, b.dtype, len(others)):
        return False
    for one, other in zip(parts, others, strict=True):
        if isinstance(one, TensorEntry) and isinstance(other, TensorEntry) and one.dtype is other.dtype:
            are_sizes = one.dtype.kind == "int"
            if one.shape != other.shape or (are_sizes and not same_bytes(row_major(one), row_major(other))):
                return False
        elif one.dtype is not other.dtype or type(one) is not type(other) or one.storage.nbytes != other.storage.nbytes:
            return False
    return True


def _part(tensor: Tensor, expected: Expected, on_mismatch: str) -> tuple[int, ...] | None:
    """The shape of the corner that both have, where the user asked for it and it is all of one of them."""
    if not isinstance(tensor, TensorEntry) or expected.shape is None or len(tensor.shape) != len(expected.shape):
        return None
    smaller = tuple(map(min, tensor.shape, expected.shape))
    whole = {"slice": expected.shape, "pad": tensor.shape}.get(on_mismatch)
    return smaller if smaller == whole else None


def _dtype_changes(loaded: Sequence[Loaded], chosen: Mapping[str, Assignment], target: Target) -> Iterator[DtypeChange]:
    """Each change of a dtype; the tensors that may lose values are read while they are not too many."""
    budget = READ_FOR_LOSSES
    for fact in loaded:
        tensor, new = chosen[fact.target].tensor, target.tensors[fact.target].dtype
        if not isinstance(tensor, TensorEntry) or new is None or tensor.dtype is new:
            continue
        sure = conversion(tensor.dtype, new)
        budget -= tensor.nbytes if sure == LOSSY else 0
        lost: tuple[bool | None, int | None, int | None] = (None, None, None)
        if sure == EXACT:
            lost = (True, 0, 0)
        elif budget >= 0:
            tally = losses(tensor, new)
            lost = (not tally.changed, tally.changed, tally.overflowed)
        yield DtypeChange(fact.source, fact.target, tensor.dtype, new, *lost)


# Advice --------------------------------------------------------------------------------------------------------------


def _suggestions(tensors: Mapping[str, Tensor], found: _Matched, target: Target) -> tuple[Suggestion, ...]:
    """Rules that would make more fit, for names as rules see them: without the prefixes that are taken off anyway."""
    if len(found.pairs) in (len(found.names), len(target.tensors)):
        return ()
    ours = {without_wrappers(name): tensors[key].shape for key, name in found.names.items()}
    wanted = {without_wrappers(name): e.shape for name, e in target.tensors.items() if name not in found.excluded}
    placed = {without_wrappers(found.names[key]): without_wrappers(goal) for goal, key in found.pairs.items()}
    return tuple(suggest(ours, wanted, placed))


_SKIP = f"Keep the model's own: {arg(on_mismatch='skip')}"


def _refusals(report: LoadReport, options: MatchOptions, wanted: int) -> list[Refusal]:
    found = []
    if not report.loaded:
        what = "no tensor of the checkpoint fits the target"
        found.append(Refusal("nothing-loaded", what, _advice(report)))
    cut, pad, compute = arg(on_mismatch="slice"), arg(on_mismatch="pad"), arg(resize="PATTERN=HOW")
    any_way = f"{_SKIP}; cut or fill up: {cut} or {pad}; compute: {compute}"
    for about, fix in (("shape", any_way), ("dtype", _SKIP), ("kind", _SKIP)):
        facts = [fact for fact in report.mismatched if (fact.done, fact.about) == (REFUSED, about)]
        if facts:
            texts = [f"{printable(fact.target)} {fact.have} against {fact.want}" for fact in facts]
            what = f"{counted(len(facts), 'tensor is', 'tensors are')} of another {about}: {listed(texts, 3)}"
            found.append(Refusal(f"{about}-mismatch", what, _of_positions(facts) + fix))
    for word, names in (
        ("missing", [fact.name for fact in report.missing]),
        ("unexpected", [fact.source for fact in report.unexpected]),
        ("skipped", [fact.target for fact in report.mismatched if fact.done == SKIPPED]),
    ):
        if options.strict and names:
            shown = listed([printable(name) for name in names], 3)
            what = f"{counted(len(names), 'name is', 'names are')} {word}: {shown}"
            found.append(Refusal("strict", what))
    if found and not report.loaded:
        return found
    if not found and options.min_loaded is None:
        found = little(report, wanted, _advice(report))
    return found + unmet(report, options.min_loaded, options.missing)


def _of_positions(facts: Sequence[Mismatch]) -> str:
    """What resizes the positions of a square grid, where one does not fit: a ViT at another size."""
    for fact in facts:
        if how := of_positions(fact.target, fact.have.shape, fact.want.shape):
            return f"For another grid: {arg(resize=f'{fact.target}={how}')}. "
    return ""


def _advice(report: LoadReport) -> str:
    """The suggestions as options to type, where they are few; else where to look."""
    sure = [rule for suggestion in report.suggestions for rule in suggestion.rules]
    if 0 < len(sure) <= 4:
        return f"Perhaps: {arg(rename=sure)}"
    if sure:
        return f"Rules that would make more fit: {arg(suggest='rules.yaml')}, then {arg(rules='rules.yaml')}"
    return f"See both sides: {command('inspect', report.source or FILE, all=True)}"


# What is written -----------------------------------------------------------------------------------------------------


class Filled(NamedTuple):
    """A whole state dict for a target, and the names whose values are the target's own."""

    state_dict: OrderedDict
    taken: tuple[str, ...]


def filled(target: Target, chosen: dict[str, Assignment]) -> Filled:
    """Every key of the target with a value: what was chosen from the checkpoint, the rest from the target itself.

    Raises `Conflict` naming what a target without values (a spec) cannot fill up.
    """
    values, order = target.values or {}, target.values or target.tensors
    own_names = [name for name in order if name not in chosen]
    partly = [name for name, choice in chosen.items() if choice.part not in (None, target.tensors[name].shape)]
    if target.values is None and (own_names or partly):
        raise Conflict(
            f"{target.name} has no values, and these names are not all in the checkpoint: {listed(own_names + partly)}",
            "A spec says names, shapes and types. Nothing was written.",
            f"Name a target that has values: {arg(against=Slot('CHECKPOINT'))} or {arg(against='file.py:factory')}",
        )
    firsts = {name: expected.tied_to or name for name, expected in target.tensors.items() if name in chosen}
    made: dict[str, Tensor] = {}
    for name, first in firsts.items():
        if first not in made:
            made[first] = _loaded(chosen[name], target.tensors[name], values.get(name))
    holders: dict[int, list[str]] = {}
    for first, tensor in made.items():
        if isinstance(tensor, TensorEntry):
            holders.setdefault(id(tensor.storage), []).append(first)
    for firsts_of in holders.values():
        tensors: list[Any] = [made[first] for first in firsts_of]
        bases: list[Any] = [values.get(first) for first in firsts_of]
        if all(isinstance(base, TensorEntry) for base in bases) and len({id(base.storage) for base in bases}) == 1:
            layouts = [[(each.storage.nbytes, each.layout) for each in side] for side in (tensors, bases)]
            if layouts[0] == layouts[1]:
                continue  # views that lie in one storage just so in the target
        for first, tensor in zip(firsts_of, tensors, strict=True):
            # Tensors that are two in the target are two here, without what else was in the checkpoint's storage.
            if len(tensors) > 1 or tensor.span() != (0, tensor.storage.nbytes):
                own = compact(tensor)
                storage = replace(own.storage) if own.storage is tensor.storage else own.storage
                made[first] = replace(own, storage=storage)
    items: dict[str, Any] = {}
    same: dict[tuple[str, int], Tensor] = {}  # what is one object in the target stays one
    for name in order:
        if name not in firsts:
            items[name] = values[name]
            continue
        tensor, base = made[firsts[name]], values.get(name)
        if isinstance(tensor, TensorEntry):
            flags = base.flags if isinstance(base, TensorEntry) else NO_FLAGS
            tensor = tensor.with_flags(Flags(flags.requires_grad, flags.parameter, *tensor.flags.lazy))
        items[name] = same.setdefault((firsts[name], id(base)), tensor)
    attributes = {"_metadata": target.metadata} if target.metadata is not None else None

    def on_cpu(storage: Storage) -> Storage:
        return storage if storage.location == "cpu" else replace(storage, location="cpu")

    return Filled(map_storages(OrderedDict(items, attributes), on_cpu), tuple(own_names))


def _loaded(choice: Assignment, expected: Expected, base: Any) -> Tensor:
    """A tensor as the target wants it. base: the target's own."""
    tensor = choice.tensor
    if isinstance(tensor, Composite) or expected.dtype is None:
        return tensor
    if choice.part is None:
        return converted(tensor, expected.dtype)
    part = converted(compact(first_part(tensor, choice.part)), expected.dtype)
    if part.shape == expected.shape:
        return part
    if not isinstance(base, TensorEntry):
        what = f"{expected.name} is no plain tensor in the target, so nothing can be laid over it"
        raise Conflict(what, "Nothing was written.", f"Keep the target's: {arg(on_mismatch='skip')}")
    return laid_over(base, part)


# The optimizer -------------------------------------------------------------------------------------------------------


class Carried(NamedTuple):
    """State by the names of the target, the groups of the names, and the report with the names without state."""

    state: dict[str, Any]
    groups: list[dict[str, Any]]  # as saved, without `params` and `param_names`
    group_of: dict[str, int]
    report: OptimizerReport


def carried(
    checkpoint: Checkpoint, root: StateDict, target: Target, chosen: Mapping[str, Assignment], parameters: Sequence[str]
) -> Carried:
    """The optimizer state of a checkpoint by the parameter names of a target.

    parameters: the target's, in order.  Raises `NoMatch` where there is no optimizer, `UsageError` where there are
    several, `Conflict` where it cannot be known which slot belongs to which parameter.
    """
    slots = _only_one(checkpoint)
    first = first_names(root)
    told = target.tensors if target.kinds_known else {}
    kinds = {first[choice.source]: told[name].kind for name, choice in chosen.items() if name in told}
    names, known_by = slots.among(parameters_of(root, kinds), ordered=in_model_order(root.node))
    goes_to = _destinations(first, target, chosen, parameters)
    state: dict[str, Any] = {}
    group_of: dict[str, int] = {}
    left: list[LeftOut] = []
    for number, group in enumerate(slots.groups):
        for slot in group["params"]:
            name = names.get(slot)
            goal, why = goes_to.get(name, ("", "its parameter is not loaded")) if name is not None else ("", "no name")
            if goal:
                group_of[goal] = number
                if not why and slot in slots.tree["state"]:
                    state[goal] = slots.tree["state"][slot]
            if why:
                left.append(LeftOut(name or str(slot), why))
    fresh = tuple(name for name in parameters if name not in state)
    kept = tuple(name for name in parameters if name in state)
    report = OptimizerReport(slots.place, known_by, kept, fresh, tuple(left))
    without = ("params", "param_names")
    groups = [{key: value for key, value in group.items() if key not in without} for group in slots.groups]
    return Carried(state, groups, group_of, report)


def as_state_dict(found: Carried, parameters: Sequence[str]) -> dict[str, Any]:
    """The argument of `Optimizer.load_state_dict` for an optimizer with the target's parameters, group by group.

    Raises `Conflict` where a parameter without state belongs to one of several groups, and nothing says to which.
    """
    members: list[list[str]] = [[] for _ in found.groups]
    unknown = []
    for name in parameters:
        number = found.group_of.get(name, 0 if len(found.groups) == 1 else -1)
        if number < 0:
            unknown.append(name)
        else:
            members[number].append(name)
    if unknown:
        what = f"the optimizer has {counted(len(found.groups), 'group')} of parameters, and it is unclear "
        what += f"which of them {listed(unknown)} belong to"
        fix = "Load it in Python, into your own optimizer: ckptool.load_into(model, FILE, optimizer=optimizer)"
        raise Conflict(what, "The learning rate and weight decay would be a guess. Nothing was written.", fix)
    named = [{**group, "params": names} for group, names in zip(found.groups, members, strict=True)]
    state = {name: found.state[name] for names in members for name in names if name in found.state}
    return Slots({"state": state, "param_groups": named}, "").numbered()


def _only_one(checkpoint: Checkpoint) -> Slots:
    found = list(optimizers(checkpoint.tree))
    where = checkpoint.source or "the checkpoint"
    if not found:
        why = "It would be a dictionary with `state` and `param_groups`. Nothing was changed."
        raise NoMatch(f"{where} has no optimizer state", why, f"Go without it: omit {arg(optimizer=True)}")
    if len(found) > 1:
        what = f"{where} has {counted(len(found), 'optimizer')}: {listed([address(path) for path, _ in found])}"
        fix = f"Keep only one in a copy: {command('edit', FILE, drop=ADDRESS, out=OUT)}"
        raise UsageError(what, "Which one belongs to these weights is not known.", fix)
    ((path, optimizer),) = found
    return Slots(optimizer, address(path))


def _destinations(
    first: Mapping[str, str], target: Target, chosen: Mapping[str, Assignment], parameters: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """Name in the checkpoint -> name in the target, and why its state does not go along where it does not."""
    taken = set(parameters)
    found = {}
    for name, choice in chosen.items():
        goal = name if name in taken else target.tensors[name].tied_to
        if goal in taken:
            why = "" if choice.part is None else "only a part of its parameter is loaded"
            why = "its parameter is resized" if choice.how == RESIZED else why
            found[first[choice.source]] = (goal, why)
    return found
