"""The rules by which torch's own modules accept state dicts that older versions of them saved.

Source: the `_load_from_state_dict` and load hooks of torch 2.13 (nn/modules/batchnorm.py, nn/utils/spectral_norm.py,
nn/utils/parametrizations.py, ao/nn/intrinsic/qat/modules/conv_fused.py, ao/quantization/observer.py). A module tells
the version of what it loads by `_metadata`; a state dict without it (safetensors, a plain dictionary) is of the oldest.
Here modules are known by the names that they give their parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

COUNTER = "num_batches_tracked"  # of BatchNorm and InstanceNorm, since version 2 (torch 0.4.1)
_FUSED = {"weight": "gamma", "bias": "beta"} | {name: name for name in ("running_mean", "running_var", COUNTER)}


@dataclass(slots=True)
class Accepted:
    """pairs: names of the model -> keys of the checkpoint that torch renames to them.

    supplied: names that torch gives a value of its own.  dropped: keys that torch takes out.
    """

    pairs: dict[str, str] = field(default_factory=dict)
    supplied: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def accepted(pairs: Mapping[str, str], missing: Collection[str], free: Mapping[str, str], metadata: Any) -> Accepted:
    """Does with the names that a model misses in an older state dict what torch does.

    pairs: name of the model -> the checkpoint's key that it gets.  free: names without a counterpart -> their keys.
    metadata: the state dict's `_metadata`, None where it has none.
    """
    done = Accepted()
    for name in missing:
        module, _, last = name.rpartition(".")
        parts, outer = module.split("."), module.removesuffix("bn")
        if last in ("original0", "original1") and parts[-2:-1] == ["parametrizations"]:
            # `weight_g`, `weight_v` of torch before 2.1, of `parametrizations.weight_norm`.
            old = ".".join([*parts[:-2], parts[-1]])
            if f"{old}_g" in free and f"{old}_v" in free:
                done.pairs[name] = free[f"{old}_g" if last == "original0" else f"{old}_v"]
        elif parts[-1] == "bn" and last in _FUSED:
            # `gamma`, `beta` and statistics beside the convolution, for the `bn` that QAT fuses with it.
            gamma, old = f"{outer}gamma", f"{outer}{_FUSED[last]}"
            if gamma in free and old in free and _version(metadata, free[gamma]) < 2:
                done.pairs[name] = free[old]
        if name in done.pairs:
            continue
        if last == COUNTER:
            beside = pairs.get(_sibling(name, "running_mean")) or done.pairs.get(_sibling(name, "running_mean"))
            # The fused module around a `bn`, of version 1, misses the counter before the BatchNorm supplies it.
            quantizer = pairs.get(f"{outer}weight_fake_quant.scale")
            is_missed = quantizer is not None and _version(metadata, quantizer.removesuffix(".scale")) < 2
            if beside is not None and not is_missed and _version(metadata, beside) < 2:
                done.supplied.append(name)
        elif last == "eps":
            beside = pairs.get(_sibling(name, "min_val"))
            if beside is not None and _version(metadata, beside) < 2:
                done.supplied.append(name)
        elif last.endswith("_v"):
            _spectral_norm(done, name, pairs, free, metadata)
    return done


def also_newer(extra: Collection[str], theirs: Collection[str], metadata: Any) -> list[str]:
    """Names that only the model of today has beside a checkpoint of it: counters of older BatchNorms."""
    return [
        name
        for name in extra
        if name.rpartition(".")[2] == COUNTER
        and _sibling(name, "running_mean") in theirs
        and _version(metadata, _sibling(name, "running_mean")) < 2
    ]


def _sibling(name: str, last: str) -> str:
    module, dot, _ = name.rpartition(".")
    return module + dot + last


def _version(metadata: Any, key: str) -> int:
    """The version that the module of a key had when it was saved; 0 where nothing says it."""
    facts = metadata.get(key.rpartition(".")[0]) if isinstance(metadata, Mapping) else None
    version = facts.get("version") if isinstance(facts, Mapping) else None
    return version if type(version) is int else 0


def _spectral_norm(done: Accepted, name: str, pairs: Mapping[str, str], free: Mapping[str, str], metadata: Any) -> None:
    """The second vector of `nn.utils.spectral_norm`: torch before 1.0 saved the weight itself instead."""
    weight = name.removesuffix("_v")
    if not (f"{weight}_orig" in pairs and f"{weight}_u" in pairs and weight in free):
        return
    module, _, last = pairs[f"{weight}_orig"].removesuffix("_orig").rpartition(".")
    facts = metadata.get(module) if isinstance(metadata, Mapping) else None
    versions = facts.get("spectral_norm") if isinstance(facts, Mapping) else None
    if not (isinstance(versions, Mapping) and versions.get(f"{last}.version")):
        done.supplied.append(name)
        done.dropped.append(free[weight])
