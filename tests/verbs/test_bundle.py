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
from fixtures.make import make
from fixtures.sparse import make_sparse
from tests.support.bundles import GAN, LAYOUTS, small_net
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_members_are_seen_and_addressed(gan_files: Path, layout: str) -> None:
    ckptool.bundle(GAN, layout, values={"epoch": 3})
    found = ckptool.inspect(layout)
    assert [(root.address, root.detail or root.kind) for root in found.roots] == [
        ("generator", "model weights"),
        ("discriminator", "model weights"),
        ("optimizerA", "Adam state for 6 parameters"),
        ("ema", "EMA weights"),
        ("epoch", "plain values"),
    ]
    assert_same_objects(ckptool.load(f"{layout}#generator"), load(gan_files / "G.pt"))
    assert ckptool.diff(f"{layout}#discriminator", "D.pt#state_dict").same


def test_containers_may_differ(gan_files: Path) -> None:
    ckptool.convert("G.pt", "G.safetensors")
    ckptool.convert("ema.pt", "ema.npz")
    torch.save(load(gan_files / "ema.pt"), "legacy.pt", _use_new_zipfile_serialization=False)
    ckptool.bundle({"a": "G.safetensors", "b": "ema.npz", "c": "legacy.pt"}, "all.pt", verify=True)
    loaded, average = load(gan_files / "all.pt"), load(gan_files / "ema.pt")
    assert_same_objects(loaded["c"], average)
    assert all(torch.equal(loaded["b"][name], average[name]) for name in average)
    assert all(torch.equal(loaded["a"][name], tensor) for name, tensor in load(gan_files / "G.pt").items())


def test_texts_of_a_safetensors_member_are_said_to_stay_behind(gan_files: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, "w.safetensors", {"format": "pt", "author": "me"})
    done = ckptool.bundle({"a": "w.safetensors", "b": "G.pt"}, "out.pt")
    assert [note.code for note in done.notes] == ["metadata-left"] and "author" in done.notes[0].message


# Sharing -------------------------------------------------------------------------------------------------------------


def test_ties_within_and_between_parts_of_one_file_stay(gan_files: Path) -> None:
    shared = torch.randn(4, 4)
    torch.save({"a": {"x.weight": shared, "y.weight": shared}, "b": {"z.weight": shared[1:]}}, "tied.pt")
    ckptool.bundle({"one": "tied.pt#a", "two": "tied.pt#b"}, "out.pt", verify=True)
    loaded = load(gan_files / "out.pt")
    loaded["one"]["x.weight"].fill_(7)
    assert (loaded["one"]["y.weight"] == 7).all() and (loaded["two"]["z.weight"] == 7).all()


@pytest.mark.parametrize("again", ["G.pt", "./G.pt", "G.pt#0.weight"])
def test_what_is_taken_twice_is_two_things(gan_files: Path, again: str) -> None:
    ckptool.bundle({"teacher": "G.pt", "student": again}, "out.pt")
    loaded = load(gan_files / "out.pt")
    student = loaded["student"] if again.endswith("weight") else loaded["student"]["0.weight"]
    student.zero_()
    assert loaded["teacher"]["0.weight"].any()


# Changing a bundle ---------------------------------------------------------------------------------------------------


def test_drop_rename_and_add_are_as_if_made_so(gan_files: Path) -> None:
    ckptool.bundle(GAN, "gan.tar", values={"epoch": 3})
    done = ckptool.bundle(
        {"critic": "D.pt#state_dict"},
        "new.tar",
        file="gan.tar",
        drop=["discriminator", "epoch"],
        rename={"generator": "G"},
        values={"epoch": 4},
        verify=True,
    )
    ckptool.bundle(
        {"G": "G.pt", "optimizerA": "optimizer.pt", "ema": "ema.pt", "critic": "D.pt#state_dict"},
        "fresh.tar",
        values={"epoch": 4},
    )
    assert Path("new.tar").read_bytes() == Path("fresh.tar").read_bytes()
    assert [member["name"] for member in done.facts["members"]] == ["G", "optimizerA", "ema", "critic", "epoch"]


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


def test_a_foreign_bundle_can_be_changed(tmp_path: Path) -> None:
    file = make("gan.pt", tmp_path)
    before = load(file)
    ckptool.bundle(file=file, out=tmp_path / "out.pt", rename={"generator": "G"}, values={"note": "text"})
    after = load(tmp_path / "out.pt")
    assert [*after] == ["G" if name == "generator" else name for name in before] + ["note"]
    assert_same_objects(after["G"], before["generator"])
    assert_same_objects(after["discriminator"], before["discriminator"])


def test_a_swap_of_names(gan_files: Path) -> None:
    ckptool.bundle({"a": "G.pt", "b": "ema.pt"}, "two.pt")
    ckptool.bundle(file="two.pt", out="out.pt", rename={"a": "b", "b": "a"})
    assert list(load(gan_files / "out.pt")) == ["b", "a"]
    assert_same_objects(load(gan_files / "out.pt")["b"], load(gan_files / "G.pt"))


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
        (["a=G.pt", "a=ema.pt"], "two members are called a"),
        (["a=G.pt", "a:=1"], "two members are called a"),
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


def test_a_folder_for_one_file(gan_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "a=G.pt", "-d", "out"]) == 2
    assert "bundle has no option -d" in capsys.readouterr().err


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
