"""The prefixes that wrappers put on keys, and keys without them.

`module.` comes from DataParallel, DistributedDataParallel and averaged models; `_orig_mod.` from torch.compile; `_fsdp_wrapped_module.` and
`_checkpoint_wrapped_module.` from FSDP and activation checkpointing; `_forward_module.` from DeepSpeed and Ray. No module of a user's own
is called like the latter, so they go wherever they stand; one may well be called `module`, so that goes once, from the front.
"""

from __future__ import annotations

PEELED = "module."
INNER_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
# The one key that an averaged model keeps beside those of its module.
COUNTER = "n_averaged"


def without_wrappers(key: str) -> str:
    """The key as the bare module has it: `module.` taken off once at the front, wrappers that begin with `_` anywhere."""
    if "_" not in key and not key.startswith(PEELED):
        return key
    *modules, name = key.split(".")
    modules = [part for part in modules if part not in INNER_WRAPPERS]
    if modules and modules[0] == "module":
        del modules[0]
    return ".".join([*modules, name])


def unwrapped_front(key: str) -> str:
    """The key without the `_` wrappers that stand before anything else."""
    parts = key.split(".")
    while len(parts) > 1 and parts[0] in INNER_WRAPPERS:
        del parts[0]
    return ".".join(parts)


def wrappers(key: str) -> str:
    """The wrapper prefixes of a key, in order: `module._orig_mod.`; the empty text if it has none."""
    if "_" not in key:
        return PEELED if key.startswith(PEELED) and len(key) > len(PEELED) else ""
    front = unwrapped_front(key)
    found = [part for part in key.split(".")[:-1] if part in INNER_WRAPPERS]
    if front.startswith(PEELED) and len(front) > len(PEELED):
        found.insert(key.split(".").index("module"), "module")
    return "".join(f"{part}." for part in found)
