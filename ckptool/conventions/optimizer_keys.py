"""The keys of an optimizer's state: flattened ones, as FSDP and torchtitan write them, and numbers that became text.

Source: torch/distributed/checkpoint/state_dict.py (`flatten_optimizer_state_dict`): `state.NAME.KEY` for every entry of
a parameter's state, of which dictionaries are flattened as well, and `param_groups.NAME.OPTION` for every option of its
group; torchtitan stores those below `optimizer.`. torch.distributed.checkpoint writes the keys of dictionaries as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.nodes import same_kind
from ckptool.errors import Corrupt

# What optimizers count in one number, whatever the parameter (torch/optim/{adam,nadam,asgd}.py; LaProp, old NAdams).
NUMBERS = frozenset("step mu_product eta mu m_schedule exp_avg_lr_1 exp_avg_lr_2".split())
# What is of other shapes than the parameter: Adafactor's rows and columns and norm, bitsandbytes' scales of codes.
FACTORS = NUMBERS.union(
    "row_var col_var exp_avg_sq_row exp_avg_sq_col RMS qmap1 qmap2 absmax1 absmax2 unorm_vec".split()
)
PARAMETER_LISTS = frozenset({"params", "param_names"})  # of a group
_STATE, _GROUPS = "state.", "param_groups."
RESTORED = "optimizer-keys"  # the code of notes on keys that are shown in another form
_SMALL = 1 << 10  # bytes of an option that is a tensor, as a learning rate may be
MAX_PLACES = 16  # prefixes of flattened optimizers in one dictionary
MAX_LEVELS = 16  # of dictionaries in the state of one parameter; Shampoo has three


class FlatKey(NamedTuple):
    """A key of a flattened optimizer: `optimizer.`, `state.` or `param_groups.`, a parameter's name, what is of it."""

    prefix: str
    section: str
    name: str
    inner: tuple[str, ...]

    def text(self, name: str) -> str:
        """The key for a parameter of that name."""
        return f"{self.prefix}{self.section}{'.'.join((name, *self.inner))}"


def flat_keys(node: Any) -> dict[Any, FlatKey]:
    """The keys of flattened optimizers in a dictionary; none in anything else, or where nested ones are there, too."""
    names: dict[str, set[str]] = {}  # of the parameters below each prefix
    texts = [key for key in node if type(key) is str] if isinstance(node, dict) else []
    for text in (text for text in texts if _GROUPS in text):
        prefix, _, rest = text.partition(_GROUPS)
        name, _, option = rest.rpartition(".")
        if name and option and (not prefix or prefix.endswith(".")):
            names.setdefault(prefix, set()).add(name)
    nested_keys = {key for prefix in names for key in ([prefix[:-1]] if prefix else ["state", "param_groups"])}
    if not names or len(names) > MAX_PLACES or not nested_keys.isdisjoint(node):
        return {}
    sections = [(prefix, section) for prefix in names for section in (_STATE, _GROUPS)]
    keys: dict[Any, FlatKey] = {}
    for text in texts:
        prefix, section = next((pair for pair in sections if text.startswith("".join(pair))), ("", ""))
        name, _, leaf = text.removeprefix(prefix + section).rpartition(".")
        if not (section and name):
            continue
        # NAME.KEY…: the name is the longest of the groups' names that it begins with, else all but the last part.
        parameter, inner = name, [leaf]
        while section == _STATE and parameter not in names[prefix] and len(inner) < MAX_LEVELS and "." in parameter:
            parameter, _, part = parameter.rpartition(".")
            inner.insert(0, part)
        is_known = section == _GROUPS or parameter in names[prefix]
        keys[text] = FlatKey(prefix, section, *((parameter, (*inner,)) if is_known else (name, (leaf,))))
    return keys


def nested(tree: Any) -> Any:
    """The tree with flattened optimizers as `state` by name and `param_groups`, below their prefix; else the same tree.

    They are looked for at the top and one level below. Raises `Corrupt` for a key that leads through a plain value.
    """
    if not isinstance(tree, dict):
        return tree
    children = {key: _unflattened(value) for key, value in tree.items() if isinstance(value, dict)}
    is_same = all(children[key] is tree[key] for key in children)
    return _unflattened(tree if is_same else same_kind(tree, {**tree, **children}))


