"""`prove`: a command that is killed anywhere ends with the same checkpoints; of a configuration it is `train`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from ckptool.checkpoint.paths import temporary_files
from ckptool.commands import Watched, arg, argument, option, several, verb
from ckptool.errors import UsageError
from ckptool.formats import PathLike
from ckptool.training import check_harness
from ckptool.training.reports import Proof
from ckptool.verbs._options import Say, Set

_WORDS = "The configuration to prove, or a command of your own, in which {run} stands for a fresh folder."


def _words(words: Annotated[Sequence[str], argument("run.yaml | -- COMMAND", _WORDS, several=True)]) -> dict[str, Any]:
    is_command = len(words) > 1 or "{run}" in words[0] or words[0].endswith(".py")
    return {"config": None if is_command else words[0], "command": words if is_command else ()}


@verb(
    ("ckptool prove run.yaml --steps 40 --kills 3", "whether it ends with the same bytes"),
    ("ckptool prove -- python train.py --out {run}", "your own script, in a fresh folder"),
    from_words=_words,
)
def prove(
    config: PathLike | dict[str, Any] | None = None,
    set: Set = (),
    *,
    command: Sequence[str] = (),
    steps: Annotated[int | None, option("--steps N", "Length of the run, with 20 saves in it.", least=2)] = None,
    kills: Annotated[int, option("--kills N", "Number of kills.", least=1)] = 5,
    seed: Annotated[int, option("--seed N", "Seed for choosing where to kill.")] = 0,
    timeout: Annotated[float, option("--timeout SECONDS", "Time limit of one process.", least=1)] = 600,
    say: Annotated[Say | None, Watched("status")] = None,
) -> Proof:
    """Proves that a run of this configuration, killed anywhere, ends with the same checkpoints as one that is not.

    command: a program of your own in place of the configuration, `["python", "train.py", "--out", "{run}"]`, where
    `{run}` is replaced by a fresh folder; it is killed and restarted, and its checkpoints are compared. Of a
    configuration it is `ckptool train`. Raises `RunFailed` where the command fails unbroken.
    """
    if command and (config is not None or set or steps):
        options = f"It takes only the options {arg('kills')}, {arg('seed')} and {arg('timeout')}."
        raise UsageError("a command of your own has no configuration and no length", options)
    if config is None and not command:
        raise UsageError("prove was given neither a configuration nor a command")
    from ckptool.training.prove import prove_command

    with temporary_files(), TemporaryDirectory(prefix="ckptool-config-") as folder:
        if config is not None:
            check_harness()
            from ckptool.training import configfile, run_folder

            saves = [f"train.steps={steps}", "train.epochs=null", f"save.every={max(1, steps // 20)}"] if steps else []
            path = Path(folder, "run.yaml")
            values = configfile.read(config, [*saves, *several(set)]).dumped()
            path.write_text(run_folder.dumped(values), encoding="utf-8")
            words = ("ckptool", "train", str(path), "--set", "run={run}", "--resume", "auto", "-q")
            command = [sys.executable, "-m", *words]
        return prove_command(command, kills=kills, seed=seed, timeout=timeout, say=say or str)
