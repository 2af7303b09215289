"""`bundle`: what torch loads of it, what is refused, and that it is what `unbundle` takes apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import ckptool
from ckptool.cli import main
from fixtures.sparse import make_sparse
from tests.support.bundles import GAN, small_net
from tests.support.files import load
from tests.support.memory import LIMIT, peak_of
from tests.support.same import assert_same_objects

# What others read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [False, True])
def test_the_tutorials_layout_loads_in_torch(gan_files: Path, mmap: bool) -> None:
    done = ckptool.bundle(GAN, "gan.tar", values={"epoch": 3, "config": {"lr": [0.1, None]}}, verify=True)
    loaded = torch.load("gan.tar", weights_only=True, mmap=mmap)
    assert list(loaded) == [*GAN, "epoch", "config"]
    assert_same_objects(loaded["generator"], load(gan_files / "G.pt"))
    assert_same_objects(loaded["discriminator"], load(gan_files / "D.pt")["state_dict"])
    assert_same_objects(loaded["optimizerA"], load(gan_files / "optimizer.pt"))
    assert (loaded["epoch"], loaded["config"]) == (3, {"lr": [0.1, None]})
    generator = small_net(64)
    assert generator.load_state_dict(loaded["generator"]) == nn.modules.module._IncompatibleKeys([], [])
    torch.optim.Adam(generator.parameters()).load_state_dict(loaded["optimizerA"])
    assert done.verified and done.container == "torch-zip"
    assert [member["name"] for member in done.facts["members"]] == list(loaded)
    assert done.facts["members"][1] == {
        "name": "discriminator",
        "kind": "model weights",
        "tensors": 9,
        "bytes": sum(tensor.nbytes for tensor in loaded["discriminator"].values()),
        "file": "D.pt#state_dict",
    }


def test_stock_safetensors_reads_the_other_layout(gan_files: Path) -> None:
    ckptool.bundle(GAN, "gan.safetensors", values={"epoch": 3}, verify=True)
    stock = safetensors.torch.load_file("gan.safetensors")
    original = load(gan_files / "G.pt")
    ours = {name.removeprefix("generator/"): tensor for name, tensor in stock.items() if name.startswith("generator/")}
    assert ours.keys() == original.keys()
    assert all(torch.equal(ours[name], original[name]) for name in original)
    assert "optimizerA/state/0/exp_avg" in stock
    back = ckptool.load("gan.safetensors")
    assert_same_objects(back["generator"], original)
    assert_same_objects(back["optimizerA"], load(gan_files / "optimizer.pt"))
    assert back["epoch"] == 3 and list(back) == [*GAN, "epoch"]


# Sharing -------------------------------------------------------------------------------------------------------------


def test_ties_within_and_between_parts_of_one_file_stay(gan_files: Path) -> None:
    shared = torch.randn(4, 4)
    torch.save({"a": {"x.weight": shared, "y.weight": shared}, "b": {"z.weight": shared[1:]}}, "tied.pt")
    ckptool.bundle({"one": "tied.pt#a", "two": "tied.pt#b"}, "out.pt", verify=True)
    loaded = load(gan_files / "out.pt")
    loaded["one"]["x.weight"].fill_(7)
    assert (loaded["one"]["y.weight"] == 7).all() and (loaded["two"]["z.weight"] == 7).all()


# Changing a bundle ---------------------------------------------------------------------------------------------------


def test_in_place_leaves_every_byte_that_is_there(gan_files: Path) -> None:
    ckptool.bundle(GAN, "gan.tar", values={"epoch": 3})
    before = Path("gan.tar").read_bytes()
    done = ckptool.bundle(file="gan.tar", drop=["ema"], rename={"generator": "G"}, in_place=True, verify=True)
    after = Path("gan.tar").read_bytes()
    assert done.how == "in place" and after.startswith(before[: before.rindex(b"PK\x06\x06")])
    assert "unused-record" in [note.code for note in done.notes]
    loaded = load(gan_files / "gan.tar")
    assert list(loaded) == ["G", "discriminator", "optimizerA", "epoch"]
    assert_same_objects(loaded["G"], load(gan_files / "G.pt"))


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command(gan_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("G.pt").rename("epoch=3.pt")  # names of files may have a =
    words = [
        "bundle",
        "-o",
        "gan.tar",
        "generator=epoch=3.pt",
        "discriminator=D.pt#state_dict",
        "epoch:=3",
        'why:="a=b"',
    ]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith("bundle: 4 members → gan.tar (") and "D.pt#state_dict" in said
    assert (
        main(["bundle", "gan.tar", "--add", "ema=ema.pt", "--add", "step:=[1]", "--drop", "epoch", "--in-place"]) == 0
    )
    capsys.readouterr()
    assert main(["bundle", "gan.tar", "--rename", "generator=G", "-o", "new.tar", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "ckptool.written/2" and answer["verb"] == "bundle"
    assert [m["name"] for m in answer["facts"]["members"]] == ["G", "discriminator", "why", "ema", "step"]
    assert list(load(gan_files / "new.tar")) == ["G", "discriminator", "why", "ema", "step"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["G.pt", "ema.pt"], "names no member"),
        (["a=G.pt", "a=ema.pt"], "two members are called 'a'"),
        (["a=G.pt", "a:=1"], "two members are called 'a'"),
        (["=G.pt"], "names no member"),
        (["a="], "names no member"),
        (["epoch:=tree"], "is not JSON"),
        (["epoch=3"], "For the value: 'epoch:=3'"),
        (["epoch=tree"], "cannot read tree"),
        (["a=G.pt", "b=ema.pt", "--drop", "a"], "change one bundle"),
        (["b.tar", "--rename", "x"], "is not of the form OLD=NEW"),
        (["b.tar", "--rename", "a=b", "--rename", "a=c"], "was given 'a' twice"),
        ([], "no members"),
    ],
)
def test_words_that_make_no_sense(
    gan_files: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bundle", *words, "-o", "out.pt"]) == 2
    assert said in capsys.readouterr().err and not Path("out.pt").exists()


# Memory --------------------------------------------------------------------------------------------------------------

PROGRAM = """
ckptool.bundle({"a": "a.pt", "b": "b.pt"}, "out.tar")
ckptool.unbundle("out.tar", "parts")
ckptool.bundle(out="again.tar", from_folder="parts")
"""


def memory(folder: Path, nbytes: int) -> int:
    for name in ("a", "b"):
        make_sparse(folder / f"{name}.pt", nbytes)
    peak = peak_of(PROGRAM, folder)
    assert ckptool.inspect(folder / "again.tar").bytes == (folder / "out.tar").stat().st_size
    for path in folder.rglob("*.*"):
        path.unlink()
    return peak


def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    assert memory(tmp_path, 50_000_000) < LIMIT + 2_000 * 200


@pytest.mark.soak
def test_two_gigabytes_stay_below_128_mb(tmp_path: Path) -> None:
    assert memory(tmp_path, 2 << 30) < 128_000_000
