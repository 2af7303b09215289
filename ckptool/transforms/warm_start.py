"""A warm start: which tensor of a checkpoint goes under which name of a target, planned before anything is changed.

The plan needs only names, shapes and dtypes; values are read, up to a limit, to tell whether a smaller dtype loses any.
What is then written has the target's keys in the target's order, each tensor in the target's type, on the CPU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckptool.analysis.targets import STATE, Expected, Target, accepted, extra_states, kind_by_name, tie_groups
from ckptool.analysis.warm_start import (
    AS_IT_IS,
    REFUSED,
    RESIZED,
    SKIPPED,
    Absent,
    DtypeChange,
    Loaded,
    LoadReport,
    Mismatch,
    Refusal,
    Suggestion,
    Tied,
    Typed,
    checked_share,
    little,
    unmet,
)
from ckptool.checkpoint import NO_FLAGS, Composite, Flags, Note, Storage, Tensor, TensorEntry
from ckptool.checkpoint.arrays import is_same
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.checkpoint.paths import literal, selected
from ckptool.checkpoint.tree import is_meta, map_storages
from ckptool.commands import FILE, Slot, arg, command, several
from ckptool.conventions.state_dicts import COUNTER, PEELED, StateDict, of_positions, paired, without_wrappers, wrappers
from ckptool.errors import Conflict, UsageError, counted, listed, printable
from ckptool.formats import IN_MEMORY
from ckptool.names.rule_files import renaming
from ckptool.names.rules import Rule
from ckptool.names.steps import by_rules
from ckptool.transforms.casting import EXACT, LOSSY, compact, conversion, converted, losses
from ckptool.transforms.rename import refuse_collisions
from ckptool.transforms.resize import Resize, parse_resize, resized
from ckptool.transforms.suggest import suggest

READ_FOR_LOSSES = 256 << 20  # bytes of tensors that get a smaller dtype, in all


class MatchOptions(NamedTuple):
    """The options of a plan. only, exclude: patterns for names of the target, or of the checkpoint after `rules`.

    on_mismatch: where shapes differ, `error`; `skip` keeps the target's tensor.  resize: patterns for names, and
    how their tensors are computed in the target's shape; the first match counts.
    min_loaded: the least fraction of values, None for `little`.  missing: patterns for all names that may be missing.
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
    """The options from texts; a file's rules come after those of `rename`. Raises `UsageError` for an invalid one."""
    rules = renaming(several(rename, " => "), rules_file)
    checked_share(min_loaded)
    allowed = None if missing is None else several(missing)
    ways = []
    for text in several(resize, "="):
        if (match := re.fullmatch(r"(.+?)=(\w+(?:\(.*\))?)", text)) is None:
            what = f"{arg('resize')} {text!r} is not of the form PATTERN=HOW"
            raise UsageError(what, "", f"For example: {arg(resize='pos_embed=bicubic(cls=1)')}")
        ways.append((match[1], parse_resize(match[2])))
    return MatchOptions(rules, several(only), several(exclude), on_mismatch, min_loaded, strict, allowed, ways)


class Assignment(NamedTuple):
    """The tensor that is loaded under a name. how: as in `Loaded`."""

    source: str
    tensor: Tensor
    how: str = AS_IT_IS


class WarmStartPlan(NamedTuple):
    """`chosen`: the assignment of each name of the target that is loaded, tied names included. `states`: the extra
    states that are loaded, by the target's names."""

    chosen: dict[str, Assignment]
    states: dict[str, Any]
    report: LoadReport


