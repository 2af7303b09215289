"""Finds the weights of a checkpoint, whether they fit the model that they are for, and what makes them fit.

Fitting is what stock `load_state_dict(strict=True)` would say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptool.analysis.findings import Finding, Stage
from ckptool.analysis.inspect import Listing
from ckptool.analysis.targets import CHECKPOINT, SPEC, Target, tie_groups
from ckptool.analysis.torch_versions import accepted, also_newer
from ckptool.checkpoint import StorageRef, Tensor
from ckptool.checkpoint.nodes import Object, OrderedDict
from ckptool.checkpoint.numpy_arrays import Array, array_tensor
from ckptool.checkpoint.state_dicts import (
    AVERAGE,
    COUNTER,
    WEIGHTS,
    StateDict,
    is_optimizer,
    without_wrappers,
    wrappers,
)
from ckptool.checkpoint.tree import Path, address, children, item_at, walk
from ckptool.commands import FILE, OUT, OUT_PT, Advice, Command, command
from ckptool.errors import counted, form, listed, printable
from ckptool.formats import named
from ckptool.pickles.plain.values import expand

_LIGHTNING = "pytorch-lightning_version"
# Submodules by which averages keep two models, and the one that is the average.
_ONLINE, _AVERAGED = ("online_model.", "model."), ("ema_model.", "ema.", "model_ema.", "swa_model.")
_AVERAGES = ("ema", "swa", "average", "shadow")
# Lists of tensors without names, as torch_ema and diffusers keep the averages of `model.parameters()`.
_SHADOWS = frozenset({"shadow_params", "collected_params", "ema_params", "shadow"})
# Entries of a state dict that modules write themselves, and that are not tensors.
_OF_MODULES = ("_extra_state", "_packed_params", "_packed_params.dtype", "_packed_params._packed_params")
_TRIED = 8  # names of the model by which prefixes are looked for

_NO_DICT = "Expected state_dict to be dict-like"
_OTHER_KEYS = "Missing key(s) in state_dict: … Unexpected key(s) in state_dict: …"


def _missing(key: str) -> str:
    return f'Missing key(s) in state_dict: "{printable(key)}"'


def _unexpected(key: str) -> str:
    return f'Unexpected key(s) in state_dict: "{printable(key)}"'


# The place of the weights ---------------------------------------------------------------------------------------------


def mains(found: Listing) -> list[StateDict]:
    """The sets of weights that somebody may mean: all but averages, where there are others."""
    models = [root for root in found.roots if root.is_model]
    return [root for root in models if root.kind == WEIGHTS] or models


def of_layout(
    found: Listing, chosen: StateDict | None, alone: bool, taken: StateDict | None, gone: Collection[str] = ()
) -> Iterator[Finding]:
    """Findings on the place of the weights. chosen: those that fit the model best, if known.  alone: it is not.

    taken: the set of weights that an earlier command has written alone.  gone: addresses of what an earlier command
    left out.
    """
    if named(found.container).is_program:
        return
    yield from _unnamed(found)
    candidates = mains(found)
    root = chosen or (candidates[0] if candidates else None)
    if root is None:
        if not any(note.code == "numpy-weights" for note in found.notes):
            yield from _no_weights(found)
        return
    if root.path:
        yield _nested(found, root, [] if chosen is not None else candidates, root is taken)
    if root.module is None:
        yield from _not_tensors(root, gone)
        if alone:
            yield from _counter(root)
            yield from _inner_prefix(found, root)


def _nested(found: Listing, root: StateDict, candidates: Sequence[StateDict], is_taken: bool) -> Finding:
    """Weights that are an entry of the file, or one set of several, so that the file is not a state dict."""
    take = () if is_taken else (command("convert", FILE / address(root.path), out=OUT),)
    averages = {other.path[0] for other in found.roots if other.kind == AVERAGE and other.path}
    tops = [key for key, _ in children(found.tree)]
    others = [printable(str(key)) + (" (an average)" if key in averages else "") for key in tops if key != root.path[0]]
    says = _unexpected(str(tops[0]))
    inside = _in_python(found.tree, root.path) + (".state_dict()" if root.module is not None else "")
    if is_taken and named(found.container).is_folder:  # which torch.load does not read
        inside = f"ckptool.load({f'{found.file}#{root.address}'!r})"
    python = f"in Python: model.load_state_dict({printable(inside)})"
    if len(candidates) > 1:
        names = listed([printable(each.address) for each in candidates], 4)
        what = f"it holds {counted(len(candidates), 'set')} of weights, and a model takes one: {names}"
        advice = f"And so on for each. Or {python}"
        return Finding("several-weights", what, says, False, (), advice, take, Stage.ENTRIES)
    beside = f", beside {listed(others, 3)}" if others else ""
    what = f"the weights are the entry {printable(root.address)}{beside}"
    return Finding("nested-weights", what, says, False, (), f"Or {python}", take, Stage.PLACE)


def _in_python(tree: Any, path: Path) -> str:
    """What a part of a loaded checkpoint is in Python: `checkpoint['learner'].model`."""
    text, node = "checkpoint", tree
    for key in path:
        own = isinstance(node, Object) and key in (node.attributes or ()) and str(key).isidentifier()
        text += f".{key}" if own else f"[{key!r}]"
        node = dict(children(node)).get(key)
    return text


def _no_weights(found: Listing) -> Iterator[Finding]:
    """A file that loads, and in which there is nothing for a model."""
    if any(_is_shadow(path) for path, _ in _lists(found.tree)):
        return
    kinds = listed(list(dict.fromkeys(root.detail or root.kind for root in found.roots)))
    if isinstance(found.tree, Tensor):
        kinds = "one tensor"
    yield Finding("no-weights", f"it holds no state dict: {kinds}", _NO_DICT, False, stage=Stage.ENTRIES)


def _unnamed(found: Listing) -> Iterator[Finding]:
    for path, node in _lists(found.tree):
        if _is_shadow(path):
            where = printable(address(path)) or "the file"
            what = f"{where} is a list of {counted(len(node), 'tensor')} without names"
            advice = "Only their order names them: that of model.parameters() for an average. Copy them in Python."
            yield Finding("unnamed-weights", what, _NO_DICT, False, advice=advice, stage=Stage.ENTRIES)


def _is_shadow(path: Path) -> bool:
    return not path or path[-1] in _SHADOWS


def _lists(tree: Any) -> list[tuple[Path, Any]]:
    """The lists of two or more tensors and nothing else, at the top or under a name of _SHADOWS."""
    below = walk(tree) if isinstance(tree, dict) else ()
    paths = {path[:-1] for path, _ in below if len(path) > 1 and path[-1] == 1 and path[-2] in _SHADOWS}
    nodes = [((), tree), *((path, item_at(tree, path)) for path in sorted(paths, key=str))]
    return [
        (path, node)
        for path, node in nodes
        if isinstance(node, (list, tuple)) and len(node) > 1 and all(isinstance(part, Tensor) for part in node)
    ]


# Inside the weights --------------------------------------------------------------------------------------------------


def not_tensors(root: StateDict) -> dict[str, Any]:
    """The entries of a state dict that torch does not take for tensors and that no module of torch writes."""
    return {
        key: value
        for key, value in root.node.items()
        if not isinstance(value, Tensor) and not str(key).endswith(_OF_MODULES)
    }


def _not_tensors(root: StateDict, gone: Collection[str]) -> Iterator[Finding]:
    odd = {
        key: value
        for key, value in not_tensors(root).items()
        if not _becomes_tensor(value) and address((*root.path, key)) not in gone
    }
    if not odd:
        return
    shown = listed([f"{printable(str(key))} ({_kind(value)})" for key, value in odd.items()], 3)
    entries = f"{counted(len(root.node), 'entry', 'entries')} of {printable(root.address) or 'the state dict'}"
    what = f"{len(odd):,} of {entries} are not tensors: {shown}"
    says = "Unexpected key(s) in state_dict; or: While copying the parameter named …, expected torch.Tensor"
    whole = any(map(is_optimizer, root.node.values()))  # of a run, as torchtitan saves it: nothing is wrong with it
    finding = Finding("not-a-tensor", what, says, blocks=not whole, stage=Stage.ENTRIES)
    droppable = [key for key in odd if type(key) is str and "." not in key and not _pattern_like(key)]
    if len(droppable) == len(odd):  # no module's parameter is called so
        yield replace(finding, commands=(command("edit", FILE, drop=droppable, out=OUT),))
    else:
        advice = (
            "Make them tensors in Python (torch.tensor), or find a whole copy: the file does not have their values."
        )
        yield replace(finding, advice=advice)


def _pattern_like(key: str) -> bool:
    return any(c in key for c in "*?[]~/") or key.startswith("re:")


def _becomes_tensor(value: Any) -> bool:
    """True for what `convert --weights-only` makes a tensor of: it has that command already."""
    if not isinstance(value, Object):
        return False
    array = expand(value)
    return isinstance(array, Array) and array_tensor(array) is not None


def _kind(value: Any) -> str:
    if isinstance(value, Object):
        return printable(value.name)
    if isinstance(value, StorageRef):
        return "a storage"
    return "None" if value is None else f"a {type(value).__name__}"


def _counter(root: StateDict) -> Iterator[Finding]:
    """The counter of an averaged model, which the model itself does not have."""
    if COUNTER in root.node and len(root.node) > 1:
        yield _averaged_counter("the model itself")


def _averaged_counter(model: str) -> Finding:
    what = f"{COUNTER} counts the models of an average; {model} has no such entry"
    drop = command("edit", FILE, drop=COUNTER, out=OUT)
    return Finding("averaged-counter", what, _unexpected(COUNTER), commands=(drop,), stage=Stage.ENTRIES)


def _inner_prefix(found: Listing, root: StateDict) -> Iterator[Finding]:
    """A model inside another object whose layout is known: Lightning's module, an average."""
    names = [key for key in root.node if type(key) is str and isinstance(root.node[key], Tensor)]
    bare = [name.removeprefix(wrappers(name)) for name in names]
    fronts = {name.partition(".")[0] + "." for name in bare if "." in name}
    averaged = next((prefix for prefix in _AVERAGED if prefix in fronts), "")
    online = next((prefix for prefix in _ONLINE if prefix in fronts), "")
    if averaged and online:
        what = f"it holds two models under prefixes: {printable(online)} and its average {printable(averaged)}"
        steps = (command("convert", FILE, only=f"{online}*", out=OUT), _strip(online))
        advice = f"The same with {averaged} for the average."
        yield Finding("several-weights", what, _unexpected(names[0]), False, (), advice, steps, Stage.ENTRIES)
        return
    lightning = isinstance(found.tree, dict) and _LIGHTNING in found.tree
    whose = "an average" if averaged else "the LightningModule" if lightning else ""
    if whose and len(fronts) == 1 and all("." in name for name in bare):
        prefix = next(iter(fronts))
        what = f"all {counted(len(names), 'key')} begin with {printable(prefix)}, the part of {whose} that is the model"
        advice = "If you load into the outer object, nothing is wrong; --against MODEL tells which."
        says = _unexpected(f"{prefix}…")
        yield Finding("prefix", what, says, False, (), advice, (_strip(prefix),), Stage.ENTRIES)


