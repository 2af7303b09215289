"""What the tests of hostile pickles share: pickles that call a decoy, and files opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptool.formats import read
from tests.support.hostile_inputs import name, pickle_zip, text

MARKER = name("ckptool_marker", "run")


CALL = MARKER + text("trace") + b"\x85R"


class Decoy:
    """A folder in which every name that a file here mentions is a module that leaves a trace."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.trace = folder, folder / "trace"
        body = f"import pathlib\npathlib.Path({str(self.trace)!r}).touch()\n"
        body += f"def run(*a, **k):\n    pathlib.Path({str(self.trace)!r}).touch()\n"
        for module in ("ckptool_marker", "torch", "numpy", "models"):
            (folder / f"{module}.py").write_text(body)


def opened_pickle(pickle: bytes, folder: Path) -> Any:
    file = folder / "input.pt"
    file.write_bytes(pickle_zip(pickle))
    return read(file)
