"""Writes `ckptool/__init__.pyi`, what type checkers and editors know of `ckptool`: `python -m docs.stub`.

A verb gives a report for a file, a dictionary for a dictionary, a list for a list of paths: each is a signature here,
which the verb's own cannot say. All other names are imported from where they are.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import ckptool
from ckptool.commands import VERBS, function_of, parameters_of

STUB = Path(ckptool.__file__).with_suffix(".pyi")
HEAD = '''"""ckptool: open any PyTorch checkpoint without running its code. Written by `python -m docs.stub`."""

from collections.abc import Iterator, Mapping, Sequence
from io import BufferedIOBase
from os import PathLike
from typing import IO, Any, Literal, Optional, Union, overload

from torch.nn import Module
from typing_extensions import Unpack

from ckptool.checkpoint.jobs import Executor
from ckptool.verbs._save import Save, SaveInPlace, SavePart, Written
'''
PATH, MEMORY = "str | PathLike[str]", "Mapping[Any, Any] | Module"
FILE, PATHS = f"{PATH} | IO[bytes] | BufferedIOBase", f"list[Any] | tuple[Any, ...] | Iterator[{PATH}]"
_LIKE = "Union[str, PathLike[str], IO[bytes], BufferedIOBase, Mapping[Any, Any], Checkpoint, Module"
LIKE = re.compile(rf"{re.escape(_LIKE)}(, NoneType)?\]")
SEVERAL = f"jobs: int | str | Executor = ..., folder: {PATH} | None = ..., skip_refused: bool = ..., **options: Any"
OF_SEVERAL = ("average", "bundle", "lora")  # of several inputs: the kind of the first does not tell that of the result


def text_of(kind: Any) -> str:
    """A type as the stub spells it."""
    kind = get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
    text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(kind))
    return LIKE.sub(lambda match: f"{FILE} | {MEMORY} | Checkpoint{' | None' * bool(match[1])}", text)


def reports_of(name: str) -> list[Any]:
    """The types of what a verb returns; `Any` among them where that depends on what it is given."""
    returned = inspect.signature(function_of(name), eval_str=True).return_annotation
    return [*get_args(returned)] or [returned]


def signatures(name: str) -> Iterator[str]:
    """The signatures of a verb whose result depends on what it is given; none where it does not."""
    parameters = [*inspect.signature(function_of(name), eval_str=True).parameters.values()]
    function, kinds, first = VERBS[name].function, reports_of(name), parameters[0].name
    summary = (inspect.getdoc(function_of(name)) or "").partition("\n\n")[0].replace("\n", " ")  # what editors show
    takes_several, report = next(parameters_of(function_of(name))).option.each, kinds[0].__name__
    into = next((param.name for param in parameters if param.name in ("out", "folder")), "")

    def signature(words: str, result: str) -> str:
        return f'@overload\ndef {function}({words}) -> {result}: """{summary}"""'

    def line(result: str, given: dict[str, str], needed: str = "") -> str:
        """One signature.  given: other types.  needed: this parameter, and those before it, have no default."""
        words, required = list[str](), bool(needed)
        for at, param in enumerate(parameters):
            if param.kind is param.KEYWORD_ONLY and parameters[at - 1].kind is not param.KEYWORD_ONLY:
                words.append("*")
            if param.kind is param.VAR_KEYWORD:
                words.append(f"**options: Unpack[{param.annotation.__name__}]")
                continue
            default = " = ..." if param.default is not param.empty and not required else ""
            words.append(f"{param.name}: {given.get(param.name) or text_of(param.annotation)}{default}")
            required = required and param.name != needed
        return signature(", ".join(words), result)

    depends = Any in kinds and len(kinds) == 2 and bool(into)
    is_alone = depends and not name.startswith(OF_SEVERAL)
    if is_alone:
        yield line(report, {first: FILE})
    if depends:
        yield line(report, {into: PATH}, into)
    if is_alone:
        yield line("Checkpoint", {first: "Checkpoint", into: "None"})
        yield line("dict[Any, Any]", {first: MEMORY, into: "None"})
    of_several = signature(f"{first}: {PATHS}, *, {SEVERAL}", f"list[{report} | Any]")
    if depends:
        yield from [of_several] * takes_several
        yield line("Any", {into: "object"} if function in ("cast", "remap") else {})  # a dtype or a device
    elif takes_several:  # an open file is an iterator, too
        if function == "doctor":
            yield line(report, {"fix": "Literal[False]"})
        yield line("Any" if Any in kinds and into else " | ".join(map(text_of, kinds)), {})
        yield of_several


def stub() -> str:
    """The whole file."""
    verbs = {verb.function: name for name, verb in VERBS.items() if verb.in_python}
    overloads = {function: [*signatures(name)] for function, name in verbs.items()}
    homes = ckptool._HOMES | ckptool._verbs()
    imports = [(f"ckptool.{homes[name]}", name) for name in ckptool.__all__ if not overloads.get(name)]
    kinds = {kind for function, name in verbs.items() if overloads[function] for kind in reports_of(name)} - {Any}
    unseen = [(kind.__module__, kind.__name__) for kind in kinds if kind.__name__ not in (*homes, "Written")]
    lines = [f"from {home} import {name} as {name}" for home, name in sorted(imports)]
    lines += [f"from {home} import {name}" for home, name in sorted(unseen)]
    lines += ["", "__version__: str", "__all__: list[str]", ""]
    return HEAD + "\n".join([*lines, *(line for name in sorted(overloads) for line in overloads[name])]) + "\n"


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
