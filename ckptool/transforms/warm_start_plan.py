"""Which tensor of a checkpoint goes under which name of a target: the plan of a warm start, before anything is changed.

Only names, shapes and types are looked at. Values are read in two cases: where two different names of the checkpoint would become one tied
tensor of the target, and, up to so many bytes, to say whether a smaller type loses any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckptool.checkpoint import Composite, Note, StorageRef, Tensor, TensorEntry
from ckptool.checkpoint.commands import several
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.checkpoint.patterns import selected
from ckptool.checkpoint.state_dicts import COUNTER, StateDict, without_wrappers, wrappers
from ckptool.checkpoint.strided import row_major
from ckptool.errors import Conflict, NoMatch, UsageError, counted, listed, printable
from ckptool.reports.compare import same_bytes
from ckptool.reports.targets import Expected, Target, kind_by_name, tie_groups
from ckptool.reports.torch_versions import Accepted, accepted
from ckptool.reports.warm_start import (
    PADDED,
    REFUSED,
    SKIPPED,
    SLICED,
    Absent,
    DtypeChange,
    Loaded,
    LoadReport,
    Mismatch,
    Refusal,
    Suggestion,
    checked_share,
    unmet,
)
from ckptool.transforms.casting import EXACT, LOSSY, conversion, losses
from ckptool.transforms.rules import Rule, parse_rule, read_rules

ON_MISMATCH = ("error", "skip", "slice", "pad")
READ_FOR_LOSSES = 256 << 20  # bytes of tensors that get a smaller type, in all


@dataclass(frozen=True, slots=True)
class MatchOptions:
    """What the user asks of a plan. only, exclude: patterns for names of the target, or for what the checkpoint's are called after `rules`.

    on_mismatch: what happens where shapes differ: `error`; `skip` keeps the target's tensor; `slice` takes the first part of a larger
    one; `pad` puts a smaller one into the first corner of the target's.  min_loaded: the least share of values.  missing: patterns for
    the only names that may be missing.
    """

    rules: Sequence[Rule] = ()
    only: Sequence[str] = ()
    exclude: Sequence[str] = ()
    on_mismatch: str = "error"
    min_loaded: float | None = None
    strict: bool = False
    missing: Sequence[str] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The tensor that is loaded under a name. part: the shape of the first corner that is loaded; None for all of it."""

    source: str
    tensor: Tensor
    part: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class WarmStartPlan:
    """A plan: `chosen` says for each name of the target that is loaded from where (tied names included), `report` tells it all."""

    chosen: dict[str, Assignment]
    report: LoadReport


@dataclass(slots=True, eq=False)
class _Draft:
    """What is found out step by step. `pairs`: name of the target -> name in the checkpoint."""

    target: Target
    tensors: dict[str, Tensor]
    names: dict[str, str]  # name in the checkpoint -> its name after the rules
    bared: list[str]  # keys of the checkpoint that a rule matched without their prefix
    pairs: dict[str, str] = field(default_factory=dict)
    chosen: dict[str, Assignment] = field(default_factory=dict)
    loaded: list[Loaded] = field(default_factory=list)
    tied: list[tuple[str, str]] = field(default_factory=list)
    mismatched: list[Mismatch] = field(default_factory=list)
    changes: list[DtypeChange] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    left: set[str] = field(default_factory=set)  # names that were not to be loaded
    # Names that torch's own modules give a value where an older file has none.
    supplied: list[str] = field(default_factory=list)


