"""The state dicts of a checkpoint: model weights, their average, optimizer state; and the plain values beside them.

A *model state dict* is a dictionary of names to tensors that are weights. Verbs on keys act on all of them; verbs that
take one choose it here, and say so, or list the candidates: picking one in silence is how people train on the wrong
weights. Where there is none, dictionaries of names to numpy arrays take their place for the verbs that only read one. A
pickled module counts as well, by its state dict; its weights can be read, but not renamed inside the object.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import isqrt
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Tensor, TensorEntry
from ckptool.checkpoint.nodes import Object, OrderedDict
from ckptool.checkpoint.numpy_arrays import with_tensors
from ckptool.checkpoint.tree import (
    Path,
    address,
    children,
    detached,
    find,
    method_owner,
    module_attributes,
    module_state_dict,
    tensors,
)
from ckptool.commands import ADDRESS, OUT_SAFETENSORS, arg, command, input_of
from ckptool.conventions.optimizer_keys import flat_keys
from ckptool.errors import Conflict, UsageError, counted, is_text, listed, printable, quoted
from ckptool.facts import dataclass, replace

WEIGHTS, AVERAGE, OPTIMIZER, PLAIN = "model weights", "EMA weights", "optimizer state", "plain values"

# Words in the names that people give weights, their running average, and things that hold tensors but no weights.
_MODEL_WORDS = re.compile(
    r"(^|_|\b)(model|module|net|network|state_?dict|weights?|params?|generator|discriminator|encoder|decoder|"
    r"backbone|teacher|student|actor|critic|policy|[gd](?![a-z])"
    r"|blobs|unet|vae|classifier|head|embedder|lora|adapter|pretrained|ema|swa|[a-z]*net)(_?[a-z0-9])?($|_|\b)",
    re.IGNORECASE,
)
_AVERAGE_WORDS = re.compile(
    r"(^|_|\b)(ema|swa|averaged?|model_avg|shadow|polyak|moving_average)($|_|\b|\d|(?-i:(?=[A-Z])))", re.IGNORECASE
)
_OTHER_WORDS = re.compile(
    r"optim|scheduler|scaler|(^|_)rng|random|(^|_)(args|attributes|constants|config|hparams|hyper_parameters|loops?|"
    r"callbacks|criterion|history|metrics|loss(es)?|data_state|sampler)($|_)",
    re.IGNORECASE,
)
_TRAINING_WORDS = re.compile(r"optim|^opt(_states?)?$|scheduler|scaler|sampler|(^|[_-])rng|random", re.IGNORECASE)
# Where moments are kept by name: `opt/m/NAME`. A model may be called opt, too.
_OPT, _MOMENTS = ("opt", "opt_state"), ("m", "v", "mu", "nu", "exp_avg", "exp_avg_sq", "momentum", "momentum_buffer")
# Entries among weights that hold counters; anywhere else there may be a model in them.
_TRAINING_STATE = re.compile(r"(train|training|trainer)_state|data_?loaders?", re.IGNORECASE)
# What modules call their parameters and buffers: one of these as the last part of a key makes a dictionary look like a
# state dict.
_PARAMETER_NAMES = frozenset(
    "weight bias running_mean running_var num_batches_tracked in_proj_weight in_proj_bias "
    "weight_g weight_v weight_orig weight_mask gamma beta scale "
    "embedding kernel weight_ih_l0 weight_hh_l0 bias_ih_l0 bias_hh_l0".split()
)


_STATISTICS = frozenset("mean var std running_mean running_var running_std count num_batches_tracked".split())


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StateDict:
    """A part of a checkpoint and its kind. `detail`: more about it, for people (`Adam state for 12 parameters`).

    module: the object, if the part is a whole pickled module; `node` is then its state dict, which the tree lacks.
    base: the path in the file to the tree that it was found in.
    arrays: the dictionary, if the part is one of numpy arrays; `node` then has tensors in their places.
    """

    path: Path
    node: Any
    kind: str
    detail: str = ""
    module: Object | None = None
    base: Path = ()
    arrays: dict[Any, Any] | None = None

    @property
    def address(self) -> str:
        return address(self.base + self.path)

    @property
    def is_model(self) -> bool:
        return self.kind in (WEIGHTS, AVERAGE)

    @property
    def is_adapter(self) -> bool:
        """True for a LoRA, LoHa or LoKr: changes to a model's weights."""
        return self.is_model and " adapter, " in self.detail

    @property
    def call(self) -> str:
        """What gives the state dict in Python: `.state_dict()` of a module, `()` of the method itself."""
        return "" if self.module is None else ".state_dict()" if method_owner(self.module) is self.module else "()"

    def names(self) -> list[str]:
        """The keys of weights that are strings, without those of entries that belong to the training."""
        flat = flat_keys(self.node)
        items = self.node.items()
        return [key for key, value in items if type(key) is str and key not in flat and not is_beside(key, value)]

    def __str__(self) -> str:
        return f"{printable(self.address) or 'the whole file'} ({self.detail or self.kind})"

    def __repr__(self) -> str:
        return f"<{self}>"


