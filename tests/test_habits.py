"""What people write without looking it up, as in a notebook: it works, or the error says what to write.

Each snippet is run as it stands; the value of its last line has to be true. Those with words behind them raise an error
with these words.
"""

import ast
import inspect
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptool

WORKS = """
list(ckpt) == ["state_dict", "optimizer", "epoch", "args"]
ckpt["state_dict"]["fc.weight"].shape == (3, 4)
ckpt["state_dict/fc.weight"].shape == torch.Size([3, 4])
ckpt.keys() == {"state_dict", "optimizer", "epoch", "args"}
[key for key, value in ckpt.items() if isinstance(value, int)] == ["epoch"]
ckpt.get("epoch", 0) == 3 and ckpt.get("best", 0.0) == 0.0
len(ckpt) == 4 and "epoch" in ckpt and "state_dict/fc.bias" in ckpt
dict(ckpt["state_dict"]).keys() == sd.keys()
{**ckpt["args"], "lr": 1}["lr"] == 1
model.load_state_dict({k: torch.as_tensor(v) for k, v in ckpt["state_dict"].items()})
np.array_equal(np.asarray(ckpt["state_dict"]["fc.weight"]), sd["fc.weight"])
np.array_equal(ckpt["state_dict/fc.weight"][:2], sd["fc.weight"][:2])
ckpt["state_dict/fc.weight"][..., 0].tolist() == sd["fc.weight"][..., 0].tolist()
len(ckpt["state_dict/fc.weight"]) == 3 == len([row for row in ckpt["state_dict/fc.weight"]])
np.linalg.norm(ckpt["state_dict/fc.weight"]) > 0 and np.abs(ckpt["state_dict/scale"]).max() >= 0
float(ckpt["state_dict/steps"]) == 7 and ckpt["state_dict/steps"].item() == 7
ckpt["state_dict/fc.weight"].T.shape == (4, 3)
torch.equal(ckpt["state_dict/fc.weight"].to(torch.bfloat16).torch(), sd["fc.weight"].to(torch.bfloat16))
torch.equal(torch.tensor(ckpt["state_dict/scale"]), sd["scale"])
sum(e.numel for e in ckpt.tensors().values()) > 20
{name: entry.nbytes for name, entry in ckpt.tensors().items()}["state_dict/fc.weight"] == 48
ckptool.open(Path("a.pt"))["epoch"] == 3
str(ckpt).startswith("<checkpoint") and ckpt._repr_html_().startswith("<div")
ckptool.cast(sd, torch.bfloat16)["fc.weight"].dtype == torch.bfloat16
ckptool.cast(sd, dtype=np.float16)["fc.weight"].dtype is torch.float16
list(ckptool.strip_module(ddp)) == list(sd)
model.load_state_dict(ckptool.strip_module(ddp))
ckptool.diff(model, "weights.pt").same
not ckptool.diff(sd, {**sd, "steps": torch.tensor(8)}).same
ckptool.load("weights.pt")["fc.weight"].equal(sd["fc.weight"])
ckptool.load("a.pt", "cpu", weights_only=False)["epoch"] == 3
ckptool.load("a.pt", map_location=torch.device("cpu"))["state_dict"]["scale"].dtype == torch.bfloat16
ckptool.load(io.BytesIO(Path("a.pt").read_bytes()))["epoch"] == 3
nn.Module.load_state_dict(model, ckptool.load("a.pt")["state_dict"])
ckptool.inspect(sd).to_dict()["tensors"][0]["path"] == ["scale"]
json.loads(json.dumps(ckptool.inspect("a.pt").to_dict()))["container"] == "torch-zip"
ckptool.convert("weights.pt", "weights.safetensors").summary
"overwrite" in inspect.signature(ckptool.cast).parameters and "overwrite: " in ckptool.cast.__doc__
ckptool.load_into(model, sd).accepted and ckptool.load_into(model, "ddp.pt").accepted
ckptool.doctor("weights.pt", against=model).loads
ckptool.bundle({"g": model, "d": "weights.pt"})["d"].keys() == sd.keys()
ckptool.strip_module(ckptool.open("ddp.pt"))
"fc.weight" in str(ckptool.show("a.pt", at="state_dict/fc.weight"))
np.abs(ckpt["state_dict/fc.weight"][:] - ckptool.open("weights.pt")["fc.weight"][:]).max() == 0
state = {k: v.torch() for k, v in ckpt["state_dict"].items()}; model.load_state_dict(state)
report = ckptool.verify("a.pt"); report.fine and json.dumps(report.to_dict())
ckptool.edit("a.pt", "b.pt", set={"epoch": 0}, drop="optimizer"); "optimizer" not in ckptool.open("b.pt")
ckptool.bundle({"g": model, "d": sd}, "gan.pt"); list(ckptool.open("gan.pt")) == ["g", "d"]
averaged = ckptool.average(["weights.pt", "weights.pt"], "mean.pt"); ckptool.diff("mean.pt", "weights.pt").same
---
for name, entry in ckpt["state_dict"].items():
    assert entry.dtype == sd[name].dtype and entry.shape == sd[name].shape
entry.size(0) == 3
---
w = ckpt["state_dict/fc.weight"]
w[1, 2] == sd["fc.weight"][1, 2] and w[-1].shape == (4,) and w[:, None].shape == (3, 1, 4)
---
with ckptool.open("a.pt") as f:
    w = f["state_dict/fc.weight"][0]
w.shape == (4,)
---
with open("a.pt", "rb") as f:
    epoch = ckptool.open(f)["epoch"]
epoch == 3
---
copy = dict(ckpt)
copy["epoch"] = 4
ckptool.save(copy, "new.pt")
ckptool.open("new.pt")["epoch"] == 4
---
ckptool.cast("a.pt", "half.pt", dtype=torch.float16)
ckptool.open("half.pt")["state_dict/fc.weight"].dtype == torch.float16
---
report = ckptool.strip_module("ddp.pt", "clean.pt")
"\\n" not in repr(report) and "clean.pt" in str(report) and report._repr_html_().startswith("<div")
---
ckptool.remap("a.pt", "there.pt", to=torch.device("cuda", 0))
ckptool.open("there.pt")["state_dict/fc.weight"].device == "cuda:0"
---
ckptool.edit("a.pt", "c.pt", set={"state_dict/fc.bias": torch.zeros(3), "epoch": np.int64(5)})
ckptool.open("c.pt")["state_dict/fc.bias"].tolist() == [0, 0, 0]
---
ckptool.save({"w": ckpt["state_dict/fc.weight"].to("f16")}, "f16.pt")
ckptool.load("f16.pt")["w"].equal(sd["fc.weight"].half())
---
try:
    ckpt["epcoh"]
except KeyError as error:
    text = str(error)
"Did you mean epoch?" in text
"""

