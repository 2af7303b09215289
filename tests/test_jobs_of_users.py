"""Thirty jobs as a new user would say them, and what such a user types with the README and `--help` alone.

Each is run in a shell, on files that torch saved; what came of it is judged by torch, or by what the user reads.
"""

import ast
import copy
import inspect
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn

import ckptool
from fixtures.make import tagged
from tests.support.programs import TORCH, path_with

SCREEN, PYTHON = 42, shlex.quote(sys.executable)  # lines; that has to start anew

MODEL = """
from torch import nn
class Net(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.fc = nn.Linear(16, classes)
    def forward(self, x):
        return self.fc(self.encoder(x))
def three():
    return Net(3)
"""
LOOP = """
import os, sys, torch, ckptool
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
run = ckptool.Run("run", model=model, optimizer=optimizer, seed=7)
for epoch in run.epochs(3):
    for step, batch in run.batches(torch.utils.data.DataLoader(torch.ones(32, 4), batch_size=8)):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        run.save(every=2)
        if step == 5 and "die" in sys.argv:
            os.kill(os.getpid(), 9)
torch.save(model.state_dict(), sys.argv[-1])
"""
NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("import ckptool\\nckptool.load('missing.pt')")
"""


class Vit(nn.Module):
    def __init__(self, side: int, classes: int) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn(1, side * side + 1, 8))
        self.head = nn.Linear(8, classes)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.wte.weight


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has."""
    at = tmp_path_factory.mktemp("files")
    for name, text in (("model.py", MODEL), ("loop.py", LOOP), ("notebook.py", NOTEBOOK)):
        (at / name).write_text(text)
    space: dict[str, Any] = {"__name__": "model"}
    exec(MODEL, space)
    net = space["Net"]()
    ema, optimizer = copy.deepcopy(net), torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for epoch in range(5):
        net(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()
        for one, other in zip(ema.parameters(), net.parameters(), strict=True):
            one.data.lerp_(other.data, 0.1)
        training = {"epoch": epoch, "model": net.state_dict(), "ema": ema.state_dict()}
        training |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(training, at / f"epoch{epoch}.pt")
    weights = net.state_dict()
    torch.save(weights, at / "weights.pt")
    torch.save(nn.DataParallel(net).state_dict(), at / "parallel.pt")
    torch.save(training, at / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(Vit(4, 10).state_dict(), at / "vit.pt")
    torch.save(Vit(7, 3).state_dict(), at / "big.pt")
    torch.save(Tied().state_dict(), at / "tied.pt")
    torch.save(Tied(), at / "whole.pt")
    with tagged("cuda:3"):
        torch.save(training, at / "gpu.pt")
    (at / "cut.pt").write_bytes((at / "epoch4.pt").read_bytes()[:-4000])
    (at / "lora").mkdir()
    shapes = {"A": (2, 16), "B": (10, 2)}
    factors = {f"base_model.model.fc.lora_{one}.weight": torch.randn(*shape) for one, shape in shapes.items()}
    save_file(factors, at / "lora/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["fc"]}
    (at / "lora/adapter_config.json").write_text(json.dumps(config))
    (at / "many").mkdir()
    for number in range(200):
        average = {"ema": ema.state_dict()} if number == 137 else {}
        torch.save({"model": weights, **average}, at / f"many/{number}.pt")
    return at


def load(path: str) -> Any:
    return load_file(path) if path.endswith("safetensors") else torch.load(path, weights_only=True)


def weights() -> dict[str, torch.Tensor]:
    return load("weights.pt")


def last(part: str) -> Any:
    return load("epoch4.pt")[part]


def averaged() -> dict[str, torch.Tensor]:
    files = [load(f"epoch{number}.pt")["model"] for number in range(5)]
    return {key: torch.stack([file[key] for file in files]).mean(0) for key in files[0]}


def merged() -> dict[str, torch.Tensor]:
    a, b = (load("lora/adapter_model.safetensors")[f"base_model.model.fc.lora_{one}.weight"] for one in "AB")
    return weights() | {"fc.weight": weights()["fc.weight"] + 2 * b @ a}


def tied() -> tuple[torch.Tensor, torch.Tensor]:
    load_model(model := Tied(), "out.safetensors")
    return model.head.weight.detach(), load("tied.pt")["wte.weight"]


def encoder(other: str = "encoder") -> dict[str, torch.Tensor]:
    return {key.replace("encoder", other): value for key, value in weights().items() if key.startswith("encoder")}


# What the user says: what is typed; and two things that have to agree, or whether it is so. The text is what was said.
JOBS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "rename a part of my model": ("ckptool rename weights.pt 'encoder.* => backbone.*' -o out.pt",
        lambda _: ({key: load("out.pt")[key] for key in encoder("backbone")}, encoder("backbone"))),
    "what changed between two epochs?": ("ckptool diff epoch3.pt epoch4.pt",
        lambda said: all(said.index(one) < said.index("parts ") for one in ("epoch ", "/lr ", "}/step  ("))),
    "my model has a new head": ("ckptool warm-start weights.pt --against model.py:three --on-mismatch skip -o out.pt",
        lambda _: ({**load("out.pt"), **encoder()}, load("out.pt")) if len(load("out.pt")["fc.bias"]) == 3 else False),
    "several models in one file": ("ckptool bundle -o out.pt generator=weights.pt discriminator=tied.pt epoch:=3",
        lambda _: (load("out.pt"), {"generator": weights(), "discriminator": load("tied.pt"), "epoch": 3})),
    "half the size": ("ckptool cast weights.pt --dtype bf16 -o out.pt",
        lambda _: (load("out.pt"), {key: value.bfloat16() for key, value in weights().items()})),
    "the last five averaged": ("ckptool average epoch*.pt -o out.pt", lambda _: (load("out.pt"), averaged())),
    "without the optimizer": ("ckptool slim epoch4.pt -o out.pt",
        lambda _: ({**load("out.pt"), "optimizer": last("optimizer")}, load("epoch4.pt"))),
    "why does it not load?": ("ckptool doctor parallel.pt; ckptool doctor parallel.pt --fix -o out.pt",
        lambda said: (load("out.pt"), weights()) if "Missing key(s)" in said else False),
    "merge my LoRA": ("ckptool lora merge weights.pt lora -o out.pt", lambda _: (load("out.pt"), merged())),
    "shards into one file, and back": (
        "ckptool convert weights.pt -o shards/ --shard-size 1KB && ckptool convert shards -o out.safetensors",
        lambda _: (load("out.safetensors"), weights()) if len(os.listdir("shards")) > 2 else False),
    "tied weights to safetensors": ("ckptool convert tied.pt -o out.safetensors", lambda _: tied()),
    "my own loop was killed": ("python loop.py die; python loop.py out.pt; mv run killed; python loop.py whole.pt",
        lambda _: (load("out.pt"), load("whole.pt"))),
    "it was saved on cuda:3, and I have no GPU": ("ckptool remap gpu.pt --to cpu -o out.pt",
        lambda _: (load("out.pt"), load("epoch4.pt"))),
    "which of these 200 has the EMA?": ("ckptool scan many | grep EMA", lambda said: said.split()[0] == "137.pt"),
    "exit codes, for CI": (
        "for one in epoch4 cut; do ckptool verify -q $one.pt; echo $?; done; ckptool diff -q epoch[34].pt; echo $?",
        lambda said: said.split() == ["0", "cut.pt", "1", "1"]),
    "200 files at once": ("ckptool convert many/*.pt -d out --to safetensors > log; ls out | wc -l",
        lambda said: (load("out/7.safetensors"), weights()) if said.strip() == "200" else False),
    "in a notebook": (f"{PYTHON} notebook.py",
        lambda said: "missing.pt" in said and "line 2" in said and said.count("\n") <= 12),
    "a ViT at another size, with a new head": (
        "ckptool warm-start vit.pt --against big.pt --resize 'pos_embed=bicubic(cls=1)' --on-mismatch skip -o out.pt",
        lambda _: [*load("out.pt")["pos_embed"].shape, len(load("out.pt")["head.weight"])] == [1, 50, 8, 3]),
    "a whole module, and I do not have its class": ("ckptool convert whole.pt -o out.safetensors",
        lambda _: (load("out.safetensors")["wte.weight"], torch.load("whole.pt", weights_only=False).wte.weight.data)),
    "a file of an old torch": ("ckptool convert legacy.pt -o out.pt",
        lambda _: (torch.load("out.pt", mmap=True), load("epoch4.pt"))),
    "the EMA alone": ("ckptool convert epoch4.pt#ema -o out.pt", lambda _: (load("out.pt"), last("ema"))),
    "the encoder alone": ("ckptool convert epoch4.pt#model --only 'encoder.*' -o out.safetensors",
        lambda _: (load("out.safetensors"), encoder())),
    "which learning rate was it?": ("ckptool show epoch4.pt#optimizer/param_groups/0/lr",
        lambda said: float(said) == last("optimizer")["param_groups"][0]["lr"]),
    "set a value": ("ckptool edit epoch4.pt --set epoch=0 -o out.pt",
        lambda _: (load("out.pt"), {**load("epoch4.pt"), "epoch": 0})),
    "from one GPU to DataParallel": ("ckptool add-module weights.pt -o out.pt",
        lambda _: (load("out.pt"), load("parallel.pt"))),
    "is the .pt the same as the .safetensors?": (
        "ckptool convert weights.pt -o out.safetensors && ckptool diff weights.pt out.safetensors",
        lambda said: "same: 6 tensors, byte for byte" in said),
    "what git says has changed": (
        "git init -q; ckptool git-setup > log; cp epoch3.pt a.pt; git add a.pt; cp epoch4.pt a.pt; git diff | head -40",
        lambda said: "-epoch  3" in said and "+epoch  4" in said and "Binary" not in said),
    "the download was cut off": ("ckptool recover cut.pt -o out.pt",
        lambda said: (load("out.pt")["model"], last("model")) if "lost" in said else False),
    "the newest good one": ("mkdir run; cp epoch*.pt run; cp cut.pt run/epoch5.pt; ckptool scan --latest-good -q run",
        lambda said: said == "run/epoch4.pt\n"),
    "in the place of torch.load": (
        'python -c \'import ckptool, torch; torch.save(ckptool.load("gpu.pt", map_location="cpu"), "out.pt")\'',
        lambda _: (load("out.pt"), load("epoch4.pt"))),
}  # fmt: skip


STARTS = pytest.mark.long("it starts a Python that imports IPython")


@pytest.mark.parametrize("job", [pytest.param(job, marks=[STARTS] * (PYTHON in JOBS[job][0])) for job in JOBS])
def test_a_job(job: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = () if "many" in JOBS[job][0] else ("many",)
    shutil.copytree(files, tmp_path, ignore=shutil.ignore_patterns(*others), dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    someone = {f"GIT_{who}_{what}": "someone" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **someone, "PATH": path_with(*TORCH), "COLUMNS": "80"}
    line, judge = JOBS[job]
    ended = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=False)
    verdict = judge(ended.stdout)
    if isinstance(verdict, tuple):
        torch.testing.assert_close(*verdict, rtol=0, atol=1e-6)
    else:
        assert verdict, (line, ended.stdout, ended.stderr)
    assert ended.stdout.count("\n") <= SCREEN


def test_there_are_thirty() -> None:
    assert len(JOBS) == 30


# Habits ---------------------------------------------------------------------------------------------------------------
# What people write without looking it up, as in a notebook: it works, or the error says what to write.
# Each snippet is run as it stands; the value of its last line has to be true. Those with words behind them raise an
# error with these words.


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
