"""The files that are measured on: made once, kept in the folder of the benchmark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

GB = 1 << 30


def big(path: Path) -> None:
    """2 GB: 320 f32 tensors of a DataParallel-wrapped model, on CUDA tags."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tensors = {f"module.layers.{i}.weight": torch.randn(1024, 1638, generator=generator) for i in range(320)}
    torch.save({"state_dict": tensors, "epoch": 3}, path)


def other(path: Path) -> None:
    """The same model a training step later: every value is a little different."""
    import torch

    checkpoint = torch.load(path.with_name("big.pt"), mmap=True, weights_only=True)
    checkpoint["state_dict"] = {name: tensor * 1.001 for name, tensor in checkpoint["state_dict"].items()}
    torch.save(checkpoint, path)


def equal(path: Path) -> None:
    """A copy of the 2 GB file."""
    import shutil

    shutil.copyfile(path.with_name("big.pt"), path)


def step(path: Path) -> None:
    """0.5 GB: one of the last checkpoints of a run. Several have to stay in the page cache together, with what is
    written."""
    import torch

    generator = torch.Generator().manual_seed(int(path.name.removeprefix("step")[0]))
    tensors = {f"module.layers.{i}.weight": torch.randn(1024, 1638, generator=generator) for i in range(80)}
    torch.save({"state_dict": tensors, "epoch": 3}, path)


def many(path: Path) -> None:
    """50,000 tensors of four values."""
    import torch

    torch.save(
        {f"module.layers.{i // 10}.block{i % 10}.weight": torch.full((4,), float(i)) for i in range(50_000)}, path
    )


def sparse(path: Path) -> None:
    """100 GB of holes."""
    from fixtures.sparse import make_sparse

    make_sparse(path, 100 * GB)


def several(path: Path) -> None:
    """A folder of eight files of 200 MB."""
    import torch

    path.mkdir()
    for number in range(8):
        generator = torch.Generator().manual_seed(number)
        tensors = {f"layers.{i}.weight": torch.randn(1024, 1600, generator=generator) for i in range(32)}
        torch.save({"state_dict": tensors, "epoch": number}, path / f"epoch{number}.pt")


FILES: dict[str, Callable[[Path], None]] = {
    "big.pt": big,
    "equal.pt": equal,
    "other.pt": other,
    "step1.pt": step,
    "step2.pt": step,
    "step3.pt": step,
    "many.pt": many,
    "sparse.pt": sparse,
    "several": several,
}


def prepare(folder: Path) -> None:
    """Makes what is missing. A file that is there is complete: it got its name last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        path = folder / name
        if not path.exists():
            print(f"making {path} …", flush=True)
            half = path.with_name(f"{name}.half")
            # In a process of its own: what is measured later would begin with the peak memory of the one that it is
            # forked from.
            subprocess.run([sys.executable, "-m", "benchmarks.files", name, str(half)], check=True)
            half.rename(path)


if __name__ == "__main__":
    FILES[sys.argv[1]](Path(sys.argv[2]))
