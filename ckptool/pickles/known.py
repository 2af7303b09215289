"""The names that are understood, by tier. A name is only ever text: there is no list to bypass, only one to be outside of.

Tier 1, torch's rebuild functions and value types; 2, its storages and dtypes; 3, plain data with an exact neutral form; 4, containers
of configuration that are dictionaries and lists in disguise. Calls of these are written back as they were. A call of anything else
is shown, and refused on writing. Sources: the reducers of torch 0.4 to 2.13 (torch/_utils.py, torch/_tensor.py,
torch/storage.py), numpy's and the standard library's `__reduce__` methods, and the classes of the configuration libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

from ckptool.dtypes import BY_TORCH
from ckptool.nodes import Global, Object, structural_parts

_TORCH_CALLS: dict[str, str] = {
    "torch._utils": "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_parameter_with_state"
    " _rebuild_sparse_tensor _rebuild_sparse_csr_tensor _rebuild_qtensor _rebuild_nested_tensor _rebuild_meta_tensor_no_storage"
    " _rebuild_wrapper_subclass _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor _rebuild_xla_tensor",
    "torch._tensor": "_rebuild_from_type _rebuild_from_type_v2",
    "torch.tensor": "_rebuild_from_type _rebuild_from_type_v2",
    "torch.nn.parameter": "Parameter Buffer UninitializedParameter UninitializedBuffer",
    "torch": "Size device Tensor Generator",
    "torch.serialization": "_get_layout",
    "torch.torch_version": "TorchVersion",
    "torch.nested._internal.nested_tensor": "_rebuild_njt NestedTensor",
}

_PLAIN_CALLS: dict[str, str] = {
    "collections": "OrderedDict defaultdict deque Counter",
    "builtins": "set frozenset list dict tuple str bytes bytearray int long float bool complex slice range xrange object",
    "_codecs": "",  # _codecs.encode is understood as a pattern only: see torch_objects
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "scalar _reconstruct",
    "numpy._core.multiarray": "scalar _reconstruct",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "numpy.random._pickle": "__bit_generator_ctor __generator_ctor __randomstate_ctor",
    "numpy.random": "__RandomState_ctor",
    "numpy.random._pcg64": "PCG64 PCG64DXSM",
    "numpy.random._mt19937": "MT19937",
    "numpy.random._philox": "Philox",
    "numpy.random._sfc64": "SFC64",
    "numpy.random.bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
    "datetime": "datetime date time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "uuid": "UUID SafeUUID",
    "pathlib": "PosixPath WindowsPath PurePosixPath PureWindowsPath Path PurePath",
    "pathlib._local": "PosixPath WindowsPath PurePosixPath PureWindowsPath Path PurePath",
    "argparse": "Namespace",
    "types": "SimpleNamespace",
}

_CONFIG_CALLS: dict[str, str] = {
    "omegaconf.dictconfig": "DictConfig",
    "omegaconf.listconfig": "ListConfig",
    "omegaconf.base": "ContainerMetadata Metadata",
    "pytorch_lightning.utilities.parsing": "AttributeDict",
    "lightning_fabric.utilities.data": "AttributeDict",
    "lightning.fabric.utilities.data": "AttributeDict",
    "lightning.pytorch.utilities.parsing": "AttributeDict",
    "yacs.config": "CfgNode",
    "easydict": "EasyDict",
    "addict": "Dict",
    "addict.addict": "Dict",
    "box": "Box BoxList",
    "box.box": "Box",
    "box.box_list": "BoxList",
    "mmengine.logging.history_buffer": "HistoryBuffer",
    "mmengine.config.config": "Config ConfigDict",
    "ml_collections.config_dict.config_dict": "ConfigDict FrozenConfigDict",
    "ml_collections.config_dict": "ConfigDict FrozenConfigDict",
}

_KNOWN = frozenset(
    (module, name)
    for table in (_TORCH_CALLS, _PLAIN_CALLS, _CONFIG_CALLS)
    for module, names in table.items()
    for name in names.split()
)
_MODULE_ALIASES = {"__builtin__": "builtins", "numpy.core._multiarray_umath": "numpy.core.multiarray"}


@lru_cache(maxsize=4096)
def _is_known(module: str, name: str) -> bool:
    module = _MODULE_ALIASES.get(module, module)
    if (module, name) in _KNOWN or module == "omegaconf.nodes":
        return True
    return module == "numpy.dtypes" and name.endswith("DType")


# A tensor's backward hooks are functions that torch calls when gradients are computed.
_HOOKED = frozenset(
    ("torch._utils", name)
    for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_qtensor")
)

# These call what they are given: `_rebuild_from_type_v2(os.system, ...)` is a call of os.system. (numpy's constructors take the class of
# a bit generator.)
_CALLERS = frozenset(
    {
        *(
            (module, name)
            for module in ("torch._tensor", "torch.tensor")
            for name in ("_rebuild_from_type", "_rebuild_from_type_v2")
        ),
        *(
            ("numpy.random._pickle", name)
            for name in ("__bit_generator_ctor", "__generator_ctor", "__randomstate_ctor")
        ),
        ("numpy.random", "__RandomState_ctor"),
    }
)

MAX_ARGUMENTS = 1_000  # that are looked through for names; a call with more is not one that is known


def is_known_call(fn: Any, args: Any = ()) -> bool:
    """True if a call of `fn` with these arguments is understood (tiers 1 to 4), so that it may be written back."""
    if type(fn) is not Global or not _is_known(fn.module, fn.name):
        return False
    kind = (fn.module, fn.name)
    return (kind not in _CALLERS and kind not in _HOOKED) or all(
        name is not None and (_is_known(name.module, name.name) or is_torch_name(name))
        for name in _names_in(args, containers=kind in _HOOKED)
    )


def foreign_names(fn: Any, args: Any) -> list[str]:
    """The names that are not understood among what a caller (`_rebuild_from_type_v2`) is given; empty for any other function."""
    if type(fn) is not Global or (fn.module, fn.name) not in _CALLERS | _HOOKED:
        return []
    given = [name for name in _names_in(args, containers=True) if name is not None]
    return [
        str(name) for name in dict.fromkeys(given) if not (_is_known(name.module, name.name) or is_torch_name(name))
    ]


def _names_in(args: Any, containers: bool) -> Iterator[Global | None]:
    """Every name in a tuple and the tuples in it (containers: lists and dictionaries too), and what made the objects there.

    An object of an unknown class may be callable. Ends with None where there is too much to look through.
    """
    kinds = (tuple, list, dict) if containers else (tuple,)
    stack: list[Any] = [args]
    for _ in range(MAX_ARGUMENTS):
        if not stack:
            return
        part = stack.pop()
        if type(part) is Global:
            yield part
        elif isinstance(part, Object):
            stack.append(part.fn)
        elif isinstance(part, kinds):
            stack += islice(structural_parts(part), MAX_ARGUMENTS)
    yield None


def is_torch_name(name: Global) -> bool:
    """True for torch's dtypes, storages, layouts and quantization schemes: constants, of which nothing is called."""
    if name.module not in ("torch", "torch.storage", "torch.cuda", "torch.sparse"):
        return False
    return name.name in BY_TORCH or name.name.endswith(("Storage", "Tensor", "_affine", "_float_qparams"))
