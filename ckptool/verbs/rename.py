"""`rename`: new keys for model weights, by rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptool.errors import UsageError
from ckptool.given import several
from ckptool.roots import model_roots
from ckptool.transforms.rename import by_rules
from ckptool.transforms.rules import parse_rule, read_rules
from ckptool.verbs.opening import PathLike, open_to_change
from ckptool.verbs.saving import SaveOptions, Written
from ckptool.verbs.strip_module import renamed_file

if TYPE_CHECKING:
    from typing_extensions import Unpack


def rename(
    file: PathLike,
    rules: str | Sequence[str] = (),
    out: PathLike | None = None,
    *,
    rules_file: str | None = None,
    at: str | None = None,
    **options: Unpack[SaveOptions],
) -> Written:
    """Renames the keys of all model weights in `file` by rules `OLD => NEW`; for each key the first rule that matches counts.

    rules_file: a YAML file of more rules, tried after `rules`. Raises `UsageError` for a rule that cannot work (with its line),
    `NoMatch` for one that matches nothing, `Conflict` where two keys would become one.
    """
    parsed = [parse_rule(rule) for rule in several(rules)]
    parsed += read_rules(rules_file) if rules_file is not None else []
    if not parsed:
        raise UsageError(
            "rename was given no rule",
            "A rule is OLD => NEW.",
            "For example: ckptool rename FILE 'backbone.* => encoder.*' -o OUT",
        )
    opened = open_to_change(file, at)
    renamed = by_rules(opened.checkpoint, model_roots(opened.checkpoint, opened.at), parsed)
    return renamed_file("rename", opened.checkpoint, renamed, out, options, clean="the rules leave every key as it is")
