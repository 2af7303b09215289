"""An error as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence

from ckptool.checkpoint.registry import provides
from ckptool.errors import CkptoolError
from ckptool.render.json import Json
from ckptool.render.style import PLAIN, Style


@provides("text", CkptoolError)
def error_text(error: CkptoolError, style: Style = PLAIN) -> str:
    """The three parts of an error, a line each: what happened, what it means, what to type."""
    name = f"error[{error.code}]"
    first, *lines = style.prose(f"{name}: {error.what}")
    lines = [style.red(name) + first.removeprefix(name), *lines]
    lines += [part for line in error.why.split("\n") for part in style.prose(f"  {line}")] if error.why else []
    lines += [f"  {style.cyan(error.fix)}"] if error.fix else []
    return "\n".join(lines) + "\n"


@provides("json", CkptoolError)
def error_json(error: CkptoolError, done: Sequence[Json] = ()) -> Json:
    """`ckptool.error/1`: the three parts and the code; `done`: what was finished before."""
    facts = {"schema": "ckptool.error/1", "code": error.code, "what": error.what, "why": error.why, "fix": error.fix}
    return facts | ({"done": list(done)} if done else {})