def plan_warm_start(
    root: StateDict, source: str, target: Target, options: MatchOptions, remark: str = ""
) -> WarmStartPlan:
    """The plan of loading the tensors of `root` into `target`. source: what to call the checkpoint.

    Raises `NoMatch` for a rule or pattern that matches nothing, `Conflict` where two keys would become one, `UsageError` for
    an unknown way with mismatches.
    """
    if options.on_mismatch not in ON_MISMATCH:
        raise UsageError(
            f"there is no way with mismatches called {printable(options.on_mismatch)!r}",
            f"There are: {', '.join(ON_MISMATCH)}.",
        )
    tensors = {
        key: value
        for key, value in root.node.items()
        if type(key) is str and isinstance(value, (TensorEntry, Composite))
    }
    draft = _Draft(target, tensors, *_renamed(tensors, options.rules))
    draft.notes += _choices(root, remark, target)
    if COUNTER in tensors and COUNTER not in target.tensors and draft.names[COUNTER] == COUNTER:
        del tensors[COUNTER], draft.names[COUNTER]
        draft.notes.append(Note("counter-left-out", f"{COUNTER} counts the models of an average; it is no weight"))
    _pair(draft)
    _as_torch_accepts(draft, root.node.metadata if isinstance(root.node, OrderedDict) else None)
    _leave(draft, options)
    for name in target.tensors:
        if name in draft.pairs:
            _fit(draft, name, options.on_mismatch)
    _tie(draft)
    _changes(draft)
    return WarmStartPlan(draft.chosen, _report(draft, root, source, options))


def _choices(root: StateDict, remark: str, target: Target) -> list[Note]:
    notes = [Note("root", remark)] if remark else []
    if root.path and not remark:
        notes.append(Note("root", f"took {printable(root.address)}, the only weights of the checkpoint"))
    if root.module is not None or root.detail:
        notes.append(Note("root", f"they are those of a {root.detail}"))
    return notes + [Note("root", f"of the target: {text}") for text in target.remarks]


# Names ---------------------------------------------------------------------------------------------------------------


def _renamed(tensors: dict[str, Tensor], rules: Sequence[Rule]) -> tuple[dict[str, str], list[str]]:
    """Each key with what the first rule that matches makes of it; a rule is also tried on the key without its wrappers.

    The second are the keys that it matched so.
    """
    used: set[int] = set()
    names, bared = {}, []
    for key in tensors:
        forms = dict.fromkeys((key, without_wrappers(key)))
        found = ((number, form, rule(form)) for number, rule in enumerate(rules) for form in forms)
        number, form, new = next(
            ((number, form, new) for number, form, new in found if new is not None), (-1, key, key)
        )
        used.add(number)
        names[key] = new
        bared += [key] if form != key else []
    if idle := [rule for number, rule in enumerate(rules) if number not in used]:
        place = f" ({idle[0].place})" if idle[0].place else ""
        raise NoMatch(
            f"the rule {printable(idle[0].text)!r}{place} matches no key, or only keys that an earlier rule takes",
            "Rules are for the whole key; `*` crosses dots. Nothing was changed.",
            "See the keys: ckptool inspect FILE --all",
        )
    counts = Counter(names.values())
    if clash := [key for key, new in names.items() if counts[new] > 1]:
        raise Conflict(
            f"{counted(len(clash), 'key')} would collide: {listed([f'{printable(key)} → {printable(names[key])}' for key in clash])}",
            "One of each would be lost. Nothing was changed.",
        )
    return names, bared


def _pair(draft: _Draft) -> None:
    """Equal names first; then names that are equal without the prefixes of wrappers, on either side."""
    wanted = draft.target.tensors
    draft.pairs = {name: key for key, name in draft.names.items() if name in wanted}
    free = {key: name for key, name in draft.names.items() if name not in wanted}
    bare = _by_bare([name for name in wanted if name not in draft.pairs])
    found: dict[str, list[str]] = {}
    for key, name in free.items():
        if (goal := bare.get(without_wrappers(name))) is not None:
            found.setdefault(goal, []).append(key)
    for goal, keys in found.items():
        if len(keys) > 1:
            raise Conflict(
                f"{' and '.join(map(printable, keys))} would both be {printable(goal)!r}",
                "Without the prefixes of wrappers they are the same name. Nothing was changed.",
                f"Leave one out: --exclude {printable(keys[1])!r}",
            )
        draft.pairs[goal] = keys[0]
    for word, side, names in (
        ("key", "checkpoint", [*draft.bared, *(key for keys in found.values() for key in keys)]),
        ("name", "target", list(found)),
    ):
        counts = Counter(filter(None, map(wrappers, dict.fromkeys(names))))
        draft.notes += [
            Note("prefix", f"{printable(prefix)} taken off {counted(count, word)} of the {side}")
            for prefix, count in counts.items()
        ]


