"""The plan of a warm start: which tensor of a checkpoint goes under which name of a target, before anything is changed.

Only names, shapes and dtypes are looked at. Values are read where two names of the checkpoint would become one tied
tensor of the target, and, up to so many bytes, to say whether a smaller dtype loses any.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckptool.analysis.targets import Expected, Target, kind_by_name, tie_groups
from ckptool.analysis.torch_versions import Accepted, accepted
from ckptool.analysis.warm_start import (
    PADDED,
    REFUSED,
    RESIZED,
    SKIPPED,
    SLICED,
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
from ckptool.checkpoint import Composite, Note, StorageRef, Tensor, TensorEntry
from ckptool.checkpoint.blocks import same_bytes
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.checkpoint.patterns import selected
from ckptool.checkpoint.strided import row_major
from ckptool.commands import FILE, arg, command, several
from ckptool.conventions.state_dicts import COUNTER, StateDict, without_wrappers, wrappers
from ckptool.errors import Conflict, UsageError, counted, listed, printable
from ckptool.names.rule_files import renaming
from ckptool.names.rules import TAKEN_BEFORE, WHOLE_KEY, Rule, refuse_idle
from ckptool.names.steps import renamed
from ckptool.transforms.casting import EXACT, LOSSY, conversion, losses
from ckptool.transforms.resize import Resize, parse_resize, resized

ON_MISMATCH = ("error", "skip", "slice", "pad", "resize")
READ_FOR_LOSSES = 256 << 20  # bytes of tensors that get a smaller dtype, in all


@dataclass(frozen=True, slots=True)
class MatchOptions:
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
    **more: Any,
) -> MatchOptions:
    """The options from texts; the rules of a file come after those given. Raises `UsageError` for an invalid one."""
    rules = renaming(several(rename, " => "), rules_file)
    checked_share(more.get("min_loaded"))
    allowed = None if missing is None else several(missing)
    ways = [_way(text) for text in several(resize, "=")]
    if ways and more.get("on_mismatch", "error") == "error":
        more["on_mismatch"] = "resize"
    return MatchOptions(rules, several(only), several(exclude), missing=allowed, resize=ways, **more)


def _way(text: str) -> tuple[str, Resize]:
    """The two sides of `PATTERN=HOW`."""
    found = re.fullmatch(r"(.+?)=(\w+(?:\(.*\))?)", text)
    if found is None:
        what = f"{arg('resize')} {text!r} is not of the form PATTERN=HOW"
        raise UsageError(what, "", f"For example: {arg(resize='pos_embed=bicubic(cls=1)')}")
    return found[1], parse_resize(found[2])


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The tensor that is loaded under a name. part: the shape of the first corner to load; None for all of it.

    resized: it is computed from the one of the checkpoint.
    """

    source: str
    tensor: Tensor
    part: tuple[int, ...] | None = None
    resized: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class WarmStartPlan:
    """`chosen`: the assignment of each name of the target that is loaded (tied names included); `report`: all of it."""

    chosen: dict[str, Assignment]
    report: LoadReport


@dataclass(slots=True, eq=False)
class _Draft:
    """The plan so far.

    names: name in the checkpoint -> its name after the rules.  pairs: name of the target -> name in the checkpoint.
    unwrapped: keys of the checkpoint that a rule matched without their prefix.  excluded: names that are not to be
    loaded.  supplied: names that torch's own modules give a value where an older file has none.  ways: how names of
    the target are resized.  resized: those that were made; what is tied in the checkpoint stays so.
    """

    target: Target
    tensors: dict[str, Tensor]
    names: dict[str, str]
    unwrapped: list[str]
    pairs: dict[str, str] = field(default_factory=dict)
    chosen: dict[str, Assignment] = field(default_factory=dict)
    loaded: list[Loaded] = field(default_factory=list)
    tied: list[Tied] = field(default_factory=list)
    mismatched: list[Mismatch] = field(default_factory=list)
    changes: list[DtypeChange] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    excluded: set[str] = field(default_factory=set)
    supplied: list[str] = field(default_factory=list)
    ways: dict[str, Resize | None] = field(default_factory=dict)
    resized: dict[Any, TensorEntry] = field(default_factory=dict)


