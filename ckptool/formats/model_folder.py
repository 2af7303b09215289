"""The folder of a model as its library loads it: what the weights are called, and the files that are carried along.

The library is told by the configuration beside the input's weights: in their folder, in the one above it where an
engine's tag is its name, in `huggingface/` (verl), or in a folder of the same model that the user names.

Source: transformers/utils (SAFE_WEIGHTS_NAME, `_add_variant`), diffusers/utils/constants.py, peft/utils/constants.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ckptool.checkpoint import Checkpoint, Data, FileRange, InlineBytes, Note, TensorEntry
from ckptool.checkpoint.dtypes import DTYPES
from ckptool.checkpoint.files import Folder, Source, open_input
from ckptool.checkpoint.nodes import fields
from ckptool.checkpoint.paths import absolute, is_url
from ckptool.commands import DIR, arg
from ckptool.conventions.adapter_keys import DIFFUSERS_CONFIG
from ckptool.conventions.quantized import may_be_quantized
from ckptool.errors import UsageError, listed, printable
from ckptool.facts import dataclass, field
from ckptool.formats.folder import ADAPTER, CONFIG, is_in, json_in, led_elsewhere, names_in

PARAMS = "params.json"
MODULES = "modules.json"  # of sentence-transformers: its modules, in folders of their own
TRANSFORMERS, DIFFUSERS, PEFT, TIMM = "transformers", "diffusers", "peft", "timm"
STEMS = {TRANSFORMERS: "model", DIFFUSERS: "diffusion_pytorch_model", PEFT: "adapter_model"}
MAX_COMPANION = 256 << 20  # bytes of one file; tokenizers take 40 MB

_COMPANION = re.compile(
    r"config\.json|adapter_config\.json|generation_config\.json|preprocessor_config\.json|processor_config\.json"
    r"|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|chat_template\.(?:jinja|json)"
    r"|vocab\.(?:json|txt|bpe)|merges\.txt|[\w.-]+\.model"
)
# Names that engines give to folders below that of the model.
_TAG = re.compile(r"(?:checkpoint-|global_step_?|step[-_]?|iter_|pytorch_model_fsdp_)\d+|pytorch_model|sharded|actor")
_NO_JSON = "empty, or not JSON that can be read"
_FLOATS = {dtype.torch for dtype in DTYPES if dtype.is_float}


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The library that loads a model, and the files beside its weights.

    library: empty where no configuration was found.  place: the folder of that.  files: what is carried along.
    left: the names of what is left out, with the reason.  changes: what is changed in the files, in words.
    """

    library: str = ""
    place: str = ""
    files: dict[str, Data] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """The beginning of the names of weights."""
        return STEMS.get(self.library, "model")

    @property
    def inputs(self) -> list[Source]:
        return [data.file for data in self.files.values() if isinstance(data, FileRange)]

    def lines(self) -> list[str]:
        """The files, for people."""
        how = "beside it" if self.place == ADAPTER else "carried along"  # written for it
        texts = [f"{how}: {listed([printable(name) for name in self.files], 20)}"] if self.files else []
        if not self.place and not self.left:
            texts = [f"no {CONFIG} is beside the input; to take one from another folder: convert --like DIR"]
        return [*texts, *self.changes, *([f"left out: {listed(self.left, 20)}"] if self.left else [])]


