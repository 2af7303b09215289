"""`prove`: that a run killed anywhere ends with the same bytes; and a command of yours, with the same checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from ckptool.commands import Watched, arg, argument, option, several, verb
from ckptool.errors import UsageError
from ckptool.training.reports import CommandProof, Proof
from ckptool.verbs._training import Config, PathLike, Say, Set, configuration

_WORDS = "The configuration to prove, or a command of your own, in which {run} stands for a fresh folder."
_PROCESSES = "With strategy ddp or fsdp: how many train together, and are killed. Default: 2, or one for each GPU."


def _words(words: Annotated[Sequence[str], argument("run.yaml | -- COMMAND", _WORDS, several=True)]) -> dict[str, Any]:
    own = len(words) > 1 or "{run}" in words[0]
    return {"config": None if own else words[0], "command": words if own else ()}


@verb(
    ("ckptool prove run.yaml --steps 40 --kills 3", "does it end with the same bytes?"),
    ("ckptool prove -- python train.py --out {run}", "your own script, in a fresh folder"),
    from_words=_words,
)
def prove(
    config: PathLike | dict[str, Any] | Config | None = None,
    set: Set = (),
    *,
    command: Sequence[str] = (),
    steps: Annotated[int, option("--steps N", "Length of the run in steps.", least=2)] = 300,
    kills: Annotated[int, option("--kills N", "Number of kills.", least=1)] = 5,
    seed: Annotated[int, option("--seed N", "Seed of where the kills fall.")] = 0,
    exhaustive: Annotated[bool, option("--exhaustive", "Kill a short run at every file-system event too.")] = False,
    processes: Annotated[int | None, option("--processes N", _PROCESSES, least=1)] = None,
    timeout: Annotated[float, option("--timeout SECONDS", "For one process of a command.", least=1)] = 600,
    say: Annotated[Say | None, Watched("status")] = None,
) -> Proof | CommandProof:
    """Proves that a run of this configuration which is killed anywhere ends with the same bytes as one that is not.

    command: a program of your own in place of the configuration, `["python", "train.py", "--out", "{run}"]`, where
    `{run}` stands for a fresh folder; it is killed, started again as it is, and its checkpoints are compared.
    Raises `RunFailed` where a training process fails by itself, or a command unbroken.
    """
    told = say or (lambda text: None)
    if command:
        if config is not None or set or exhaustive or processes is not None or steps != 300:
            raise UsageError(
                "a command has no configuration and no length",
                f"Of the options, it takes {arg('kills')}, {arg('seed')} and {arg('timeout')}.",
            )
        from ckptool.analysis.diff import diff_files
        from ckptool.analysis.scan import scan
        from ckptool.training.prove.command import prove_command

        compare = partial(diff_files, ignore=("order",), statistics=False)
        return prove_command(command, scan, compare, kills=kills, seed=seed, timeout=timeout, say=told)
    if config is None:
        raise UsageError("prove was given neither a configuration nor a command")
    made = configuration(config, several(set))
    from ckptool.training.prove.proof import prove as proved

    return proved(made, steps=steps, kills=kills, seed=seed, exhaustive=exhaustive, processes=processes, say=told)
