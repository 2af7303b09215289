"""`bundle`: what torch loads of it, what is refused, and that it is what `unbundle` takes apart."""

from __future__ import annotations

import json
import shutil
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import ckptool
from ckptool.cli import main
from ckptool.errors import (
    CkptoolError,
    Conflict,
    FileChanged,
    FileProblem,
    OutputExists,
    UnsafeObject,
    Unsupported,
    UsageError,
)
from ckptool.formats import read
from fixtures.make import make
from fixtures.sparse import make_sparse
from fixtures.traps import TRAPS
from tests.support.errors import three_parts
from tests.support.files import load
from tests.support.memory import peak_of
from tests.support.same import assert_same_objects

LAYOUTS = ("gan.tar", "gan.safetensors")


def model(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.Linear(width, 4))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, an optimizer, an average that equals its model but for one tensor."""
    folder = tmp_path_factory.mktemp("originals")
    torch.manual_seed(0)
    generator, discriminator = model(64), model()
    optimizer = torch.optim.Adam(generator.parameters())
    generator(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    average = {name: tensor.clone() for name, tensor in generator.state_dict().items()}
    average["2.bias"] += 1
    torch.save(generator.state_dict(), folder / "G.pt")
    torch.save({"state_dict": discriminator.state_dict(), "epoch": 7}, folder / "D.pt")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(average, folder / "ema.pt")
    return folder


@pytest.fixture
def files(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same as the working directory."""
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


GAN = {"generator": "G.pt", "discriminator": "D.pt#state_dict", "optimizerA": "optimizer.pt", "ema": "ema.pt"}


# What others read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [False, True])
def test_the_tutorials_layout_loads_in_torch(files: Path, mmap: bool) -> None:
    done = ckptool.bundle(GAN, "gan.tar", values={"epoch": 3, "config": {"lr": [0.1, None]}}, verify=True)
    loaded = torch.load("gan.tar", weights_only=True, mmap=mmap)
    assert list(loaded) == [*GAN, "epoch", "config"]
    assert_same_objects(loaded["generator"], load(files / "G.pt"))
    assert_same_objects(loaded["discriminator"], load(files / "D.pt")["state_dict"])
    assert_same_objects(loaded["optimizerA"], load(files / "optimizer.pt"))
    assert (loaded["epoch"], loaded["config"]) == (3, {"lr": [0.1, None]})
    generator = model(64)
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