def plan_warm_start(
    root: StateDict, source: str, target: Target, options: MatchOptions, remark: str = ""
) -> WarmStartPlan:
    """The plan of loading the tensors of `root` into `target`. source: the name of the checkpoint.

    Raises `NoMatch` for a rule or pattern that matches nothing, `Conflict` where two keys would become one,
    `UsageError` for an unknown `on_mismatch`.
    """
    if options.on_mismatch not in ON_MISMATCH:
        raise UsageError(
            f"unknown {arg('on_mismatch')} {options.on_mismatch!r}", f"Available: {', '.join(ON_MISMATCH)}."
        )
    members = root.node.items()
    tensors = {k: v for k, v in members if type(k) is str and isinstance(v, (TensorEntry, Composite))}
    draft = _Draft(target, tensors, *_renamed(tensors, options.rules))
    draft.notes += _choices(root, remark, target)
    if COUNTER in tensors and COUNTER not in target.tensors and draft.names[COUNTER] == COUNTER:
        del tensors[COUNTER], draft.names[COUNTER]
        draft.notes.append(Note("counter-left-out", f"{COUNTER} counts the models of an average; it is no weight"))
    _pair(draft)
    _accept_like_torch(draft, root.node.metadata if isinstance(root.node, OrderedDict) else None)
    _exclude(draft, options)
    for pattern, way in reversed(options.resize):
        draft.ways |= dict.fromkeys(selected(target.tensors, [pattern]), way)
    for names in tie_groups(target.tensors.values()).values():  # one tensor is resized in one way
        draft.ways |= dict.fromkeys(names, next(iter(filter(None, map(draft.ways.get, names))), None))
    for name in target.tensors:
        if name in draft.pairs:
            _fit(draft, name, options.on_mismatch)
    _tie(draft)
    _change_dtypes(draft)
    return WarmStartPlan(draft.chosen, _report(draft, root, source, options))


def _choices(root: StateDict, remark: str, target: Target) -> list[Note]:
    texts = [remark] if remark else []
    if root.path and not remark:
        texts.append(f"took {root.address}, the only weights of the checkpoint")
    if root.module is not None or root.detail:
        texts.append(f"they are those of a {root.detail}")
    return [Note("root", text) for text in (*texts, *(f"of the target: {text}" for text in target.remarks))]


# Names ---------------------------------------------------------------------------------------------------------------


def _renamed(tensors: dict[str, Tensor], rules: Sequence[Rule]) -> tuple[dict[str, str], list[str]]:
    """Each key with its name by the first rule that matches it or its form without wrappers; the keys of the latter."""
    used: set[tuple[str, str]] = set()
    names, unwrapped = {}, []
    found = renamed(rules, dict.fromkeys(form for key in tensors for form in (key, without_wrappers(key))))
    for key in tensors:
        forms = [form for form in (key, without_wrappers(key)) if form in found]
        if not forms:
            names[key] = key
            continue
        name = min(forms, key=lambda form: rules.index(found[form][0]))
        rule, names[key] = found[name]
        used.add(rule.origin)
        if name != key:
            unwrapped.append(key)
    refuse_idle((rule for rule in rules if rule.origin not in used), TAKEN_BEFORE, f"{WHOLE_KEY} Nothing was changed.")
    counts = Counter(names.values())
    if clash := [f"{key} → {new}" for key, new in names.items() if counts[new] > 1]:
        raise Conflict(
            f"{counted(len(clash), 'key')} would collide: {listed(clash)}",
            "One of each would be lost. Nothing was changed.",
        )
    return names, unwrapped


def _pair(draft: _Draft) -> None:
    """Pairs equal names first; then names that are equal without the prefixes of wrappers, on either side."""
    wanted = draft.target.tensors
    draft.pairs = {name: key for key, name in draft.names.items() if name in wanted}
    free = [name for name in wanted if name not in draft.pairs]
    counts = Counter(map(without_wrappers, free))
    bare = {short: name for name in free if counts[short := without_wrappers(name)] == 1}
    found: dict[str, list[str]] = {}
    for key, name in draft.names.items():
        if name not in wanted and (goal := bare.get(without_wrappers(name))) is not None:
            found.setdefault(goal, []).append(key)
    for goal, keys in found.items():
        if len(keys) > 1:
            raise Conflict(
                f"{' and '.join(keys)} would both be {goal!r}",
                "Without the prefixes of wrappers they are the same name. Nothing was changed.",
                f"Leave one out: {arg(exclude=keys[1])}",
            )
        draft.pairs[goal] = keys[0]
    for word, side, names in (
        ("key", "checkpoint", [*draft.unwrapped, *(key for keys in found.values() for key in keys)]),
        ("name", "target", list(found)),
    ):
        prefixes = Counter(filter(None, map(wrappers, dict.fromkeys(names))))
        for prefix, count in prefixes.items():
            text = f"{prefix} taken off {counted(count, word)} of the {side}"
            draft.notes.append(Note("prefix", text))


