"""An error as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence

from ckptool.errors import CkptoolError
from ckptool.render.json import Json
from ckptool.render.style import PLAIN, Style


def error_text(error: CkptoolError, style: Style = PLAIN) -> str:
    """The three parts of an error, a line each: what happened, what it means, what to type."""
    lines = [f"{style.red(f'error[{error.code}]')}: {error.what}"]
    lines += [f"  {line}" for line in error.why.split("\n")] if error.why else []
    lines += [f"  {style.cyan(error.fix)}"] if error.fix else []
    return style.page("\n".join(lines) + "\n")


def error_json(error: CkptoolError, done: Sequence[Json] = ()) -> Json:
    """`ckptool.error/2`: the three parts and the code; `done`: what was finished before."""
    facts = {"schema": "ckptool.error/2", "code": error.code, "what": error.what, "why": error.why, "fix": error.fix}
    return facts | ({"done": list(done)} if done else {})