def model_folder(model: Checkpoint, tree: Any, like: str | None = None, *, dequantized: bool = False) -> ModelFolder:
    """The folder to write the weights `tree` to, which are of `model`. like: a folder of the same model.

    dequantized: the weights no longer are what a `quantization_config` says.
    Raises `UsageError` where `like` has no configuration.
    """
    tree = tree if isinstance(tree, dict) else {}
    for place in _config_folders(model) if like is None else [like]:
        names = names_in(place)
        configs = {name: json_in(place, name) for name in (CONFIG, ADAPTER) if name in names}
        library = _library(configs, tree)
        if configs and (library or like is None):
            break
    else:
        if like is None:
            return ModelFolder()
        open_input(like)  # it may not exist
        what = f"{like} has no {CONFIG} or {ADAPTER} of a library that ckptool knows"
        raise UsageError(what, "It should be a folder that the model's library loads.", f"For example: {arg(like=DIR)}")
    if not library:
        reasons = {name: "of no library that ckptool knows" if config else _NO_JSON for name, config in configs.items()}
        return ModelFolder(left=tuple(f"{name} ({why})" for name, why in reasons.items()))
    files: dict[str, Data] = {}
    left, changes = list[str](), list[str]()
    for name in names:
        if name.endswith(".py"):
            left.append(f"{printable(name)} (code is never copied)")
        elif name == MODULES:
            left.append(f"{name} (other modules, such as pooling; to keep all, edit a copy of the folder)")
        elif _COMPANION.fullmatch(name):
            data = _companion(place, name)
            if isinstance(data, str):
                left.append(f"{printable(name)} ({data})")
                continue
            files[name] = data
    if CONFIG in files:  # which is to name the one float type of the weights, and no quantization that they lost
        dtypes = {e.dtype.torch for e in tree.values() if isinstance(e, TensorEntry) and e.dtype.is_float}
        with suppress(ValueError, RecursionError):  # what is not UTF-8, or nested a thousand levels deep, stays
            config = json.loads(files[CONFIG].read(0, files[CONFIG].length))
            if len(dtypes) == 1 and (changed := with_dtype(config, *dtypes)) != config:
                changes.append(f"{CONFIG}: dtype is now {next(iter(dtypes))}, like the weights")
                config = changed
            sections = _sections(config) if dequantized else []
            removed = [key for node in sections for key in QUANTIZATION if node.pop(key, None) is not None]
            changes += [f"{CONFIG}: without its {removed[0]}"] if removed else []
            if changes:
                files[CONFIG] = InlineBytes(json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n")
    return ModelFolder(library, place, files, tuple(left), tuple(changes))


def configuration(model: Checkpoint, like: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The numbers of a model's configuration: of config.json beside its weights, of Meta's params.json, or in
    the file itself: nanoGPT's `model_args`, Megatron's `args`; else of `like`, a folder of the same model. Empty where
    there is none that can be read."""
    if config := config_beside(model, CONFIG, PARAMS):
        return config
    tree = model.tree if isinstance(model.tree, dict) else {}
    if isinstance(ranks := tree.get("ranks"), dict):  # what each of them saved beside its weights
        tree = next((share for share in ranks.values() if isinstance(share, dict)), tree)
    if arguments := fields(tree.get("model_args", tree.get("args"))):
        return arguments
    return next(filter(None, (json_in(os.fspath(like), name) for name in (CONFIG, PARAMS))), {}) if like else {}


def _config_folders(model: Checkpoint) -> Iterator[str]:
    """The folders where the configuration of a checkpoint may be, the likeliest first."""
    if model.source is None:
        return
    path = absolute(model.source.path)
    folder = path if isinstance(model.source, Folder) else os.path.dirname(path)
    if model.source.far:
        yield folder
        return
    above = [os.path.dirname(folder)] if _TAG.fullmatch(os.path.basename(folder)) else []
    member = model.base[0] if model.base and type(model.base[0]) is str else ""
    below = [member] if member and member in names_in(folder) else []
    yield from (os.path.join(folder, name) for name in below if not os.path.islink(os.path.join(folder, name)))
    yield from (folder, *above)
    yield from (inner for place in (folder, *above) if not os.path.islink(inner := os.path.join(place, "huggingface")))


def config_beside(model: Checkpoint, *names: str) -> dict[str, Any] | None:
    """The first configuration of these names beside a checkpoint; None where there is none that can be read."""
    configs = (json_in(place, name) for place in _config_folders(model) for name in names if is_in(place, name))
    return next(filter(None, configs), None)


def stale_config(model: Checkpoint, dtype: str, *, dequantized: bool, in_place: bool) -> list[str]:
    """What is said where the configuration beside weights that were cast still has what it said of them before."""
    if dequantized and quantization_config(model):
        stale = "the quantization"
    elif in_place and with_dtype(config := config_beside(model, CONFIG), dtype) != config:
        stale = "another dtype, in which its library may load the weights"
    else:
        return []
    return [f"{CONFIG} beside it still names {stale}; in a folder ({arg(out='DIR/')}) it would not"]


def left_meaning(model: Checkpoint, changed: Checkpoint, path: str) -> tuple[Note, ...]:
    """A note where one file is written of an adapter or of quantized weights, and only the configuration beside the
    input says what their numbers mean."""
    if quantization_config(model) and may_be_quantized(changed.tree):
        code, name, what = "quantized", CONFIG, "says how its weights are quantized"
    elif DIFFUSERS_CONFIG not in changed.metadata and "lora_alpha" in (config_beside(model, ADAPTER) or {}):
        code, name, what = "adapter", ADAPTER, "has its alpha"
    else:
        return ()
    if not is_url(path) and is_in(os.path.dirname(path), name):
        return ()
    return (Note(code, f"left out: {name}, which {what}; -o DIR/ copies it, too"),)


def _library(configs: dict[str, dict[str, Any]], tree: dict[Any, Any]) -> str:
    """The library that loads the weights; empty for a configuration of none that is known."""
    config, adapter = configs.get(CONFIG, {}), configs.get(ADAPTER, {})
    is_adapter = any(type(key) is str and key.startswith("base_model.") for key in tree)
    if "peft_type" in adapter and (is_adapter or CONFIG not in configs):
        return PEFT
    if "_class_name" in config and "_diffusers_version" in config:
        return DIFFUSERS
    if "architectures" in config or "model_type" in config:
        return TRANSFORMERS
    return TIMM if "architecture" in config else ""


def _companion(place: str, name: str) -> FileRange | str:
    """A file beside weights, or the reason why it is not carried along."""
    path = os.path.join(place, name)
    if not (os.path.isfile(path) or is_url(place)):
        return "not a file"
    if led_elsewhere(place, [name]):
        return "a link that leads outside of the folder"
    source = Source(path)
    if source.size > MAX_COMPANION:
        return f"{source.size:,} bytes, too large for a tokenizer or configuration"
    if name.endswith(".model") and source.read(0, min(2, source.size))[:1] in (b"P", b"\x80"):
        return "a checkpoint, not a tokenizer"
    return FileRange(source, 0, source.size)


# The configuration of changed weights ---------------------------------------------------------------------------------

QUANTIZATION = ("quantization_config", "compression_config")  # the second is an old name of compressed-tensors'


def with_dtype(config: Any, dtype: str) -> Any:
    """A configuration with this dtype in place of each other float type that it names; everything else stays.

    Except the type in which quantized weights are computed, which their own configuration gives.
    """
    if not isinstance(config, dict):
        return config
    names = ("dtype", "torch_dtype")
    is_float = {key: str(value).removeprefix("torch.") in _FLOATS for key, value in config.items()}
    return {
        key: dtype if key in names and is_float[key] else value if key == QUANTIZATION[0] else with_dtype(value, dtype)
        for key, value in config.items()
    }


def _sections(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A configuration, and those in it, as of the `text_config` of several models."""
    return [config, *(node for node in config.values() if isinstance(node, dict))]


def quantization_config(model: Checkpoint) -> dict[str, Any]:
    """The quantization of the configuration beside a checkpoint; empty where that has none."""
    configs = (node.get(key) for node in _sections(configuration(model)) for key in QUANTIZATION)
    return next((config for config in configs if isinstance(config, dict)), {})
