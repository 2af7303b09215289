"""Writes `ckptool/transforms/memory_names.json`: what transformers does to the tensors of its files as it loads them,
from its own conversion mapping and its models, built on the meta device. With transformers installed:

    python tests/engines/scripts/make_memory_names.py
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import conversion_mapping
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.engines import conftest  # noqa: F401  # isort: split  # it makes torchvision importable

OUT = Path(__file__).parents[3] / "ckptool" / "transforms" / "memory_names.json"
LAYERS = re.compile(r"(num|n)_(hidden_|encoder_|decoder_)?(layers?|blocks)|(en|de)coder_layers|n_layer|depth")
OPERATIONS = {"MergeModulelist": "stack {dim}", "Concatenate": "cat {dim}", "Chunk": "split {dim}"}
keys: dict[int, str] = {}
kept: list[Any] = []  # so that no other object gets their ids
own_lookup = conversion_mapping.get_checkpoint_conversion_mapping


def lookup(key: str) -> Any:
    found = own_lookup(key)
    kept.append(found)
    keys.update({id(each): key for each in found or ()})
    return found


def transform(each: Any) -> list[list[Any]]:
    """Steps: [what to look for, what to put there], with a list of names and the operations where tensors change."""
    kind, targets, pattern = type(each).__name__, each.target_patterns, each.compiled_sources.pattern
    if kind == "WeightConverter":
        names = [type(op).__name__ for op in each.operations]
        ops = "?"
        if names == ["Transpose"] and not each.operations[0].check_dims:
            ops = f"transpose {each.operations[0].dim0} {each.operations[0].dim1}"
        elif set(names) <= OPERATIONS.keys():
            ops = " | ".join(
                OPERATIONS[name].format(dim=op.dim) for name, op in zip(names, each.operations, strict=True)
            )
        return [[pattern, targets, ops]]
    if kind == "GroupWeightRename":  # the last one first, so that none is renamed twice
        return [[old, new] for old, new in zip(each.source_patterns, targets, strict=True)][::-1]
    if kind not in ("WeightRenaming", "PrefixChange") or len(targets) != 1:
        return [[pattern, targets, "?"]]
    return [[re.sub(r"^\(\?P<g0>(.*)\)$", r"\1", pattern) if len(each.source_patterns) == 1 else pattern, targets[0]]]


def shrunk(config: Any) -> Any:
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            shrunk(value)
        elif LAYERS.fullmatch(name) and type(value) is int and value > 2:
            with contextlib.suppress(Exception):
                setattr(config, name, 2)
    return config


def small(config: Any) -> Any:
    """With sizes that go together, for types whose own do not."""
    for value in vars(config).values():
        if isinstance(value, transformers.PreTrainedConfig):
            small(value)
    for name, size in {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}.items():
        if type(getattr(config, name, None)) is int:
            setattr(config, name, size)
    return shrunk(config)


def where(config: Any, wanted: Any) -> str:
    """The field of a configuration that a part's configuration is, where it may be of any type."""
    for name, value in vars(config).items():
        is_any = type(config).sub_configs.get(name) is transformers.AutoConfig
        is_one = isinstance(value, transformers.PreTrainedConfig)
        if is_any and is_one and (value is wanted or value.to_dict() == wanted.to_dict()):
            return name
    return ""


def built(cls: Any, config_class: Any) -> Any:
    for change in (shrunk, lambda config: config, small):
        for more in ({}, {"vocab_size": 32}, {"pad_token_id": 0}):
            with contextlib.suppress(Exception), torch.device("meta"):
                return cls(change(config_class(**more)))
    return None


