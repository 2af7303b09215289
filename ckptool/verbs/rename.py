"""`rename`: new keys for model weights, by rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from ckptool.commands import FILE, OUT, argument, command, option, several, verb
from ckptool.conventions.state_dicts import model_state_dicts
from ckptool.errors import UsageError
from ckptool.formats import CheckpointLike
from ckptool.names.rule_files import renaming
from ckptool.names.steps import by_rules
from ckptool.transforms.rename import apply
from ckptool.verbs._options import ChangedAt, Out, files_and_rules
from ckptool.verbs._save import SavePart, Unpack, Written, begin_change, renamed_file

_FILE_OR_RULE = (
    "Checkpoints (FILE#ADDRESS changes only that part, and writes the whole file), and rules 'OLD => NEW'"
    " for whole keys: * stands for anything, {n} for anything without a dot."
)


def _words(
    words: Annotated[Sequence[str], argument("FILE|RULE", _FILE_OR_RULE, each=True)], rules_file: str | None = None
) -> dict[str, Any]:
    files, rules = files_and_rules("rename", words, rules_file is not None)
    return {"file": files, "rules": rules}


@verb(
    ("ckptool rename model.pt 'module.conv{n}.* => stem.{n}.*' -n -o renamed.pt", "preview, write nothing"),
    from_words=_words,
)
def rename(
    file: CheckpointLike,
    rules: str | Sequence[str] | Mapping[str, str] = (),
    out: Out = None,
    *,
    rules_file: Annotated[str | None, option("--rules FILE.yaml", "More rules, from a file.")] = None,
    at: ChangedAt = None,
    **options: Unpack[SavePart],
) -> Written | Any:
    """Renames the keys of all model weights by rules `OLD => NEW`; for each key the first that matches counts.

    rules: strings, or `{OLD: NEW}`; those of a file are tried after them. Raises `UsageError` for a rule that cannot
    work (with its line), `NoMatch` for one that matches nothing, `Conflict` where two keys would become one.
    """
    parsed = renaming(several(rules, " => "), rules_file)
    if not parsed:
        fix = f"For example: {command('rename', FILE, 'backbone.* => encoder.*', out=OUT)}"
        raise UsageError("rename was given no rule", "A rule is OLD => NEW.", fix)
    change = begin_change("rename", file, out, at, options)
    roots = model_state_dicts(change.part, named=change.named)
    renamed = apply(change.part, roots, by_rules(parsed, dict.fromkeys(key for root in roots for key in root.names())))
    return renamed_file(change, renamed, clean="the rules change no key")