def test_stock_safetensors_reads_the_other_layout(files: Path) -> None:
    ckptool.bundle(GAN, "gan.safetensors", values={"epoch": 3}, verify=True)
    stock = safetensors.torch.load_file("gan.safetensors")
    original = load(files / "G.pt")
    ours = {name.removeprefix("generator/"): tensor for name, tensor in stock.items() if name.startswith("generator/")}
    assert ours.keys() == original.keys()
    assert all(torch.equal(ours[name], original[name]) for name in original)
    assert "optimizerA/state/0/exp_avg" in stock
    back = ckptool.load("gan.safetensors")
    assert_same_objects(back["generator"], original)
    assert_same_objects(back["optimizerA"], load(files / "optimizer.pt"))
    assert back["epoch"] == 3 and list(back) == [*GAN, "epoch"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_members_are_seen_and_addressed(files: Path, layout: str) -> None:
    ckptool.bundle(GAN, layout, values={"epoch": 3})
    found = ckptool.inspect(layout)
    assert [(root.address, root.detail or root.kind) for root in found.listing.roots] == [
        ("generator", "model weights"),
        ("discriminator", "model weights"),
        ("optimizerA", "Adam state for 6 parameters"),
        ("ema", "EMA weights"),
        ("epoch", "plain values"),
    ]
    assert_same_objects(ckptool.load(f"{layout}#generator"), load(files / "G.pt"))
    assert ckptool.diff(f"{layout}#discriminator", "D.pt#state_dict").same


def test_containers_may_differ(files: Path) -> None:
    ckptool.convert("G.pt", "G.safetensors")
    ckptool.convert("ema.pt", "ema.npz")
    torch.save(load(files / "ema.pt"), "legacy.pt", _use_new_zipfile_serialization=False)
    ckptool.bundle({"a": "G.safetensors", "b": "ema.npz", "c": "legacy.pt"}, "all.pt", verify=True)
    loaded, average = load(files / "all.pt"), load(files / "ema.pt")
    assert_same_objects(loaded["c"], average)
    assert all(torch.equal(loaded["b"][name], average[name]) for name in average)
    assert all(torch.equal(loaded["a"][name], tensor) for name, tensor in load(files / "G.pt").items())


def test_texts_of_a_safetensors_member_are_said_to_stay_behind(files: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, "w.safetensors", {"format": "pt", "author": "me"})
    done = ckptool.bundle({"a": "w.safetensors", "b": "G.pt"}, "out.pt")
    assert [note.code for note in done.notes] == ["metadata-left"] and "author" in done.notes[0].message


# Sharing -------------------------------------------------------------------------------------------------------------


def test_ties_within_and_between_parts_of_one_file_stay(files: Path) -> None:
    shared = torch.randn(4, 4)
    torch.save({"a": {"x.weight": shared, "y.weight": shared}, "b": {"z.weight": shared[1:]}}, "tied.pt")
    ckptool.bundle({"one": "tied.pt#a", "two": "tied.pt#b"}, "out.pt", verify=True)
    loaded = load(files / "out.pt")
    loaded["one"]["x.weight"].fill_(7)
    assert (loaded["one"]["y.weight"] == 7).all() and (loaded["two"]["z.weight"] == 7).all()


@pytest.mark.parametrize("again", ["G.pt", "./G.pt", "G.pt#0.weight"])
def test_what_is_taken_twice_is_two_things(files: Path, again: str) -> None:
    ckptool.bundle({"teacher": "G.pt", "student": again}, "out.pt")
    loaded = load(files / "out.pt")
    student = loaded["student"] if again.endswith("weight") else loaded["student"]["0.weight"]
    student.zero_()
    assert loaded["teacher"]["0.weight"].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dedup_stores_equal_tensors_once_and_says_so(files: Path, layout: str) -> None:
    plain = ckptool.bundle(GAN, f"plain.{layout}")
    done = ckptool.bundle(GAN, layout, dedup=True, verify=True)
    twice = sum(t.nbytes for name, t in load(files / "G.pt").items() if t.nbytes >= 1024)
    same_in_state = done.facts["twin_bytes"] - twice  # Adam's averages after one step may be equal as well
    assert twice and same_in_state >= 0 and plain.file_bytes - done.file_bytes >= 0.9 * done.facts["twin_bytes"]
    assert f"{done.facts['twin_bytes']:,} bytes of equal tensors not stored twice" in done.summary
    assert "new-ties" in [note.code for note in done.notes]
    ours = ckptool.load(layout)
    assert_same_objects(ours["ema"], load(files / "ema.pt"))
    ours["generator"]["2.weight"].zero_()
    assert_same_objects(ours["ema"], load(files / "ema.pt"))
    assert ckptool.diff(layout, f"plain.{layout}").same


def test_what_is_said_of_equals_fits_the_layout(files: Path) -> None:
    """Stock readers tie twins in a torch file; in safetensors they find one name of them."""
    for layout, words in (("gan.tar", "stock torch.load ties them"), ("gan.safetensors", "find only one name of each")):
        done = ckptool.bundle(GAN, layout, dedup=True)
        (note,) = [note for note in done.notes if note.code == "new-ties"]
        assert words in note.message and f"{done.facts['twin_storages']} storages are not stored again" in note.message
    names = safetensors.torch.load_file("gan.safetensors").keys()
    assert ("generator/0.weight" in names) != ("ema/0.weight" in names)
    (note,) = [note for note in ckptool.inspect("gan.tar").notes if note.code == "new-ties"]
    assert "stored as" in note.message


def test_dedup_finds_equals_where_only_one_container_has_checksums(files: Path) -> None:
    ckptool.convert("G.pt", "G.safetensors")
    done = ckptool.bundle({"a": "G.pt", "b": "G.safetensors"}, "out.pt", dedup=True)
    assert done.facts["twin_storages"] == sum(t.nbytes >= 1024 for t in load(files / "G.pt").values()) > 0


def test_dedup_never_trusts_a_checksum(files: Path) -> None:
    """Two tensors with one CRC-32 and other bytes: the checksum of zeros with a multiple of its polynomial in them is
    the same."""
    poly = 0x104C11DB7  # 33 bits; added to a message, it changes no CRC
    zeros, other = bytearray(4096), bytearray(4096)
    for bit in range(33):
        if poly >> (32 - bit) & 1:
            other[100 + bit // 8] ^= 1 << (bit % 8)  # CRC-32 takes the lowest bit of a byte first
    assert zlib.crc32(zeros) == zlib.crc32(other) and zeros != other
    for name, raw in (("a", zeros), ("b", other)):
        torch.save({"w.weight": torch.frombuffer(raw, dtype=torch.uint8).clone()}, f"{name}.pt")
    done = ckptool.bundle({"a": "a.pt", "b": "b.pt"}, "out.pt", dedup=True)
    assert done.facts["twin_storages"] == 0 and "no equal tensors" in done.summary
    assert bytes(load(files / "out.pt")["b"]["w.weight"].numpy()) == other


# Changing a bundle ---------------------------------------------------------------------------------------------------


def test_drop_rename_and_add_are_as_if_made_so(files: Path) -> None:
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


def test_in_place_leaves_every_byte_that_is_there(files: Path) -> None:
    ckptool.bundle(GAN, "gan.tar", values={"epoch": 3})
    before = Path("gan.tar").read_bytes()
    done = ckptool.bundle(file="gan.tar", drop=["ema"], rename={"generator": "G"}, in_place=True, verify=True)
    after = Path("gan.tar").read_bytes()
    assert done.how == "in place" and after.startswith(before[: before.rindex(b"PK\x06\x06")])
    assert "unused-record" in [note.code for note in done.notes]
    loaded = load(files / "gan.tar")
    assert list(loaded) == ["G", "discriminator", "optimizerA", "epoch"]
    assert_same_objects(loaded["G"], load(files / "G.pt"))


def test_a_foreign_bundle_can_be_changed(tmp_path: Path) -> None:
    file = make("gan.pt", tmp_path)
    before = load(file)
    ckptool.bundle(file=file, out=tmp_path / "out.pt", rename={"generator": "G"}, values={"note": "text"})
    after = load(tmp_path / "out.pt")
    assert [*after] == ["G" if name == "generator" else name for name in before] + ["note"]
    assert_same_objects(after["G"], before["generator"])
    assert_same_objects(after["discriminator"], before["discriminator"])


def test_a_swap_of_names(files: Path) -> None:
    ckptool.bundle({"a": "G.pt", "b": "ema.pt"}, "two.pt")
    ckptool.bundle(file="two.pt", out="out.pt", rename={"a": "b", "b": "a"})
    assert list(load(files / "out.pt")) == ["b", "a"]
    assert_same_objects(load(files / "out.pt")["b"], load(files / "G.pt"))


# Refused, and nothing written ----------------------------------------------------------------------------------------

BAD_NAMES = {
    "climbs": "../../x",
    "absolute": "/abs",
    "device": "CON",
    "device-with-suffix": "nul.tar",
    "printer": "Lpt1",
    "folder": "a/",
    "backslash": "a\\b",
    "dot": ".",
    "dots": "..",
    "trailing-dot": "a.",
    "blank": " a",
    "empty": "",
    "drive": "C:x",
    "stream": "a:b",
    "nul": "a\0b",
    "escape": "\x1b[31m",
    "bidi": "a\u202eb",
    "line": "a\nb",
    "surrogate": "a\ud800",
    "long": "x" * 300,
    "dash": "-rf",
}


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_member_names_that_cannot_be_files_are_a_conflict(files: Path, name: str) -> None:
    for files_of, values in (({"a": "ema.pt", name: "G.pt"}, {}), ({"a": "ema.pt"}, {name: 1})):
        with pytest.raises(Conflict, match="a member cannot be called") as caught:
            ckptool.bundle(files_of, "out.pt", values=values)
        three_parts(caught.value)
        assert not any(not c.isprintable() for c in str(caught.value).replace("\n", ""))
    assert not Path("out.pt").exists()
    ckptool.bundle({"a": "ema.pt", "b": "G.pt"}, "two.pt")
    with pytest.raises(Conflict, match="a member cannot be called"):
        ckptool.bundle(file="two.pt", out="out.pt", rename={"a": name})
    assert not Path("out.pt").exists()


TWINS = {
    "case": ("model", "Model"),
    "normal-forms": ("caf\u00e9", "cafe\u0301"),
    "compatible-forms": ("\ufb01x", "fix"),
    "sharp-s": ("stra\u00dfe", "STRASSE"),
}


@pytest.mark.parametrize("pair", TWINS.values(), ids=TWINS)
def test_member_names_that_are_one_file_somewhere_are_a_conflict(files: Path, pair: tuple[str, str]) -> None:
    one, other = pair
    with pytest.raises(Conflict, match="are one name where"):
        ckptool.bundle({one: "G.pt", other: "ema.pt"}, "out.pt")
    with pytest.raises(Conflict, match="are one name where"):
        ckptool.bundle({one: "G.pt"}, "out.pt", values={other: 1})
    ckptool.bundle({one: "G.pt", "b": "ema.pt"}, "two.pt")
    changes: tuple[dict[str, Any], ...] = ({"rename": {"b": other}}, {"values": {other: 1}})
    for change in changes:
        with pytest.raises(Conflict, match="are one name where"):
            ckptool.bundle(file="two.pt", out="out.pt", **change)
    assert not Path("out.pt").exists()
    ckptool.bundle(file="two.pt", out="out.pt", rename={one: other})  # its own other form is free


REFUSED: dict[str, tuple[Callable[[], Any], type[CkptoolError], str]] = {
    "nothing": (lambda: ckptool.bundle({}, "out.pt"), UsageError, "no members"),
    "no-output": (lambda: ckptool.bundle(GAN), UsageError, "needs a place"),
    "missing-file": (lambda: ckptool.bundle({"a": "none.pt"}, "out.pt"), FileProblem, "none.pt"),
    "missing-part": (lambda: ckptool.bundle({"a": "D.pt#nowhere"}, "out.pt"), UsageError, "there is no nowhere"),
    "name-twice": (
        lambda: ckptool.bundle({"a": "G.pt"}, "out.pt", values={"a": 1}),
        Conflict,
        "two members are called 'a'",
    ),
    "add-there": (
        lambda: ckptool.bundle({"ema": "G.pt"}, "out.pt", file="b.tar"),
        Conflict,
        "two members are called 'ema'",
    ),
    "drop-unknown": (lambda: ckptool.bundle(file="b.tar", out="out.pt", drop=["x"]), UsageError, "no member 'x'"),
    "rename-unknown": (
        lambda: ckptool.bundle(file="b.tar", out="out.pt", rename={"x": "y"}),
        UsageError,
        "no member 'x'",
    ),
    "rename-there": (
        lambda: ckptool.bundle(file="b.tar", out="out.pt", rename={"ema": "generator"}),
        Conflict,
        "two members are called 'generator'",
    ),
    "rename-to-one": (
        lambda: ckptool.bundle(file="b.tar", out="out.pt", rename={"ema": "x", "generator": "x"}),
        Conflict,
        "two members are called 'x'",
    ),
    "drop-and-rename": (
        lambda: ckptool.bundle(file="b.tar", out="out.pt", drop=["ema"], rename={"ema": "x"}),
        UsageError,
        "dropped and renamed",
    ),
    "nothing-to-do": (lambda: ckptool.bundle(file="b.tar", out="out.pt"), UsageError, "nothing to do"),
    "drop-all": (lambda: ckptool.bundle(file="b.tar", out="out.pt", drop=["generator", "ema"]), UsageError, "no"),
    "drop-of-nothing": (lambda: ckptool.bundle(out="out.pt", drop=["a"]), UsageError, "no bundle whose members"),
    "a-state-dict": (
        lambda: ckptool.bundle(file="G.pt", out="out.pt", drop=["0.weight"]),
        UsageError,
        "one set of model",
    ),
    "an-optimizer": (
        lambda: ckptool.bundle(file="optimizer.pt", out="out.pt", drop=["state"]),
        UsageError,
        "Adam state",
    ),
    "a-part": (lambda: ckptool.bundle(file="b.tar#ema", out="out.pt", drop=["x"]), UsageError, "part of a file"),
    "npz": (lambda: ckptool.bundle(GAN, "out.npz"), UsageError, "a bundle cannot be npz"),
    "sharded": (lambda: ckptool.bundle(GAN, "out", container="sharded"), UsageError, "a bundle cannot be sharded"),
    "single-tensors": (lambda: ckptool.bundle({"a": "G.pt#0.weight"}, "out.pt"), Conflict, "together would be one set"),
    "input-is-output": (lambda: ckptool.bundle(GAN, "G.pt"), Conflict, "is the input itself"),
    "there-already": (lambda: ckptool.bundle(GAN, "b.tar"), OutputExists, "b.tar"),
    "both": (lambda: ckptool.bundle(out="out.pt", file="b.tar", from_folder="."), UsageError, "both"),
    "no-folder": (lambda: ckptool.bundle(out="out.pt", from_folder="."), Unsupported, "has no bundle.json"),
    "a-function": (lambda: ckptool.bundle(GAN, "out.pt", values={"x": len}), Unsupported, "cannot be written"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(files: Path, case: str) -> None:
    ckptool.bundle({"generator": "G.pt", "ema": "ema.pt"}, "b.tar")
    before = {path.name: path.read_bytes() for path in files.iterdir()}
    call, error, words = REFUSED[case]
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
    three_parts(caught.value) if case not in ("there-already", "missing-file") else None
    assert {path.name: path.read_bytes() for path in files.iterdir()} == before


def test_unknown_calls_are_named_and_kept_only_when_told(files: Path) -> None:
    torch.save(TRAPS["20-unknown-call"](), "odd.pt")
    with pytest.raises(UnsafeObject, match="odd/"):
        ckptool.bundle({"a": "G.pt", "odd": "odd.pt"}, "out.pt")
    assert not Path("out.pt").exists()
    ckptool.bundle({"a": "G.pt", "odd": "odd.pt"}, "out.pt", keep_unknown=True)
    assert "unsafe-global" in [note.code for note in ckptool.inspect("out.pt").notes]


def test_a_program_is_refused_by_name(files: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), "script.pt")
    with pytest.raises(Unsupported, match=r"script.pt holds .* beside its tensors"):
        ckptool.bundle({"a": "G.pt", "b": "script.pt"}, "out.pt")


def test_an_input_that_changes_meanwhile(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptool.formats import torch_zip

    write = torch_zip.write

    def meddle(*given: Any, **options: Any) -> Any:
        Path("D.pt").write_bytes(Path("D.pt").read_bytes() + b" ")
        return write(*given, **options)

    monkeypatch.setattr(torch_zip, "write", meddle)
    with pytest.raises(FileChanged, match=r"D\.pt"):
        ckptool.bundle(GAN, "out.pt")
    assert not Path("out.pt").exists()


def test_a_damaged_member_is_noticed(files: Path) -> None:
    raw = bytearray(Path("ema.pt").read_bytes())
    (place,) = [
        record.data.offset for name, record in read("ema.pt").origin.archive.records.items() if name.endswith("data/0")
    ]
    raw[place] ^= 1
    Path("ema.pt").write_bytes(raw)
    with pytest.raises(CkptoolError, match="checksum"):
        ckptool.bundle(GAN, "out.pt")
    assert not Path("out.pt").exists()


def test_dry_run_writes_nothing(files: Path) -> None:
    done = ckptool.bundle(GAN, "out.pt", dry_run=True, dedup=True)
    assert done.dry_run and not Path("out.pt").exists() and done.facts["twin_storages"]


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert main(["bundle", "gan.tar", "--rename", "generator=G", "--dedup", "-o", "new.tar", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "ckptool.written/1" and answer["verb"] == "bundle"
    assert [m["name"] for m in answer["facts"]["members"]] == ["G", "discriminator", "why", "ema", "step"]
    assert list(load(files / "new.tar")) == ["G", "discriminator", "why", "ema", "step"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["G.pt", "ema.pt"], "names no member"),
        (["a=G.pt", "a=ema.pt"], "two members are called a"),
        (["a=G.pt", "a:=1"], "two members are called a"),
        (["=G.pt"], "names no member"),
        (["a="], "names no member"),
        (["epoch:=tree"], "is not JSON"),
        (["a=G.pt", "b=ema.pt", "--drop", "a"], "change one bundle"),
        (["b.tar", "--rename", "x"], "is not of the form OLD=NEW"),
        (["b.tar", "--rename", "a=b", "--rename", "a=c"], "was given 'a' twice"),
        ([], "no members"),
    ],
)
def test_words_that_make_no_sense(files: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", *words, "-o", "out.pt"]) == 2
    assert said in capsys.readouterr().err and not Path("out.pt").exists()


def test_a_folder_for_one_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "a=G.pt", "-d", "out"]) == 2
    assert "writes one file" in capsys.readouterr().err


# Memory --------------------------------------------------------------------------------------------------------------

PROGRAM = """
ckptool.bundle({"a": "a.pt", "b": "b.pt"}, "out.tar", dedup="dedup" in sys.argv)
ckptool.unbundle("out.tar", "parts")
ckptool.bundle(out="again.tar", from_folder="parts")
"""


def memory(folder: Path, nbytes: int, *options: str) -> int:
    for name in ("a", "b"):
        make_sparse(folder / f"{name}.pt", nbytes)
    peak = peak_of(PROGRAM, folder, *options)
    assert ckptool.inspect(folder / "again.tar").listing.bytes == (folder / "out.tar").stat().st_size
    for path in folder.rglob("*.*"):
        path.unlink()
    return peak


@pytest.mark.parametrize("options", [[], ["dedup"]], ids=["plain", "dedup"])
def test_memory_does_not_grow_with_the_files(tmp_path: Path, options: list[str]) -> None:
    assert memory(tmp_path, 50_000_000, *options) < 64_000_000 + 2_000 * 200


@pytest.mark.soak
@pytest.mark.parametrize("options", [[], ["dedup"]], ids=["plain", "dedup"])
def test_two_gigabytes_stay_below_128_mb(tmp_path: Path, options: list[str]) -> None:
    assert memory(tmp_path, 2 << 30, *options) < 128_000_000
