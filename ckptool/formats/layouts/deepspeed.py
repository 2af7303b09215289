"""`deepspeed`: the folder of a tag (`global_step500`) that DeepSpeed wrote, or the one above, whose `latest` names it.

Source: deepspeed/runtime/engine.py (`save_checkpoint`, the names of files), utils/zero_to_fp32.py and
checkpoint/ds_to_universal.py, 0.10 to 0.19. `mp_rank_00_model_states.pt` holds the model and everything else that was
saved, of stage 3 one such file for each rank; what a rank has of the optimizer's flat vectors is in its
`zero_pp_rank_0_mp_rank_00_optim_states.pt`. The tree is that of the first rank's model states, with whole weights under
`module` and the optimizer's state by name under `optimizer`. `tags` reads a tag of any kind, `zero` puts the vectors of
ZeRO together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace

from ckptool.checkpoint import Checkpoint, Note
from ckptool.checkpoint.files import Folder, Input, read_small
from ckptool.commands import command, other_program
from ckptool.errors import Ambiguous, Corrupt, NotACheckpoint, counted, listed
from ckptool.formats.folder import names_in

NAME = "deepspeed"
LATEST = ("latest", "latest_universal")
OTHER_TAGS = "other-tags"  # of the note
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")  # copied beside every checkpoint
UNIVERSAL = "zero"  # the folder that a universal one has
MAX_TAG = 4_096  # bytes of the file `latest`
_STATES = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_\d+_)?mp_rank_\d+_(?:optim|model)_states\.pt")
_TAG = re.compile(r"global_step\d+(?:_universal)?")


def detect(head: bytes, source: Input) -> bool:
    return isinstance(source, Folder) and (_has_states(source.names) or tag_of(source) is not None)


def belonging(folder: Folder) -> set[str]:
    """The names in a tag's folder, or the folder above, that belong to the checkpoint that is read there."""
    if _has_states(folder.names):
        return {name for name in folder.names if name.endswith("_states.pt") or name == UNIVERSAL}
    tag = tag_of(folder)
    return {name for name in (tag, *LATEST, *SCRIPTS) if name in folder} if tag else set()


def other_tags(folder: Folder) -> set[str]:
    """The tags in a folder beside the one that is read there: checkpoints of their own."""
    tag = tag_of(folder)
    return {name for name in _tags(folder) if name != tag} if tag is not None else set()


def _tags(folder: Folder) -> list[str]:
    return [name for name in folder.names if _TAG.fullmatch(name) and _is_tag(folder, name)]


def _has_states(names: Iterable[str]) -> bool:
    return any(name.endswith("_states.pt") and _STATES.fullmatch(name) for name in names)


def tag_of(folder: Folder) -> str | None:
    """The tag that a folder's `latest` names, or the only one in it; empty where that leads nowhere; None for other
    folders."""
    tags = _tags(folder)
    for latest in LATEST:
        if latest in folder and (tags or SCRIPTS[0] in folder or _is_tag(folder, _named_by(folder, latest))):
            name = _named_by(folder, latest)
            return name if _is_tag(folder, name) else ""
    return tags[0] if len(tags) == 1 else "" if tags else None


def _named_by(folder: Folder, latest: str) -> str:
    return read_small(os.path.join(folder.path, latest), "the name of a tag", MAX_TAG).decode(errors="replace").strip()


def _is_tag(folder: Folder, name: str) -> bool:
    """True for a folder inside, by its plain name, that has DeepSpeed's files."""
    return name in folder and _has_states(names_in(os.path.join(folder.path, name)))


def read(source: Folder) -> Checkpoint:
    """The checkpoint of a tag's folder, or of the tag that `latest` names in the folder above.

    Reads the tables of every rank's files, no tensor data. Raises `Corrupt` for ranks that are missing, and for a
    `latest` that leads elsewhere; `Conflict` for files of several steps, stages or world sizes; `Unsupported` for
    tensor parallelism and what else is not joined; what opening a rank's file raises.
    """
    from ckptool.formats.layouts import tags

    tag = source if _has_states(source.names) else Folder(os.path.join(source.path, _tag(source)))
    found = tags.read(tag)
    if tag is source:
        return found
    source.adopt(os.path.basename(tag.path), tag)
    notes = found.notes
    if others := sorted(other_tags(source)):
        beside = f"{counted(len(others), 'other tag is', 'other tags are')} beside it: {listed(others, 3)}"
        notes += (Note(OTHER_TAGS, f"{os.path.basename(tag.path)} was read; {beside}"),)
    return replace(found, source=source, notes=notes)


def _tag(folder: Folder) -> str:
    """The tag in a folder. Raises `Corrupt` where `latest` leads nowhere, `Ambiguous` for several tags without it."""
    if name := tag_of(folder):
        return name
    tags = _tags(folder)
    advice = f"Name one: {command('inspect', os.path.join(folder.path, tags[-1]))}" if tags else ""
    latest = next((latest for latest in LATEST if latest in folder), None)
    if latest is None:
        shown = listed(tags, 3)
        what = f"{folder} holds {counted(len(tags), 'checkpoint')} of DeepSpeed: {shown}"
        raise Ambiguous(what, "The file `latest`, which names one of them, is not beside them.", advice)
    name, path = _named_by(folder, latest), os.path.join(folder.path, latest)
    if name in folder:
        what = f"{path} names {name}, which has none of DeepSpeed's files in it"
        raise NotACheckpoint(what, "Another program wrote it, or the run was stopped before it saved.", advice)
    what = f"{path} names {name[:200]!r}, which is no folder beside it"
    why = "The folder of that tag was moved, deleted or not copied along. One that is elsewhere is never followed."
    raise Corrupt(what, why, advice or f"See what is there: {other_program('ls', folder.path)}")
