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
from ckptool.errors import CkptoolError, Conflict, OutputExists, UsageError
from fixtures.traps import TRAPS
from tests.support.bundles import SHARED, net_state
from tests.support.errors import three_parts
from tests.support.files import load, torch_bytes
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


def test_to_safetensors(gan_bundle: Path) -> None:
    ckptool.unbundle(gan_bundle, "parts", container="safetensors", verify=True)
    stock, original = safetensors.torch.load_file("parts/generator.safetensors"), load(Path("G.pt"))
    assert stock.keys() == original.keys() and all(torch.equal(stock[name], original[name]) for name in original)
    ckptool.bundle(out="again.tar", from_folder="parts")
    assert Path("again.tar").read_bytes() == gan_bundle.read_bytes()
    with pytest.raises(UsageError, match="cannot be written as npz"):
        ckptool.unbundle(gan_bundle, "others", container="npz")


# Ties between members ------------------------------------------------------------------------------------------------


def tied_members(folder: Path) -> Path:
    tree = {
        "model": {"emb.weight": SHARED, "b.bias": torch.ones(2)},
        "critic": {"emb.weight": SHARED, "rows.weight": SHARED[2:4].t()},
        "sparse": torch.eye(2).to_sparse(),
    }
    torch.save(tree, folder / "tied.pt")
    return folder / "tied.pt"


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


# Back again, byte for byte --------------------------------------------------------------------------------------------

# What one storage can be seen as only by torch itself is refused on writing, as everywhere.
WRITABLE = [name for name in TRAPS if name != "04-two-dtypes-of-one-storage"]


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