def _unflattened(node: dict[Any, Any]) -> dict[Any, Any]:
    """The dictionary with `state` and `param_groups` in place of the flattened keys that begin with each prefix."""
    keys = flat_keys(node)
    if not keys:
        return node
    options: dict[str, dict[str, dict[str, Any]]] = {}
    result: dict[Any, Any] = same_kind(node, {})
    for key, value in node.items():
        if (flat := keys.get(key)) is None:
            result[key] = value
            continue
        parent = result.setdefault(flat.prefix[:-1], {}) if flat.prefix else result
        state = parent.setdefault("state", {})
        parent.setdefault("param_groups", [])
        if flat.section == _GROUPS:
            options.setdefault(flat.prefix, {}).setdefault(flat.name, {})[flat.inner[0]] = value
            continue
        for part in (flat.name, *flat.inner[:-1]):
            state = state.setdefault(part, {})
            if not isinstance(state, dict):
                raise Corrupt(f"an optimizer's key {key[:200]} leads through another value", "It was damaged.")
        state[flat.inner[-1]] = value
    for prefix, names in options.items():
        (result[prefix[:-1]] if prefix else result)["param_groups"] += _groups(names)
    return result


def flat_again(tree: Any, before: Any) -> Any:
    """The tree with the optimizers flattened that are so in `before`, of which `nested` has made it."""
    if tree is before or not isinstance(tree, dict):
        return tree
    children = {key: _flat_as(node, before.get(key)) for key, node in tree.items() if isinstance(node, dict)}
    return _flat_as(same_kind(tree, {**tree, **children}), before)


def _flat_as(node: dict[Any, Any], before: Any) -> dict[Any, Any]:
    prefixes = {flat.prefix for flat in flat_keys(before).values()}
    items: dict[Any, Any] = {}
    for key, value in node.items():
        if f"{key}." in prefixes:
            items |= {f"{key}.{inner}": entry for inner, entry in flattened(value).items()}
        elif "" not in prefixes or key not in ("state", "param_groups"):
            items[key] = value
    return same_kind(node, items | (flattened(node) if "" in prefixes else {})) if prefixes else node


def _groups(options: Mapping[str, dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """The parameter groups: names with the same options, in the order in which they come."""
    groups: dict[Any, dict[str, Any]] = {}
    for name, values in options.items():
        texts = []  # the same for equal tensors, plain values, and lists of these
        for option, value in sorted(values.items()):
            if isinstance(value, TensorEntry):
                data = value.bytes() if value.nbytes <= _SMALL else value.view
                texts.append((option, repr((value.dtype, value.shape, data))))
                continue
            types = {*map(type, value if isinstance(value, (list, tuple)) else (value,))}
            is_plain = types <= {str, int, float, bool, type(None)}
            texts.append((option, repr(value) if is_plain else f"<{id(value)}>"))
        groups.setdefault(tuple(texts), {**values, "params": []})["params"].append(name)
    return groups.values()


def flattened(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The same with `state.NAME.KEY` and `param_groups.NAME.OPTION`; its state must be keyed by name."""
    flat: dict[str, Any] = {}
    for name, slot in optimizer["state"].items():
        flat.update(_flat(f"state.{name}", slot))
    for group in optimizer["param_groups"]:
        options = {key: value for key, value in group.items() if key != "params"}
        flat |= {f"param_groups.{name}.{key}": value for name in group["params"] for key, value in options.items()}
    return flat


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for inner, child in value.items():
            yield from _flat(f"{key}.{inner}", child)
    else:
        yield key, value


def with_numbers(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The optimizer with numbers as keys of its state where they became text: `"0"`, where a group names 0."""
    groups = [group.get("params") for group in optimizer["param_groups"] if isinstance(group, dict)]
    slots = {slot for group in groups if isinstance(group, (list, tuple)) for slot in group if type(slot) in (int, str)}
    numbers = {str(slot): slot for slot in slots if type(slot) is int and str(slot) not in slots}
    state = optimizer["state"]
    if not any(type(key) is str and key in numbers and numbers[key] not in state for key in state):
        return optimizer
    return {**optimizer, "state": {numbers.get(key, key): value for key, value in state.items()}}
