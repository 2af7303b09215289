"""Files that are only parts of checkpoints, as the programs write them that divide one over processes or files.

Tensors of torch.distributed are saved by two real processes; DeepSpeed's and Megatron's layouts are made of what their
files hold.
"""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.engine_folders import hub, write_zero
from tests.support.ranks import save_on_two_ranks

# Their shares of one model: FSDP2, ShardedTensor, and two ways of torch.distributed.checkpoint.
SAVE = """
    import torch.nn as nn
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate

    def save(rank, folder, mesh):
        model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 1))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        torch.save(model.state_dict(), f"{folder}/model_world_size_2_rank_{rank}.pt")
        torch.save(optimizer.state_dict(), f"{folder}/optim_world_size_2_rank_{rank}.pt")
        torch.save({"model": model.state_dict(), "step": 5}, f"{folder}/pytorch_model_fsdp_0_rank{rank}.bin")
        torch.save({"fc.weight": DTensor.from_local(torch.ones(3, 3), mesh, [Replicate()])},
            f"{folder}/replica_rank{rank}.pt")
        halves = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
        torch.save({"a.weight": sharded_tensor.rand(halves, 10, 4), "b": torch.ones(3)}, f"{folder}/sharded_{rank}.pt")
        dcp.save({"model": model.state_dict()}, storage_writer=dcp.FileSystemWriter(f"{folder}/tables"),
            use_collectives=False)
        weights = {name: value for name, value in model.state_dict().items() if name.startswith("0.")}
        dcp.save(weights, storage_writer=dcp.HuggingFaceStorageWriter(f"{folder}/pieces", save_distributed=True))
"""


def saved_by_two_ranks(folder: Path) -> Path:
    """The folder, in which two processes of torch have saved one model in several ways."""
    save_on_two_ranks(SAVE, folder, folder)
    return folder


def random_weights(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.randn(3, 4) for name in names}


def saved_below(value: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


def safe_file(path: Path) -> Path:
    save_file(random_weights("a.weight", "a.bias"), path, metadata={"format": "pt"})
    return path


def sharded_folder(folder: Path) -> Path:
    """A folder of three safetensors shards and their index, as the hub's savers write it."""
    return hub(folder, random_weights(*(f"layers.{n}.{part}" for n in (1, 2, 3) for part in ("weight", "bias"))))


def megatron_folder(folder: Path, ranks: int = 2) -> Path:
    """Megatron's legacy layout: `iter_0000500/mp_rank_00/model_optim_rng.pt`."""
    args = Namespace(tensor_model_parallel_size=ranks, pipeline_model_parallel_size=1)
    for rank in range(ranks):
        model = {"language_model": {"encoder": random_weights("layers.0.weight", "layers.0.bias")}}
        saved_below(
            {"args": args, "iteration": 500, "model": model}, folder / f"mp_rank_{rank:02}" / "model_optim_rng.pt"
        )
    return folder


def lone_shard(folder: Path) -> Path:
    """One shard of three whose index was not copied along."""
    path = sharded_folder(folder / "whole") / "model-00003-of-00003.safetensors"
    return path.rename(folder / path.name)


def ungathered(folder: Path) -> Path:
    """What a script saves of a model under ZeRO stage 3 without gathering it first."""
    model = {"fc.weight": torch.empty(0), "fc.bias": torch.empty(0), "mean": torch.zeros(3)}
    return saved_below(model, folder / "pytorch_model.bin")


def offloaded(folder: Path) -> Path:
    """What a script saves of a model of which a layer is offloaded: a parameter on the device meta."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    return saved_below({"model": model.state_dict(keep_vars=True), "epoch": 3}, folder / "offloaded.pt")


def flattened(folder: Path) -> Path:
    """One rank's file of FSDP1's LOCAL_STATE_DICT."""
    return saved_below(
        {"_flat_param": torch.randn(35), "0.weight": torch.randn(35), "1.weight": torch.empty(0)}, folder / "local.pt"
    )


# What a part is called, and how it is made; those of `DISTRIBUTED` are copied from what two processes saved.
DISTRIBUTED = {"rank 1 of 2": "model_world_size_2_rank_1.pt", "rank 0 of 2": "pytorch_model_fsdp_0_rank0.bin"}
MADE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "zero-3 model": (lambda f: write_zero(f, 3, 2) / "zero_pp_rank_1_mp_rank_00_model_states.pt", "rank 1 of 2"),
    "zero-3 optimizer": (lambda f: write_zero(f, 3, 2) / "zero_pp_rank_0_mp_rank_00_optim_states.pt", "rank 0 of 2"),
    "zero-2 optimizer": (lambda f: write_zero(f, 2, 2) / "zero_pp_rank_1_mp_rank_00_optim_states.pt", "rank 1 of 2"),
    "a layer of a pipeline": (
        lambda f: saved_below(random_weights("attention.weight"), f / "layer_03-model_00-model_states.pt"), "layer 3"),
    "an expert": (
        lambda f: saved_below(
            random_weights("deepspeed_moe.weight"), f / "layer_1_expert_2_mp_rank_00_model_states.pt"
        ),
        "layer 1, expert 2",
    ),
    "one of two consolidated": (
        lambda f: saved_below(random_weights("tok_embeddings.weight"), f / "consolidated.01.pth"), "rank 1 of 2"),
    "megatron": (lambda f: megatron_folder(f) / "mp_rank_01" / "model_optim_rng.pt", "rank 1 of 2"),
    "nanotron": (
        lambda f: saved_below({"data": torch.ones(2)}, f / "model_weight_pp-rank-0-of-1_tp-rank-1-of-2.pt"),
        "one file of nanotron's"),
    "torchtune": (lambda f: saved_below(random_weights("a.weight"), f / "hf_model_0002_0.pt"), "shard 2 of 2"),
    "torch_xla": (lambda f: saved_below(random_weights("a.weight"), f / "rank1-of-2-model.pth"), "rank 1 of 2"),
    "deepseek": (lambda f: safe_file(f / "model0-mp2.safetensors"), "rank 0 of 2"),
    "shard in its folder": (lambda f: sharded_folder(f) / "model-00002-of-00003.safetensors", "shard 2 of 3"),
    "shard without an index": (lone_shard, "shard 3 of 3"),
    "ungathered": (ungathered, "weights without values"),
    "offloaded": (offloaded, "weights without values"),
    "flattened": (flattened, "what one rank saved"),
}  # fmt: skip


def trainer_folder(folder: Path, ranks: int = 1, step: int = 500) -> Path:
    """What transformers' Trainer saves at a step."""
    folder.mkdir(parents=True, exist_ok=True)
    model = random_weights("fc.weight", "fc.bias")
    save_file(model, folder / "model.safetensors", metadata={"format": "pt"})
    state = {
        number: {"step": torch.tensor(3.0), "exp_avg": value, "exp_avg_sq": value}
        for number, value in enumerate(model.values())
    }
    saved_below({"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}, folder / "optimizer.pt")
    saved_below({"last_epoch": step, "_step_count": step + 1}, folder / "scheduler.pt")
    for rank in range(ranks):
        name = f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"
        saved_below({"cpu": torch.get_rng_state(), "python": (3, (1, 2, 3), None)}, folder / name)
    saved_below({"output_dir": "runs"}, folder / "training_args.bin")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 1.0, "log_history": []}))
    (folder / "config.json").write_text("{}")
    return folder