def _accept_like_torch(draft: _Draft, metadata: Any) -> None:
    """Treats an older state dict like the modules of torch when they load it."""
    taken = {*draft.pairs.values()}
    missing = [name for name in draft.target.tensors if name not in draft.pairs]
    free: dict[str, str] = {}
    for key, name in draft.names.items():
        if key not in taken:
            free[without_wrappers(name)] = free[name] = key
    found = accepted(draft.pairs, missing, free, metadata) if missing else Accepted()
    draft.pairs.update(found.pairs)
    draft.supplied = found.supplied
    for key in found.dropped:
        del draft.tensors[key], draft.names[key]
    if found.pairs:
        shown = listed([f"{key} → {name}" for name, key in found.pairs.items()], 2)
        draft.notes.append(Note("older-names", f"names of an older torch taken as it takes them: {shown}"))
    if found.supplied:
        shown = listed(found.supplied, 2)
        draft.notes.append(Note("supplied", f"an older torch did not save them, and torch supplies them: {shown}"))


def _exclude(draft: _Draft, options: MatchOptions) -> None:
    """Takes out names that are not to be loaded, by patterns for names of the target and of the renamed checkpoint."""
    if not (options.only or options.exclude):
        return
    goals = {key: goal for goal, key in draft.pairs.items()}
    ours = {key: goals.get(key, name) for key, name in draft.names.items()}
    every = list(dict.fromkeys([*draft.target.tensors, *ours.values()]))
    draft.excluded = set(every) - selected(every, options.only, options.exclude)
    draft.names = {key: name for key, name in draft.names.items() if ours[key] not in draft.excluded}
    draft.pairs = {goal: key for goal, key in draft.pairs.items() if goal not in draft.excluded}


# Fit -----------------------------------------------------------------------------------------------------------------


def _fit(draft: _Draft, name: str, on_mismatch: str) -> None:
    """Decides whether a pair is loaded as it is, in part, or not."""
    expected, key = draft.target.tensors[name], draft.pairs[name]
    tensor = draft.tensors[key]
    about = _misfit(tensor, expected, (draft.target.values or {}).get(name))
    if about == "shape" and isinstance(tensor, TensorEntry) and (tensor.shape, expected.shape) == ((1,), ()):
        tensor, about = replace(tensor, shape=(), stride=()), ""  # as torch before 0.4 saved numbers
        draft.notes.append(Note("zero-dim", f"{key} [1] taken as []"))
    way = draft.ways.get(name)
    if not about and way is not None and (way.old or way.new):
        about = "shape"  # 14x20 to 20x14 has as many tokens
    if not about:
        draft.loaded.append(Loaded(key, name, expected.kind, expected.numel))
        draft.chosen[name] = Assignment(key, tensor)
        return
    part = _part(tensor, expected, on_mismatch) if about == "shape" else None
    done = SKIPPED if on_mismatch == "skip" else REFUSED
    if about == "shape" and way is not None and isinstance(tensor, TensorEntry):
        done, shape = RESIZED, expected.shape or ()
        made = draft.resized.setdefault((tensor.view, shape, way), resized(tensor, shape, way, name))
        draft.loaded.append(Loaded(key, name, expected.kind, expected.numel, done))
        draft.chosen[name] = Assignment(key, made, resized=True)
    elif part is not None:
        done = SLICED if on_mismatch == "slice" else PADDED
        draft.loaded.append(Loaded(key, name, expected.kind, prod(part), done))
        draft.chosen[name] = Assignment(key, tensor, part)
    have, want = Typed(tensor.dtype, tensor.shape), Typed(expected.dtype, expected.shape)
    how = way.text if done == RESIZED and way is not None else ""
    draft.mismatched.append(Mismatch(key, name, expected.kind, about, have, want, done, how))


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
    return all(_has_same_size(one, other) for one, other in zip(parts, others, strict=True))