def _as_torch_accepts(draft: _Draft, metadata: Any) -> None:
    """Does with an older state dict what the modules of torch do when they load it."""
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
        shown = listed([f"{printable(key)} → {printable(name)}" for name, key in found.pairs.items()], 2)
        draft.notes.append(Note("older-names", f"names of an older torch taken as it takes them: {shown}"))
    if found.supplied:
        shown = listed([printable(name) for name in found.supplied], 2)
        draft.notes.append(Note("supplied", f"an older torch did not save them, and torch supplies them: {shown}"))


def _by_bare(names: list[str]) -> dict[str, str]:
    """Names without wrappers -> names, where that is one to one."""
    counts = Counter(map(without_wrappers, names))
    return {bare: name for name in names if counts[bare := without_wrappers(name)] == 1}


def _leave(draft: _Draft, options: MatchOptions) -> None:
    """Takes out what was not to be loaded. A pattern is for names of the target, and for what the checkpoint's are called."""
    if not (options.only or options.exclude):
        return
    called = {key: goal for goal, key in draft.pairs.items()}
    ours = [called.get(key, name) for key, name in draft.names.items()]
    every = list(dict.fromkeys([*draft.target.tensors, *ours]))
    draft.left = set(every) - selected(every, options.only, options.exclude)
    draft.names = {key: name for key, name in draft.names.items() if called.get(key, name) not in draft.left}
    draft.pairs = {goal: key for goal, key in draft.pairs.items() if goal not in draft.left}


# What fits ---------------------------------------------------------------------------------------------------------------


def _fit(draft: _Draft, name: str, on_mismatch: str) -> None:
    """Decides what becomes of a pair: loaded as it is, in part, or not."""
    expected, key = draft.target.tensors[name], draft.pairs[name]
    tensor = draft.tensors[key]
    about = _misfit(tensor, expected, (draft.target.values or {}).get(name))
    if about == "shape" and isinstance(tensor, TensorEntry) and (tensor.shape, expected.shape) == ((1,), ()):
        tensor, about = replace(tensor, shape=(), stride=()), ""  # as torch before 0.4 saved numbers
        draft.notes.append(Note("zero-dim", f"{printable(key)} [1] taken as []"))
    part = _part(tensor, expected, on_mismatch) if about == "shape" else None
    if about and part is None:
        done = SKIPPED if on_mismatch == "skip" else REFUSED
        have, want = (tensor.dtype, tensor.shape), (expected.dtype, expected.shape)
        draft.mismatched.append(Mismatch(key, name, expected.kind, about, have, want, done))
        return
    if part is not None:
        how = SLICED if on_mismatch == "slice" else PADDED
        have, want = (tensor.dtype, tensor.shape), (expected.dtype, expected.shape)
        draft.mismatched.append(Mismatch(key, name, expected.kind, about, have, want, how))
        draft.loaded.append(Loaded(key, name, expected.kind, prod(part), how))
    else:
        draft.loaded.append(Loaded(key, name, expected.kind, expected.numel))
    draft.chosen[name] = Assignment(key, tensor, part)


def _misfit(tensor: Tensor, expected: Expected, there: Any) -> str:
    """The aspect in which a tensor does not fit where it is expected; empty if it fits. there: the target's own, if it has one."""
    if tensor.shape is None or expected.shape is None:
        fits = isinstance(tensor, Composite) and isinstance(there, Composite) and _same_layout(tensor, there)
        return "" if fits else "kind"
    if conversion(tensor.dtype, expected.dtype) is None:
        return "dtype"
    if isinstance(tensor, Composite) and tensor.dtype is not expected.dtype:
        return "dtype"
    return "" if tensor.shape == expected.shape else "shape"


def _same_layout(a: Composite, b: Composite) -> bool:
    """True for two tensors of parts (nested ones) whose parts have the same sizes; those are data themselves, and few."""
    parts, others = list(a.parts()), list(b.parts())
    if (a.kind, a.dtype, len(parts)) != (b.kind, b.dtype, len(others)):
        return False
    return all(_same_size(one, other) for one, other in zip(parts, others, strict=True))


