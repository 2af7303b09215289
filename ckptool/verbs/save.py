"""`ckptool.save`: tensors, arrays and entries to a checkpoint, durably."""

from __future__ import annotations

import os
from typing import Any, BinaryIO

from ckptool import formats
from ckptool.checkpoint import FileRange
from ckptool.checkpoint.graph import no_collection
from ckptool.checkpoint.tree import storages
from ckptool.errors import UsageError
from ckptool.output import check_target
from ckptool.verbs._save import checkpoint_of, path_of, put_in_place


def save(
    tree: Any,
    path: str | os.PathLike[str] | BinaryIO,
    *,
    container: str | None = None,
    overwrite: bool = False,
    keep_unknown: bool = False,
) -> None:
    """Writes `tree` to `path`: what `torch.save` takes, of a module its state dict, entries and checkpoints.

    path: also a URL that can be written (`s3://bucket/model.pt`), or a file that is open for writing in binary. An open
    file gets the bytes when they are complete; whether they survive a power cut is then its owner's to see to.
    container: `torch-zip`, `safetensors`, `sharded`, `npz`, …; by default that of the suffix, else `torch-zip`.
    overwrite: replace what is there; it stays whole under its name until the new file is.
    keep_unknown: write objects of unknown classes as `torch.save` would (they load with `weights_only=False` only).
    Numpy arrays become tensors in safetensors and other containers of tensors alone, and stay arrays in torch files.
    Raises `Unsupported`, naming what cannot be saved and where it is.
    """
    if callable(getattr(path, "write", None)):
        _save_into(path, tree, container=container or formats.DEFAULT, keep_unknown=keep_unknown)
        return
    path = path_of("save", path)
    target = formats.by_name(container) if container else formats.for_output(path, formats.DEFAULT)
    formats.refuse_name(path, target, asked=bool(container))
    if not target.writes_folder:
        check_target(path, overwrite=overwrite)
    made = checkpoint_of(tree, arrays_as_tensors=target.tensors_only, keep_unknown=keep_unknown)
    with no_collection():
        plan = target.write(made, keep_unknown=keep_unknown)
    ranges = [each.data for each in storages(made.tree) if isinstance(each.data, FileRange)]
    sources = list({id(data.file): data.file for data in ranges}.values())
    put_in_place(plan, path, overwrite=overwrite, inputs=sources)


def _save_into(file: Any, tree: Any, **options: Any) -> None:
    """Saves to an open file, by way of a temporary one."""
    from shutil import copyfileobj
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="ckptool-") as folder:
        path = os.path.join(folder, "checkpoint")
        save(tree, path, **options)
        try:
            with open(path, "rb") as content:
                copyfileobj(content, file, 1 << 20)
        except (IsADirectoryError, TypeError, ValueError) as error:
            fix = "Open it for writing in binary: open(PATH, 'wb'); for a folder of files, name one."
            raise UsageError(f"<{type(file).__name__}> does not take the bytes of a file", str(error), fix) from None