def plan_warm_start(
    root: StateDict, source: str, target: Target, options: MatchOptions, remark: str = ""
) -> WarmStartPlan:
    """The plan of loading the tensors of `root` into `target`. source: the name of the checkpoint.

    Raises `NoMatch` for a rule or pattern that matches nothing, `Conflict` where two keys would become one.
    """
    targets, groups = target.tensors, tie_groups(target.tensors.values()).values()
    tensors = {k: v for k, v in root.node.items() if type(k) is str and isinstance(v, (TensorEntry, Composite))}
    keys = [*tensors, *extra_states(root.node, tensors)]
    matched = _match_names(keys, root.node, [*targets, *target.states], options)
    states = {name: matched.pairs.pop(name) for name in target.states if name in matched.pairs}
    for key in states.values():
        tensors.pop(key, None)  # a module may keep a tensor there
    for name in [name for name, key in matched.pairs.items() if key not in tensors]:
        del matched.pairs[name]  # a tensor for which the checkpoint has an extra state
    took = remark or (f"took {root.address}" if root.path else "")
    is_other = root.module is not None or root.detail
    texts = [took, f"they are those of a {root.detail}" if is_other else ""]
    texts += [f"of the target: {text}" for text in target.remarks]
    notes = [*(Note("root", text) for text in texts if text), *matched.notes]
    chosen, mismatched = _fit_tensors(tensors, matched, target, options, groups, notes)

    refused, tied, through = list[Refusal](), list[Tied](), set[str]()
    for names in groups:  # one name of a tied tensor represents the others
        first, *others = [name for name in names if name in chosen] or [""]
        for other in others:
            if not _are_one(chosen[first].tensor, chosen[other].tensor):
                what = f"{printable(first)} and {printable(other)} are one tensor in the target, and "
                what += " and ".join(printable(chosen[name].source) for name in (first, other)) + " differ"
                refused.append(Refusal("ties-differ", what, f"Leave one out: {arg(exclude=literal(other))}"))
        if first:
            through.update(name for name in names if name != first)
            chosen.update((name, chosen[first]) for name in names if name != first)
            tied += [Tied(name, first) for name in names if name != first and name not in matched.excluded]
    # A misfit is reported under each name, a resized tensor once.
    mismatched = [fact for fact in mismatched if fact.target not in through or fact.done in (SKIPPED, REFUSED)]
    pairs = [(name, chosen[name], targets[name]) for name in targets if name in chosen and name not in through]
    loaded = [Loaded(choice.source, name, each.kind, each.numel, choice.how) for name, choice, each in pairs]
    loaded_states = [Loaded(key, name, STATE, 0) for name, key in states.items()] if loaded else []  # never alone
    met = {*chosen, *states, *matched.supplied, *matched.excluded, *(fact.target for fact in mismatched)}
    taken = {*matched.pairs.values(), *states.values()}
    left = {key: name for key, name in matched.names.items() if key not in taken}
    suggestions, short = list[Suggestion](), {key: without_wrappers(key) for key in tensors}
    if len(matched.pairs) != len(targets) and not left.keys().isdisjoint(tensors):
        # Rules that would make more fit, for names as rules see them: without the prefixes that are removed anyway.
        ours = {short[key]: tensors[key].shape for key in matched.names if key in tensors}
        goals = {name: without_wrappers(name) for name in targets}  # one more where it would be removed from it again
        goals = {name: goal if goal == without_wrappers(goal) else PEELED + goal for name, goal in goals.items()}
        theirs = {goals[name]: e.shape for name, e in targets.items() if name not in matched.excluded}
        placed = {short[key]: goals[goal] for goal, key in matched.pairs.items()}
        order = "; to be given before the other rules" * bool(options.rules)
        suggestions = [replace(hint, why=hint.why + order) for hint in suggest(ours, theirs, placed)]
    report = LoadReport(
        source=source,
        target=target.name,
        target_kind=target.kind,
        root=root.address,
        loaded=(*loaded, *loaded_states),
        tied=tuple(tied),
        missing=tuple(_absent("", name, targets.get(name)) for name in (*targets, *target.states) if name not in met),
        unexpected=tuple(_absent(key, name, tensors.get(key)) for key, name in left.items()),
        mismatched=tuple(mismatched),
        dtype_changes=tuple(_dtype_changes(loaded, chosen, target)),
        excluded=tuple(name for name in targets if name in matched.excluded and name not in chosen),
        elements=sum(fact.elements for fact in loaded),
        total=sum(expected.numel for expected in target.unique),
        normalised=tuple(notes),
        suggestions=tuple(suggestions),
        refused=(),
        supplied=tuple(name for name in matched.supplied if name not in chosen and name not in matched.excluded),
    )
    skipped = (fact.target for fact in mismatched if (fact.done, fact.about) == (SKIPPED, "shape"))
    out = {*matched.excluded, *skipped}
    needed = {expected.tied_to or name for name, expected in targets.items() if name not in out}
    advice = _advice(report, root, target)
    refused += _refusals(report, options, sum(targets[name].numel for name in needed), advice)
    values = {name: root.node[key] for name, key in states.items()}
    return WarmStartPlan(chosen, values, replace(report, refused=tuple(refused)))


def _absent(key: str, name: str, facts: Expected | Tensor | None) -> Absent:
    """What only one side has.  facts: what it is there; None for an extra state."""
    if facts is None:
        return Absent(key, name, STATE, None, None)
    kind = facts.kind if isinstance(facts, Expected) else kind_by_name(key, facts.dtype)
    return Absent(key, name, kind, facts.dtype, facts.shape)