def is_unset(roots: Sequence[StateDict], path: Path, shape: Any, nans: int) -> bool:
    """True for an infinite number outside of all weights and optimizers of a checkpoint that has weights: one of the
    training that has no value yet, such as its best loss."""
    holders = (root for root in roots if path[: len(root.path)] == root.path)
    beside_weights = any(root.is_model for root in roots) and all(root.kind == PLAIN for root in holders)
    return beside_weights and not (shape or nans)


def is_optimizer(node: Any) -> bool:
    """True for what `Optimizer.state_dict()` returns: a state, and parameter groups."""
    return isinstance(node, dict) and isinstance(node.get("state"), dict) and isinstance(node.get("param_groups"), list)


def find_state_dicts(checkpoint: Checkpoint) -> list[StateDict]:
    """The parts of a checkpoint, in order: model roots and optimizers at any depth, and their siblings on the way."""
    tree = checkpoint.tree
    by_path = {root.path: root for root in _roots(tree, checkpoint.base)}
    for root in [root for root in by_path.values() if root.is_model and root.module is None]:
        beside = ((*root.path, key) for key, value in root.node.items() if is_beside(key, value))
        by_path |= {
            path: StateDict(path, root.node[path[-1]], PLAIN, base=root.base) for path in beside if path not in by_path
        }
    if () in by_path or not isinstance(tree, (dict, list, tuple, Object)) or not (by_path or isinstance(tree, dict)):
        return list(by_path.values()) or [StateDict((), tree, PLAIN, base=checkpoint.base)]
    ancestors = {path[:length] for path in by_path for length in range(len(path))} | {()}
    roots: list[StateDict] = []
    stack: list[tuple[Path, Any]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        if path in ancestors and path not in by_path:
            parts = node.items() if isinstance(node, dict) else children(node)
            stack += reversed([((*path, key), value) for key, value in parts])
        else:
            roots.append(by_path.get(path) or StateDict(path, node, PLAIN, base=checkpoint.base))
    return roots


def model_state_dicts(checkpoint: Checkpoint, *, named: bool = False) -> list[StateDict]:
    """The model roots whose keys a verb may change. named: the user named the part, so it is a root if it has none.

    Raises `UsageError` if there is none, if the part is not a dictionary or is an optimizer's, or if one is a whole
    module, which has no keys to change.
    """
    roots = [root for root in _roots(checkpoint.tree, checkpoint.base) if root.is_model]
    if named and not roots and is_optimizer(checkpoint.tree):
        what = f"{address(checkpoint.base) or 'the whole file'} is the state of an optimizer, not weights"
        raise UsageError(what, "This works on the weights of a model.")
    roots = roots or _weights(checkpoint, "" if named else None)
    roots = [root for root in roots if root.module is None] or roots  # whole modules beside stay as they are
    if modules := [root for root in roots if root.module is not None]:
        where = str(checkpoint.source or "the checkpoint")
        take = command("convert", input_of(checkpoint.source, modules[0].address), out=OUT_SAFETENSORS)
        place = f"#{modules[0].address}" if modules[0].path else ""
        what = f"{where}{place} is a {modules[0].detail}, pickled with its class"
        why = "Its names are attributes of objects, not keys: if they changed, the class would not find them."
        why += " Nothing was written."
        raise UsageError(what, why, f"Write only its weights, then change those: {take}")
    return roots


def _weights(checkpoint: Checkpoint, at: str | None, arrays: bool = False) -> list[StateDict]:
    """The model roots, or what is at an address. arrays: those of numpy arrays, if there are no others."""
    if at is not None:
        path, node = find(checkpoint.tree, at)
        root = arrays and isinstance(node, dict) and _array_root(path, node)
        root = root or (StateDict(path, node, WEIGHTS) if isinstance(node, dict) else _whole_module(path, node))
        if root is None:
            what = f"{address(checkpoint.base + path) or 'the whole file'} is not a dictionary of tensors"
            is_tensor = isinstance(node, (TensorEntry, Composite))
            raise UsageError(what, f"It is {'a tensor' if is_tensor else f'of type {type(node).__name__}'}.")
        return [replace(root, base=checkpoint.base)]
    roots = [root for root in _roots(checkpoint.tree, checkpoint.base) if root.is_model]
    array_roots = [] if roots else array_state_dicts(checkpoint.tree)
    if not roots and not (arrays and array_roots):
        where, file = str(checkpoint.source or "the checkpoint"), input_of(checkpoint.source)
        why, fix = "This works on the weights of a model.", f"See what it has: {command('inspect', file)}"
        if array_roots:  # no address turns those into weights
            fix = f"Make tensors of its {array_roots[0].detail}: {command('convert', file, out=OUT_SAFETENSORS)}"
        elif is_optimizer(checkpoint.tree):
            why = "It is optimizer state."
            fix = f"Everything goes into one file: {command('convert', file, all=True, out=OUT_SAFETENSORS)}"
        else:
            fix += f"; then name the part: {arg(at=ADDRESS)}"
        raise UsageError(f"{where} has no dictionary that looks like model weights", why, fix)
    return roots or array_roots


def one_state_dict(checkpoint: Checkpoint, at: str | None = None) -> tuple[StateDict, str]:
    """The one model root of a verb that takes one, and a remark where the model was taken and not its EMA.

    Raises `UsageError` listing the candidates where there are several.
    """
    roots = _weights(checkpoint, at, arrays=True)
    if len(roots) == 1:
        return roots[0], ""
    models = [root for root in roots if root.kind == WEIGHTS]
    if len(models) == 1:
        averages = listed([printable(root.address) for root in roots if root.kind == AVERAGE])
        return models[0], f"took {printable(models[0].address)}, not its average {averages}"
    sets = listed([str(root).removesuffix(f" ({WEIGHTS})") for root in roots], MANY_STATE_DICTS)
    what = f"{checkpoint.source or 'the checkpoint'} has {counted(len(roots), 'set')} of model weights: {sets}"
    alone = f"Give it alone: checkpoint{''.join(f'[{key!r}]' for key in roots[0].path)}"
    fix = alone if checkpoint.source is None else f"Name it: {quoted(input_of(checkpoint.source, roots[0].address))}"
    raise UsageError(what, "This command takes one set.", fix)


def _whole_module(path: Path, node: Any) -> StateDict | None:
    """The root of a pickled module that has weights, or of an object that is a state dict with a class of its own."""
    names, what, of = module_state_dict(node), "whole module", node
    if names and (of := method_owner(node)) is not node:
        what = "state_dict method, saved uncalled, of a"
    if names is None and type(node) is Object and node.items and not node.elements and _is_weights(path, node.items):
        names, what = OrderedDict(node.items), "dictionary of class"
    return StateDict(path, names, _kind_at(path), f"{what} {printable(of.name)}", node) if names else None


def array_state_dicts(tree: Any) -> list[StateDict]:
    """The dictionaries of numpy arrays in a tree, pickled instead of state dicts; their nodes hold tensors.

    Those that look like weights, if any do.
    """
    roots = [root for root in _roots(tree, arrays=True) if root.arrays is not None]
    return [root for root in roots if _looks_like_weights(root.path, root.node)] or roots


def _array_root(path: Path, node: dict[Any, Any]) -> StateDict | None:
    """The root of a dictionary of which at least half are numpy arrays, and none a tensor."""
    if _is_other(path) or not all(type(key) is str for key in node):
        return None
    if any(isinstance(value, (TensorEntry, Composite)) for value in node.values()):
        return None
    entries = with_tensors(node)
    count = sum(isinstance(value, TensorEntry) for value in entries.values())
    if not count or 2 * count < len(entries):
        return None
    return StateDict(path, entries, _kind_at(path), counted(count, "numpy array"), arrays=node)


def unnamed_tensors(root: StateDict) -> list[tuple[Path, Tensor]]:
    """The tensors in a whole module that its state dict does not have: non-persistent buffers, plain attributes."""
    named = {tensor.view for tensor in root.node.values()}
    found = [(root.path + path, tensor, detached(tensor) or tensor) for path, tensor in tensors(root.module)]
    return [(path, tensor) for path, tensor, held in found if held.view not in named]


def quantized_outside(root: StateDict) -> list[str]:
    """The addresses of quantized weights of a whole module that only its class makes entries of a state dict."""
    others = unnamed_tensors(root) if root.module is not None else []
    return [address(path) for path, tensor in others if "quantized" in getattr(tensor, "kind", "")]


def kinds_of(roots: Iterable[StateDict]) -> list[str]:
    """The kinds of sets of weights, optimizers and whole modules of a checkpoint, each once."""
    return list(dict.fromkeys(root.detail or root.kind for root in roots if root.is_model or root.detail))


# The entries by which Lightning's WeightAveraging says that `state_dict` is the average, and where the weights are that
# are trained.
_AVERAGED_BY_LIGHTNING = ("state_dict", "current_model_state", "averaging_state")


def _roots(tree: Any, base: Path = (), *, arrays: bool = False) -> Iterator[StateDict]:
    """Model roots and optimizers, outermost first; their inside is not searched. base: the path to the tree.  arrays:
    also dictionaries of numpy arrays, whose inside is searched."""
    averaged = isinstance(tree, dict) and all(key in tree for key in _AVERAGED_BY_LIGHTNING)
    seen: set[int] = set()
    stack: list[tuple[Path, Any]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        if id(node) in seen or not isinstance(node, (dict, list, tuple, Object)):
            continue
        seen.add(id(node))
        place, is_opaque = base + path, False
        root: StateDict | None = None
        if isinstance(node, Object):
            root = None if _is_other(place) else _whole_module(place, node)
            is_opaque = module_attributes(node) is not None  # others (a learner, an agent) hold their parts by name
        elif is_optimizer(node):
            root = StateDict(path, node, OPTIMIZER, optimizer_detail(node))
        elif isinstance(node, dict) and _is_weights(place, node):
            kind = AVERAGE if averaged and place == ("state_dict",) else _kind_at(place)
            detail, joined = "", "\n".join(node)  # the quickest way to search many names
            if any(part in joined for part in ("lora", "hada_w", "lokr_w", "base_model.model.", "prompt_embeddings")):
                from ckptool.conventions.adapter_keys import adapter_detail  # of few files

                detail = adapter_detail(node)
            root = StateDict(path, node, kind, detail)
            stack += [((*path, key), value) for key, value in node.items() if is_optimizer(value)]  # torchtitan's
        if root is None and arrays and isinstance(node, dict):
            root = _array_root(place, node)
        if root is not None:
            yield replace(root, path=path, base=base)
        if not is_opaque and (root is None or root.arrays is not None):  # weights may lie beside their scales
            # The parts that have parts themselves; of an object, not the arguments that made it.
            below: Iterable[tuple[Any, Any]] = node.items() if isinstance(node, dict) else children(node)
            if isinstance(node, Object):
                below = [part for part in below if type(part[0]) is not str or not part[0].startswith("(")]
            parts = [((*path, key), value) for key, value in below if type(value) in _HOLDERS and value]
            stack += reversed(parts)


_TENSORS = frozenset({TensorEntry, Composite})
MANY_STATE_DICTS = 20  # that are listed where one of them has to be chosen
_HOLDERS = frozenset({dict, OrderedDict, list, tuple, Object})


def _kind_at(path: Path) -> str:
    return AVERAGE if any(isinstance(key, str) and _AVERAGE_WORDS.search(key) for key in path) else WEIGHTS


def _is_weights(path: Path, node: dict[Any, Any]) -> bool:
    kinds = set(map(type, node.values()))
    if kinds.isdisjoint(_TENSORS) or set(map(type, node)) != {str}:
        return False
    flat = flat_keys(node)
    members = {key: value for key, value in node.items() if not key.endswith(EXTRA_STATE) and key not in flat}
    entries = {key: value for key, value in members.items() if type(value) in _TENSORS}
    dotted = any("." in key for key in entries)
    if not entries or (2 * len(entries) < len(members) and not dotted) or _is_other(path):
        return False
    others = members.items() if kinds - _TENSORS else ()
    containers = [(key, value) for key, value in others if isinstance(value, (dict, list, tuple))]
    nested = sum(1 for key, value in containers if not (dotted and is_beside(key, value)) and _holds_tensors(value))
    if nested and not (dotted and nested < len(entries)):
        return False  # a few tensors beside the weights: random states, a loss, class weights
    return _looks_like_weights(path, entries)


def is_beside(key: Any, value: Any) -> bool:
    """True for an entry among weights whose name says that it belongs to the training: torchtitan's `train_state`."""
    if not isinstance(value, (dict, list, tuple)) or type(key) is not str or "." in key:
        return False
    return is_optimizer(value) or bool(_OTHER_WORDS.search(key) or _TRAINING_STATE.fullmatch(key))


def is_of_training(key: Any) -> bool:
    """True for the name of an entry with the state of an optimizer, an average, or random numbers."""
    return isinstance(key, str) and bool(_TRAINING_WORDS.search(key) or _AVERAGE_WORDS.search(key))


def _is_other(path: Path) -> bool:
    """True where a name in the path says that it holds no weights (`callbacks`, `hyper_parameters`), save averages."""
    average = bool(path) and isinstance(path[-1], str) and bool(_AVERAGE_WORDS.search(path[-1]))
    is_other = any(isinstance(key, str) and _OTHER_WORDS.search(key) for key in path)
    return not average and (is_other or any(pair[0] in _OPT and pair[1] in _MOMENTS for pair in pairwise(path)))


def _looks_like_weights(path: Path, entries: dict[str, Any]) -> bool:
    if not path or any("." in name for name in entries):
        return True
    shapes = [getattr(value, "shape", ()) for value in entries.values()]
    if not any(shapes) or all(name.strip("_") in _STATISTICS for name in entries):
        return False  # what is measured: losses, mean and variance of observations, by which they are normalized
    of_model = isinstance(path[-1], str) and bool(_MODEL_WORDS.search(path[-1]))
    return of_model or any(name in _PARAMETER_NAMES for name in entries)


def _holds_tensors(node: Any, depth: int = 3) -> bool:
    """True if there are tensors in a container, or in the containers in it, down to so many levels."""
    if is_optimizer(node):
        return True
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    return any(
        isinstance(part, (TensorEntry, Composite)) or (depth > 1 and _holds_tensors(part, depth - 1)) for part in parts
    )


# The keys of what an optimizer keeps of its parameters, in order, with the options that tell Muon, LAMB and NovoGrad.
_OPTIMIZERS = {
    "Adam": "exp_avg exp_avg_sq( fp32_param| master_param)?( max_exp_avg_sq)?( param)?",
    "NAdam": "exp_avg exp_avg_sq mu_product",
    "Adamax": "exp_avg exp_inf",
    "Adafactor": "col_var row_var( variance)?|(exp_avg )?(exp_avg_sq )?exp_avg_sq_col exp_avg_sq_row|variance",
    "Adadelta": "acc_delta square_avg",
    "RMSprop": "(grad_avg )?(momentum_buffer )?square_avg",
    "Rprop": "prev step_size",
    "ASGD": "ax eta mu",
    "Adagrad": "sum",
    "LBFGS": "(.* )?func_evals n_iter( .*)?",
    "Muon": "momentum_buffer ns_steps",
    "SGD momentum": "momentum_buffer",
    "Lion": "exp_avg",
}


def optimizer_detail(node: Any) -> str:
    """An optimizer's state dict in words: `Adam state for 12 parameters (lr 0.0003)`."""
    state = node["state"]
    groups = [group for group in node["param_groups"] if isinstance(group, dict)]
    keys = {key for slot in state.values() if isinstance(slot, dict) for key in slot if type(key) is str}
    keys |= {"ns_steps", "grad_averaging"}.intersection(*groups[:1])
    text = " ".join(sorted(keys - {"step", "RMS"}))
    name = next((name for name, pattern in _OPTIMIZERS.items() if re.fullmatch(pattern, text)), "optimizer")
    count = sum(len(group["params"]) for group in groups if isinstance(group.get("params"), (list, tuple)))
    rates = dict.fromkeys(f"{group['lr']:.4g}" for group in groups if type(group.get("lr")) is float)
    lr = f" (lr {listed(list(rates), 3)})" if rates else ""
    if not state:
        return f"optimizer without state, {counted(count, 'parameter')}{lr}"
    return f"{name} state for {counted(count if name == 'LBFGS' else len(state), 'parameter')}{lr}"


def optimizers(tree: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every optimizer's state dict in a tree, with its path."""
    return ((root.path, root.node) for root in _roots(tree) if root.kind == OPTIMIZER)


PEELED = "module."
INNER_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
# The one key that an averaged model keeps beside those of its module.
COUNTER = "n_averaged"
EXTRA_STATE = "_extra_state"  # what `get_extra_state` of a module returns, behind the name of the module


def without_wrappers(key: str) -> str:
    """The key as the bare module has it: one `module.` off the front, wrappers that begin with `_` off anywhere."""
    return key.removeprefix(PEELED) if "_" not in key else ".".join(_peeled(key)[1])


def wrappers(key: str) -> str:
    """The wrapper prefixes of a key, in order: `module._orig_mod.`; the empty text if it has none."""
    if "_" not in key:
        return PEELED if key.startswith(PEELED) and key != PEELED else ""
    return "".join(f"{part}." for part in _peeled(key)[0])


def _peeled(key: str) -> tuple[list[str], list[str]]:
    """The segments of a key that are wrappers', and the others."""
    *modules, name = key.split(".")
    peeled = [part for part in modules if part in INNER_WRAPPERS]
    others = [part for part in modules if part not in INNER_WRAPPERS]
    if others[:1] == ["module"]:
        peeled.insert(modules.index("module"), others.pop(0))
    return peeled, [*others, name]


def bare(path: Path) -> Path:
    """The path of an entry, with each key as the bare module has it."""
    return tuple(without_wrappers(part) if type(part) is str else part for part in path)


def paired(names: Iterable[str], wanted: Iterable[str], fix: Callable[[str], str] = lambda name: "") -> dict[str, str]:
    """For each wanted name the one of `names` for it: an equal one, else the one equal without wrappers' prefixes.

    Raises `Conflict` where two names would be one. fix: of that error, to leave out the name it is called with.
    """
    names = dict.fromkeys(names)
    wanted = dict.fromkeys(wanted)
    pairs = {name: name for name in wanted if name in names}
    short_names = [(without_wrappers(name), name) for name in wanted if name not in pairs]
    counts = Counter(short for short, _ in short_names)
    targets = {short: name for short, name in short_names if counts[short] == 1}
    for name in names if targets else ():
        if name in wanted or (target := targets.get(without_wrappers(name))) is None:
            continue
        if target in pairs:
            what = f"{pairs[target]} and {name} would both be {target!r}"
            why = "Without the wrappers' prefixes they are the same name. Nothing was changed."
            raise Conflict(what, why, fix(name))
        pairs[target] = name
    return pairs


def of_positions(name: str, old: Sequence[int] | None, new: Sequence[int] | None) -> str:
    """How `--resize` computes a square grid's positions for another grid: a ViT at another size. Empty for others."""
    is_named = re.search(r"(?<![a-z])pos(ition(al|s)?|_?emb\w*)?(?![a-z])", name.lower())
    if not is_named or not old or not new or min(len(old), len(new)) < 2 or old[-1] != new[-1]:
        return ""
    # Tables of a text model are no grid, though 1,024 is a square, and OPT's and BART's begin with 2 others.
    starts = (0, 1, 2) if len(old) > 2 or re.search("vi[st]|image", name.lower()) else (1,)
    for first in starts if {1}.issuperset([*old[:-2], *new[:-2]]) else ():
        if all(count > first and isqrt(count - first) ** 2 == count - first for count in (old[-2], new[-2])):
            return f"bicubic(cls={first})" if first else "bicubic"
    return ""


def is_metadata(metadata: Any) -> bool:
    """True for the `_metadata` of a state dict as torch writes it: names of modules, each with plain facts."""
    return isinstance(metadata, dict) and all(
        type(name) is str
        and is_text(name)
        and type(facts) is dict
        and all(type(key) is str and is_text(key) and type(value) in (int, bool) for key, value in facts.items())
        for name, facts in metadata.items()
    )


def differences(pair: Sequence[Mapping[Any, Any]], names: Sequence[str], *, types: bool = True) -> Iterator[str]:
    """The names, shapes and types in which two state dicts do not agree, in words. names: what the two are called."""
    left, right = pair
    for node, other, where in ((left, right, names[0]), (right, left, names[1])):
        if only := [str(key) for key in node if key not in other]:
            yield f"{len(only):,} only in {where} ({listed(only, 2)})"
    for key, value in right.items():
        before = left.get(key)
        if isinstance(value, TensorEntry) and isinstance(before, TensorEntry):
            if before.shape != value.shape:
                yield f"{key!s} is {list(before.shape)} in {names[0]}, {list(value.shape)} in {names[1]}"
            elif before.dtype is not value.dtype and types:
                yield f"{key!s} is {before.dtype} in {names[0]}, {value.dtype} in {names[1]}"
        elif key in left and type(before) is not type(value):
            yield f"{key!s} is a tensor in only one of {names[0]} and {names[1]}"
