"""Finds the weights of a checkpoint, whether they fit the model that they are for, and what makes them fit.

Fitting is what stock `load_state_dict(strict=True)` would say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any

from ckptool.analysis.findings import Finding, finding
from ckptool.analysis.inspect import NUMPY, Listing
from ckptool.analysis.targets import CHECKPOINT, SPEC, Target, accepted, also_newer, tie_groups
from ckptool.analysis.words import shape_text
from ckptool.checkpoint import StorageRef, Tensor
from ckptool.checkpoint.nodes import Object, OrderedDict, with_article
from ckptool.checkpoint.numpy_arrays import Array, array_tensor
from ckptool.checkpoint.tree import address, children, item_at, walk
from ckptool.commands import FILE, OUT, OUT_PT, command
from ckptool.conventions import state_dicts
from ckptool.conventions.state_dicts import COUNTER, StateDict, of_positions, without_wrappers, wrappers
from ckptool.errors import counted, form, listed
from ckptool.facts import dataclass, replace
from ckptool.formats import named
from ckptool.pickles.plain import expand

FEW = 8  # names by which prefixes are looked for
_LIGHTNING = "pytorch-lightning_version"
# Submodules by which averages keep two models, and the one that is the average.
_ONLINE, _AVERAGED = ("online_model.", "model."), ("ema_model.", "ema.", "model_ema.", "swa_model.")
_AVERAGES = ("ema", "swa", "average", "shadow")
# Lists of tensors without names, as torch_ema and diffusers keep the averages of `model.parameters()`.
_SHADOWS = frozenset({"shadow_params", "collected_params", "ema_params", "shadow"})
# Entries of a state dict that modules write themselves, and that are not tensors.
_OF_MODULES = ("_extra_state", "_packed_params", "_packed_params.dtype", "_packed_params._packed_params")


# The place of the weights ---------------------------------------------------------------------------------------------


def mains(contents: Listing, target: Target | None) -> list[StateDict]:
    """The sets of weights that a user may mean: all but averages, where there are others. target: those that fit this
    model best."""
    models = [root for root in contents.roots if root.is_model]
    models = [root for root in models if root.kind == state_dicts.WEIGHTS] or models
    if target is None or len(models) < 2:
        return models
    fits = [find_way(root, target).fit for root in models]
    scores = [fit.matched - len(fit.missing) - len(fit.extra) - len(fit.shapes) for fit in fits]
    return [root for root, score in zip(models, scores, strict=True) if score == max(scores)]


def of_layout(
    contents: Listing, candidates: Sequence[StateDict], model: str, sole: StateDict | None, dropped: Collection[str]
) -> Iterator[Finding]:
    """Findings on the place of the weights. candidates: see `mains`.  model: the name of the one it is for.
    sole: the set of weights that an earlier command has written alone.  dropped: addresses of what an earlier command
    left out."""
    if named(contents.container).is_program:
        return
    unnamed = False
    walked = walk(contents.tree) if isinstance(contents.tree, dict) else ()
    paths = {path[:-1] for path, _ in walked if len(path) > 1 and path[-1] == 1 and path[-2] in _SHADOWS}
    for path in [(), *sorted(paths, key=str)]:  # lists of two or more tensors and nothing else
        node = item_at(contents.tree, path)
        if isinstance(node, (list, tuple)) and len(node) > 1 and all(isinstance(part, Tensor) for part in node):
            unnamed = True
            yield finding("unnamed-weights", where=address(path) or "the file", count=counted(len(node), "tensor"))
    root = next(iter(candidates), None)
    if root is None:
        if not unnamed and not any(note.code == NUMPY for note in contents.notes):
            kinds = listed([*dict.fromkeys(root.detail or root.kind for root in contents.roots)]) or "nothing at all"
            yield finding("no-weights", kinds="one tensor" if isinstance(contents.tree, Tensor) else kinds)
        return
    if root.path:  # an entry of the file, or one set of several: the file is not a state dict
        tops = [key for key, _ in children(contents.tree)]
        expression, node = "checkpoint", contents.tree  # the weights in Python: `checkpoint['learner'].model`
        for key in root.path:
            is_own = isinstance(node, Object) and key in (node.attributes or ()) and str(key).isidentifier()
            expression += f".{key}" if is_own else f"[{key!r}]"
            node = dict(children(node)).get(key)
        expression += root.call
        if root is sole and named(contents.container).is_folder:  # which torch.load does not read
            expression = f"ckptool.load({f'{contents.file}#{root.address}'!r})"
        facts = {"place": address(root.path), "top": str(tops[0]), "python": expression}
        if len(candidates) > 1:
            sets, addresses = counted(len(candidates), "set"), listed([root.address for root in candidates], 4)
            reason = finding("several-weights", count=sets, names=addresses, **facts)
        else:
            averages = {other.path[0] for other in contents.roots if other.kind == state_dicts.AVERAGE and other.path}
            other_keys = sorted((key for key in tops if key != root.path[0]), key=lambda key: key not in averages)
            others = [f"{key}{' (an average)' if key in averages else ''}" for key in other_keys]
            reason = finding("nested-weights", beside=f", beside {listed(others, 3)}" if others else "", **facts)
        yield replace(reason, commands=()) if root is sole else reason
    if root.module is None:
        yield from _non_tensor_finding(root, dropped)
    if root.module is None and not model:
        if COUNTER in root.node and len(root.node) > 1:
            yield finding("averaged-counter", model="the model itself")
        # A model inside another object whose layout is known: Lightning's module, an average.
        names = [key for key in root.node if type(key) is str and isinstance(root.node[key], Tensor)]
        bare = [name.removeprefix(wrappers(name)) for name in names]
        prefixes = {name.partition(".")[0] + "." for name in bare if "." in name}
        averaged = next((prefix for prefix in _AVERAGED if prefix in prefixes), "")
        online = next((prefix for prefix in _ONLINE if prefix in prefixes), "")
        lightning = isinstance(contents.tree, dict) and _LIGHTNING in contents.tree
        matrices = (name for key, name in zip(names, bare, strict=True) if len(root.node[key].shape or ()) > 1)
        if averaged and online and all(name.startswith((online, averaged)) for name in matrices):
            yield finding("several-weights, under prefixes", online=online, averaged=averaged, first=names[0])
        elif (averaged or lightning) and len(prefixes) == 1 and all("." in name for name in bare):
            (prefix,), count = prefixes, counted(len(names), "key")
            whose = "an average" if averaged else "the LightningModule"
            yield finding("prefix, of another object", count=count, prefix=prefix, whose=whose)


# Inside the weights ---------------------------------------------------------------------------------------------------


def not_tensors(root: StateDict) -> dict[str, Any]:
    """The entries of a state dict that are no tensors to torch and that no module of torch writes."""
    entries = root.node.items()
    return {k: v for k, v in entries if not isinstance(v, Tensor) and not str(k).endswith(_OF_MODULES)}


def _non_tensor_finding(root: StateDict, dropped: Collection[str]) -> Iterator[Finding]:
    odd = {}
    for key, value in not_tensors(root).items():
        # `convert --weights-only` makes a tensor of an array, which has that command already.
        array = expand(value) if isinstance(value, Object) else None
        is_array = isinstance(array, Array) and array_tensor(array) is not None
        if not is_array and address((*root.path, key)) not in dropped:
            odd[key] = value
    if not odd:
        return
    entries = f"{counted(len(root.node), 'entry', 'entries')} of {root.address or 'the state dict'}"
    kinds = {key: "None" if value is None else with_article(type(value).__name__) for key, value in odd.items()}
    kinds |= {key: value.name for key, value in odd.items() if isinstance(value, Object)}
    kinds |= {key: "a storage" for key, value in odd.items() if isinstance(value, StorageRef)}
    examples = listed([f"{key} ({kind})" for key, kind in kinds.items()], 3)
    holds_tensors = any(isinstance(node, Tensor) for value in odd.values() for _, node in walk(value))
    name = "not-a-tensor, but holds some" if holds_tensors else "not-a-tensor"
    reason = finding(name, count=f"{len(odd):,}", entries=entries, odd=examples)
    if any(map(state_dicts.is_optimizer, root.node.values())):  # of a run, as torchtitan saves it: that is no problem
        reason = replace(reason, blocks=False)
    droppable = [key for key in odd if type(key) is str and not set(".*?[]~/") & set(key) and not key.startswith("re:")]
    if len(droppable) == len(odd) and not holds_tensors:  # no parameter of a module has such a name
        reason = replace(reason, commands=(command("edit", FILE, drop=droppable, out=OUT),), advice="")
    yield reason


# The fit --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """Names that the model misses and those that it does not have, after what torch's own modules make up for; shapes
    that differ. names: as the model would see them -> keys of the checkpoint."""

    names: Mapping[str, str]
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
    """The fit of the keys of `root` under other names (name -> key)."""
    target_names = dict.fromkeys([*target.tensors, *target.states])
    pairs = {name: names[name] for name in target_names if name in names}
    missing = [name for name in target_names if name not in pairs]
    free = {name: key for name, key in names.items() if name not in target_names}
    metadata = root.node.metadata if isinstance(root.node, OrderedDict) else None
    renamed, supplied, dropped = accepted(pairs, missing, free, metadata)
    used = {*renamed.values(), *dropped}
    extra = [name for name, key in free.items() if key not in used]
    pairs |= renamed
    if target.kind == CHECKPOINT:
        newer = set(also_newer(extra, target_names, target.metadata))
        extra = [name for name in extra if name not in newer]
    missing = [name for name in missing if name not in renamed and name not in supplied]
    shapes = []
    for name, key in pairs.items():
        value, expected = root.node[key], target.tensors.get(name)
        if expected is not None and isinstance(value, Tensor) and value.shape != expected.shape:
            shapes += [name] if value.shape != (1,) or expected.shape else []  # as torch before 0.4 saved numbers
    return Fit(names, tuple(missing), tuple(extra), tuple(shapes))


@dataclass(frozen=True, slots=True)
class Way:
    """Steps that make the names fit, and how the weights fit after them. unwraps: wrappers go."""

    fit: Fit
    steps: tuple[Finding, ...] = ()
    unwraps: bool = False


def find_way(root: StateDict, target: Target) -> Way:
    """The ready translations that make the keys of the checkpoint those of the model: prefixes off, or on."""
    keys = [key for key in root.node if type(key) is str]
    way = Way(fit(root, target, {key: key for key in keys}))
    if way.fit.is_exact:
        return way
    bare = {without_wrappers(key): key for key in keys}
    if any(map(wrappers, keys)) and len(bare) == len(keys):
        unwrapped = fit(root, target, bare)
        way = Way(unwrapped, (), True) if unwrapped.matched >= way.fit.matched else way
    if COUNTER in way.fit.extra:
        uncounted = {name: key for name, key in way.fit.names.items() if name != COUNTER}
        way = Way(fit(root, target, uncounted), (finding("averaged-counter", model=target.name),), way.unwraps)
    if way.fit.is_exact:
        return way
    names, improvements = way.fit.names, list[tuple[Any, Way]]()

    def consider(order: tuple[Any, ...], row_name: str, prefix: str, tried: dict[str, str], count: int) -> None:
        """Keeps the names with a prefix off or on, if more match that way, and at least half of `count`."""
        fits = fit(root, target, tried)
        if fits.matched > way.fit.matched and 2 * fits.matched >= count:
            step = finding(row_name, prefix=prefix, model=target.name, rest=f"{len(names) - len(tried):,}")
            improvements.append(((bool(fits.missing), *order), Way(fits, (*way.steps, step), way.unwraps)))

    for prefix in _prefixes(target.tensors, names):
        stripped = {name[len(prefix) :]: key for name, key in names.items() if name.startswith(prefix)}
        order = any(word in prefix.lower() for word in _AVERAGES), -len(stripped), prefix
        row_name = f"prefix, {'some' if len(stripped) < len(names) else 'all'} have it"
        consider(order, row_name, prefix, stripped, len(target.tensors))
    for prefix in () if improvements else _prefixes(names, target.tensors):
        prefixed = {prefix + name: key for name, key in names.items()}
        consider((), "prefix, the model has it", prefix, prefixed, len(names))
    return min(improvements, key=itemgetter(0))[1] if improvements else way


def _prefixes(names: Iterable[str], full_names: Collection[str]) -> dict[str, None]:
    """The prefixes with which a few of the names become some of the full ones."""
    few = islice(names, FEW)
    return dict.fromkeys(full[: -len(name)] for name in few for full in full_names if full.endswith(f".{name}"))


def of_target(root: StateDict, target: Target, way: Way) -> Iterator[Finding]:
    """The steps of a way, and what does not fit after them."""
    from ckptool.names.layout import translation_to  # imports all layouts, which no other diagnosis needs

    if root.is_adapter:
        yield replace(finding("adapter", model=target.name), advised=(target.plus_adapter(FILE),))
        return
    yield from way.steps
    names, shapes = way.fit.names, way.fit.shapes
    weights = {name: root.node[key] for name, key in names.items()} if shapes or not way.fit.is_exact else {}
    if weights and (translation := translation_to(weights, target.tensors)) is not None:
        yield replace(finding("layout", why=translation[0]), commands=(translation[1],))
        return
    reported = {key for key in not_tensors(root) if type(key) is str}  # which have a finding of their own
    missing = [name for name in way.fit.missing if names.get(name) not in reported]
    extra = [name for name in way.fit.extra if names[name] not in reported]
    groups = tie_groups(target.tensors.values()).values() if not extra else ()
    tied_names = {name for group in groups if any(name in names for name in group) for name in group}
    tied, missing = ([name for name in missing if (name in tied_names) is is_tied] for is_tied in (True, False))
    unequal = [(name, root.node[names[name]].shape, target.tensors[name].shape) for name in shapes if name in names]
    ways = [f"{name}={how}" for name, have, want in unequal if (how := of_positions(name, have, want))]
    skip, out, is_other = "skip" if shapes else "", OUT_PT if tied else OUT, way.fit.matched <= len(shapes)
    line = command("warm-start", FILE, against=target.name, resize=ways, on_mismatch=skip, out=out)
    # Where rules may be meant instead, it would be refused.
    new_shapes = {getattr(root.node[names[name]], "shape", None) for name in extra}
    is_renamed = any(name in target.tensors and target.tensors[name].shape in new_shapes for name in missing)
    fixes = () if target.kind == SPEC or is_renamed or is_other else (line,)
    if tied:
        reason = finding("tied-weights", names=listed(tied, 3), first=tied[0], model=target.name)
        yield replace(reason, commands=fixes, advice="" if shapes else reason.advice)
    if missing or extra:
        sides = (("missing", missing), ("unexpected", extra))
        parts = (f"{len(odd):,} {form(len(odd), 'is', 'are')} {word} ({listed(odd, 2)})" for word, odd in sides if odd)
        what = {"count": counted(len(target.tensors), "key"), "differ": " and ".join(parts), "model": target.name}
        reason = finding(f"keys-differ{', all of them' * is_other}", **what)
        yield replace(reason, advised=(command("warm-start", FILE, against=target.name, on_mismatch=skip),))
    if shapes:
        differ = listed([f"{name} {shape_text(have)} against {shape_text(want)}" for name, have, want in unequal], 3)
        what = {"count": counted(len(shapes), "tensor has", "tensors have"), "shapes": differ, "model": target.name}
        reason = finding(f"shape-mismatch{', of positions' * bool(ways)}", **what)
        yield replace(reason, commands=fixes, advice=reason.advice if fixes else "")
