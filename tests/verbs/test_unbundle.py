"""`unbundle`, and the way back: byte for byte what it was, for every trap; `bundle.json` is not trusted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptool
from ckptool.errors import (
    Ambiguous,
    CkptoolError,
    Conflict,
    Corrupt,
    LimitExceeded,
    OutputExists,
    Unsupported,
    UsageError,
)
from fixtures.traps import TRAPS
from tests.support.bundles import SHARED, net_state
from tests.support.cli import Run
from tests.support.errors import three_parts
from tests.support.files import load, torch_bytes
from tests.support.looped import looped
from tests.support.same import assert_same_objects
from tests.support.zips import record_starts


def test_each_member_is_a_file_that_torch_loads(gan_bundle: Path) -> None:
    done = ckptool.unbundle(gan_bundle, "parts", verify=True)
    files = ["bundle.json", "ema.pt", "generator.pt", "optimizerA.pt", "tied.pt"]
    assert sorted(os.listdir("parts")) == files and (done.how, done.verified) == ("new folder", True)
    assert_same_objects(load(Path("parts/generator.pt")), load(Path("G.pt")))
    tied = load(Path("parts/tied.pt"))
    tied["w.weight"].zero_()
    assert not tied["tied.weight"].any() and not tied["part.weight"].any()
    record = json.loads(Path("parts/bundle.json").read_text())
    assert record["schema"] == "ckptool.bundle/1" and record["container"] == "torch-zip"
    assert [(m["name"], m.get("file"), m.get("value")) for m in record["members"]] == [
        *((name, f"{name}.pt", None) for name in ("generator", "tied", "optimizerA", "ema")),
        ("epoch", None, 3),
        ("config", None, {"lr": [0.1, 1e-300, None, True], "name": "n\u00e4me"}),
        ("empty", None, {}),
    ]
    assert done.file_bytes == sum(path.stat().st_size for path in Path("parts").iterdir())


def test_to_safetensors(gan_bundle: Path) -> None:
    ckptool.unbundle(gan_bundle, "parts", container="safetensors", verify=True)
    stock, original = safetensors.torch.load_file("parts/generator.safetensors"), load(Path("G.pt"))
    assert stock.keys() == original.keys() and all(torch.equal(stock[name], original[name]) for name in original)
    ckptool.bundle(out="again.tar", from_folder="parts")
    assert Path("again.tar").read_bytes() == gan_bundle.read_bytes()
    with pytest.raises(UsageError, match="cannot be written as npz"):
        ckptool.unbundle(gan_bundle, "others", container="npz")


def test_a_damaged_member_leaves_no_folder_and_a_dry_run_reads_none(gan_bundle: Path) -> None:
    starts, data = record_starts(gan_bundle), bytearray(gan_bundle.read_bytes())
    data[next(start for name, start in starts.items() if "/data/" in name)] ^= 1
    gan_bundle.write_bytes(data)
    for verify in (False, True):
        with pytest.raises(CkptoolError, match="checksum"):
            ckptool.unbundle(gan_bundle, "parts", verify=verify)
        assert ckptool.unbundle(gan_bundle, "parts", verify=verify, dry_run=True).dry_run
    assert not Path("parts").exists() and not [name for name in os.listdir() if name.startswith(".")]
    Path("parts").mkdir()
    Path("parts/mine.txt").write_text("precious")
    with pytest.raises(OutputExists):
        ckptool.unbundle(gan_bundle, "parts", dry_run=True)


def test_ties_between_members_come_back_unless_they_differ_now(tmp_path: Path) -> None:
    model = {"emb.weight": SHARED, "b.bias": torch.ones(2)}
    critic = {"emb.weight": SHARED, "rows.weight": SHARED[2:4].t()}
    torch.save({"model": model, "critic": critic, "sparse": torch.eye(2).to_sparse()}, tmp_path / "tied.pt")
    parts = tmp_path / "parts"
    ckptool.unbundle(tmp_path / "tied.pt", parts)
    ckptool.bundle(out=tmp_path / "out.pt", from_folder=parts, rename={"critic": "C"}, drop=["sparse"])
    after = load(tmp_path / "out.pt")
    after["model"]["emb.weight"].zero_()
    assert list(after) == ["model", "C"] and not after["C"]["emb.weight"].any()
    changed = load(parts / "critic.pt")
    changed["emb.weight"] += 1
    torch.save(changed, parts / "critic.pt")
    with pytest.raises(Conflict, match="were one tensor in the bundle, and differ now") as caught:
        ckptool.bundle(out=tmp_path / "no.pt", from_folder=parts)
    three_parts(caught.value)
    assert not (tmp_path / "no.pt").exists()


def test_a_tie_whose_address_leads_to_two_tensors_is_refused(tmp_path: Path) -> None:
    shared = torch.ones(2)
    torch.save({"a": {0: shared, "0": shared.clone()}, "b": {"w": shared}}, tmp_path / "in.pt")
    with pytest.raises(Ambiguous, match="a/0 leads to two tensors"):
        ckptool.unbundle(tmp_path / "in.pt", tmp_path / "parts")
    assert not (tmp_path / "parts").exists()


# Back again, byte for byte -------------------------------------------------------------------------------------------

# What one storage can be seen as only by torch itself is refused on writing, as everywhere.
WRITABLE = [name for name in TRAPS if name != "04-two-dtypes-of-one-storage"]


def comes_back(bundle: str, **options: Any) -> bool:
    ckptool.unbundle(bundle, f"{bundle}.parts", **options)
    ckptool.bundle(out=f"again.{bundle}", from_folder=f"{bundle}.parts", **options)
    return Path(bundle).read_bytes() == Path(f"again.{bundle}").read_bytes()


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
    different = []
    for name in names:
        Path("in.pt").write_bytes(torch_bytes(TRAPS[name]()))
        ckptool.bundle({"a": "in.pt", "b": "in.pt"}, f"{name}.pt", values={"epoch": 1}, keep_unknown=True)
        different += [] if comes_back(f"{name}.pt", keep_unknown=True) else [name]
    assert not different


def test_mixed_and_edited_bundles_come_back_byte_for_byte(gan_bundle: Path) -> None:
    ckptool.convert("G.pt", "G.safetensors")  # without checksums
    ckptool.bundle({"a": "G.safetensors", "b": "T.pt"}, "mixed.pt")
    ckptool.bundle(file=gan_bundle, out="new.tar", drop=["tied"], rename={"generator": "G"}, values={"more": [1]})
    assert comes_back("mixed.pt") and comes_back("new.tar")


# Refused, and nothing written ----------------------------------------------------------------------------------------


@looped(
    ("tree", "error", "words"),
    [
        (net_state(1), UsageError, "one set of model weights"),
        ([net_state(1)], UsageError, "is not a bundle: it is of type list"),
        ({"a": net_state(1), None: net_state(2)}, Conflict, "cannot be called None"),
        ({"a": net_state(1), None: 3}, Conflict, "neither a string nor a number"),
        (torch.ones(2), UsageError, "not a bundle"),
    ],
)
def test_what_is_no_bundle(tmp_path: Path, tree: Any, error: type[CkptoolError], words: str) -> None:
    torch.save(tree, tmp_path / "in.pt")
    with pytest.raises(error) as caught:
        ckptool.unbundle(tmp_path / "in.pt", tmp_path / "parts")
    assert words in str(caught.value) and not (tmp_path / "parts").exists()
    three_parts(caught.value)


def member(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record["members"].append(fields)


@looped(
    ("spoil", "error", "words"),
    [
        (member(name="x", file="../G.pt"), Corrupt, "outside its folder"),
        (member(name="x", file="/etc/passwd"), Corrupt, "outside its folder"),
        (member(name="x", file="none.pt"), CkptoolError, "none.pt"),
        (member(name="ema", value=1), Corrupt, "twice"),
        (member(name="x", file="ema.pt", value=1), Corrupt, "not exactly one"),
        (member(name="x"), Corrupt, "not exactly one"),
        (member(file="ema.pt"), Corrupt, "damaged"),
        (member(name=[1], value=1), Corrupt, "damaged"),
        (member(name=True, value=1), Corrupt, "damaged"),
        (member(name="a/b", file="ema.pt"), Conflict, "cannot be called"),
        (lambda record: record["members"].append(3), Corrupt, "damaged"),
        (lambda record: record.update(members={}), Corrupt, "damaged"),
        (lambda record: record.pop("members"), Corrupt, "damaged"),
        (lambda record: record.update(ties=[[1]]), Corrupt, "damaged"),
        (lambda record: record.update(schema="ckptool.bundle/2"), Unsupported, "ckptool.bundle/2"),
        (lambda record: record.pop("schema"), Unsupported, "None"),
    ],
    ids=str,
)
def test_a_spoiled_record(gan_bundle: Path, spoil: Any, error: type[CkptoolError], words: str) -> None:
    shutil.rmtree("parts", ignore_errors=True)
    ckptool.unbundle(gan_bundle, "parts")
    record = json.loads(Path("parts/bundle.json").read_text())
    spoil(record)
    Path("parts/bundle.json").write_text(json.dumps(record))
    with pytest.raises(error) as caught:
        ckptool.bundle(out="out.pt", from_folder="parts")
    assert words in str(caught.value) and not Path("out.pt").exists()


def test_a_record_of_any_bytes_and_any_size(gan_bundle: Path) -> None:
    Path("parts").mkdir()
    for raw in (b"", b"{", b"[]", b'{"a":1,"a":2}', b"[" * 100_000, b'{"schema":"\\ud800"}'):
        Path("parts/bundle.json").write_bytes(raw)
        with pytest.raises((Corrupt, Ambiguous)):
            ckptool.bundle(out="out.pt", from_folder="parts")
    os.truncate("parts/bundle.json", 1 << 40)
    with pytest.raises(LimitExceeded):
        ckptool.bundle(out="out.pt", from_folder="parts")


def test_addresses_that_lead_nowhere_are_passed_over(gan_bundle: Path) -> None:
    ckptool.unbundle(gan_bundle, "parts")
    record = json.loads(Path("parts/bundle.json").read_text())
    record |= {"ties": [["gone/a", "ema/0.weight"]], "twins": [[["gone"], ["nowhere"]]]}
    Path("parts/bundle.json").write_text(json.dumps(record))
    ckptool.bundle(out="again.tar", from_folder="parts")
    assert Path("again.tar").read_bytes() == gan_bundle.read_bytes()


def test_the_command(gan_bundle: Path, run: Run) -> None:
    done = json.loads(run("unbundle", "gan.tar", "--only", "ema", "--only", "epoch", "-d", "parts", "--json").out)
    assert [(m["name"], m["file"]) for m in done["facts"]["members"]] == [("ema", "ema.pt"), ("epoch", "3")]
    assert run("unbundle", "gan.tar", "-d", "parts").code == 2
    assert run("unbundle", "gan.tar", "-d", "parts", "-f", "--verify").code == 0
    assert run("bundle", "--from", "parts", "-o", "again.tar").code == 0
    assert Path("again.tar").read_bytes() == gan_bundle.read_bytes()
    assert "unbundle writes a folder" in run("unbundle", "gan.tar").err
