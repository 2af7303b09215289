"""The process that fuzzes one target: `python -m tests.fuzz.one TARGET SEEDS CORPUS [libFuzzer's options]`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import atheris

with atheris.instrument_imports(include=["ckptool"]):
    from tests.fuzz.exercise import TooMuch, cut_off_sooner, exercise_bytes

from tests.fuzz.mending import MENDERS
from tests.support.hostile_inputs import ONE, pickle_zip


def confirmed(data: bytes) -> None:
    """Runs an input through. Instrumented code is up to fifty times as slow: what takes too long here is tried again
    without."""
    try:
        exercise_bytes(data)
    except TooMuch:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            if subprocess.run([sys.executable, "-m", "tests.fuzz", "--input", file.name], check=False).returncode:
                raise


def main() -> None:
    target = sys.argv[1]
    cut_off_sooner()
    mend = MENDERS.get(target)

    def once(data: bytes) -> None:
        confirmed(data)
        if target == "pickle":
            confirmed(pickle_zip(data, ONE))

    def mutate(data: bytes, size: int, seed: int) -> bytes:
        changed: bytes = atheris.Mutate(data, size)
        return mend(changed)[:size] if mend is not None and seed % 4 else changed

    arguments = [sys.argv[0], *sys.argv[2:]]
    if mend is not None:
        atheris.Setup(arguments, once, custom_mutator=mutate)
    else:
        atheris.Setup(arguments, once)
    atheris.Fuzz()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    main()