def _strip(prefix: str) -> Command:
    return command("strip-module", FILE, prefix=prefix, out=OUT)


# The fit -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """Names that the model misses and those that it does not have, after what torch's own modules make good; shapes
    that differ."""

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
    """The fit of the keys of `root` under other names (name -> key)."""
    modules_save = [
        name for name in target.values or () if name not in target.tensors and name.endswith("_extra_state")
    ]
    theirs = [*target.tensors, *modules_save]
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


def _same_shape(value: Any, target: Target, name: str) -> bool:
    expected = target.tensors.get(name)
    if expected is None or not isinstance(value, Tensor):
        return True
    return value.shape == expected.shape or (value.shape, expected.shape) == ((1,), ())  # a number, before torch 0.4


def best_root(roots: Sequence[StateDict], target: Target) -> StateDict | None:
    """The set of weights that fits a model best; the first of those that fit alike."""

    def score(root: StateDict) -> int:
        found = find_way(root, target).fit
        return found.matched - len(found.missing) - len(found.extra) - len(found.shapes)

    return max(roots, key=score, default=None)


# Prefixes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """Steps that make the names fit, and how the weights fit after them. unwraps: wrappers go."""

    fit: Fit
    steps: tuple[Finding, ...] = ()
    unwraps: bool = False


def find_way(root: StateDict, target: Target) -> Way:
    """The steps that make the keys of the checkpoint those of the model, by prefixes alone."""
    keys = [key for key in root.node if type(key) is str]
    way = Way(fit(root, target, {key: key for key in keys}))
    if way.fit.is_exact:
        return way
    bare = {without_wrappers(key): key for key in keys}
    if any(map(wrappers, keys)) and len(bare) == len(keys):
        unwrapped = fit(root, target, bare)
        if unwrapped.matched > way.fit.matched:
            way = Way(unwrapped, (), True)
    if COUNTER in way.fit.extra:
        names = {name: key for name, key in way.fit.names.items() if name != COUNTER}
        way = _after(way, fit(root, target, names), _averaged_counter(printable(target.name)))
    if way.fit.is_exact:
        return way
    return _by_prefix(root, target, way) or _by_adding(root, target, way) or way


def _after(way: Way, found: Fit, step: Finding) -> Way:
    return Way(found, (*way.steps, step), way.unwraps)


def _prefix_step(what: str, *commands: Command) -> Finding:
    return Finding("prefix", what, _OTHER_KEYS, commands=commands, stage=Stage.ENTRIES)


def _by_prefix(root: StateDict, target: Target, way: Way) -> Way | None:
    """The prefix that the model's names have in the checkpoint, with what else is there left out."""
    found: list[tuple[bool, bool, int, str, Way]] = []
    for prefix in _prefixes(list(target.tensors), list(way.fit.names)):
        inside = {name[len(prefix) :]: key for name, key in way.fit.names.items() if name.startswith(prefix)}
        found_fit = fit(root, target, inside)
        if found_fit.matched <= way.fit.matched or 2 * found_fit.matched < len(target.tensors):
            continue
        if rest := len(way.fit.names) - len(inside):
            what = f"the model's keys begin with {printable(prefix)}; {rest:,} others do not"
            step = _prefix_step(what, command("convert", FILE, only=f"{prefix}*", out=OUT), _strip(prefix))
        else:
            what = f"its keys begin with {printable(prefix)}, those of {printable(target.name)} do not"
            step = _prefix_step(what, _strip(prefix))
        average = any(word in prefix.lower() for word in _AVERAGES)
        found.append((bool(found_fit.missing), average, rest, prefix, _after(way, found_fit, step)))
    return min(found, key=lambda each: each[:4])[4] if found else None