def _has_same_size(one: TensorEntry | StorageRef, other: TensorEntry | StorageRef) -> bool:
    if one.dtype is not other.dtype or type(one) is not type(other):
        return False
    if not isinstance(one, TensorEntry) or not isinstance(other, TensorEntry):
        return one.storage.nbytes == other.storage.nbytes
    sizes = one.dtype.kind == "int"
    return one.shape == other.shape and (not sizes or same_bytes(row_major(one), row_major(other)))


def _part(tensor: Tensor, expected: Expected, on_mismatch: str) -> tuple[int, ...] | None:
    """The shape of the corner that both have, where the user asked for it and it is all of one of them."""
    if not isinstance(tensor, TensorEntry) or expected.shape is None or len(tensor.shape) != len(expected.shape):
        return None
    smaller = tuple(map(min, tensor.shape, expected.shape))
    whole = {"slice": expected.shape, "pad": tensor.shape}.get(on_mismatch)
    return smaller if smaller == whole else None


# Ties ----------------------------------------------------------------------------------------------------------------


def _tie(draft: _Draft) -> None:
    """Lets one name of a tied tensor stand for the others; refuses where the checkpoint's values for them differ."""
    for names in tie_groups(draft.target.tensors.values()).values():
        given = [name for name in names if name in draft.chosen]
        if not given:
            continue
        first = given[0]
        for other in given[1:]:
            if not _has_same_values(draft.chosen[first], draft.chosen[other]):
                what = (
                    f"{printable(first)} and {printable(other)} are one tensor in the target, and "
                    f"{printable(draft.pairs[first])} and {printable(draft.pairs[other])} are two with different values"
                )
                draft.refused.append(Refusal("ties-differ", what, f"Leave one out: {arg(exclude=other)}"))
        others = set(names) - {first}
        draft.chosen.update((name, draft.chosen[first]) for name in names if name != first)
        draft.tied += [Tied(name, first) for name in names if name != first and name not in draft.excluded]
        draft.loaded = [fact for fact in draft.loaded if fact.target not in others]
        draft.mismatched = [  # a misfit is reported under whatever name; a tensor loaded in part, once
            fact for fact in draft.mismatched if fact.target not in others or fact.done in (SKIPPED, REFUSED)
        ]


def _has_same_values(one: Assignment, other: Assignment) -> bool:
    a, b = one.tensor, other.tensor
    if a.view == b.view:
        return True
    if not isinstance(a, TensorEntry) or not isinstance(b, TensorEntry):
        return False
    alike = (a.dtype, a.shape, a.flags.lazy, one.part) == (b.dtype, b.shape, b.flags.lazy, other.part)
    stored = max(a.storage.nbytes, b.storage.nbytes)  # an expanded view may stand for any number of values
    return alike and a.nbytes <= stored and same_bytes(row_major(a), row_major(b))


# Dtypes --------------------------------------------------------------------------------------------------------------


def _change_dtypes(draft: _Draft) -> None:
    """Notes each change of a dtype; reads the tensors that may lose values while they are not too many."""
    budget = READ_FOR_LOSSES
    for fact in draft.loaded:
        tensor, new = draft.chosen[fact.target].tensor, draft.target.tensors[fact.target].dtype
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
        draft.changes.append(DtypeChange(fact.source, fact.target, tensor.dtype, new, *lost))


# The report ----------------------------------------------------------------------------------------------------------


