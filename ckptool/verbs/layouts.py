"""The layouts that ship: `translate --list`, and those that the weights of a file need to become a model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptool.commands import FILE, OUT, Command, command
from ckptool.errors import UsageError, listed
from ckptool.transforms.translate.layouts import LayoutList, layout_between, read_layout, shipped


def layouts(name: str | None = None) -> LayoutList:
    """The layouts that ship, between whose sides `translate(rules_file=NAME)` goes; or the one of that name.

    Raises `UsageError` for a name that none has.
    """
    if name is not None and name not in shipped():
        what = f"{name!r} is not a layout that ships"
        raise UsageError(what, f"There are {listed(list(shipped()), 20)}.", "See them: ckptool translate --list")
    return LayoutList(tuple(read_layout(path) for each, path in shipped().items() if name in (None, each)))


def translation_to(weights: Mapping[Any, Any], model: Mapping[str, Any]) -> tuple[str, Command] | None:
    """The command that makes weights of one side of a layout those of a model of the other, and why; None where there
    is no such layout."""
    between = layout_between(weights, model)
    if between is None:
        return None
    layout, turned = between
    names = (layout.old.name, layout.new.name) if not turned else (layout.new.name, layout.old.name)
    why = f"names and shapes are those of {names[0]}, and the model has those of {names[1]} ({layout.title})"
    return why, command("translate", FILE, rules_file=layout.name, out=OUT)