def _same_size(one: TensorEntry | StorageRef, other: TensorEntry | StorageRef) -> bool:
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
    """Lets one name of a tied tensor stand for the others; refuses where the checkpoint has different values for them."""
    for names in tie_groups(draft.target.tensors.values()).values():
        given = [name for name in names if name in draft.chosen]
        if not given:
            continue
        first = given[0]
        for other in given[1:]:
            if not _same_values(draft.chosen[first], draft.chosen[other]):
                what = (
                    f"{printable(first)} and {printable(other)} are one tensor in the target, "
                    f"and {printable(draft.pairs[first])} and {printable(draft.pairs[other])} are two with different values"
                )
                draft.refused.append(Refusal("ties-differ", what, f"Leave one out: --exclude {printable(other)!r}"))
        for name in names:
            if name != first:
                draft.chosen[name] = draft.chosen[first]
                if name not in draft.left:
                    draft.tied.append((name, first))
        others = set(names) - {first}
        draft.loaded = [fact for fact in draft.loaded if fact.target not in others]
        draft.mismatched = [  # what does not fit is told under whatever name; what is loaded in part, once
            fact for fact in draft.mismatched if fact.target not in others or fact.done in (SKIPPED, REFUSED)
        ]


def _same_values(one: Assignment, other: Assignment) -> bool:
    a, b = one.tensor, other.tensor
    if a.view == b.view:
        return True
    if not isinstance(a, TensorEntry) or not isinstance(b, TensorEntry):
        return False
    alike = (a.dtype, a.shape, a.flags.lazy, one.part) == (b.dtype, b.shape, b.flags.lazy, other.part)
    stored = max(a.storage.nbytes, b.storage.nbytes)  # an expanded view may stand for any number of values
    return alike and a.nbytes <= stored and same_bytes(row_major(a), row_major(b))


# Types ---------------------------------------------------------------------------------------------------------------


def _changes(draft: _Draft) -> None:
    """Notes where a tensor gets another type, and reads those that may lose values while they are not too many."""
    budget = READ_FOR_LOSSES
    for fact in draft.loaded:
        tensor, new = draft.chosen[fact.target].tensor, draft.target.tensors[fact.target].dtype
        if not isinstance(tensor, TensorEntry) or new is None or tensor.dtype is new:
            continue
        sure = conversion(tensor.dtype, new)
        budget -= tensor.nbytes if sure == LOSSY else 0
        draft.changes.append(_change(fact, tensor, new, sure == EXACT, read=budget >= 0))


def _change(fact: Loaded, tensor: TensorEntry, new: DType, exact: bool, read: bool) -> DtypeChange:
    names = (fact.source, fact.target, tensor.dtype, new)
    if exact:
        return DtypeChange(*names, True, 0, 0)
    if not read:
        return DtypeChange(*names, None)
    tally = losses(tensor, new)
    return DtypeChange(*names, not tally.changed, tally.changed, tally.overflowed)


# The report ------------------------------------------------------------------------------------------------------------


def _report(draft: _Draft, root: StateDict, source: str, options: MatchOptions) -> LoadReport:
    target = draft.target
    met = {*draft.chosen, *draft.supplied, *(fact.target for fact in draft.mismatched)}
    missing = [e for name, e in target.tensors.items() if name not in met and name not in draft.left]
    taken = {*draft.pairs.values()}
    unexpected = [key for key in draft.names if key not in taken]
    report = LoadReport(
        source,
        target.name,
        target.kind,
        root.address,
        tuple(draft.loaded),
        tuple(draft.tied),
        tuple(Absent("", e.name, e.kind, e.dtype, e.shape) for e in missing),
        tuple(_unexpected(draft, key) for key in unexpected),
        tuple(draft.mismatched),
        tuple(draft.changes),
        tuple(name for name in target.tensors if name in draft.left and name not in draft.chosen),
        sum(fact.elements for fact in draft.loaded),
        sum(expected.numel for expected in target.unique),
        tuple(draft.notes),
        _suggested(draft),
        (),
        supplied=tuple(name for name in draft.supplied if name not in draft.chosen and name not in draft.left),
    )
    return replace(report, refused=(*draft.refused, *_refusals(report, options)))


def _unexpected(draft: _Draft, key: str) -> Absent:
    tensor = draft.tensors[key]
    return Absent(key, draft.names[key], kind_by_name(key, tensor.dtype), tensor.dtype, tensor.shape)


