"""The rules by which torch's own modules accept state dicts that older versions of them saved.

Source: the `_load_from_state_dict` and load hooks of torch 2.13 (nn/modules/batchnorm.py, nn/utils/parametrizations.py,
nn/utils/spectral_norm.py, ao/nn/intrinsic/qat/modules/conv_fused.py, ao/quantization/observer.py). A module tells the
version of what it loads by `_metadata`; a state dict without it (safetensors, a plain dictionary) is of the oldest.
Modules are known by the names of their parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

COUNTER = "num_batches_tracked"  # of BatchNorm and InstanceNorm, since version 2 (torch 0.4.1)
_WEIGHT_NORM = {"original0": "_g", "original1": "_v"}  # of `parametrizations.weight` -> of torch before 2.1
# Of the `bn` that QAT fuses with a convolution -> beside that, before torch 1.6.
_FUSED = {"weight": "gamma", "bias": "beta"} | {name: name for name in ("running_mean", "running_var", COUNTER)}


def accepted(
    pairs: Mapping[str, str], missing: Collection[str], free: Mapping[str, str], metadata: Any
) -> tuple[dict[str, str], list[str], list[str]]:
    """Names that a model misses in an older state dict -> keys that torch renames to them; names that it supplies; and
    keys that it takes out.

    pairs: name of the model -> the checkpoint's key that it gets.  free: names without a counterpart -> their keys.
    metadata: the state dict's `_metadata`, None where it has none.
    """
    renamed, supplied, dropped = dict[str, str](), list[str](), list[str]()
    for name in missing:
        *outer, last = name.split(".")
        old, around = ".".join([*outer[:-2], *outer[-1:]]), name.removesuffix(f"bn.{last}")
        gamma, mean = free.get(f"{around}gamma") if outer[-1:] == ["bn"] else None, _mean_beside(name)
        is_norm = last in _WEIGHT_NORM and outer[-2:-1] == ["parametrizations"]
        if is_norm and f"{old}_g" in free and f"{old}_v" in free:
            renamed[name] = free[old + _WEIGHT_NORM[last]]
        elif gamma and f"{around}{_FUSED.get(last, '?')}" in free and _version(metadata, gamma) < 2:
            renamed[name] = free[around + _FUSED[last]]
        elif last == COUNTER and (key := renamed.get(mean) or pairs.get(mean)) and _version(metadata, key) < 2:
            # The fused module around a `bn`, of version 1, misses the counter before the BatchNorm supplies it.
            quantizer = pairs.get(f"{around}weight_fake_quant.scale", "")
            supplied += [name] if not quantizer or _version(metadata, quantizer.removesuffix(".scale")) >= 2 else []
        elif last == "eps" and (low := pairs.get(".".join([*outer, "min_val"]))) and _version(metadata, low) < 2:
            supplied.append(name)  # of an observer
        elif {f"{name[:-2]}_orig", f"{name[:-2]}_u"} <= pairs.keys() and name[:-2] in free and last.endswith("_v"):
            # The second vector of `nn.utils.spectral_norm`: torch before 1.0 saved the weight itself instead.
            supplied.append(name)
            dropped.append(free[name[:-2]])
    return renamed, supplied, dropped


def also_newer(extra: Collection[str], theirs: Collection[str], metadata: Any) -> list[str]:
    """Names that only the model of today has beside a checkpoint of it: counters of older BatchNorms."""
    counters = [name for name in extra if name.rpartition(".")[2] == COUNTER and _mean_beside(name) in theirs]
    return [name for name in counters if _version(metadata, _mean_beside(name)) < 2]


def _mean_beside(counter: str) -> str:
    return counter.removesuffix(COUNTER) + "running_mean"


def _version(metadata: Any, key: str) -> int:
    """The version that the module of a key had when it was saved; 0 where nothing says it."""
    facts = metadata.get(key.rpartition(".")[0]) if isinstance(metadata, Mapping) else None
    version = facts.get("version") if isinstance(facts, Mapping) else None
    return version if type(version) is int else 0
