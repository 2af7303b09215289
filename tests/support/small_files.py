"""Small files of all kinds, and for every command a line about them that ends well."""

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
import yaml
from safetensors.torch import save_file
from torch import nn

from ckptool.cli import main
from ckptool.cli.parser import typed_parameters
from ckptool.commands import function_of
from tests.support.cli import command_lines
from tests.support.small_runs import MLP

HARNESS = ("train", "resume", "eval", "prove", "prune")

# A command line of each command that ends well, with the output that it writes.
PLAIN = dict(
    line.split(": ", 1)
    for line in command_lines("""
inspect: m.pt | show: m.pt#epoch | diff: m.pt n.pt | verify: m.pt | doctor: m.pt | scan: there
report: m.pt n.pt -o out.html | browse: m.pt | strip-module: m.pt -o out.pt | add-module: m.pt -o out.pt
rename: m.pt,*weight => *w,-o,out.pt | remap: m.pt --to cpu -o out.pt | cast: m.pt --dtype bf16 -o out.pt
edit: m.pt --drop epoch -o out.pt | slim: m.pt -o out.pt
translate: m.pt,{m}.a.weight => w : transpose,--rest,keep,-o,out.pt | convert: m.pt -o out.safetensors
recover: m.pt -o out.pt | bundle: a=m.pt b=n.pt -o out.pt | unbundle: g.pt -d out | average: m.pt n.pt -o out.pt
lora merge: m.pt lora.safetensors -o out.pt | lora extract: n.pt m.pt --rank 1 -o adapter/
lora resize: lora.safetensors --rank 1 -o out.safetensors
lora convert: lora.safetensors --to kohya -o out.safetensors | bake: m.pt -o out.pt
warm-start: m.pt --against n.pt -o out.pt | spec: m.pt -o out.json | train: run.yaml | resume: run | eval: run
prove: run.yaml --steps 2 --kills 1 | prune: run | plot: run | explain: io | demo: playground | schema: inspect
completion: bash | git-setup: --global -n | git-check: m.pt
""")
)


def make_small_files(folder: Path) -> None:
    """Makes the files, a run among them, in a folder that is there."""
    state = {"module.a.weight": torch.arange(6.0).reshape(2, 3), "module.a.bias": torch.zeros(2)}
    torch.save({"sd": state, "epoch": 3}, folder / "m.pt")
    torch.save({"sd": {key: value + 1 for key, value in state.items()}, "epoch": 4}, folder / "n.pt")
    torch.save({"G": nn.Linear(3, 2).state_dict(), "D": nn.Linear(2, 1).state_dict(), "epoch": 3}, folder / "g.pt")
    halves = {"lora_unet_a.lora_down.weight": torch.ones(1, 3), "lora_unet_a.lora_up.weight": torch.ones(2, 1)}
    save_file(halves, folder / "lora.safetensors")
    (folder / "there").mkdir()
    shutil.copy(folder / "m.pt", folder / "there" / "one.pt")
    (folder / "text.txt").write_text("some words\n")
    (folder / "rules.yaml").write_text("- 'module.* => x.*'\n")
    numpy.save(folder / "v.npy", numpy.ones((2, 3), "f4"))
    os.symlink("m.pt", folder / "link.pt")
    os.symlink("loop.pt", folder / "loop.pt")
    os.symlink("nowhere.pt", folder / "broken.pt")
    os.mkfifo(folder / "pipe")
    config = {**MLP, "run": "run", "train": {"steps": 2}, "eval": {"every": 2}, "save": {"every": 1}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    here = os.getcwd()
    os.chdir(folder)
    try:
        assert main(["train", "run.yaml", "-q"]) == 0
    finally:
        os.chdir(here)


def plain_words(command: str) -> list[str]:
    text = PLAIN[command]
    return text.split("," if "," in text else None)


def kinds_and_bytes(place: Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for path in sorted(place.parent.rglob("*")):
        name = str(path.relative_to(place.parent))
        found[name] = (
            "" if path.is_dir() else path.read_bytes() if path.is_file() and not path.is_symlink() else "other"
        )
    return found


class Option(NamedTuple):
    """An argument or option as the program declares it.

    flag: `--out`, or empty for an argument.  metavar: what its help calls the value.  choices, number: what it takes.
    """

    name: str
    flag: str
    metavar: str
    is_flag: bool
    required: bool
    choices: tuple[str, ...]
    number: type | None


def options_of(command: str) -> list[Option]:
    """Every argument and option of a command: what a new one is tried with, too."""
    found = []
    for name, kind, _, option, needed in typed_parameters(function_of(command)):
        flag, number = (option.flags or ("",))[-1], kind if kind in (int, float) else None
        found.append(Option(name, flag, option.metavar, kind is bool, needed, option.choices, number))
    return found