def _by_adding(root: StateDict, target: Target, way: Way) -> Way | None:
    """The prefix that the model's names have and the checkpoint's do not."""
    for prefix in _prefixes(list(way.fit.names), list(target.tensors)):
        names = {prefix + name: key for name, key in way.fit.names.items()}
        longer = fit(root, target, names)
        if longer.matched > way.fit.matched and 2 * longer.matched >= len(names):
            what = f"the keys of {printable(target.name)} begin with {printable(prefix)}, the others do not"
            add = command("add-module", FILE, prefix="" if prefix == "module." else prefix, out=OUT)
            return _after(way, longer, _prefix_step(what, add))
    return None


def _prefixes(names: Sequence[str], longer: Sequence[str]) -> list[str]:
    """The prefixes under which the first few of `names` stand among `longer`."""
    found = {other[: -len(name)]: None for name in names[:_TRIED] for other in longer if other.endswith("." + name)}
    return list(found)


# The rest ------------------------------------------------------------------------------------------------------------


TranslationTo = Callable[[Mapping[Any, Any], Mapping[str, Any]], tuple[str, Command] | None]
"""The command that makes weights those of a model of another layout, and why; None where there is none."""


def of_target(root: StateDict, target: Target, way: Way, translation: TranslationTo) -> Iterator[Finding]:
    """The steps of a way, and what does not fit after them. translation: what makes weights of another layout fit."""
    yield from way.steps
    weights = {name: root.node[key] for name, key in way.fit.names.items()}
    fits = way.fit.is_exact and not way.fit.shapes
    if not fits and (found := translation(weights, target.tensors)) is not None:
        what, translate = found
        advice = "Then look again: the layouts may differ in more than tensors."
        yield Finding("layout", printable(what), _OTHER_KEYS, commands=(translate,), advice=advice, stage=Stage.MODEL)
        return
    odd = set(not_tensors(root))  # which have a finding of their own
    missing = [name for name in way.fit.missing if not (name in way.fit.names and way.fit.names[name] in odd)]
    extra = [name for name in way.fit.extra if way.fit.names[name] not in odd]
    if tied := _tied(missing, target, way) if not extra else []:
        missing = [name for name in missing if name not in tied]
        yield _tied_weights(tied, target)
    if missing or extra:
        yield _keys_differ(missing, extra, target, way)
    if way.fit.shapes:
        yield _shape_mismatch(root, target, way)