# Names ---------------------------------------------------------------------------------------------------------------


class _Matched(NamedTuple):
    """Which key of the checkpoint is which name of the target. names: of each key that may be loaded, after the rules.

    pairs: name of the target -> key.  excluded: names that are not to be loaded.  supplied: names to which torch's own
    modules give a value where an older file has none.  notes: what was done without being asked.
    """

    names: dict[str, str]
    pairs: dict[str, str]
    excluded: set[str]
    supplied: list[str]
    notes: list[Note]


def _match_names(keys: Sequence[str], node: Any, targets: Sequence[str], options: MatchOptions) -> _Matched:
    """Pairs by the rules and equal names, then without wrapper prefixes, then by names of older torch versions."""
    notes, excluded = list[Note](), set[str]()
    # By the rules for the key; by those for its form without wrappers, where only they give a name of the target.
    short, goals = {key: without_wrappers(key) for key in keys}, {*map(without_wrappers, targets)}
    rename, names, peeled = by_rules(options.rules, {*short, *short.values()}), dict[str, str](), list[str]()
    for key in short:
        names[key], new = rename(key), rename(short[key])
        is_whole = names[key] != key and (without_wrappers(names[key]) in goals or without_wrappers(new) not in goals)
        if new != short[key] != key and not is_whole:
            names[key] = new
            peeled.append(key)
    refuse_collisions(names, "the checkpoint")
    if COUNTER in names and COUNTER not in targets and names[COUNTER] == COUNTER:
        del names[COUNTER]
        notes.append(Note("counter-left-out", f"{COUNTER} counts the models of an average; it is not a weight"))
    named = {name: key for key, name in names.items()}
    paired_names = paired(named, targets, lambda name: f"Leave one out: {arg(exclude=literal(named[name]))}")
    pairs = {goal: named[name] for goal, name in paired_names.items()}
    bare = [goal for goal, name in paired_names.items() if goal != name]
    for word, side, prefixed in (
        ("key", "checkpoint", [*peeled, *(pairs[goal] for goal in bare)]),
        ("name", "target", bare),
    ):
        prefixes = Counter(filter(None, map(wrappers, dict.fromkeys(prefixed))))
        texts = (f"{prefix} removed from {counted(count, word)} of the {side}" for prefix, count in prefixes.items())
        notes += [Note("prefix", text) for text in texts]

    taken, free = {*pairs.values()}, dict[str, str]()
    for key, name in names.items():
        if key not in taken:
            free[without_wrappers(name)] = free[name] = key
    missing = [name for name in targets if name not in pairs]
    metadata = node.metadata if isinstance(node, OrderedDict) else None
    older, supplied, dropped = accepted(pairs, missing, free, metadata)
    pairs |= older
    names = {key: name for key, name in names.items() if key not in dropped}
    if older:
        shown = listed([f"{key} → {name}" for name, key in older.items()], 2)
        notes.append(Note("older-names", f"names of an older torch, read as torch reads them: {shown}"))
    if supplied:
        text = f"an older torch did not save them; torch fills them in: {listed(supplied, 2)}"
        notes.append(Note("supplied", text))
    if options.only or options.exclude:  # patterns are for the target's name of a key, else for the rules' name
        ours = names | {key: goal for goal, key in pairs.items() if key in names}
        forms = {name: {name, without_wrappers(name)} for name in (*targets, *ours.values())}
        all_forms = dict.fromkeys(form for aliases in forms.values() for form in aliases)
        included, allowed = selected(all_forms, options.only), selected(all_forms, (), options.exclude)
        excluded = {name for name, aliases in forms.items() if aliases.isdisjoint(included) or not aliases <= allowed}
        names = {key: name for key, name in names.items() if ours[key] not in excluded}
        pairs = {goal: key for goal, key in pairs.items() if goal not in excluded}
    return _Matched(names, pairs, excluded, supplied, notes)


def _are_one(one: Tensor, other: Tensor) -> bool:
    """True for one view, and for copies with the same bytes, as containers without ties have them."""
    if one.view == other.view:
        return True
    if not (isinstance(one, TensorEntry) and isinstance(other, TensorEntry)):
        return False
    if any(each.nbytes > each.storage.nbytes for each in (one, other)):  # expanded, maybe to terabytes
        return False
    return is_same(one, other)


