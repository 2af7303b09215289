"""The common parts of the verbs that write adapters: PEFT's folder, or one file of another scheme."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

from ckptool.checkpoint import Checkpoint, InlineBytes
from ckptool.checkpoint.files import Input, read_json
from ckptool.commands import OUT_SAFETENSORS, arg, argument, option
from ckptool.conventions.adapter_keys import DIFFUSERS_CONFIG
from ckptool.conventions.state_dicts import one_state_dict
from ckptool.errors import Corrupt, Unsupported, UsageError, printable
from ckptool.formats import SHARDED, CheckpointLike, PathLike, open_whole, safetensors
from ckptool.formats.folder import ADAPTER, MAX_TABLE
from ckptool.formats.model_folder import PEFT, STEMS, ModelFolder, config_beside
from ckptool.formats.sharded import divided
from ckptool.transforms.lora.adapters import Adapter, AdapterFile, read_adapter
from ckptool.verbs._save import Change, Written

AdapterConfig: TypeAlias = PathLike | Mapping[str, Any] | Any  # `Any`: a configuration of peft's
AdapterArgument = Annotated[
    CheckpointLike,
    argument("ADAPTER", "A LoRA, LoHa or LoKr: PEFT's folder, a file, or FILE#ADDRESS for a part of one."),
]
ConfigOption = Annotated[AdapterConfig | None, option("--config FILE.json", "adapter_config.json, if not beside it.")]
Rank = Annotated[int, option("--rank R", "The rank of every module.")]
NEW_ADAPTER = f"For example: {arg(out='adapter/')}"
_WHOLE = "1000TB"  # PEFT reads no shards


def open_adapter(path: CheckpointLike, config: AdapterConfig | None = None) -> tuple[Checkpoint, Adapter]:
    """An adapter, with PEFT's configuration: `config` (a file, a dictionary, peft's own), or the one beside it."""
    opened = open_whole(path)
    root, _ = one_state_dict(opened.checkpoint, opened.at)
    fields = config_beside(opened.checkpoint, ADAPTER)
    if config is not None and not isinstance(config, (str, os.PathLike)):
        raw = config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)()
        # As PEFT's adapter_config.json has them: a list for a set.
        sets = (set, frozenset)
        fields = json.loads(json.dumps(dict(raw), default=lambda x: sorted(x) if isinstance(x, sets) else str(x)))
        if not fields:
            what = f"{type(config).__name__} is not an adapter's configuration"
            raise UsageError(what, "", "Give adapter_config.json, its contents, or a peft.LoraConfig.")
    elif config is not None:
        fields = read_json(config, "a configuration", MAX_TABLE)
        if not isinstance(fields, dict):
            raise Corrupt(f"{os.fspath(config)} is not a JSON object", "A configuration has to be one.")
    return opened.checkpoint, read_adapter(root.node, printable(opened.name), fields, opened.checkpoint.metadata)


def write_adapter(change: Change, base: Checkpoint, file: AdapterFile, inputs: Sequence[Input | None] = ()) -> Written:
    """Writes an adapter: with a configuration as PEFT's folder, else as one file. base: the checkpoint it comes from.
    Raises `UsageError` for PEFT's into a file, `Unsupported` where the container has no place for a scale."""
    changed = replace(base, tree=file.tree, metadata=file.metadata, origin=None, extras={}, discarded=())
    changed = replace(changed, part=None, base=())
    if change.live and (file.config is not None or file.metadata):
        what = f"{change.verb} makes an adapter with scales, which a dictionary of tensors cannot hold"
        raise UsageError(what, "They belong in its configuration or metadata.", f"Write it: {arg(out='adapter/')}")
    container = change.format(safetensors.NAME if file.config is None else SHARDED).name
    beside = None
    if file.config is not None:
        if container != SHARDED:
            what = f"{change.path or ''} would be a file, but a PEFT adapter is a folder"
            raise UsageError(what, f"Its scales are in {ADAPTER}.", f"For example: {arg(out='adapter/')}")
        config = json.dumps(file.config, indent=2, sort_keys=True).encode() + b"\n"
        beside = ModelFolder(PEFT, files={ADAPTER: InlineBytes(config)}, place=ADAPTER)
        change = replace(change, path=None if change.path is None else os.path.join(change.path, ""))
        changed = divided(changed, _WHOLE, STEMS[PEFT])
    elif DIFFUSERS_CONFIG in file.metadata and container != safetensors.NAME:
        what = f"{container} cannot hold the scales of an adapter with diffusers' names"
        raise Unsupported(what, "They are kept in the metadata of safetensors.", f"Write {arg(out=OUT_SAFETENSORS)}")
    sources = [source for source in inputs if source is not None]
    return change.into(container).write(base, changed, inputs=sources, beside=beside)
