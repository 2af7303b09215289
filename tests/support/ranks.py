"""Processes of torch.distributed (gloo, on this machine) that load one thing together."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAD = """
    import os, sys, warnings
    warnings.simplefilter("ignore")
    import torch, torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    torch.set_num_threads(1)
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
    sys.stdout.flush()
    os._exit(code)
"""


def on_ranks(world: int, work: str, folder: Path, scratch: Path) -> None:
    """Runs `work(rank, folder, mesh)`, as the text defines it, in so many processes that meet in the folder
    `scratch`."""
    script, meet = scratch / "ranks.py", scratch / "meet"
    script.write_text("".join(map(textwrap.dedent, (HEAD, work, RUN))))
    command = [sys.executable, script, folder, meet, str(world)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    script.unlink()
    meet.unlink(missing_ok=True)