def row(model: Any) -> list[Any]:
    """[prefix, {place: mapping}, {part: [field, usual type]}], and a 1 where names of the model itself, which lack the
    prefix, get it from the mapping."""
    seen: dict[str, str] = {}
    transforms = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    for each in transforms:
        path = each.scope_prefix
        seen.setdefault("" if path is None else path or ".", keys[id(each)])
    parts = {}
    for name, module in model.named_modules():
        is_part = name and isinstance(module, transformers.PreTrainedModel) and module.config is not model.config
        if is_part and (field := where(model.config, module.config)):
            parts.setdefault(name, [field, module.config.model_type])
    outer = {name for name in parts if not any(name.startswith(f"{other}.") for other in parts)}
    prefix = model.base_model_prefix
    targets = [text for each in transforms if not each.scope_prefix for text in each.target_patterns]
    is_bare = bool(prefix) and not hasattr(model, prefix) and any(text.startswith(f"{prefix}.") for text in targets)
    return [prefix, seen, {name: parts[name] for name in parts if name in outer}, *([1] if is_bare else [])]


def ties(cls: Any, config_class: Any) -> str:
    """What a class may tie, but for layers, whose number is not known: `target source`, and so on."""
    model = built(cls, lambda **more: tying(config_class(**more)))
    if model is None:
        pairs = getattr(cls, "_tied_weights_keys", None) or {}
    else:
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        pairs = model.get_expanded_tied_weights_keys(all_submodels=True)
        pairs = {target: source for target, source in pairs.items() if {target, source} <= names}
    made = [" ".join(pair) for pair in sorted(pairs.items())]
    made = [each for each in made if not re.search(r"\.\d|[^\w. ]", each)]
    return " ".join(made if len(made) < 8 else [])  # more: a whole part


def tying(config: Any) -> Any:
    for value in vars(config).values():
        if isinstance(value, transformers.PreTrainedConfig):
            tying(value)
    config.tie_word_embeddings = True
    return config


def odd(model: Any) -> list[str]:
    """Modules that the names of their weights are wrong about: no linear layers or convolutions that PEFT wraps."""
    from ckptool.conventions.adapter_keys import is_linear

    state, found = model.state_dict(), []
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim < 2:
            continue
        conv = torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d
        linear = type(module) in (torch.nn.Linear, *conv) or type(module).__name__ == "Conv1D" or is_plain(module)
        if not linear and is_linear(name, shapes):
            found.append(".".join(name.split(".")[-2:]))
    return sorted(set(found))


def not_for_peft(model_type: str) -> set[str]:
    """The ends of modules that PEFT takes for others: for experts that transformers 5 fuses, or for Mamba's."""
    from peft.tuners import tuners_utils
    from peft.utils import transformers_weight_conversion as moe

    of_experts = conversion_mapping._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    ends = set(moe._MOE_TARGET_MODULE_MAPPING.get(of_experts, ())) if of_experts in moe._MOE_FUSED_TARGETS else set()
    config = SimpleNamespace(peft_type="LORA")
    model = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    try:
        tuners_utils._check_lora_target_modules_mamba(config, model, "out_proj")
    except ValueError:
        ends.add("out_proj")
    return ends


def is_plain(module: Any) -> bool:
    """True for a model's own kind of linear layer that gives one tensor of the usual shape, which PEFT adds to."""
    if not isinstance(module, torch.nn.Linear) or type(module).__module__ == "torch.nn.modules.linear":
        return False
    with contextlib.suppress(Exception), torch.device("meta"):
        return module(torch.empty(2, module.in_features)).shape == (2, module.out_features)
    return False


