"""Two processes of torch.distributed (gloo, on this machine) that save one thing together."""

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
    other = os.fork()
    rank, folder = int(other == 0), sys.argv[1]
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    torch.manual_seed(0)
    save(rank, folder, init_device_mesh("cpu", (2,)))
    dist.barrier()
    dist.destroy_process_group()
    if other:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def save_on_two_ranks(save: str, folder: Path, scratch: Path) -> None:
    """Runs `save(rank, folder, mesh)`, as the text defines it, in two processes that meet in the folder `scratch`."""
    script, meet = scratch / "ranks.py", scratch / "meet"
    script.write_text("".join(map(textwrap.dedent, (HEAD, save, RUN))))
    command = [sys.executable, script, folder, meet]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    script.unlink()
    meet.unlink(missing_ok=True)
