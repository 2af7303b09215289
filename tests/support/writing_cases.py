"""Command lines that write, with what lies in their folder before and what they change."""

import io
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from tests.support.files import torch_bytes

Files = dict[str, bytes]


def training(prefix: str = "module.", device: str = "cpu") -> dict[str, Any]:
    w = torch.arange(40_000, dtype=torch.float32).reshape(200, 200)
    state = {f"{prefix}fc.weight": w, f"{prefix}tied.weight": w, f"{prefix}fc.bias": torch.ones(200).half()}
    return {"state_dict": state, "epoch": 3, "best": 0.5}


def model_files(prefix: str = "module.") -> Files:
    state = {f"{prefix}fc.weight": torch.arange(40_000, dtype=torch.float32), f"{prefix}fc.bias": torch.ones(200)}
    return {"m.safetensors": safetensors.torch.save(state)}


def pt(**more: bytes) -> Files:
    return {"in.pt": torch_bytes(training())} | more


def heavy() -> Files:
    """With optimizer state, and a small tensor that is a view of a large one."""
    state = training() | {
        "optimizer": {"state": {0: {"exp_avg": torch.ones(9_000)}}, "param_groups": [{"params": [0]}]}
    }
    state["state_dict"]["module.part"] = torch.arange(20_000.0)[:7]
    return {"in.pt": torch_bytes(state)}


def two() -> Files:
    """Two checkpoints of one model."""
    other = training(prefix="")
    other["state_dict"]["fc.weight"] = other["state_dict"]["tied.weight"] = torch.ones(200, 200)
    return {"in.pt": torch_bytes(training(prefix=""))} | {"other.pt": torch_bytes(other)}


def normed() -> Files:
    """With weight norm."""
    return {"in.pt": torch_bytes({"fc.weight_g": torch.ones(200, 1), "fc.weight_v": torch.ones(200, 200)})}


INDEX = "out/model.safetensors.index.json"


def shards() -> Files:
    """A folder of shards, as another program left it: one of a name that the new ones do not have."""
    names = ["out/model-00001-of-00001.safetensors"]
    state = {"old.weight": torch.full((9_000,), 7.0)}
    index = {"metadata": {"total_size": 36_000}, "weight_map": {"old.weight": names[0].rpartition("/")[2]}}
    return {names[0]: safetensors.torch.save(state), INDEX: json.dumps(index).encode()}