# Fit -----------------------------------------------------------------------------------------------------------------


def _fit_tensors(
    tensors: Mapping[str, Tensor],
    matched: _Matched,
    target: Target,
    options: MatchOptions,
    groups: Collection[list[str]],
    notes: list[Note],
) -> tuple[dict[str, Assignment], list[Mismatch]]:
    """What is loaded under each name, as it is or resized, and every mismatch.

    groups: names of the target that are one tensor.  notes: what is done to shapes without being asked is added.
    """
    chosen: dict[str, Assignment] = {}
    mismatched: list[Mismatch] = []
    ways: dict[str, Resize | None] = {}
    for pattern, resize in reversed(options.resize):
        ways |= dict.fromkeys(selected(target.tensors, [pattern]), resize)
    for names in groups:  # a tensor is resized in one way under all its names
        ways |= dict.fromkeys(names, next(iter(filter(None, map(ways.get, names))), None))
    results: dict[Any, TensorEntry] = {}  # resized tensors: what is tied in the checkpoint stays tied
    for name in (name for name in target.tensors if name in matched.pairs):
        key, expected, way = matched.pairs[name], target.tensors[name], ways.get(name)
        tensor = tensors[key]
        if None in (tensor.shape, expected.shape) or is_meta(tensor):  # as for nested tensors, whose sizes are data
            about = "kind"
        else:
            is_cast = isinstance(tensor, TensorEntry) and conversion(tensor.dtype, expected.dtype) is not None
            about = "" if tensor.shape == expected.shape else "shape"
            about = "dtype" if tensor.dtype is not expected.dtype and not is_cast else about
        if about == "shape" and isinstance(tensor, TensorEntry) and (tensor.shape, expected.shape) == ((1,), ()):
            tensor, about = replace(tensor, shape=(), stride=()), ""  # as torch before 0.4 saved numbers
            notes.append(Note("zero-dim", f"{key} [1] taken as []"))
        if not about and (way is None or not (way.old or way.new)):  # 14x20 to 20x14 has as many tokens
            chosen[name] = Assignment(key, tensor)
            continue
        about, how, outcome = about or "shape", "", SKIPPED if options.on_mismatch == "skip" else REFUSED
        if about == "shape" and way is not None and isinstance(tensor, TensorEntry):
            outcome, how, shape = RESIZED, way.text, expected.shape or ()
            result = results.setdefault((tensor.view, shape, way), resized(tensor, shape, way, name))
            chosen[name] = Assignment(key, result, how=outcome)
        have, want = Typed(tensor.dtype, tensor.shape), Typed(expected.dtype, expected.shape)
        mismatched.append(Mismatch(key, name, expected.kind, about, have, want, outcome, how))
    return chosen, mismatched


def _dtype_changes(loaded: Sequence[Loaded], chosen: Mapping[str, Assignment], target: Target) -> Iterator[DtypeChange]:
    """Each change of a dtype; tensors that may lose values are read, up to `READ_FOR_LOSSES` bytes."""
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


_SKIP = f"Keep the model's own: {arg(on_mismatch='skip')}"


def _refusals(report: LoadReport, options: MatchOptions, needed: int, advice: str) -> list[Refusal]:
    refusals = []
    if not report.loaded:
        refusals.append(Refusal("nothing-loaded", "no tensor of the checkpoint fits the target", advice))
    any_way = f"{_SKIP}; compute it: {arg(resize='PATTERN=HOW')}"
    for about, fix in (("shape", any_way), ("dtype", _SKIP), ("kind", _SKIP)):
        facts = [fact for fact in report.mismatched if (fact.done, fact.about) == (REFUSED, about)]
        if facts:
            texts = [f"{printable(fact.target)} {fact.have} against {fact.want}" for fact in facts]
            what = f"{counted(len(facts), 'tensor is', 'tensors are')} of another {about}: {listed(texts, 3)}"
            ways = (of_positions(fact.target, fact.have.shape, fact.want.shape) for fact in facts)
            grid = next((f"{fact.target}={how}" for fact, how in zip(facts, ways, strict=True) if how), "")
            hint = f"For another grid: {arg(resize=grid)}. " if grid else ""  # of a ViT at another size
            refusals.append(Refusal(f"{about}-mismatch", what, hint + fix))
    for word, names in (
        ("missing", [fact.name for fact in report.missing]),
        ("unexpected", [fact.source for fact in report.unexpected]),
        ("skipped", [fact.target for fact in report.mismatched if fact.done == SKIPPED]),
    ):
        if options.strict and names:
            what = f"{counted(len(names), 'name is', 'names are')} {word}"
            refusals.append(Refusal("strict", f"{what}: {listed(list(map(printable, names)), 3)}"))
    if refusals and not report.loaded:
        return refusals
    if not refusals and options.min_loaded is None:
        refusals = little(report, needed, advice)
    return refusals + unmet(report, options.min_loaded, options.missing)