def _tied(missing: Sequence[str], target: Target, way: Way) -> list[str]:
    """Names that the model has for tensors of which the checkpoint has another name."""
    groups = tie_groups(target.tensors.values()).values()
    there = {name for names in groups if any(name in way.fit.names for name in names) for name in names}
    return [name for name in missing if name in there]


def _tied_weights(tied: Sequence[str], target: Target) -> Finding:
    names = listed([printable(name) for name in tied], 3)
    what = f"{names}: tied in {printable(target.name)} to a tensor that the file has under its other name"
    finding = Finding("tied-weights", what, _missing(tied[0]), stage=Stage.MODEL)
    if target.kind == SPEC:
        return replace(finding, advice="safetensors.torch.load_model(model, FILE) loads it.")
    write = command("warm-start", FILE, against=target.name, out=OUT_PT)
    return replace(finding, commands=(write,), advice=LOAD_MODEL)


LOAD_MODEL = "Or in Python: safetensors.torch.load_model(model, FILE)"


def _keys_differ(missing: Sequence[str], extra: Sequence[str], target: Target, way: Way) -> Finding:
    parts = [
        f"{len(names):,} {form(len(names), 'is', 'are')} {word} ({listed([printable(key) for key in names], 2)})"
        for word, names in (("missing", missing), ("unexpected", extra))
        if names
    ]
    what = f"of {counted(len(target.tensors), 'key')} of {printable(target.name)} {' and '.join(parts)}"
    advice: str = "No tensor of the file fits the model: it was saved from a different one."
    if way.fit.matched > len(way.fit.shapes):
        skip = "skip" if way.fit.shapes else ""
        plan = command("warm-start", FILE, against=target.name, on_mismatch=skip)
        advice = Advice("What fits, and rules for other names: ", plan)
    return Finding("keys-differ", what, _OTHER_KEYS, advice=advice, stage=Stage.MODEL)


def _shape_mismatch(root: StateDict, target: Target, way: Way) -> Finding:
    shapes = [
        f"{printable(name)} {_shape(root.node[way.fit.names[name]])} against {_shape(target.tensors[name])}"
        for name in way.fit.shapes
        if name in way.fit.names
    ]
    count, model = len(way.fit.shapes), printable(target.name)
    what = f"{counted(count, 'tensor has', 'tensors have')} another shape than in {model}: {listed(shapes, 3)}"
    says = "size mismatch for …: copying a param with shape … from checkpoint"
    finding = Finding("shape-mismatch", what, says, stage=Stage.MODEL)
    if target.kind == SPEC or way.fit.matched <= count:  # a spec has no values to fill up with
        return finding
    start = command("warm-start", FILE, against=target.name, on_mismatch="skip", out=OUT)
    return replace(finding, commands=(start,), advice=f"It takes what fits, and the values of {model} for the rest.")


def _shape(tensor: Any) -> str:
    return str(list(tensor.shape)) if tensor.shape is not None else "[?]"
