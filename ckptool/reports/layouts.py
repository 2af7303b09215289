"""Where in a checkpoint the weights are, and what of it `load_state_dict` does not take as it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ckptool.checkpoint import Composite, StorageRef, TensorEntry
from ckptool.checkpoint.commands import FILE, OUT, Advice, command
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.numpy_arrays import array_tensor
from ckptool.checkpoint.state_dicts import AVERAGE, COUNTER, WEIGHTS, StateDict, wrappers
from ckptool.checkpoint.tree import address, walk
from ckptool.errors import counted, listed, printable
from ckptool.pickles.plain import Array, expand
from ckptool.reports.findings import Finding, Found
from ckptool.reports.inspect import Listing

_LIGHTNING = "pytorch-lightning_version"
# Submodules by which averages keep two models, and the one that is the average.
_ONLINE, _AVERAGED = ("online_model.", "model."), ("ema_model.", "ema.", "model_ema.", "swa_model.")
# Lists of tensors without names, as torch_ema and diffusers keep the averages of `model.parameters()`.
_SHADOWS = frozenset({"shadow_params", "collected_params", "ema_params", "shadow"})
# Entries of a state dict that modules write themselves, and that are no tensors.
_OF_MODULES = ("_extra_state", "_packed_params", "_packed_params.dtype", "_packed_params._packed_params")


def mains(found: Listing) -> list[StateDict]:
    """The sets of weights that somebody may mean: all but averages, where there are others."""
    models = [root for root in found.roots if root.is_model]
    return [root for root in models if root.kind == WEIGHTS] or models


def of_layout(
    found: Listing, chosen: StateDict | None, alone: bool, taken: StateDict | None, gone: Collection[str] = ()
) -> Iterator[Found]:
    """Findings on where the weights are. chosen: the weights that the model fits best, where it is known.  alone: it is not.

    taken: the set of weights that an earlier command has written alone.  gone: addresses of what an earlier command has left out.
    """
    if found.container == "torchscript":
        return
    yield from _unnamed(found)
    candidates = mains(found)
    root = chosen or (candidates[0] if candidates else None)
    if root is None:
        if not any(note.code == "numpy-weights" for note in found.notes):
            yield from _no_weights(found)
        return
    if root.path:
        finding, fixes = _nested(found, root, [] if chosen is not None else candidates)
        yield finding, (() if root is taken else fixes)
    if root.module is None:
        yield from _not_tensors(root, gone)
        yield from _counter(root, alone)
        if alone:
            yield from _inner_prefix(found, root)


def _nested(found: Listing, root: StateDict, candidates: Sequence[StateDict]) -> Found:
    """Weights that are an entry of the file, or one set of several: `load_state_dict` does not take the file as it is."""
    inside = f"checkpoint{''.join(f'[{segment!r}]' for segment in root.path)}"
    take = command("convert", FILE / address(root.path), out=OUT)
    averages = {other.path[0] for other in found.roots if other.kind == AVERAGE and other.path}
    tops = list(found.tree) if isinstance(found.tree, dict) else range(len(found.tree))
    others = [printable(str(key)) + (" (an average)" if key in averages else "") for key in tops if key != root.path[0]]
    first = f'"{printable(str(tops[0]))}"'
    python = f"model.load_state_dict({printable(inside)})"
    says = f"Unexpected key(s) in state_dict: {first}"
    if len(candidates) > 1:
        names = listed([printable(each.address) for each in candidates], 4)
        what = f"it holds {counted(len(candidates), 'set')} of weights, and a model takes one: {names}"
        return Finding("several-weights", what, says, False, advice=f"And so on for each. Or in Python: {python}"), (
            take,
        )
    beside = f", beside {listed(others, 3)}" if others else ""
    what = f"the weights are the entry {printable(root.address)}{beside}"
    return Finding("nested-weights", what, says, False, advice=f"Or in Python: {python}"), (take,)


def _no_weights(found: Listing) -> Iterator[Found]:
    """A file that loads, and in which there is nothing for a model."""
    if any(_is_shadow(path) for path, _ in _lists(found.tree)):
        return
    kinds = listed(list(dict.fromkeys(root.detail or root.kind for root in found.roots)))
    if isinstance(found.tree, (TensorEntry, Composite)):
        kinds = "one tensor"
    yield Finding("no-weights", f"it holds no state dict: {kinds}", "Expected state_dict to be dict-like", False), ()


def _unnamed(found: Listing) -> Iterator[Found]:
    for path, node in _lists(found.tree):
        if _is_shadow(path):
            where = printable(address(path)) or "the file"
            what = f"{where} is a list of {counted(len(node), 'tensor')} without names"
            advice = "Which is which, only the order says: that of model.parameters() where an average was kept so. Copy them in Python."
            yield Finding("unnamed-weights", what, "Expected state_dict to be dict-like", False, advice=advice), ()


def _is_shadow(path: tuple[Any, ...]) -> bool:
    return not path or path[-1] in _SHADOWS


def _lists(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The lists of two or more tensors and nothing else, at the top or under a name of _SHADOWS."""
    tops = [((), tree)] if isinstance(tree, (list, tuple)) else []
    below = walk(tree) if isinstance(tree, dict) else ()
    parents = {path[:-1] for path, node in below if len(path) > 1 and path[-1] == 1 and path[-2] in _SHADOWS}
    nodes = [*tops, *((path, _at(tree, path)) for path in sorted(parents, key=str))]
    return [
        (path, node)
        for path, node in nodes
        if isinstance(node, (list, tuple))
        and len(node) > 1
        and all(isinstance(e, (TensorEntry, Composite)) for e in node)
    ]


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for segment in path:
        try:
            tree = tree[segment]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


