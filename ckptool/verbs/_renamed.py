"""What the verbs on keys do last: save and report a renaming."""

from __future__ import annotations

from typing import Any

from ckptool.checkpoint import Note
from ckptool.checkpoint.state_dicts import optimizers
from ckptool.checkpoint.tree import address
from ckptool.errors import counted, listed
from ckptool.transforms.rename import Renamed
from ckptool.verbs._change import FileChange, Row, Written


def renamed_file(change: FileChange, renamed: Renamed, clean: str) -> Written | Any:
    """Saves a renaming and reports it.  clean: what to say where no key changes."""
    saved = change.save(renamed.checkpoint, changes=renamed.changed > 0)
    summary = f"{renamed.changed:,} of {counted(renamed.total, 'key')} renamed" if renamed.changed else clean
    of_roots = [
        f"{root or 'the whole file'}: {changed:,} of {counted(keys, 'key')}" for root, changed, keys in renamed.roots
    ]
    examples = [f"{old} → {new}" for old, new in renamed.examples]
    more = len(renamed.names) - len(examples)
    roots = [{"root": root, "changed": changed, "keys": keys} for root, changed, keys in renamed.roots]
    return saved.about(
        summary,
        Row("roots", roots, of_roots if len(of_roots) > 1 else []),
        *examples,
        *([f"… {more:,} more"] if more else []),
        changed=renamed.changed,
        keys=renamed.total,
        notes=_old_names(change, renamed),
    )


def _old_names(change: FileChange, renamed: Renamed) -> list[Note]:
    """The optimizers outside of the part that was changed, which call its parameters by their old names."""
    notes = []
    for path, optimizer in optimizers(change.outside):
        groups = [group for group in optimizer["param_groups"] if isinstance(group, dict)]
        lists = [group[field] for group in groups for field in ("params", "param_names") if field in group]
        names = [name for each in (*lists, optimizer["state"]) if isinstance(each, (list, dict)) for name in each]
        if old := list(dict.fromkeys(name for name in names if type(name) is str and name in renamed.names)):
            message = f"{address(path)} is outside what was changed, and has the old names: {listed(old, 3)}"
            notes.append(Note("old-names", message))
    return notes