def accelerate_folder(folder: Path) -> Path:
    """What `Accelerator.save_state` saves of one model on one process."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(random_weights("fc.weight"), folder / "model.safetensors", metadata={"format": "pt"})
    saved_below({"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}, folder / "optimizer.bin")
    saved_below({"last_epoch": 3}, folder / "scheduler.bin")
    saved_below({"generator": torch.get_rng_state()}, folder / "sampler.bin")
    saved_below({"step": 3, "torch_manual_seed": torch.get_rng_state()}, folder / "random_states_0.pkl")
    return folder


def pipeline_folder(folder: Path) -> Path:
    """A diffusers pipeline of two models, a scheduler and a tokenizer."""
    index = {
        "_class_name": "Pipeline",
        "safety_checker": [None, None],
        "unet": ["diffusers", "UNet"],
        "vae": ["diffusers", "VAE"],
    }
    index |= {"scheduler": ["diffusers", "DDIM"], "tokenizer": ["transformers", "CLIPTokenizer"]}
    for name in ("unet", "vae"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
        save_file(
            random_weights(f"{name}.weight"),
            folder / name / "diffusion_pytorch_model.safetensors",
            metadata={"format": "pt"},
        )
    for name in ("scheduler", "tokenizer"):
        (folder / name).mkdir()
        (folder / name / f"{name}_config.json").write_text("{}")
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def sentence_folder(folder: Path) -> Path:
    """A model of sentence-transformers: a transformer, its pooling, and a dense layer."""
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "2_Dense").mkdir()
    save_file(random_weights("embeddings.weight"), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "1_Pooling" / "config.json").write_text("{}")
    save_file(random_weights("linear.weight"), folder / "2_Dense" / "model.safetensors", metadata={"format": "pt"})
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": "m"} for i, path in enumerate(("", "1_Pooling", "2_Dense"))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


# Folders of members, each with how many it has, and a member without which it is not complete.
FOLDERS: dict[str, tuple[Callable[[Path], Path], int, str]] = {
    "trainer": (trainer_folder, 6, "optimizer.pt"),
    "trainer of two ranks": (lambda f: trainer_folder(f, 2), 7, "rng_state_0.pth"),
    "accelerate": (accelerate_folder, 5, "random_states_0.pkl"),
    "diffusers": (pipeline_folder, 2, "vae/diffusion_pytorch_model.safetensors"),
    "sentence-transformers": (sentence_folder, 2, "2_Dense/model.safetensors"),
    "megatron": (megatron_folder, 2, "mp_rank_00/model_optim_rng.pt"),
}
NOT_JOINED = ("megatron",)