# Inside the weights --------------------------------------------------------------------------------------------------


def not_tensors(root: StateDict) -> dict[str, Any]:
    """The entries of a state dict that torch does not take for tensors and that no module of torch writes."""
    return {
        key: value
        for key, value in root.node.items()
        if not isinstance(value, (TensorEntry, Composite)) and not str(key).endswith(_OF_MODULES)
    }


def _not_tensors(root: StateDict, gone: Collection[str]) -> Iterator[Found]:
    odd = {
        key: value
        for key, value in not_tensors(root).items()
        if not _becomes_tensor(value) and address((*root.path, key)) not in gone
    }
    if not odd:
        return
    shown = listed([f"{printable(str(key))} ({_kind(value)})" for key, value in odd.items()], 3)
    entries = f"{counted(len(root.node), 'entry', 'entries')} of {printable(root.address) or 'the state dict'}"
    what = f"{len(odd):,} of {entries} are no tensors: {shown}"
    says = "Unexpected key(s) in state_dict; or: While copying the parameter named …, expected torch.Tensor"
    droppable = [key for key in odd if type(key) is str and "." not in key and not _pattern_like(key)]
    if len(droppable) == len(odd):  # no module's parameter is called so
        yield Finding("not-a-tensor", what, says), (command("edit", FILE, drop=droppable, out=OUT),)
    else:
        advice = "Make them tensors in Python (torch.tensor), or find a whole copy; what they should be, the file does not say."
        yield Finding("not-a-tensor", what, says, advice=advice), ()


def _pattern_like(key: str) -> bool:
    return any(c in key for c in "*?[]~/") or key.startswith("re:")


def _becomes_tensor(value: Any) -> bool:
    """True for what `convert --weights-only` makes a tensor of: it has that command already."""
    if not isinstance(value, Object):
        return False
    made = expand(value)
    return isinstance(made, Array) and array_tensor(made) is not None


def _kind(value: Any) -> str:
    if isinstance(value, Object):
        return printable(value.name)
    if isinstance(value, StorageRef):
        return "a storage"
    return "None" if value is None else f"a {type(value).__name__}"


def _counter(root: StateDict, alone: bool) -> Iterator[Found]:
    """The counter of an averaged model, which the model itself does not have."""
    if alone and COUNTER in root.node and len(root.node) > 1:
        says = f'Unexpected key(s) in state_dict: "{COUNTER}"'
        what = f"{COUNTER} counts the models of an average; the model itself has no such entry"
        yield Finding("averaged-counter", what, says), (command("edit", FILE, drop=COUNTER, out=OUT),)


def _inner_prefix(found: Listing, root: StateDict) -> Iterator[Found]:
    """A model inside another object whose layout is known: Lightning's module, an average."""
    names = [key for key in root.node if type(key) is str and isinstance(root.node[key], (TensorEntry, Composite))]
    bare = [name.removeprefix(wrappers(name)) for name in names]
    fronts = {name.partition(".")[0] + "." for name in bare if "." in name}
    advice = Advice("For the outer object itself it is right as it is; with --against MODEL the model decides.")
    averaged = next((prefix for prefix in _AVERAGED if prefix in fronts), "")
    online = next((prefix for prefix in _ONLINE if prefix in fronts), "")
    if averaged and online:
        what = f"it holds two models under prefixes: {printable(online)} and its average {printable(averaged)}"
        says = f'Unexpected key(s) in state_dict: "{printable(names[0])}"'
        steps = (
            command("convert", FILE, only=f"{online}*", out=OUT),
            command("strip-module", FILE, prefix=online, out=OUT),
        )
        yield Finding("several-weights", what, says, False, advice=f"The same with {averaged} for the average."), steps
        return
    whose = "an average" if averaged else "the LightningModule" if _is_lightning(found) else ""
    if whose and len(fronts) == 1 and all("." in name for name in bare):
        prefix = next(iter(fronts))
        what = f"all {counted(len(names), 'key')} begin with {printable(prefix)}, the part of {whose} that is the model"
        says = f'Unexpected key(s) in state_dict: "{printable(prefix)}…"'
        yield (
            Finding("prefix", what, says, False, advice=advice),
            (command("strip-module", FILE, prefix=prefix, out=OUT),),
        )


def _is_lightning(found: Listing) -> bool:
    return isinstance(found.tree, dict) and _LIGHTNING in found.tree