def main() -> None:
    conversion_mapping.get_checkpoint_conversion_mapping = lookup
    classes: dict[str, dict[str, Any]] = {}
    mappings = [value for name, value in vars(modeling_auto).items() if re.fullmatch(r"MODEL_\w*MAPPING", name)]
    for model_type in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[model_type]
        for mapping in mappings:
            with contextlib.suppress(Exception):
                found = mapping[config_class]
                for cls in found if isinstance(found, (tuple, list)) else (found,):
                    classes.setdefault(model_type, {}).setdefault(cls.__name__, cls)
    for name, module in sorted(sys.modules.items()):
        for cls in vars(module).values() if name.startswith("transformers.models.") and ".modeling_" in name else ():
            if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) and cls.__module__ == name:
                model_type = getattr(cls.config_class, "model_type", None)
                if model_type in classes and not cls.__name__.endswith("PreTrainedModel"):
                    classes[model_type].setdefault(cls.__name__, cls)
    steps: dict[str, str] = {}  # by mapping, as text
    for key, value in conversion_mapping._build_checkpoint_conversion_mapping().items():
        steps[key] = json.dumps([step for each in value for step in transform(each)])
    first = {text: key for key, text in reversed(steps.items())}
    tied: dict[str, list[str]] = {}
    for model_type, named in classes.items():
        for name, cls in named.items():
            tied.setdefault(ties(cls, CONFIG_MAPPING[model_type]), []).append(name)
    kinds: dict[str, list[Any]] = {}
    for model_type, named in classes.items():
        rows: dict[str, list[str]] = {}
        odds: set[str] = set()
        for name, cls in named.items():
            model, known = built(cls, CONFIG_MAPPING[model_type]), {model_type, name} & steps.keys()
            found = row(model) if model is not None else "?" if known else ["", {}, {}]
            odds |= set(odd(model)) if model is not None else set()
            if found != "?":
                found[1] = {place: first[steps[key]] for place, key in found[1].items()}
            rows.setdefault(json.dumps(found), []).append(name)
        odds |= not_for_peft(model_type)
        kinds[model_type] = [{" ".join(names): json.loads(text) for text, names in rows.items()}, sorted(odds)]
    mappings = {key: json.loads(text) for key, text in steps.items()}
    ties_of = {text: list(dict.fromkeys(names)) for text, names in sorted(tied.items()) if text}
    OUT.write_text(written(f"transformers {transformers.__version__}", ties_of, kinds, mappings))


def written(version: str, tied: dict[str, list[str]], kinds: dict[str, list[Any]], mappings: dict[str, Any]) -> str:
    """The table as text, a line for what is the same but for a prefix, and for the types that are alike."""
    shared = Counter(each for text in tied for each in templates(text))
    by_template: dict[str, dict[str, str]] = {}
    for text, names in tied.items():
        told = templates(text)
        template = max(told, key=lambda each: (shared[each], "*" not in each, len(each)))
        by_template.setdefault(template, {})[told[template]] = " ".join(names)
    alike: dict[str, list[str]] = {}
    for kind, (rows, odds) in kinds.items():
        by_row: dict[str, list[str]] = {}
        for names, found in rows.items():
            by_row.setdefault(json.dumps(without_prefix(found)), []).append(names)
        merged = {" ".join(names): json.loads(text) for text, names in by_row.items()}
        each = {"": json.loads(next(iter(by_row)))} if len(by_row) == 1 else merged
        if odds or list(each.values()) != [["", {}, {}]]:
            alike.setdefault(json.dumps([each, odds]), []).append(kind)
    lines, seen = [f'{{"version": "{version}"'], set[str]()
    lines.append('"ties": {' + ",\n".join(json.dumps({key: by_template[key]})[1:-1] for key in by_template) + "}")
    for text, names in alike.items():
        each, odds = json.loads(text)
        used = {key for found in each.values() if found != "?" for key in found[1].values()} - seen
        seen |= used
        own = {key: mappings[key] for key in sorted(used)}
        lines.append(json.dumps({" ".join(names): [each, odds, own]})[1:-1])
    return ",\n".join(lines) + "}\n"


def templates(text: str) -> dict[str, str]:
    """The ways to write names with `*` for a beginning that they share, each with that beginning."""
    names = text.split()
    starts = {name[: match.end()] for name in names for match in re.finditer(r"\.", name)}
    made = {text: "", " ".join(f"*{name}" for name in names): ""}
    for start in sorted(starts):
        made[" ".join(f"*{n.removeprefix(start)}" if n.startswith(start) else n for n in names)] = start
    return made


def without_prefix(found: Any) -> Any:
    """A row in which the parts of a model with a head are called as those of the model without."""
    if found == "?" or not (found[1] or found[2]):
        return found if found == "?" else ["", {}, {}]
    parts = {path.removeprefix(found[0]).removeprefix("."): part for path, part in found[2].items()}
    return [*found[:2], parts, *found[3:]]


if __name__ == "__main__":
    main()