def ranks() -> Files:
    """A folder of torch.distributed.checkpoint, with what a larger run left in it."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: one process saves
        dcp.save({"old": torch.full((9_000,), 7.0)}, checkpoint_id=folder, no_dist=True)
        files = {f"out.dcp/{path.name}": path.read_bytes() for path in Path(folder).iterdir()}
    return files | {"out.dcp/__7_0.distcp": b"of a run on eight ranks"}


def cut() -> Files:
    """A file of which the end is missing."""
    data = pt()["in.pt"]
    return {"in.pt": data[: len(data) * 9 // 10]}


def bias() -> bytes:
    buffer = io.BytesIO()
    numpy.save(buffer, numpy.zeros(200, numpy.float16))
    return buffer.getvalue()


@dataclass(frozen=True)
class Case:
    """A command, what lies in its folder before, and which of that it may change."""

    words: str
    files: Callable[[], Files] = pt
    changes: tuple[str, ...] = ("out.pt",)
    old: bytes | None = None  # what stands at the output before
    again: str = " -f"  # what the next run needs to be let write
    link: dict[str, str] = field(default_factory=dict)
    folder: str = ""  # whose files all change at once
    code: int = 0  # of success
    judges: bool = False  # what it cannot read of its input, it reports, and goes on


OLD = b"a file that was there"
SAME = ("in.pt",)
SHARDS = (INDEX, "out/model-00001-of-00002.safetensors", "out/model-00002-of-00002.safetensors")
ST = ("m.safetensors",)
RANKS = ("out.dcp/.metadata", "out.dcp/__0_0.distcp")
CASES = {
    "strip, new": Case("strip-module in.pt -o out.pt"),
    "strip, over another": Case("strip-module in.pt -o out.pt -f", old=OLD),
    "strip, over itself": Case("strip-module in.pt -o in.pt -f", changes=SAME),
    "strip, in place": Case("strip-module in.pt --in-place", changes=SAME, again=""),
    "strip, through a link": Case("strip-module in.pt -o link.pt -f", old=OLD, link={"link.pt": "out.pt"}),
    "strip, into a folder": Case("strip-module in.pt -d new", changes=("new/in.pt",)),
    "strip, verified": Case("strip-module in.pt -o out.pt -f --verify", old=OLD),
    "strip, in place, verified": Case("strip-module in.pt --in-place --verify", changes=SAME, again=""),
    "add": Case("add-module in.pt -o out.pt -f", old=OLD),
    "add, in place": Case("add-module in.pt --in-place", changes=SAME, again=""),
    "rename": Case("rename in.pt '*fc.{n} => *lin.{n}' -o out.pt"),
    "rename, in place": Case("rename in.pt '*fc.{n} => *lin.{n}' --in-place", changes=SAME, again=""),
    "remap": Case("remap in.pt --to cuda:0 -o out.pt -f", old=OLD),
    "remap, in place": Case("remap in.pt --to cuda:0 --in-place", changes=SAME, again=""),
    "cast": Case("cast in.pt --dtype bf16 -o out.pt -f", old=OLD),
    "cast, in place": Case("cast in.pt --dtype bf16 --in-place", changes=SAME, again=""),
    "cast, safetensors, in place": Case("cast m.safetensors --dtype f16 --in-place", model_files, ST, again=""),
    "strip, safetensors, in place": Case("strip-module m.safetensors --in-place", model_files, ST, again=""),
    "edit": Case("edit in.pt --set epoch:=4 --drop best -o out.pt"),
    "into a new folder": Case("cast in.pt --dtype bf16 -d new/deep", changes=("new/deep/in.pt",)),
    "edit, in place": Case("edit in.pt --set epoch:=4 --in-place", changes=SAME, again=""),
    "convert": Case("convert in.pt -o out.safetensors -f", changes=("out.safetensors",), old=OLD),
    "convert, all": Case("convert in.pt --all -o out.safetensors", changes=("out.safetensors",)),
    "convert back": Case("convert m.safetensors -o out.pt -f", model_files, old=OLD),
    "convert, compact": Case("convert in.pt -o out.pt"),
    "fix": Case("doctor in.pt --fix -o out.pt -f", old=OLD),
    "fix, half the size": Case("doctor in.pt --fix --dtype bf16 -o out.pt"),
    "fix, in place": Case("doctor in.pt --fix --in-place", changes=SAME, again=""),
    "slim": Case("slim in.pt -o out.pt -f", heavy, old=OLD),
    "slim, tied": Case("slim in.pt --dedup -o out.pt", heavy),
    "plain values": Case("convert in.pt --weights-only -o out.pt -f", old=OLD),
    "recover": Case("recover in.pt -o out.pt", cut, code=1, judges=True),
    "recover, over another": Case("recover in.pt -o out.pt -f", cut, old=OLD, code=1, judges=True),
    "digests": Case("verify in.pt --write-digest d.json", changes=("d.json",), judges=True),
    "digests, over others": Case("verify in.pt --write-digest d.json -f", changes=("d.json",), old=OLD, judges=True),
    "average": Case("average in.pt other.pt -o out.pt -f", two, old=OLD),
    "average, new": Case("average in.pt other.pt -o out.pt --ema 0.9 --verify", two),
    "bake": Case("bake in.pt -o out.pt -f", normed, old=OLD),
    "bundle": Case("bundle -o out.pt a=in.pt b=m.safetensors epoch:=4 -f", lambda: pt() | model_files(), old=OLD),
    "bundle, of two": Case("bundle -o out.pt a=in.pt b=other.pt", two),
    "bundle, changed": Case("bundle in.pt --drop best -o out.pt", pt),
    "unbundle": Case("unbundle in.pt -d out", changes=("out/bundle.json", "out/state_dict.pt"), folder="out"),
    "warm start": Case("warm-start in.pt --against other.pt -o out.pt -f", two, old=OLD),
    "spec": Case("spec in.pt -o spec.json -f", changes=("spec.json",), old=OLD),
    "shards, new": Case("convert in.pt --shard-size 100KB -o out", changes=SHARDS, folder="out"),
    "shards, over others":
        Case("convert in.pt --shard-size 100KB -o out -f", lambda: pt() | shards(), changes=SHARDS, folder="out"),
    "dcp, new": Case("convert in.pt -o out.dcp --ranks 2", changes=(*RANKS, "out.dcp/__1_0.distcp"), folder="out.dcp"),
    "dcp, over others": Case("convert in.pt -o out.dcp -f", lambda: pt() | ranks(), changes=RANKS, folder="out.dcp"),
    "dcp, over others, verified":
        Case("strip-module in.pt -o out.dcp -f --verify", lambda: pt() | ranks(), changes=RANKS, folder="out.dcp"),
    "dcp to a file": Case("convert out.dcp -o out.pt -f", ranks, old=OLD),
}  # fmt: skip
