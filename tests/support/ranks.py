"""Processes of torch.distributed (gloo, on this machine) that save or load one thing together.

They are forked from one process that has torch imported, which each process of the tests starts when it needs it.
"""

import atexit
import os
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.forks import Forks, serve_forked, torchrun_places

ROOT = Path(__file__).parents[2]
HEAD = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
"""
RUN = """
world, others = int(sys.argv[3]), []
for rank in range(1, world):
    others.append(os.fork())
    if not others[-1]:
        break
else:
    rank = 0
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=world)
code = 0
try:
    work(rank, sys.argv[1], init_device_mesh("cpu", (world,)))
except BaseException:
    import traceback
    traceback.print_exc()
    code = 1
dist.barrier()
dist.destroy_process_group()
if not rank:
    code |= any([os.waitpid(other, 0)[1] for other in others])
sys.stderr.flush()
os._exit(code)
"""
SEEDED = """
def work(rank, folder, mesh):
    torch.manual_seed(0)
    save(rank, folder, mesh)
"""


def on_ranks(world: int, work: str, folder: Path, scratch: Path) -> None:
    """Runs `work(rank, folder, mesh)`, as the text defines it, in so many processes that meet in the folder
    `scratch`."""
    meet, errors = scratch / "meet", scratch / "errors"
    script = HEAD + textwrap.dedent(work) + RUN
    assert _run(script, errors, ["ranks.py", str(folder), str(meet), str(world)]) == 0, errors.read_text()
    errors.unlink()
    meet.unlink(missing_ok=True)


def save_on_two_ranks(save: str, folder: Path, scratch: Path) -> None:
    """Runs `save(rank, folder, mesh)`, as the text defines it, in two processes, with the same seed."""
    on_ranks(2, textwrap.dedent(save) + SEEDED, folder, scratch)


def torchrun(world: int, script: str, *words: str, scratch: Path) -> None:
    """Runs a script in so many processes, with the variables that `torchrun` sets."""
    errors = scratch / "errors"
    starts = STARTS.format(places=torchrun_places(world), script=script)
    assert _run(starts, errors, ["ranks.py", *words]) == 0, errors.read_text()


STARTS = """
import os
ranks = []
for place in {places}:
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ.update(place)
        exec({script!r})
        os._exit(0)
os._exit(max(bool(os.waitpid(rank, 0)[1]) for rank in ranks))
"""


def _run(script: str, errors: Path, words: list[str]) -> int:
    return int(_server().ask([script, str(errors), words]))


@cache
def _server() -> Forks:
    server = Forks("-m", __name__)
    atexit.register(close)
    return server


def close() -> None:
    """Ends the process that forks, if it was started."""
    if _server.cache_info().currsize and _server().process.poll() is None:
        _server().close()


def _as_told(request: Any) -> None:
    """A script with its words, which ends the process."""
    script, errors, words = request
    os.setsid()
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), 2)
    os.dup2(2, 1)
    sys.argv = words
    exec(compile(script, words[0], "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    exec(HEAD, {})
    serve_forked(_as_told, lambda status, _: os.waitstatus_to_exitcode(status))