def _report(draft: _Draft, root: StateDict, source: str, options: MatchOptions) -> LoadReport:
    target, names = draft.target, draft.names
    met = {*draft.chosen, *draft.supplied, *draft.excluded, *(fact.target for fact in draft.mismatched)}
    missing = [Absent("", e.name, e.kind, e.dtype, e.shape) for name, e in target.tensors.items() if name not in met]
    taken = {*draft.pairs.values()}
    rest = {key: draft.tensors[key] for key in names if key not in taken}
    report = LoadReport(
        source=source,
        target=target.name,
        target_kind=target.kind,
        root=root.address,
        loaded=tuple(draft.loaded),
        tied=tuple(draft.tied),
        missing=tuple(missing),
        unexpected=tuple(Absent(k, names[k], kind_by_name(k, t.dtype), t.dtype, t.shape) for k, t in rest.items()),
        mismatched=tuple(draft.mismatched),
        dtype_changes=tuple(draft.changes),
        excluded=tuple(name for name in target.tensors if name in draft.excluded and name not in draft.chosen),
        elements=sum(fact.elements for fact in draft.loaded),
        total=sum(expected.numel for expected in target.unique),
        normalised=tuple(draft.notes),
        suggestions=_suggestions(draft),
        refused=(),
        supplied=tuple(name for name in draft.supplied if name not in draft.chosen and name not in draft.excluded),
    )
    skipped = (fact.target for fact in draft.mismatched if (fact.done, fact.about) == (SKIPPED, "shape"))
    out = {*draft.excluded, *skipped}
    wanted = {expected.tied_to or name for name, expected in target.tensors.items() if name not in out}
    values = sum(target.tensors[name].numel for name in wanted)
    return replace(report, refused=(*draft.refused, *_refusals(report, options, values)))


def _suggestions(draft: _Draft) -> tuple[Suggestion, ...]:
    """Rules that would make more fit, for names as rules see them: without the prefixes that are taken off anyway."""
    if len(draft.pairs) in (len(draft.names), len(draft.target.tensors)):
        return ()
    from ckptool.transforms.suggest import suggest  # half of what a plan imports, for what fits needlessly

    tensors = draft.target.tensors
    ours = {without_wrappers(name): draft.tensors[key].shape for key, name in draft.names.items()}
    wanted = {without_wrappers(name): tensors[name].shape for name in tensors if name not in draft.excluded}
    placed = {without_wrappers(draft.names[key]): without_wrappers(goal) for goal, key in draft.pairs.items()}
    return tuple(suggest(ours, wanted, placed))


_FILL_UP = f"fills up what is smaller in every dimension. Cut what is larger: {arg(on_mismatch='slice')}"
_CUT = f"cuts what is larger in every dimension. Fill up what is smaller: {arg(on_mismatch='pad')}"
# The advice for tensors of another shape, by the way that did not do for them.
_OTHER_WAYS = {
    "slice": f"slice {_CUT}; keep the target's: skip",
    "pad": f"pad {_FILL_UP}; keep the target's: skip",
    "resize": f"Say how each is resized, by its name: {arg(resize='PATTERN=bicubic(cls=1)')}, 'PATTERN=rows(mean)', …",
}
_SKIP = f"Keep the target's: {arg(on_mismatch='skip')}"


def _refusals(report: LoadReport, options: MatchOptions, wanted: int) -> list[Refusal]:
    found = []
    if not report.loaded:
        what = "no tensor of the checkpoint fits the target"
        found.append(Refusal("nothing-loaded", what, _first_rule(report)))
    cut, pad, compute = (arg(on_mismatch=way) for way in ("slice", "pad", "resize"))
    any_way = f"{_SKIP}; cut or fill up: {cut} or {pad}; compute: {compute}"
    shape_fix = _OTHER_WAYS.get(options.on_mismatch, any_way)
    for about, fix in (("shape", shape_fix), ("dtype", _SKIP), ("kind", _SKIP)):
        facts = [fact for fact in report.mismatched if (fact.done, fact.about) == (REFUSED, about)]
        if facts:
            texts = [f"{printable(fact.target)} {fact.have} against {fact.want}" for fact in facts]
            what = f"{counted(len(facts), 'tensor is', 'tensors are')} of another {about}: {listed(texts, 3)}"
            found.append(Refusal(f"{about}-mismatch", what, fix))
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
        found = little(report, wanted, _first_rule(report))
    return found + unmet(report, options.min_loaded, options.missing)


def _first_rule(report: LoadReport) -> str:
    """The suggestion that brings most, as options to type."""
    for suggestion in report.suggestions:
        if suggestion.unambiguous and 0 < len(suggestion.rules) <= 4:
            return f"Perhaps: {arg(rename=suggestion.rules)}"
    if any(suggestion.rules for suggestion in report.suggestions):
        return f"Write rules that would make more fit: {arg(suggest='rules.yaml')}"
    return f"See both sides: {command('inspect', FILE, all=True)}"
