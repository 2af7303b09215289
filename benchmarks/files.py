"""The files that are measured on: made once, kept in the folder of the benchmark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
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


def gpt2(path: Path) -> None:
    """2 GB of f16 in GPT-2's layout: queries, keys and values in one, matrices as [in, out]."""
    import torch

    width, state = 2048, {}
    shapes = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width), "mlp.c_fc": (width, 4 * width)}
    for n in range(21):
        for name, shape in {**shapes, "mlp.c_proj": (4 * width, width)}.items():
            state[f"h.{n}.{name}.weight"] = torch.randn(shape).half()
            state[f"h.{n}.{name}.bias"] = torch.randn(shape[1]).half()
    torch.save(state, path)


def many(path: Path) -> None:
    """50,000 tensors of four values."""
    import torch

    torch.save(
        {f"module.layers.{i // 10}.block{i % 10}.weight": torch.full((4,), float(i)) for i in range(50_000)}, path
    )


def tenthousand(path: Path) -> None:
    """10,000 tensors of four values, in layers."""
    import torch

    names = [f"layers.{layer}.{part}.weight" for layer in range(1250) for part in "abcdefgh"]
    torch.save({"state_dict": {name: torch.zeros(4) for name in names}, "epoch": 3}, path)


def blocks(path: Path) -> None:
    """10,000 tensors of 4,096 values, in layers."""
    import torch

    names = [f"layers.{layer}.{part}.weight" for layer in range(1250) for part in "abcdefgh"]
    torch.save({name: torch.randn(64, 64) for name in names}, path)


def wide(path: Path) -> None:
    """1 GB in four tensors."""
    import torch

    torch.save({f"{name}.weight": torch.randn(8192, 8192) for name in "abcd"}, path)


def tensors(path: Path) -> None:
    """20,000 tensors of 16 values, as torch or safetensors write them."""
    import torch
    from safetensors.torch import save_file

    values = {f"layers.{i // 10}.block{i % 10}.weight": torch.full((4, 4), float(i)) for i in range(20_000)}
    (save_file if ".safetensors" in path.name else torch.save)(values, path)


def big_tensors(path: Path) -> None:
    """The tensors of the 2 GB file as safetensors."""
    import torch
    from safetensors.torch import save_file

    save_file(torch.load(path.with_name("big.pt"), mmap=True, map_location="cpu")["state_dict"], path)


def base(path: Path) -> None:
    """2 GB: a billion values of bf16 in 64 square matrices."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(4096, 4096, generator=generator).bfloat16() for _ in range(64))
    save_file({f"layers.{i}.q_proj.weight": weight for i, weight in enumerate(weights)}, path)


def adapter(path: Path) -> None:
    """An adapter of rank 16 on all of these, as PEFT writes it."""
    import json

    import torch
    from safetensors.torch import save_file

    path.mkdir()
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    factors = {}
    for i in range(64):
        module = f"base_model.model.layers.{i}.q_proj"
        factors[f"{module}.lora_A.weight"] = torch.randn(16, 4096)
        factors[f"{module}.lora_B.weight"] = torch.randn(4096, 16)
    save_file(factors, path / "adapter_model.safetensors")


def many_ranks(path: Path) -> None:
    """50,000 tensors of 64 values, divided among eight ranks."""
    import torch

    import ckptool

    tensors = {f"layers.{i // 10}.block{i % 10}.weight": torch.full((64,), float(i)) for i in range(50_000)}
    ckptool.convert(tensors, f"{path}.dcp", ranks=RANKS)
    Path(f"{path}.dcp").rename(path)


def small_files(path: Path) -> None:
    """A folder of 1,000 files of ten tensors."""
    import torch

    path.mkdir()
    for number in range(1_000):
        torch.save({f"layer{i}.weight": torch.full((16,), float(i)) for i in range(10)}, path / f"{number}.pt")


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


RANKS = 8


def ranks(path: Path, size: int = 4 * GB) -> None:
    """4 GB of torch.distributed.checkpoint: f32 tensors on eight ranks, every second one divided by columns."""
    import os

    others: list[int] = []
    for rank in range(1, RANKS):
        others.append(os.fork())
        if not others[-1]:
            _save_rank(path, rank, size)
            os._exit(0)
    _save_rank(path, 0, size)
    codes = [os.waitpid(other, 0)[1] for other in others]
    if any(codes):
        raise SystemExit("a rank failed")
    path.with_name(f"{path.name}.meet").unlink(missing_ok=True)


def _save_rank(path: Path, rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path.absolute()}.meet", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(rank)
    state = {}
    for i in range(size // (4 << 20) // 4):  # of 16 MB each
        dim = i % 2
        shape = (2048 // RANKS, 2048) if dim == 0 else (2048, 2048 // RANKS)
        state[f"layers.{i}.weight"] = DTensor.from_local(torch.randn(shape, generator=generator), mesh, [Shard(dim)])
    dcp.save({"model": state}, checkpoint_id=path)
    dist.destroy_process_group()


def joined(path: Path) -> None:
    """The same tensors in one torch file."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path.with_name("ranks.dcp"), path)


FILES: dict[str, Callable[[Path], None]] = {
    "big.pt": big,
    "equal.pt": equal,
    "other.pt": other,
    "step1.pt": step,
    "step2.pt": step,
    "step3.pt": step,
    "gpt2.pt": gpt2,
    "many.pt": many,
    "tenthousand.pt": tenthousand,
    "blocks.pt": blocks,
    "wide.pt": wide,
    "tensors.pt": tensors,
    "tensors.safetensors": tensors,
    "big.safetensors": big_tensors,
    "sparse.pt": sparse,
    "ranks.dcp": ranks,
    "joined.pt": joined,
    "several": several,
    "base.safetensors": base,
    "adapter": adapter,
    "manyranks.dcp": many_ranks,
    "small": small_files,
}


def prepare(folder: Path, names: Iterable[str] = FILES) -> None:
    """Makes what is missing. A file that is there is complete: it got its name last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
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
