"""Adapters merged into the weights that they are for: every key of the adapter is used, or nothing is merged.

Where a change goes follows from the names and shapes of the base; `changes` computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from math import prod
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.nodes import same_kind
from ckptool.checkpoint.tree import memories
from ckptool.commands import OUT, OUT_SAFETENSORS, PATTERN, command
from ckptool.conventions.adapter_keys import BIAS, EMBEDDING, KOHYA, LORA, TOKENS, WHOLE, Places, orientation
from ckptool.errors import Conflict, NoMatch, Unsupported, counted, listed
from ckptool.formats.folder import ADAPTER
from ckptool.transforms.average import alike
from ckptool.transforms.lora.adapters import Adapter, Delta, matches, scale_of
from ckptool.transforms.lora.changes import Misfit, as_type, changed, with_rows

_MOST_PARAMETERS = 6  # of a module, for all orders to be tried
_OWN_HEAD = "Save the base with a head of its own, and tie_word_embeddings false in its config.json"


class AdapterMerge:
    """An adapter merged into a base, its changes times `multiplier`; `tree` is the state dict. Reads nothing yet.

    is_ordered: the base has its tensors in the order of the model, even where that is the order of their names too.
    ties: see `MemoryTree.ties`.  computed, replaced, added: the base's names of tensors that were computed, taken
    whole, and new.  count: of the adapter's keys.

    Raises `NoMatch` where keys of the adapter have no place in the base, or targets no keys in the adapter, `Conflict`
    for shapes that do not fit and ties that would be lost, `Unsupported` for weights that are not floats.
    """

    def __init__(
        self,
        base: Mapping[Any, Any],
        adapter: Adapter,
        base_name: str,
        multiplier: float,
        is_ordered: bool,
        ties: Mapping[str, str] | None,
    ) -> None:
        self.base, self.adapter, self.multiplier, self.is_ordered = base, adapter, multiplier, is_ordered
        self.base_name, self.name, self.ties = base_name, adapter.name, {**(ties or {})}
        self.tensors = {key: item for key, item in base.items() if type(key) is str and isinstance(item, TensorEntry)}
        self.parameters: dict[Delta, list[str]] = {}  # changes of single parameters, with the possible names of each
        targets = [target.rpartition(".")[::2] for target in adapter.names("target_parameters")]
        for delta in (delta for delta in adapter.deltas if delta.method == LORA):
            names = [name for owner, name in targets if f".{delta.module}".endswith(f".{owner}") or not owner]
            self.parameters |= {delta: list(dict.fromkeys(names))} if names else {}
        self.places = Places((key for key in base if type(key) is str), underscored=adapter.scheme == KOHYA)
        self.count = sum(len(delta.keys) for delta in adapter.deltas)
        self.merged: dict[str, TensorEntry] = {}
        self.changed: dict[str, tuple[int, ...]] = {}  # names, and the adapter's tensors that changed them
        self.replaced: list[str] = []
        self.added: list[str] = []
        self.turns = orientation(self.tensors)
        self.expert_turns: frozenset[bool] | None = None
        deltas = sorted(adapter.deltas, key=lambda delta: delta.method != WHOLE)  # whole tensors first
        for component in dict.fromkeys(delta.component for delta in deltas):
            self.places.settle(component, [self._spellings(delta) for delta in deltas if delta.component == component])
        replacements = [delta for delta in deltas if delta.method == WHOLE]
        self.whole = {self.places.in_base(each.component, each.module): each.factors[""] for each in replacements}
        self._settle_parameters()
        if unplaced := [delta for delta in deltas if not self._apply(delta)]:
            for name, delta in ((f"{delta.module}.weight", delta) for delta in unplaced if delta.method == LORA):
                if source := self.ties.get(self.places.in_base(delta.component, name)):
                    self._refuse_one_side(name, f"{source} in the model", _OWN_HEAD)
            keys = [key for delta in unplaced for key in delta.keys.values()]
            what = f"{len(keys):,} of {counted(self.count, 'key')} of {self.name} have no place in {base_name}: "
            what += f"{listed(keys)}"
            why = "It is for another base or for more than this part, or a key is misspelt. Nothing was written."
            fix = f"See what the adapter is for: {command('inspect', self.name)}; leave keys out on purpose: "
            fix += f"{command('edit', self.name, drop=PATTERN, out=OUT)}"
            raise NoMatch(what, why, fix)
        self._refuse_missing()
        self._refuse_untied(ties is None)
        self.tree = same_kind(base, {key: self.merged.get(key, base.get(key)) for key in (*base, *self.added)})
        self.computed = [key for key in self.changed if key not in self.replaced or len(self.changed[key]) > 1]

    # Changes

    def _spellings(self, delta: Delta) -> list[str]:
        """The possible names of the tensor that a change is for, without a prefix that the base may have."""
        if delta.method == WHOLE:
            return [delta.module]
        names = ["bias"] if delta.method == BIAS else ["weight", "in_proj_weight"]
        return [f"{delta.module}.{name}" for name in (*self.parameters.get(delta, ()), *names)]

    def _settle_parameters(self) -> None:
        """Finds the parameter that each change is for. PEFT wraps a module once for each parameter, in the module's
        order, the first innermost: told by shapes, else by a base that is in that order.
        """
        modules: dict[str, list[Delta]] = {}
        for delta in sorted(self.parameters, key=lambda delta: -delta.depth):
            modules.setdefault(delta.module, []).append(delta)
        order = {key: index for index, key in enumerate(self.tensors)}
        for module, deltas in modules.items():
            component, names = deltas[0].component, self.parameters[deltas[0]]
            pairs = ((self.places.key(component, [f"{module}.{name}"]), name) for name in names)
            present = {key: name for key, name in pairs if key in self.tensors}
            if not present:  # a name without its module: every module may have a `down_proj`
                self.parameters = {delta: names for delta, names in self.parameters.items() if delta not in deltas}
            if not len(deltas) <= len(present) <= _MOST_PARAMETERS:
                continue
            fits = list[tuple[str, ...]]()
            for keys in permutations(sorted(present, key=lambda key: order[key]), len(deltas)):
                for delta, key in zip(deltas, keys, strict=True):
                    # A change of a parameter [out, in] or [in, out], or of one of each expert.
                    shape, sides = self.tensors[key].shape, (delta.factors["B"].shape[0], delta.factors["A"].shape[1])
                    if sorted(sides) != sorted(shape[-2:]) or delta.rank % max(1, prod(shape[:-2])):
                        break
                else:
                    fits.append(keys)
            if len(fits) > 1 and not self.is_ordered and sorted(present) == sorted(present, key=lambda key: order[key]):
                what = f"which change is for which of {listed(sorted(present))} is not known"
                why = "They have one shape, PEFT takes them in the module's order, but this file sorts names."
                fix = "Name a base that keeps the order: its state_dict(), saved with torch.save"
                raise Unsupported(f"{self.name}: {what}", f"{why} Nothing was written.", fix)
            for delta, key in zip(deltas, fits[0] if fits else (), strict=False):
                self.parameters[delta] = [present[key]]

    def _target_key(self, delta: Delta) -> str | None:
        tied = self.places.in_base(delta.component, f"{delta.module}.weight") if delta.method == TOKENS else ""
        return self.places.key(delta.component, self._spellings(delta)) or self.ties.get(tied)

    def _apply(self, delta: Delta) -> bool:
        """Applies a change to its tensor; False where the base has no such tensor."""
        key = self._target_key(delta)
        name = key or self.places.in_base(delta.component, delta.module) or delta.module
        if delta.method == WHOLE:  # PEFT saves tied tensors under each of their names
            view = self.tensors[key].view if key in self.tensors else None
            same = (other for other in self.replaced if view and self.tensors[other].view == view)
            twin = self.whole.get(self.ties.get(name) or next(same, ""))
            if twin is not None and alike(twin, delta.factors[""]):
                delta = replace(delta, factors={"": twin})
                if key is None:
                    del self.ties[name]
                    return True
        if key is None:
            saved = any(f".{module}." in f".{delta.module}" for module in self.adapter.names("modules_to_save"))
            if delta.method != WHOLE or not saved or name in self.merged:
                return False
            self.added.append(name)
            self.merged[name] = delta.factors[""]
            return True
        before, tied, is_twice = self.changed.get(key, ()), [key], False
        if delta.method == TOKENS:  # PEFT writes them to tied weights, too, where another change would be lost
            tied = [name for name, value in self.tensors.items() if value.view == self.base[key].view]
            is_twice = any(self.changed.get(name, before) != before for name in tied)
        expected = 1 if key in self.replaced else 0
        if is_twice or (delta.method != TOKENS and len(before) > expected):
            what = f"{self.name} changes {key} twice"
            raise Conflict(what, "Two of its modules map to one tensor. Nothing was written.")
        try:
            self.merged[key] = self._changed_entry(key, delta)
        except Misfit as misfit:
            what = f"{self.name}: the change to {delta.module} is for {list(misfit.args[0])}, and "
            what += f"{key} of {self.base_name} is {list(self.base[key].shape)}"
            fix = "If its vocabulary was resized, save a resized base first: model.resize_token_embeddings(…)"
            fix *= delta.method == WHOLE and misfit.args[0][1:] == self.base[key].shape[1:]
            raise Conflict(what, "The adapter was trained on a different base. Nothing was written.", fix) from None
        except Conflict as error:
            raise error.within(f"{self.name}: {delta.module}") from None
        before = () if delta.method == WHOLE else before
        self.replaced += [key] if delta.method == WHOLE else []
        self.merged |= dict.fromkeys(tied, self.merged[key])
        self.changed |= dict.fromkeys(tied, (*before, *(id(factor.storage) for factor in delta.factors.values())))
        return True

    def _changed_entry(self, key: str, delta: Delta) -> TensorEntry:
        weight, replacement = self.merged.get(key, self.base[key]), delta.factors.get("")
        is_counter = isinstance(weight, TensorEntry) and replacement is not None and replacement.dtype is weight.dtype
        if not isinstance(weight, TensorEntry) or not (weight.dtype.is_float or is_counter):
            what = f"{self.base_name}: {key} is quantized, or not of a floating-point type"
            raise Unsupported(what, "An adapter is added to plain weights. Nothing was written.")
        if replacement is not None:
            if replacement.shape != weight.shape:
                raise Misfit(replacement.shape)
            return as_type(replacement, weight)
        if delta.method == TOKENS:
            return with_rows(delta.factors["tokens"], self.adapter.tokens(delta.module), weight)
        scale, is_parameter = delta.scale, delta in self.parameters
        experts = weight.shape[0] if is_parameter and len(weight.shape) == 3 else 0
        if "B" in delta.factors and self.adapter.config.get("target_parameters"):
            name = f"{delta.module}.{key.rpartition('.')[2]}" if is_parameter else delta.module  # which patterns match
            _, scale = scale_of(self.adapter, self.adapter.config, name, {}, LORA, delta.rank, experts or 1)
        return changed(
            delta,
            weight,
            scale * self.multiplier,
            experts=experts > 0,
            peft=not delta.keys.get("magnitude", "").endswith("dora_scale"),
            turned=lambda: self._is_turned(key, delta),
        )

    def _is_turned(self, key: str, delta: Delta) -> bool:
        """True for a square weight that is [in, out]: told for experts by the adapter's other changes, else by other
        weights of the base, or by the configuration, where PEFT leaves the kind of the last layer that it wrapped.

        Raises `Unsupported` where nothing tells.
        """
        products = [other for other in self.adapter.products if "B" in other.factors and not other.embedding]
        if delta in self.parameters and len(self.tensors[key].shape) == 3:
            if self.expert_turns is None:
                pairs = [(other, self.tensors.get(self._target_key(other) or "")) for other in products]
                self.expert_turns = frozenset(
                    other.factors["B"].shape[0] == entry.shape[-1]
                    for other, entry in pairs
                    if entry is not None and len(entry.shape) == 3 and entry.shape[-1] != entry.shape[-2]
                )
            votes = self.expert_turns
        else:
            in_attention = any(".base_layer.out_proj." in name for name in delta.keys.values())  # only the config tells
            votes = frozenset() if in_attention else self.turns(key)
            matrices = [other for other in products if len(other.factors["A"].shape) == 2]
            if len(votes) > 1 and self.is_ordered:  # as are the layers that PEFT wraps
                order = {key: index for index, key in enumerate(self.tensors)}
                matrices = sorted(matrices, key=lambda other: order.get(self._target_key(other) or "", -1))[-1:]
            names = {other.module.rpartition(".")[2] for other in matrices}
            if not votes or (len(votes) > 1 and names == {delta.module.rpartition(".")[2]}):
                votes = frozenset({bool(self.adapter.config.get("fan_in_fan_out"))})
        if len(votes) != 1:
            what = f"{self.name}: {key} of {self.base_name} is square, [out, in] or [in, out]"
            raise Unsupported(what, "No other weights settle it. Nothing was written.")
        return next(iter(votes))

    # Refusals

    def _refuse_missing(self) -> None:
        """Raises `NoMatch` where PEFT's configuration names modules that the adapter has nothing for."""
        config = self.adapter.config
        removed, added = next(iter(self.places.prefixes.values()), ("", ""))
        no_filter = not any(config.get(field) for field in ("exclude_modules", "layers_to_transform", "layers_pattern"))
        targets = config.get("target_modules")  # ends of names, or an expression for whole names
        ends = tuple(f".{end}" for end in self.adapter.names("target_modules"))
        saved, handled = self.adapter.names("modules_to_save"), {*self.changed, *self.added}
        missing = []
        for key, value in self.tensors.items() if saved or targets else ():
            if key in handled or not key.startswith(added):
                continue
            name = removed + key.removeprefix(added)
            is_named = any(f".{module}." in f".{name}" for module in saved)
            if not is_named and no_filter and name.endswith(".weight") and len(value.shape) > 1:
                module = name.removesuffix(".weight")
                is_in_text = isinstance(targets, str) and matches("target_modules", targets, module)
                is_named = is_in_text or f".{module}".endswith(ends)
            missing += [key] if is_named else []
        if missing:
            what = f"{self.name} has nothing for {counted(len(missing), 'tensor')} of modules that its configuration "
            what += f"names: {listed(missing)}"
            fix = f"If it is to leave them as they are, its {ADAPTER} must not name them"
            raise NoMatch(what, "It is incomplete, or was trained on a different base. Nothing was written.", fix)

    def _refuse_untied(self, is_unknown: bool) -> None:
        """Raises `Conflict` where tied tensors are not all changed in the same way; `Unsupported` for a changed
        embedding to which the configuration ties an unknown head."""
        is_ensured = bool(self.adapter.config.get("ensure_weight_tying"))
        is_unknown &= not is_ensured
        if embeddings := [name for name in self.changed if is_unknown and EMBEDDING.fullmatch(name)]:
            what = f"{self.name} changes {listed(embeddings)}, and config.json ties the head to one"
            raise Unsupported(what, "It is unknown which tensors its library ties. Nothing was written.", _OWN_HEAD)
        apart = (
            f"Write the base without ties first: {command('convert', self.base_name, ties='copy', out=OUT_SAFETENSORS)}"
        )
        sharing: dict[int, list[str]] = {}  # by memory, the tensors in it
        for key, number in memories({key: value for key, value in self.tensors.items() if value.numel}).items():
            sharing.setdefault(number, []).append(key)
        for keys in sharing.values():
            if others := [key for key in keys if self.changed.get(key) != self.changed.get(keys[0])]:
                first, second = sorted([keys[0], others[0]], key=lambda name: name not in self.changed)
                self._refuse_one_side(first, second, apart)
        changed = {self._target_key(delta) for delta in self.adapter.deltas if delta.method != TOKENS}
        for name, source in {} if is_ensured else self.ties.items():
            if source in changed and name not in self.tensors and name not in self.added:
                self._refuse_one_side(source, f"{name} in the model", _OWN_HEAD)

    def _refuse_one_side(self, changed: str, unchanged: str, fix: str) -> None:
        why = "It does not change both in the same way. Nothing was written."
        raise Conflict(f"{self.name} changes {changed}, which is tied to {unchanged}", why, fix)
