"""`explain`: what a code or an error message means, and what fixes it."""

from __future__ import annotations

from typing import Annotated

from ckptool.analysis.doctor import Diagnosis
from ckptool.analysis.explain import Explanation, explain_text
from ckptool.analysis.explain import explain as explained
from ckptool.options import argument, verb
from ckptool.verbs._options import standard_input


@verb(
    ("ckptool explain prefix-module", "a code: what it means, and what fixes it"),
    ("python train.py 2>&1 | ckptool explain -", "any error message, ckptool's or not"),
    exits=False,
)
def explain(
    code: Annotated[
        str,
        argument(
            "[CODE|-]", "The code of a note or error; - reads a message from standard input. Without it: list all."
        ),
    ] = "",
) -> Explanation | Diagnosis:
    """The explanation of a code, or of the message that is piped in; without a code the list of all."""
    return explain_text(standard_input()) if code == "-" else explained(code)