def _advice(report: LoadReport, root: StateDict, target: Target) -> str:
    """The suggestions as options to type if they are few, else where to look; what adds an adapter to its model."""
    file = FILE if report.source == IN_MEMORY else report.source
    if root.is_adapter:
        return f"Add it to its model: {target.plus_adapter(file)}"
    sure = [rule for suggestion in report.suggestions for rule in suggestion.rules]
    if 0 < len(sure) <= 4:
        return f"Perhaps: {arg(rename=sure)}"
    if sure:
        return f"Rules that would make more fit: {arg(suggest='rules.yaml')}, then {arg(rules='rules.yaml')}"
    return f"See both sides: {command('inspect', file, all=True)}"


# What is written -----------------------------------------------------------------------------------------------------


def filled(target: Target, chosen: dict[str, Assignment], states: Mapping[str, Any]) -> OrderedDict:
    """Every key of the target with a value: what was chosen from the checkpoint, the rest from the target itself; under
    the names that `load_state_dict` of a wrapped model expects.
    states: extra states that are taken from the checkpoint.

    Raises `Conflict` naming what a target without values (a spec) cannot fill in.
    """
    values, order = target.values or {}, target.values or target.tensors
    own_names = [name for name in order if name not in chosen]
    if target.values is None and own_names:
        raise Conflict(
            f"{target.name} has no values, and these names are not all in the checkpoint: {listed(own_names)}",
            "A spec has only names, shapes and types. Nothing was written.",
            f"Use a target that has values: {arg(against=Slot('CHECKPOINT'))} or {arg(against='file.py:factory')}",
        )
    firsts = {name: expected.tied_to or name for name, expected in target.tensors.items() if name in chosen}
    results: dict[str, Tensor] = {}
    for name, first in firsts.items():
        if first not in results:
            tensor, dtype = chosen[name].tensor, target.tensors[name].dtype
            results[first] = tensor if isinstance(tensor, Composite) or dtype is None else converted(tensor, dtype)
    holders: dict[int, list[str]] = {}
    for first, tensor in results.items():
        if isinstance(tensor, TensorEntry):
            holders.setdefault(id(tensor.storage), []).append(first)
    for names in holders.values():
        tensors: list[Any] = [results[first] for first in names]
        bases = [base for first in names if isinstance(base := values.get(first), TensorEntry)]
        layouts = [[(entry.storage.nbytes, entry.layout) for entry in side] for side in (tensors, bases)]
        if len({id(base.storage) for base in bases}) == 1 and layouts[0] == layouts[1]:
            continue  # views that lie in one storage the same way in the target
        # Separate tensors in the target are separate here, without the rest of the checkpoint's storage.
        for first, tensor in zip(names, tensors, strict=True):
            if len(tensors) > 1 or tensor.span() != (0, tensor.storage.nbytes):
                results[first] = compact(tensor.alone())
    items: dict[str, Any] = {}
    same: dict[tuple[str, int], Tensor] = {}  # what is one object in the target stays one
    for name in order:
        if name not in firsts:
            items[name] = states.get(name, values[name])
            continue
        tensor, base = results[firsts[name]], values.get(name)
        if isinstance(tensor, TensorEntry):
            flags = base.flags if isinstance(base, TensorEntry) else NO_FLAGS
            tensor = tensor.with_flags(Flags(flags.requires_grad, flags.parameter, *tensor.flags.lazy))
        items[name] = same.setdefault((firsts[name], id(base)), tensor)
    metadata, wrapper = target.metadata, target.wrapper
    if wrapper:
        items = {wrapper + name: value for name, value in items.items()}
        metadata = metadata and {f"{wrapper}{path}".rstrip("."): facts for path, facts in metadata.items()}
    attributes = {"_metadata": metadata} if metadata is not None else None

    def on_cpu(storage: Storage) -> Storage:
        return storage if storage.location == "cpu" else replace(storage, location="cpu")

    state_dict: OrderedDict = map_storages(OrderedDict(items, attributes), on_cpu)
    return state_dict
