"""What torch says of the files of the lab is what `explain -` knows, and means what `doctor` finds in them."""

import warnings
from pathlib import Path

import torch

import ckptool
from ckptool.analysis.findings import recognised
from fixtures.lab import SPECIMENS, make

# What a message cannot tell apart, and `doctor FILE` does: names of classes, first bytes, what is in a folder or tar.
LESS = {*"weights-only not-a-checkpoint numpy-values pickle-protocol corrupt truncated folder legacy-tar io".split()}


def test_the_message_of_every_file_that_does_not_load(tmp_path: Path) -> None:
    wrong, messages = [], 0
    for name, specimen in SPECIMENS.items():
        (folder := tmp_path / name).mkdir()
        file = make(specimen, folder)
        codes = {each.code for each in ckptool.doctor(file).findings}
        for load in (torch.load, lambda path: torch.load(path, mmap=True), torch.jit.load):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    load(str(file))
            except Exception as error:  # noqa: BLE001
                said, messages = f"{type(error).__name__}: {error}", messages + 1
                known = recognised(said)
                if known is None or (load is torch.load and known.finding.code not in codes | LESS):
                    wrong.append((name, sorted(codes), known and known.finding.code, said))
    assert not wrong, "\n".join(map(str, wrong))
    assert messages > 60
