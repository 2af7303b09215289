"""`ckptool.save`: tensors, arrays and entries to a checkpoint, durably; `save_for_cpu`: a module's, for any machine."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, BinaryIO, cast

from ckptool import formats
from ckptool.checkpoint import Checkpoint, FileRange
from ckptool.checkpoint.graph import no_collection
from ckptool.checkpoint.paths import temporary_files
from ckptool.checkpoint.tree import map_storages, storages
from ckptool.commands import FILE, OUT, command
from ckptool.conventions.state_dicts import INNER_WRAPPERS, WEIGHTS, StateDict
from ckptool.errors import UsageError
from ckptool.formats import Module
from ckptool.output import check_target
from ckptool.verbs._save import change_of, checkpoint_of


def save(
    tree: Any,
    path: str | os.PathLike[str] | BinaryIO,
    *,
    container: str | None = None,
    overwrite: bool = False,
    keep_unknown: bool = False,
) -> None:
    """Writes `tree` to `path`: what `torch.save` takes, of a module its state dict, entries and checkpoints.

    path: also a URL that can be written (`s3://bucket/model.pt`), or a file open for writing in binary. An open file
    gets the complete bytes; making them durable is up to its owner.
    container: `torch-zip`, `safetensors`, `sharded`, `npz`, …; by default that of the suffix, else `torch-zip`.
    overwrite: replace what is there; it stays intact until the new file is complete.
    keep_unknown: write objects of unknown classes as `torch.save` would (they load with `weights_only=False` only).
    Numpy arrays become tensors in safetensors and other containers of tensors, and stay arrays in torch files.
    Raises `Unsupported`, naming what cannot be saved and where it is.
    """
    if isinstance(tree, (str, os.PathLike)):
        what, why = f"save was given the path {os.fspath(tree)!r} as what to save", "The path comes second."
        raise UsageError(what, why, f"To write what a file holds: {command('convert', FILE, out=OUT)}")
    if callable(getattr(path, "write", None)):  # an open file, through a temporary one
        from shutil import copyfileobj
        from tempfile import TemporaryDirectory

        with temporary_files(), TemporaryDirectory(prefix="ckptool-") as folder:
            temporary, file = os.path.join(folder, "checkpoint"), cast(Any, path)
            save(tree, temporary, container=container or formats.DEFAULT, keep_unknown=keep_unknown)
            try:
                with open(temporary, "rb") as content:
                    copyfileobj(content, file, 1 << 20)
            except (IsADirectoryError, TypeError, ValueError) as error:
                what = f"<{type(file).__name__}> does not accept bytes"
                fix = "Open it for writing in binary: open(PATH, 'wb'); for a folder of files, name one."
                raise UsageError(what, str(error), fix) from None
        return
    change = change_of("save", path, {"container": container, "overwrite": overwrite})  # type: ignore[arg-type]
    out, target = change.path or "", change.format(formats.DEFAULT)
    formats.refuse_name(out, target, asked=bool(container))
    if not target.writes_folder:
        check_target(out, overwrite=overwrite)
    checkpoint = checkpoint_of(tree, arrays_as_tensors=target.tensors_only, keep_unknown=keep_unknown)
    with no_collection():
        plan = target.write(checkpoint, keep_unknown=keep_unknown)
    ranges = [storage.data for storage in storages(checkpoint.tree) if isinstance(storage.data, FileRange)]
    change.put(plan, out, list({id(data.file): data.file for data in ranges}.values()))


def save_for_cpu(model: Module, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes a model's state dict so that any machine can load it: on the CPU, without wrappers' prefixes.

    The model stays where it is: tensors on another device are copied piece by piece. `torch.load(path,
    weights_only=True)` and `model.load_state_dict` accept it.  overwrite: replace what is there. Raises `OutputExists`,
    `DiskFull`, `Unsupported` naming tensors that are pieces of others (FSDP), `OnlyAPart` for ungathered ones (ZeRO).
    """

    from ckptool.bridge.from_live import from_torch
    from ckptool.bridge.modules import unwrapped
    from ckptool.formats.folder import as_part, refuse_placeholders
    from ckptool.transforms.rename import apply

    def without_inner(key: str) -> str:  # what `torch.compile` and the like put on submodules; not a submodule `module`
        *modules, name = key.split(".")
        return ".".join([*(part for part in modules if part not in INNER_WRAPPERS), name])

    state: Any = unwrapped(model, averages=True).state_dict()
    tree = map_storages(from_torch(state), lambda storage: replace(storage, location="cpu"))
    checkpoint = Checkpoint(tree, formats.LIVE)
    refuse_placeholders(replace(checkpoint, part=as_part(checkpoint)), tree.items())
    save(apply(checkpoint, [StateDict((), tree, WEIGHTS)], without_inner).checkpoint, path, overwrite=overwrite)
