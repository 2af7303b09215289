"""`unbundle`, and the way back: byte for byte what it was, for every trap."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import ckptool
from ckptool.cli import main
from ckptool.errors import Ambiguous, CkptoolError, Conflict, OutputExists, UsageError
from fixtures.make import make
from fixtures.traps import TRAPS
from tests.support.bundles import SHARED, net_state
from tests.support.deduplicated import deduplicated
from tests.support.errors import three_parts
from tests.support.files import load, torch_bytes
from tests.support.looped import looped
from tests.support.same import assert_same_objects
from tests.support.zips import record_starts

# Apart ---------------------------------------------------------------------------------------------------------------


def test_each_member_is_a_file_that_torch_loads(gan_bundle: Path) -> None:
    done = ckptool.unbundle(gan_bundle, "parts", verify=True)
    assert sorted(os.listdir("parts")) == ["bundle.json", "ema.pt", "generator.pt", "optimizerA.pt", "tied.pt"]
    assert_same_objects(load(Path("parts/generator.pt")), load(Path("G.pt")))
    tied = load(Path("parts/tied.pt"))
    tied["w.weight"].zero_()
    assert not tied["tied.weight"].any() and not tied["part.weight"].any()
    nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2)).load_state_dict(load(Path("parts/ema.pt")))
    record = json.loads(Path("parts/bundle.json").read_text())
    assert record["schema"] == "ckptool.bundle/1" and record["container"] == "torch-zip"
    assert [(m["name"], m.get("file"), m.get("value")) for m in record["members"]] == [
        ("generator", "generator.pt", None),
        ("tied", "tied.pt", None),
        ("optimizerA", "optimizerA.pt", None),
        ("ema", "ema.pt", None),
        ("epoch", None, 3),
        ("config", None, {"lr": [0.1, 1e-300, None, True], "name": "n\u00e4me"}),
        ("empty", None, {}),
    ]
    assert (done.how, done.verified) == ("new folder", True) and "with 3 plain values" in done.summary
    assert done.file_bytes == sum(path.stat().st_size for path in Path("parts").iterdir())


def test_a_damaged_bundle_is_refused_where_it_is_verified(gan_bundle: Path) -> None:
    """But not read by a dry run."""
    starts, data = record_starts(gan_bundle), bytearray(gan_bundle.read_bytes())
    data[next(start for name, start in starts.items() if "/data/" in name)] ^= 1
    gan_bundle.write_bytes(data)
    with pytest.raises(CkptoolError, match="checksum"):
        ckptool.unbundle(gan_bundle, "parts", verify=True)
    assert not os.path.exists("parts")
    assert ckptool.unbundle(gan_bundle, "parts", verify=True, dry_run=True) and not os.path.exists("parts")


def test_only_some_members(gan_bundle: Path) -> None:
    ckptool.unbundle(gan_bundle, "parts", only=["ema", "epoch"])
    assert sorted(os.listdir("parts")) == ["bundle.json", "ema.pt"]
    assert [m["name"] for m in json.loads(Path("parts/bundle.json").read_text())["members"]] == ["ema", "epoch"]
    with pytest.raises(UsageError, match="there is no member 'nobody'") as caught:
        ckptool.unbundle(gan_bundle, "others", only=["nobody"])
    assert "generator, tied" in str(caught.value) and not Path("others").exists()


def test_to_safetensors(gan_bundle: Path) -> None:
    ckptool.unbundle(gan_bundle, "parts", container="safetensors", verify=True)
    stock, original = safetensors.torch.load_file("parts/generator.safetensors"), load(Path("G.pt"))
    assert stock.keys() == original.keys() and all(torch.equal(stock[name], original[name]) for name in original)
    ckptool.bundle(out="again.tar", from_folder="parts")
    assert Path("again.tar").read_bytes() == gan_bundle.read_bytes()
    with pytest.raises(UsageError, match="cannot be written as npz"):
        ckptool.unbundle(gan_bundle, "others", container="npz")


def test_a_part_of_a_file(tmp_path: Path) -> None:
    torch.save({"epoch": 1, "models": {"a": net_state(1), "b": net_state(2)}}, tmp_path / "in.pt")
    ckptool.unbundle(f"{tmp_path / 'in.pt'}#models", tmp_path / "parts")
    assert sorted(os.listdir(tmp_path / "parts")) == ["a.pt", "b.pt", "bundle.json"]


def test_rows_say_what_a_member_is(tmp_path: Path) -> None:
    shared, optimizer = torch.ones(8), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    tree = {
        "G": {"a.weight": shared, "b.weight": shared},
        "ema": {"a.weight": torch.ones(8)},
        "training": {"state_dict": {"a.weight": shared}, "optimizer": optimizer.state_dict()},
        "fresh": optimizer.state_dict(),
        "mask": torch.ones(3),
        "epoch": 3,
        "betas": (0.9, 0.99),
    }
    torch.save(tree, tmp_path / "in.pt")
    rows = ckptool.unbundle(tmp_path / "in.pt", tmp_path / "parts", dry_run=True).facts["members"]
    assert [(row["name"], row["kind"], row["tensors"], row["bytes"]) for row in rows] == [
        ("G", "model weights", 2, 32),
        ("ema", "EMA weights", 1, 32),
        ("training", "model weights, optimizer without state, 1 parameter", 1, 32),
        ("fresh", "optimizer without state, 1 parameter", 0, 0),
        ("mask", "tensor", 1, 12),
        ("epoch", "plain value", 0, 0),
        ("betas", "plain values", 0, 0),
    ]


def test_what_is_no_plain_value_gets_a_file(tmp_path: Path) -> None:
    tree = {
        "tuple": (1, 2),
        "long": "x" * 70_000,
        "nan": float("nan"),
        "list": [1, [2.5, "a"]],
        "twice": [[1]] * 2,
        "keys": {1: 2},
        "minus zero": -0.0,
        "big": 1 << 1000,
    }
    torch.save(tree, tmp_path / "in.pt")
    ckptool.unbundle(tmp_path / "in.pt", tmp_path / "parts")
    files = sorted(name.removesuffix(".pt") for name in os.listdir(tmp_path / "parts"))
    assert files == sorted(["bundle.json", "tuple", "long", "nan", "twice", "keys"])
    ckptool.bundle(out=tmp_path / "again.pt", from_folder=tmp_path / "parts")
    assert_same_objects(load(tmp_path / "again.pt"), tree)


def test_members_under_numbers(tmp_path: Path) -> None:
    tree = {0: net_state(1), 1: net_state(2), "epoch": 3, 7: "seven"}
    torch.save(tree, tmp_path / "in.pt")
    ckptool.unbundle(tmp_path / "in.pt", tmp_path / "parts")
    assert sorted(os.listdir(tmp_path / "parts")) == ["0.pt", "1.pt", "bundle.json"]
    ckptool.bundle(out=tmp_path / "again.pt", from_folder=tmp_path / "parts")
    assert_same_objects(load(tmp_path / "again.pt"), tree)


# Of 0.1.0: stored once, and not tied ---------------------------------------------------------------------------------


def test_each_member_gets_its_own_again(gan_bundle: Path) -> None:
    assert deduplicated(gan_bundle, "dd.tar")
    assert Path("dd.tar").stat().st_size < gan_bundle.stat().st_size - 3000
    ckptool.unbundle("dd.tar", "parts", container="torch-zip", verify=True)
    for name in ("generator", "ema"):
        assert_same_objects(load(Path(f"parts/{name}.pt")), load(Path("G.pt")))
    assert [note.code for note in ckptool.inspect("parts/ema.pt").notes] == []
    ckptool.bundle(out="again.tar", from_folder="parts", verify=True)
    assert ckptool.diff("again.tar", gan_bundle).same


def test_twins_inside_one_member_are_apart_in_its_file(tmp_path: Path) -> None:
    torch.save(
        {"a": {"x.weight": SHARED, "y.weight": SHARED.clone()}, "b": {"z.weight": SHARED.clone()}}, tmp_path / "in.pt"
    )
    assert deduplicated(tmp_path / "in.pt", tmp_path / "dd.pt") == 2
    ckptool.unbundle(tmp_path / "dd.pt", tmp_path / "parts")
    alone = load(tmp_path / "parts" / "a.pt")
    alone["x.weight"].zero_()
    assert torch.equal(alone["y.weight"], SHARED)


def test_a_record_of_what_was_stored_once(gan_bundle: Path) -> None:
    """Each member has its bytes in its own file: they stay apart."""
    ckptool.unbundle(gan_bundle, "parts")
    record = json.loads(Path("parts/bundle.json").read_text())
    record["twins"] = [[["generator/0.weight"], ["ema/0.weight"]]]
    Path("parts/bundle.json").write_text(json.dumps(record))
    ckptool.bundle(out="again.tar", from_folder="parts")
    assert Path("again.tar").read_bytes() == gan_bundle.read_bytes()


# Ties between members ------------------------------------------------------------------------------------------------


def tied_members(folder: Path) -> Path:
    tree = {
        "model": {"emb.weight": SHARED, "b.bias": torch.ones(2)},
        "critic": {"emb.weight": SHARED, "rows.weight": SHARED[2:4].t()},
        "sparse": torch.eye(2).to_sparse(),
    }
    torch.save(tree, folder / "tied.pt")
    return folder / "tied.pt"


def test_ties_between_members_come_back(tmp_path: Path) -> None:
    file = tied_members(tmp_path)
    ckptool.unbundle(file, tmp_path / "parts")
    assert json.loads((tmp_path / "parts" / "bundle.json").read_text())["ties"] == [
        ["model/emb.weight", "critic/emb.weight", "critic/rows.weight"]
    ]
    ckptool.bundle(out=tmp_path / "again.pt", from_folder=tmp_path / "parts", verify=True)
    before, after = load(file), load(tmp_path / "again.pt")
    # One tensor object in two members becomes two objects, each of which sees what happens to the other.
    after["model"]["emb.weight"].zero_()
    assert not after["critic"]["emb.weight"].any() and not after["critic"]["rows.weight"].any()
    before["model"]["emb.weight"].zero_()
    assert_same_objects(before["critic"]["rows.weight"], after["critic"]["rows.weight"])
    assert ckptool.diff(file, tmp_path / "again.pt").same


def test_ties_survive_a_rename_on_the_way_back(tmp_path: Path) -> None:
    ckptool.unbundle(tied_members(tmp_path), tmp_path / "parts")
    ckptool.bundle(out=tmp_path / "out.pt", from_folder=tmp_path / "parts", rename={"critic": "C"}, drop=["sparse"])
    after = load(tmp_path / "out.pt")
    after["model"]["emb.weight"].zero_()
    assert list(after) == ["model", "C"] and not after["C"]["emb.weight"].any()


def test_ties_that_differ_now_are_refused(tmp_path: Path) -> None:
    ckptool.unbundle(tied_members(tmp_path), tmp_path / "parts")
    changed = load(tmp_path / "parts" / "critic.pt")
    changed["emb.weight"] += 1
    torch.save(changed, tmp_path / "parts" / "critic.pt")
    with pytest.raises(Conflict, match="were one tensor in the bundle, and differ now") as caught:
        ckptool.bundle(out=tmp_path / "out.pt", from_folder=tmp_path / "parts")
    three_parts(caught.value)
    assert not (tmp_path / "out.pt").exists()


def test_an_address_of_two_tensors_cannot_be_written_down(tmp_path: Path) -> None:
    torch.save({"a": {0: SHARED, "0": torch.ones(2)}, "b": {"w.weight": SHARED}}, tmp_path / "in.pt")
    with pytest.raises(Ambiguous, match="a/0 leads to two tensors"):
        ckptool.unbundle(tmp_path / "in.pt", tmp_path / "parts")
    assert not (tmp_path / "parts").exists()


# Back again, byte for byte --------------------------------------------------------------------------------------------

# What one storage can be seen as only by torch itself is refused on writing, as everywhere.
WRITABLE = [name for name in TRAPS if name != "04-two-dtypes-of-one-storage"]
SHARING = [name for name in WRITABLE if name[:2] in {f"{n:02}" for n in (1, 2, 3, 5, 6, 7, 8, 10, 12, 16, 17, 18)}]


def there_and_back(name: str, suffix: str) -> bool:
    """Whether a trap, twice in a bundle that was taken apart and put together again, is the same file."""
    Path("in.pt").write_bytes(torch_bytes(TRAPS[name]()))
    out, again = f"{name}{suffix}", f"{name}.again{suffix}"
    told: Any = {"keep_unknown": True}
    ckptool.bundle({"a": "in.pt", "b": "in.pt"}, out, values={"epoch": 1}, **told)
    ckptool.unbundle(out, f"{name}.parts", **told)
    ckptool.bundle(out=again, from_folder=f"{name}.parts", **told)
    return Path(out).read_bytes() == Path(again).read_bytes()


@pytest.mark.parametrize(
    "names",
    [
        [name for name in WRITABLE if name[:2] not in ("09", "13", "14", "15", "16")],
        pytest.param(WRITABLE, marks=pytest.mark.soak),
    ],
    ids=["most", "all"],
)
def test_every_trap_comes_back_byte_for_byte(tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [name for name in names if not there_and_back(name, ".pt")] == []


def test_shared_tensors_come_back_from_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in SHARING:
        assert there_and_back(name, ".safetensors"), name
        ckptool.unbundle(f"{name}.safetensors", f"{name}.pt.parts", container="torch-zip")
        before, after = (load(Path(path), weights_only=False) for path in ("in.pt", f"{name}.pt.parts/a.pt"))
        assert_same_objects(before, after)


@pytest.mark.parametrize("name", ["gan.pt", "training.pt", "lightning.ckpt"])
def test_foreign_bundles_come_back_the_same(tmp_path: Path, name: str) -> None:
    file = make(name, tmp_path)
    ckptool.unbundle(file, tmp_path / "parts", verify=True)
    ckptool.bundle(out=tmp_path / "again.pt", from_folder=tmp_path / "parts")
    assert ckptool.diff(file, tmp_path / "again.pt").same
    ckptool.unbundle(tmp_path / "again.pt", tmp_path / "parts2")
    ckptool.bundle(out=tmp_path / "third.pt", from_folder=tmp_path / "parts2")
    assert (tmp_path / "third.pt").read_bytes() == (tmp_path / "again.pt").read_bytes()


def test_an_input_without_checksums_comes_back_byte_for_byte(gan_bundle: Path) -> None:
    ckptool.convert("G.pt", "G.safetensors")
    ckptool.bundle({"a": "G.safetensors", "b": "T.pt"}, "mixed.pt")
    ckptool.unbundle("mixed.pt", "parts")
    ckptool.bundle(out="again.pt", from_folder="parts")
    assert Path("again.pt").read_bytes() == Path("mixed.pt").read_bytes()


def test_an_edited_bundle_comes_back_byte_for_byte(gan_bundle: Path) -> None:
    ckptool.bundle(file=gan_bundle, out="new.tar", drop=["tied"], rename={"generator": "G"}, values={"more": [1]})
    ckptool.unbundle("new.tar", "parts")
    ckptool.bundle(out="again.tar", from_folder="parts")
    assert Path("again.tar").read_bytes() == Path("new.tar").read_bytes()


# Refused, and nothing written ----------------------------------------------------------------------------------------


BAD = ["../../x", "/abs", "CON", "a/", "..", "a\\b", "a\0b", "aux.pt", "\x1b[2J", "", "-rf", "--help"]


@looped("name", BAD)
def test_member_names_that_cannot_be_files_are_a_conflict(tmp_path: Path, name: str) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    torch.save({"a": net_state(1), name: net_state(2)}, inner / "in.pt")
    with pytest.raises(Conflict, match="a member cannot be called"):
        ckptool.unbundle(inner / "in.pt", inner / "parts")
    assert [path.name for path in tmp_path.rglob("*")] == ["inner", "in.pt"]
    ckptool.unbundle(inner / "in.pt", inner / "parts", only=["a"])
    ckptool.bundle(file=inner / "in.pt", out=inner / "out.pt", rename={name: "b"})
    assert list(load(inner / "out.pt")) == ["a", "b"]


@pytest.mark.parametrize(
    "pair", [("model", "MODEL"), ("caf\u00e9", "cafe\u0301"), (0, "0")], ids=["case", "normal-forms", "number"]
)
def test_member_names_that_are_one_file_somewhere_are_a_conflict(tmp_path: Path, pair: tuple[Any, Any]) -> None:
    torch.save({pair[0]: net_state(1), pair[1]: net_state(2)}, tmp_path / "in.pt")
    with pytest.raises(Conflict, match="are one name where"):
        ckptool.unbundle(tmp_path / "in.pt", tmp_path / "parts")
    assert not (tmp_path / "parts").exists()


def test_names_of_plain_values_are_free(tmp_path: Path) -> None:
    torch.save({"a": net_state(1), "train/loss": 0.5, "CON": 1, "con": 2}, tmp_path / "in.pt")
    ckptool.unbundle(tmp_path / "in.pt", tmp_path / "parts")
    ckptool.bundle(out=tmp_path / "out.pt", from_folder=tmp_path / "parts")
    assert_same_objects(load(tmp_path / "out.pt"), load(tmp_path / "in.pt"))


@pytest.mark.parametrize(
    ("tree", "error", "words"),
    [
        (net_state(1), UsageError, "one set of model weights"),
        ([net_state(1)], UsageError, "is not a bundle: it is of type list"),
        ({"a": net_state(1), None: net_state(2)}, Conflict, "cannot be called None"),
        ({"a": net_state(1), None: 3}, Conflict, "neither a string nor a number"),
        (torch.ones(2), UsageError, "not a bundle"),
    ],
    ids=["state-dict", "list", "none", "plain-none", "tensor"],
)
def test_what_is_no_bundle(tmp_path: Path, tree: Any, error: type[CkptoolError], words: str) -> None:
    torch.save(tree, tmp_path / "in.pt")
    with pytest.raises(error) as caught:
        ckptool.unbundle(tmp_path / "in.pt", tmp_path / "parts")
    assert words in str(caught.value) and not (tmp_path / "parts").exists()
    three_parts(caught.value)


def test_folders_that_are_there(gan_bundle: Path) -> None:
    with pytest.raises(UsageError, match="writes a folder"):
        ckptool.unbundle(gan_bundle)
    Path("parts").mkdir()
    ckptool.unbundle(gan_bundle, "parts")  # an empty one may be used
    with pytest.raises(OutputExists):
        ckptool.unbundle(gan_bundle, "parts")
    ckptool.unbundle(gan_bundle, "parts", only=["ema"], overwrite=True)
    assert sorted(os.listdir("parts")) == ["bundle.json", "ema.pt"]
    Path("parts/mine.txt").write_text("precious")
    with pytest.raises(Conflict, match=r"mine\.txt would be deleted"):
        ckptool.unbundle(gan_bundle, "parts", overwrite=True)
    assert sorted(os.listdir("parts")) == ["bundle.json", "ema.pt", "mine.txt"]
    assert not [name for name in os.listdir() if name.startswith(".")]


def test_dry_run_writes_nothing(gan_bundle: Path) -> None:
    done = ckptool.unbundle(gan_bundle, "parts", dry_run=True)
    assert done.dry_run and not Path("parts").exists() and len(done.facts["members"]) == 7
    Path("parts").mkdir()
    Path("parts/mine.txt").write_text("precious")
    with pytest.raises(OutputExists):
        ckptool.unbundle(gan_bundle, "parts", dry_run=True)


def test_a_damaged_member_leaves_no_folder(gan_bundle: Path) -> None:
    with zipfile.ZipFile(gan_bundle) as archive:
        info = archive.getinfo("archive/data/0")
    raw = bytearray(gan_bundle.read_bytes())
    raw[info.header_offset + 200] ^= 1
    gan_bundle.write_bytes(raw)
    with pytest.raises(CkptoolError, match="checksum"):
        ckptool.unbundle(gan_bundle, "parts")
    assert not Path("parts").exists() and not [name for name in os.listdir() if name.startswith(".")]


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command(gan_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unbundle", "gan.tar", "--only", "ema", "--only", "epoch", "-d", "parts", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["verb"] == "unbundle" and answer["output"] == "parts"
    assert [(m["name"], m["file"]) for m in answer["facts"]["members"]] == [("ema", "ema.pt"), ("epoch", "3")]
    assert main(["unbundle", "gan.tar", "-d", "parts"]) == 2
    assert main(["unbundle", "gan.tar", "-d", "parts", "-f", "--verify"]) == 0
    assert main(["bundle", "--from", "parts", "-o", "again.tar"]) == 0
    assert Path("again.tar").read_bytes() == gan_bundle.read_bytes()
    assert main(["unbundle", "gan.tar"]) == 2
    assert "unbundle writes a folder" in capsys.readouterr().err
