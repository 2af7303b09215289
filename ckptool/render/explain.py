"""Renders `explain` as text and JSON."""

from __future__ import annotations

from ckptool.analysis.explain import Explanation
from ckptool.checkpoint.registry import provides
from ckptool.render.json import document
from ckptool.render.style import PLAIN, Style

WIDTH = 25  # columns of a code in the list


@provides("text", Explanation)
def explain_text(found: Explanation, *, style: Style = PLAIN) -> str:
    """A code with its facts, a line each; of a list the code and its meaning, below the title of its table."""
    lines: list[str] = []
    kind = ""
    for code in found.codes:
        meaning, *more = [(head, text.replace("`", "")) for head, text in code.facts.items()]
        if found.is_list:
            lines += ["", style.bold(code.kind)] if code.kind != kind else []
            kind = code.kind
            first, *rest = style.prose(f"{code.code:{WIDTH}} {meaning[1]}", " " * (WIDTH + 1))
            lines += [style.cyan(first[:WIDTH]) + first[WIDTH:], *rest]
            continue
        lines += ["", f"{style.bold(code.code)} ({code.kind})", *style.prose(f"  {meaning[1]}")]
        lines += [line for head, text in more for line in style.prose(f"  {head}: {text}", "    ")]
    return "\n".join(lines).lstrip("\n") + "\n"


document(Explanation, "explain", "codes")
