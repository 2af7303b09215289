"""Adapters merged into the weights they are for: every key of the adapter is used, or nothing is.

Where a change goes follows from the names and shapes of the base; `changes` computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.adapter_keys import KOHYA, PEFT
from ckptool.checkpoint.commands import OUT, OUT_SAFETENSORS, Advice, command
from ckptool.checkpoint.nodes import same_kind
from ckptool.errors import Conflict, NoMatch, Unsupported, counted, listed, printable
from ckptool.transforms.blockwise import TensorValues, computed_tensor
from ckptool.transforms.lora.adapters import Adapter, Delta, Whole
from ckptool.transforms.lora.changes import Change, as_type, like, through
from ckptool.transforms.lora.places import Places, Prefix

if TYPE_CHECKING:
    from ckptool.checkpoint.numeric import Array

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "shared")
_HEADS = ("lm_head", "output", "embed_out")


@dataclass(frozen=True, slots=True)
class Merged:
    """A state dict with an adapter merged into it.

    changed, replaced, added: the base's names of tensors that were computed, taken whole, and new.
    moved: differences between the adapter's names and the base's, in words.  keys: how many of the adapter were used.
    """

    tree: dict[Any, Any]
    changed: tuple[str, ...]
    replaced: tuple[str, ...]
    added: tuple[str, ...]
    moved: tuple[str, ...]
    keys: int


def merge(
    base: Mapping[Any, Any], adapter: Adapter, *, names: tuple[str, str], multiplier: float = 1.0, tied: bool = False
) -> Merged:
    """The state dict with the adapter's changes, times `multiplier`. Reads nothing yet.

    names: of the base and the adapter.  tied: the model's configuration says that its head is its embedding.
    Raises `NoMatch` where keys of the adapter have no place in the base, or targets no keys in the adapter; `Conflict`
    for shapes that do not fit and ties that would be lost; `Unsupported` for weights of no floating type.
    """
    return _Merge(base, adapter, names, multiplier).merged(tied)


class _Merge:
    def __init__(self, base: Mapping[Any, Any], adapter: Adapter, names: tuple[str, str], multiplier: float) -> None:
        self.base, self.adapter, self.multiplier = base, adapter, multiplier
        self.base_name, self.name = names
        self.parameters = dict(_parameters_of(adapter))
        keys = [key for key, value in base.items() if type(key) is str]
        self.places = Places(keys, underscored=adapter.scheme == KOHYA)
        self.tree: dict[str, TensorEntry] = {}
        self.changed: dict[str, tuple[int, ...]] = {}  # and by which tensors of the adapter
        self.replaced: list[str] = []
        self.added: list[str] = []
        self.lost: list[str] = []
        self.prefixes: dict[str, Prefix] = {}
        self.votes: dict[str, set[bool]] = {}  # of layers by their names, and of all: see `is_conv1d`

    def merged(self, tied: bool) -> Merged:
        components = [each.component for each in self.adapter.deltas]
        components += [each.component for each in self.adapter.whole]
        for component in dict.fromkeys(components):
            wanted = [self._spellings(each) for each in self.adapter.deltas if each.component == component]
            wanted += [[each.name] for each in self.adapter.whole if each.component == component]
            self.prefixes[component] = self.places.prefix(wanted)
        for whole in self.adapter.whole:
            self._replace(whole)
        for delta in self.adapter.deltas:
            self._change(delta)
        if self.lost:
            self._refuse_lost()
        self._refuse_missing()
        self._refuse_untied(tied)
        tree = same_kind(self.base, {})
        for key, value in self.base.items():
            tree[key] = self.tree.get(key, value)
        for key in self.added:
            tree[key] = self.tree[key]
        moved = tuple(dict.fromkeys(str(prefix) for prefix in self.prefixes.values() if prefix != Prefix()))
        count = sum(len(delta.keys) for delta in self.adapter.deltas) + len(self.adapter.whole)
        changed = [key for key in self.changed if key not in self.replaced or len(self.changed[key]) > 1]
        return Merged(tree, tuple(changed), tuple(self.replaced), tuple(self.added), moved, count)

    # Places

    def _spellings(self, delta: Delta) -> list[str]:
        """The names, without a prefix that the base may have, of the weight that a change is for."""
        if delta in self.parameters:
            return [f"{delta.module}.{name}" for name in self.parameters[delta]]
        return [f"{delta.module}.{name}" for name in (("weight", "in_proj_weight") if delta.factors else ("bias",))]

    def _find(self, component: str, names: Sequence[str]) -> str | None:
        prefix = self.prefixes[component]
        return next((key for name in names if (key := self.places.key(name, prefix)) is not None), None)

    def _refuse_lost(self) -> None:
        count = sum(len(delta.keys) for delta in self.adapter.deltas) + len(self.adapter.whole)
        raise NoMatch(
            f"{len(self.lost):,} of {counted(count, 'key')} of {self.name} have no place in {self.base_name}: "
            f"{listed([printable(key) for key in self.lost])}",
            "It is for another base, for more than this part of it, or a key is misspelt. Nothing was written.",
            Advice(
                "See what the adapter is for: ",
                command("inspect", self.name),
                "; leave keys out on purpose: ",
                command("edit", self.name, drop="PATTERN", out=OUT),
            ),
        )

    def _refuse_missing(self) -> None:
        """Raises `NoMatch` where PEFT's configuration lists modules that the adapter has nothing for."""
        config, fields = self.adapter.config, ("exclude_modules", "layers_to_transform", "layers_pattern")
        if any(config.get(field) for field in fields):
            return
        ends = tuple(f".{target}" for target in self.adapter.names("target_modules"))
        added = self.prefixes["base_model.model."].added if "base_model.model." in self.prefixes else ""
        done = {*self.changed, *self.added}
        missing = [
            key
            for key, value in self.base.items()
            if type(key) is str
            and key not in done
            and key.startswith(added)
            and f".{key}".removesuffix(".weight").endswith(ends)
            and key.endswith(".weight")
            and isinstance(value, TensorEntry)
            and len(value.shape) > 1
        ]
        if ends and missing:
            raise NoMatch(
                f"{self.name} has nothing for {counted(len(missing), 'module')} that its configuration targets: "
                f"{listed([printable(key) for key in missing])}",
                "It is incomplete, or for another base. Nothing was written.",
            )

    def _refuse_untied(self, tied: bool) -> None:
        """Raises `Conflict` where only one side of tied tensors is changed, or each in another way."""
        views: dict[tuple[Any, ...], list[str]] = {}
        for key, value in self.base.items():
            if isinstance(value, TensorEntry) and type(key) is str:
                views.setdefault(value.view, []).append(key)
        for keys in views.values():
            if len(keys) > 1 and len({self.changed.get(key) for key in keys}) > 1:
                self._refuse_one_side(next(key for key in keys if key in self.changed), keys)
        if tied and not self.adapter.config.get("ensure_weight_tying"):
            modules = {key.split(".")[-2]: key for key in (*self.base, *self.added) if type(key) is str and "." in key}
            if not modules.keys() & set(_HEADS):
                for key in self.changed:
                    if key.split(".")[-2:-1] and key.split(".")[-2] in _EMBEDDINGS:
                        self._refuse_one_side(key, [key, "the head"], by_config=True)

    def _refuse_one_side(self, changed: str, keys: Sequence[str], by_config: bool = False) -> None:
        others = listed([printable(key) for key in keys if key != changed])
        apart = command("convert", self.base_name, ties="copy", out=OUT_SAFETENSORS)
        raise Conflict(
            f"{self.name} changes {printable(changed)}, which is tied to {others}{' by config.json' * by_config}",
            "The adapter was trained with the one changed and the other as it was. Nothing was written.",
            "Save the base with a head of its own, and tie_word_embeddings false in its config.json"
            if by_config
            else Advice("Write the base without ties first: ", apart),
        )

    # Changes

    def _replace(self, whole: Whole) -> None:
        key = self._find(whole.component, [whole.name])
        if key is None:
            saved = self.adapter.names("modules_to_save")
            module = f".{whole.name.rpartition('.')[0]}."
            name = self.prefixes[whole.component].of(whole.name) or whole.name
            if any(f".{each}." in module for each in saved) and name not in self.tree:
                self.tree[name] = whole.entry
                self.added.append(name)
            else:
                self.lost.append(whole.key)
            return
        old = self.base[key]
        is_counter = isinstance(old, TensorEntry) and old.dtype is whole.entry.dtype and not old.dtype.is_float
        entry = old if is_counter else self._weight(key)
        if entry.shape != whole.entry.shape:
            self._refuse_shape(key, whole.name, whole.entry.shape)
        self.tree[key] = as_type(whole.entry, entry)
        self.replaced.append(key)
        self.changed[key] = (id(whole.entry.storage),)

    def _change(self, delta: Delta) -> None:
        key = self._find(delta.component, self._spellings(delta))
        bias = self._find(delta.component, [f"{delta.module}.bias", f"{delta.module}.in_proj_bias"])
        if key is None or (delta.bias is not None and bias is None):
            self.lost.extend(
                delta.keys if key is None else [each for each in delta.keys if "bias" in each or "_b" in each]
            )
            return
        if delta.factors:
            self._put(key, self._with_change(key, self._weight(key), delta), delta)
        if delta.bias is not None and bias is not None:
            self._put(bias, self._with_bias(bias, delta, delta.bias), delta)

    def _put(self, key: str, entry: TensorEntry, delta: Delta) -> None:
        if len(self.changed.get(key, ())) > (key in self.replaced):
            raise Conflict(
                f"{self.name} changes {printable(key)} twice", "Two of its modules have one place. Nothing was written."
            )
        self.tree[key] = entry
        self.changed[key] = (*self.changed.get(key, ()), *(id(each.storage) for each in delta.factors.values()))

    def _weight(self, key: str) -> TensorEntry:
        value = self.tree.get(key, self.base[key])
        if not isinstance(value, TensorEntry) or not value.dtype.is_float:
            what = f"{self.base_name}: {printable(key)} is quantized, or of no floating type"
            raise Unsupported(what, "An adapter is added to plain weights. Nothing was written.")
        return value

    def _with_change(self, key: str, weight: TensorEntry, delta: Delta) -> TensorEntry:
        peft = self.adapter.scheme == PEFT
        parameter = delta in self.parameters
        try:
            change = Change(delta, weight, self.multiplier, parameter, peft, lambda: self.is_conv1d(key, delta))
        except Conflict as error:
            raise error.within(f"{self.name}: {printable(delta.module)}") from None
        if change.misfit:
            self._refuse_shape(key, delta.module, change.misfit)
        return change.applied(key.endswith("in_proj_weight"))

    def _with_bias(self, key: str, delta: Delta, bias: TensorEntry) -> TensorEntry:
        weight = self._weight(key)
        if bias.shape != weight.shape:
            self._refuse_shape(key, delta.module, bias.shape)
        before, after = TensorValues(weight), TensorValues(bias)
        scale = delta.bias_scale * self.multiplier

        def values(start: int, stop: int) -> Array:
            change = after.read(start, stop)
            change = through(change * change.dtype.type(scale), bias.dtype)
            return before.read(start, stop) + change

        return like(weight, computed_tensor(weight.dtype, weight.shape, values, (weight, bias)))

    def _refuse_shape(self, key: str, module: str, shape: Sequence[int]) -> None:
        weight = self.base[key]
        raise Conflict(
            f"{self.name}: the change to {printable(module)} is for {list(shape)}, and {printable(key)} of "
            f"{self.base_name} is {list(weight.shape)}",
            "The adapter is for another base. Nothing was written.",
        )

    def is_conv1d(self, key: str, delta: Delta) -> bool:
        """True for a square weight that is [in, out], as transformers' Conv1D has it.

        Told by layers that are not square and have a bias: those of the same name, else all of the base; else by the
        configuration, which PEFT writes for all layers at once.
        """
        if delta in self.parameters and len(self.base[key].shape) == 3:
            return self._experts_are_transposed(key)
        for name, value in self.base.items() if not self.votes else ():
            if type(name) is str and name.endswith(".weight") and isinstance(value, TensorEntry):
                bias = self.base.get(name.removesuffix("weight") + "bias")
                if len(value.shape) == 2 and value.shape[0] != value.shape[1] and isinstance(bias, TensorEntry):
                    for place in ("", _leaf(name)):
                        self.votes.setdefault(place, set()).add(bias.shape == value.shape[1:])
        self.votes.setdefault("", set())
        own = self.votes.get(_leaf(key)) or self.votes[""]
        return own == {True} if len(own) == 1 else bool(self.adapter.config.get("fan_in_fan_out"))

    def _experts_are_transposed(self, key: str) -> bool:
        """The same for experts, [experts, in, out]: told by those of the adapter that are not square."""
        votes: set[bool] = set()
        for delta in self.parameters:
            other = self._find(delta.component, self._spellings(delta))
            shape: tuple[int, ...] = self.base[other].shape if other is not None else ()
            if len(shape) == 3 and shape[1] != shape[2]:
                votes.add(delta.factors["B"].shape[0] == shape[2])
        if len(votes) != 1:
            what = f"{self.name}: {printable(key)} of {self.base_name} is square, [out, in] or [in, out]"
            raise Unsupported(what, "No other experts of the adapter tell which.")
        return votes.pop()


def _leaf(key: str) -> str:
    return (".." + key).split(".")[-2]


def _parameters_of(adapter: Adapter) -> Iterator[tuple[Delta, list[str]]]:
    """The changes of single parameters (`target_parameters`), with the names that each may be for, the likeliest first.

    PEFT wraps a module once for each parameter, in the order of its list: the first is the innermost.
    """
    targets = adapter.names("target_parameters")
    modules: dict[str, list[Delta]] = {}
    for delta in adapter.deltas:
        modules.setdefault(delta.module, []).append(delta)
    for module, deltas in modules.items():
        names = []
        for target in targets:
            owner, _, name = target.rpartition(".")
            if module == owner or module.endswith(f".{owner}") or not owner:
                names.append(name)
        for delta in deltas if names else ():
            place = len(deltas) - 1 - delta.depth
            yield delta, names[place : place + 1]