REFUSED = {
    'ckpt["fc.weight"]': "Did you mean state_dict/fc.weight?",
    'ckpt["state_dict"]["fc.wieght"]': "Did you mean fc.weight?",
    'ckpt["state_dict"]["fc"]': "fc.weight? For all 2 that begin so, if the command has it: only='fc.*'",
    'ckpt["epoch"] = 4': "does not support item assignment",
    'ckpt["args"]["lr"] = 4': "change a copy",
    'ckpt["state_dict/fc.weight"].mean()': "entry.numpy().mean or entry.torch().mean",
    'ckpt["state_dict/fc.weight"].to("cuda")': "entry.torch().to(DEVICE)",
    'ckpt["state_dict/fc.weight"].to(float)': "between torch and numpy.\nWrite torch.float32 or torch.float64.",
    'ckpt["state_dict/fc.weight"].item()': "entry.tolist()",
    'if ckptool.diff("a.pt", "ddp.pt"): pass': ".same",
    'ckptool.cast(sd, "bf16.pt", float)': "torch.float32 or torch.float64",
    'ckptool.cast(sd, "bf16")': "dtype=",
    'ckptool.strip_module("ddp.pt")': "out=OUT",
    'ckptool.strip_module("ddp.pt", "a.pt")': "overwrite=True",
    'ckptool.strip_module("ddp.pt", "c.pt", force=True)': "overwrite",
    'ckptool.open("nothing.pt")': "nothing.pt",
    "ckptool.open(3)": "3",
}


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)
            self.register_buffer("steps", torch.tensor(7))
            self.scale = nn.Parameter(torch.randn(5).bfloat16())

    model = Model()
    sd = model.state_dict()
    ddp = {f"module.{key}": value for key, value in sd.items()}
    torch.save({"state_dict": sd, "optimizer": {}, "epoch": 3, "args": {"lr": 0.1}}, "a.pt")
    torch.save(sd, "weights.pt")
    torch.save(ddp, "ddp.pt")
    modules = {"ckptool": ckptool, "np": np, "torch": torch, "nn": nn, "json": json, "io": io, "inspect": inspect}
    return {**modules, "Path": Path, "ckpt": ckptool.open("a.pt"), "model": model, "sd": sd, "ddp": ddp}


def value_of(snippet: str, names: dict[str, Any]) -> Any:
    """The value of the last line."""
    tree = ast.parse(snippet.strip())
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "snippet", "exec"), names)
    return eval(compile(ast.Expression(last.value), "snippet", "eval"), names) if isinstance(last, ast.Expr) else True


FIRST, *LONGER = WORKS.split("---")
SNIPPETS = [*FIRST.strip().splitlines(), *LONGER]  # each line of the first is one


@pytest.mark.parametrize("snippet", SNIPPETS, ids=[text.strip().splitlines()[0] for text in SNIPPETS])
def test_it_works(snippet: str, names: dict[str, Any]) -> None:
    assert value_of(snippet, names)


@pytest.mark.parametrize(("snippet", "words"), REFUSED.items())
def test_the_error_says_what_to_write(snippet: str, words: str, names: dict[str, Any]) -> None:
    before = sorted(Path().iterdir())
    with pytest.raises((ckptool.CkptoolError, TypeError, AttributeError)) as caught:
        value_of(snippet, names)
    assert words in str(caught.value)
    assert sorted(Path().iterdir()) == before


def test_there_are_enough() -> None:
    assert len(SNIPPETS) + len(REFUSED) >= 40
