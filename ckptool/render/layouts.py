"""Renders the list of layouts as text and JSON."""

from __future__ import annotations

from ckptool.checkpoint.registry import provides
from ckptool.errors import counted, printable
from ckptool.render.json import Json, fields_json, picked_of
from ckptool.render.style import PLAIN, Style
from ckptool.transforms.translate.layouts import LayoutList, LayoutSide


@provides("text", LayoutList)
def layouts_text(found: LayoutList, *, style: Style = PLAIN) -> str:
    """A line for each layout; of one alone, what identifies its sides, and what the rules refuse or need."""
    if len(found.layouts) != 1:
        width = max((len(each.name) for each in found.layouts), default=0)
        lines = [f"{style.bold(each.name.ljust(width))}  {printable(each.title)}" for each in found.layouts]
        hint = "what one needs and refuses: --list --rules NAME"
        lines.append(style.dim(f"{counted(len(found.layouts), 'layout')}: translate FILE --rules NAME -o OUT; {hint}"))
        return "\n".join(lines) + "\n"
    (layout,) = found.layouts
    lines = [f"{style.bold(layout.name)}: {printable(layout.title)}"]
    lines += [f"  {line}" for side in (layout.old, layout.new) for line in _side(side)]
    if layout.translation.variables:
        lines.append(f"  of the configuration, or --set: {', '.join(map(printable, layout.translation.variables))}")
    lines += [f"  {printable(note)}" for note in layout.notes]
    lines.append(style.dim(f"  facts: {printable(layout.source)}"))
    return "\n".join(lines) + "\n"


def _side(side: LayoutSide) -> list[str]:
    told = ", ".join(map(printable, side.has))
    without = f", without {', '.join(map(printable, side.lacks))}" if side.lacks else ""
    refused = dict.fromkeys(f"  refused: {printable(why)}" for _, why in side.refuse)
    return [f"{printable(side.name)}: {told}{without}", *refused]


@provides("json", LayoutList)
def layouts_json(found: LayoutList) -> Json:
    """`ckptool.layouts/1`: every layout that ships."""
    layouts = [
        {
            **fields_json(each, "name title source old new"),
            "variables": list(each.translation.variables),
            **fields_json(each, "notes file"),
        }
        for each in found.layouts
    ]
    return {"schema": "ckptool.layouts/1", "layouts": layouts}


picked_of(LayoutSide, "name has lacks refused=refuse:what,why")
