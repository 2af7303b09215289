"""One object as Python's own value: containers, configuration, and what `python_values` and `numpy_arrays` know.

Source: the `__reduce__` methods of the standard library, torch, numpy 1 and 2, and omegaconf 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptool.checkpoint.nodes import Global, Object, canonical
from ckptool.checkpoint.numpy_arrays import array, array_type, element, scalar
from ckptool.errors import CkptoolError
from ckptool.pickles.plain.python_values import VALUES, stateless


def expand(node: Object) -> Any:
    """One object as Python's own value; where that is a container, its parts are still nodes. The node itself if it is unknown."""
    known = _SHAPES.get(canonical(node.fn))
    if known is not None:
        try:
            value = known(node)
        except (CkptoolError, TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
            return node  # not what the class itself would have written
        return node if value is NotImplemented else value
    if type(node.fn) is Global and node.fn.module == "omegaconf.nodes":
        return node.attributes.get("_val", node)
    return node


def is_known(node: Object) -> bool:
    """Whether its class is in the table here."""
    return canonical(node.fn) in _SHAPES


def _attributes(node: Object) -> Any:
    return NotImplemented if node.items or node.elements else dict(node.attributes)


def _items(node: Object) -> Any:
    return dict(node.items or {})


def _elements(node: Object) -> Any:
    return list(node.elements or ())


def _counter(node: Object) -> Any:
    first = node.args[0] if node.args else {}
    return {**first, **(node.items or {})} if isinstance(first, dict) else NotImplemented


def _deque(node: Object) -> Any:
    first = node.args[0] if node.args else []
    return [*first, *(node.elements or ())] if isinstance(first, (list, tuple)) else NotImplemented


def _dict_call(node: Object) -> Any:
    return _items(node) if not node.args else NotImplemented


def _list_call(node: Object) -> Any:
    first = node.args[0] if node.args else []
    return [*first, *(node.elements or ())] if isinstance(first, (list, tuple)) else NotImplemented


def _tuple_call(node: Object) -> Any:
    found = _list_call(node)
    return found if found is NotImplemented else tuple(found)


def _omegaconf(node: Object) -> Any:
    """A DictConfig or ListConfig: what its `_content` holds. None and missing values (`???`) stay those."""
    content = node.attributes["_content"]
    return content if isinstance(content, (dict, list, str, type(None))) else NotImplemented


def _inner(*names: str) -> Callable[[Object], Any]:
    """A wrapper around one dictionary, which is the attribute of one of these names."""

    def find(node: Object) -> Any:
        return next(
            (value for name in names if isinstance(value := node.attributes.get(name), (dict, Object))), NotImplemented
        )

    return find


def _dict_or_attributes(node: Object) -> Any:
    """A dictionary with attribute access: its items, or its attributes where it keeps them there only."""
    return dict(node.items if node.items is not None else node.attributes)


def _size(node: Object) -> Any:
    (sizes,) = stateless(node)
    return tuple(sizes) if isinstance(sizes, (tuple, list)) else NotImplemented


def _device(node: Object) -> Any:
    kind, *index = stateless(node)
    return f"{kind}:{index[0]}" if index and index[0] is not None else str(kind)


def _layout(node: Object) -> Any:
    (name,) = stateless(node)
    return name if type(name) is str else NotImplemented


def _array_or_node(node: Object) -> Any:
    try:
        return array(node)
    except CkptoolError:
        return NotImplemented


def _scalar_value(node: Object) -> Any:
    try:
        found = scalar(node)
    except CkptoolError:
        return NotImplemented
    if found is NotImplemented:
        return found
    value = element(found.type, found.data)
    return found if value is NotImplemented else value


def _dtype_name(node: Object) -> Any:
    try:
        return str(array_type(node))
    except CkptoolError:
        return NotImplemented


_SHAPES: dict[str, Callable[[Object], Any]] = {
    **VALUES,
    "numpy.core.multiarray._reconstruct": _array_or_node,
    "numpy.core.numeric._frombuffer": _array_or_node,
    "numpy.core.multiarray.scalar": _scalar_value,
    "numpy.dtype": _dtype_name,
    "argparse.Namespace": _attributes,
    "types.SimpleNamespace": _attributes,
    "collections.defaultdict": _items,
    "collections.Counter": _counter,
    "collections.deque": _deque,
    "builtins.dict": _dict_call,
    "builtins.list": _list_call,
    "builtins.tuple": _tuple_call,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "omegaconf.dictconfig.DictConfig": _omegaconf,
    "omegaconf.listconfig.ListConfig": _omegaconf,
    "pytorch_lightning.utilities.parsing.AttributeDict": _dict_or_attributes,
    "lightning_fabric.utilities.data.AttributeDict": _dict_or_attributes,
    "lightning.fabric.utilities.data.AttributeDict": _dict_or_attributes,
    "lightning.pytorch.utilities.parsing.AttributeDict": _dict_or_attributes,
    "yacs.config.CfgNode": _items,
    "easydict.EasyDict": _dict_or_attributes,
    "addict.Dict": _items,
    "addict.addict.Dict": _items,
    "box.Box": _items,
    "box.box.Box": _items,
    "box.BoxList": _elements,
    "box.box_list.BoxList": _elements,
    "mmengine.config.config.ConfigDict": _items,
    "mmengine.config.config.Config": _inner("_cfg_dict"),
    "ml_collections.config_dict.config_dict.ConfigDict": _inner("_fields"),
    "ml_collections.config_dict.config_dict.FrozenConfigDict": _inner("_fields"),
    "ml_collections.config_dict.ConfigDict": _inner("_fields"),
    "ml_collections.config_dict.FrozenConfigDict": _inner("_fields"),
    "mmengine.logging.history_buffer.HistoryBuffer": _attributes,
}