def _suggested(draft: _Draft) -> tuple[Suggestion, ...]:
    """Rules that would make more fit, the best first; of names as rules see them, without the prefixes that are taken off anyway."""
    if len(draft.pairs) in (len(draft.names), len(draft.target.tensors)):
        return ()
    from ckptool.transforms.suggest import suggest  # half of what a plan imports, for what fits needlessly

    tensors = draft.target.tensors
    ours = {without_wrappers(name): draft.tensors[key].shape for key, name in draft.names.items()}
    wanted = {without_wrappers(name): tensors[name].shape for name in tensors if name not in draft.left}
    placed = {without_wrappers(draft.names[key]): without_wrappers(goal) for goal, key in draft.pairs.items()}
    return tuple(suggest(ours, wanted, placed))


def _refusals(report: LoadReport, options: MatchOptions) -> list[Refusal]:
    found = _no_match(report)
    wrong = [fact for fact in report.mismatched if fact.done == REFUSED]
    for about, fix in (
        ("shape", _ways(options.on_mismatch)),
        ("dtype", "Keep the target's: --on-mismatch skip"),
        ("kind", "Keep the target's: --on-mismatch skip"),
    ):
        if facts := [fact for fact in wrong if fact.about == about]:
            told = [f"{printable(fact.target)} {_told(fact.have)} against {_told(fact.want)}" for fact in facts]
            what = f"{len(facts):,} tensor{'s are' if len(facts) > 1 else ' is'} of another {about}: {listed(told, 3)}"
            found.append(Refusal(f"{about}-mismatch", what, fix))
    if options.strict:
        found += [
            Refusal("strict", f"{counted} {word}: {listed([printable(name) for name in facts], 3)}")
            for word, facts in (
                ("missing", [fact.name for fact in report.missing]),
                ("unexpected", [fact.source for fact in report.unexpected]),
                ("skipped", [fact.target for fact in report.mismatched if fact.done == SKIPPED]),
            )
            if facts and (counted := f"{len(facts):,} name{'s are' if len(facts) > 1 else ' is'}")
        ]
    return found + ([] if found and not report.loaded else unmet(report, options.min_loaded, options.missing))


def _ways(on_mismatch: str) -> str:
    """What to type for tensors of another shape, where this way did not do for them."""
    if on_mismatch == "slice":
        return "slice cuts what is larger in every dimension. Fill up what is smaller: --on-mismatch pad; keep the target's: skip"
    if on_mismatch == "pad":
        return "pad fills up what is smaller in every dimension. Cut what is larger: --on-mismatch slice; keep the target's: skip"
    return "Keep the target's: --on-mismatch skip; cut or fill up: --on-mismatch slice or --on-mismatch pad"


def _no_match(report: LoadReport) -> list[Refusal]:
    if report.loaded:
        return []
    what = "not a single tensor of the checkpoint goes into the target"
    return [Refusal("nothing-loaded", what, _first_rule(report))]


def _first_rule(report: LoadReport) -> str:
    """The suggestion that brings most, as options to type."""
    for suggestion in report.suggestions:
        if suggestion.unambiguous and 0 < len(suggestion.rules) <= 4:
            return " ".join(["Perhaps:", *(f"--rename '{printable(rule)}'" for rule in suggestion.rules)])
    if any(suggestion.rules for suggestion in report.suggestions):
        return "Have rules written that would make more fit: --suggest rules.yaml"
    return "See both sides: ckptool inspect FILE --all"


def _told(side: tuple[DType | None, tuple[int, ...] | None]) -> str:
    dtype, shape = side
    return f"{dtype.name if dtype else '?'} {list(shape) if shape is not None else '[?]'}"


def match_options(
    rename: str | Sequence[str] = (),
    rules_file: str | None = None,
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    missing: str | Sequence[str] | None = None,
    **more: Any,
) -> MatchOptions:
    """What the user asks for, from texts; the rules of a file come after those given. Raises `UsageError` for a rule that cannot work."""
    rules = [parse_rule(rule) for rule in several(rename)] + ([] if rules_file is None else read_rules(rules_file))
    checked_share(more.get("min_loaded"))
    return MatchOptions(
        rules, several(only), several(exclude), missing=None if missing is None else several(missing), **more
    )
