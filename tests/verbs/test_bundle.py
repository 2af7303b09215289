"""`bundle`: what others read of it, and what is refused with everything left as it was. `unbundle` is the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptool
from ckptool import errors
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.errors import CkptoolError, Conflict, Unsupported, UsageError
from ckptool.transforms.bundles import MAX_PLAIN, check_names, is_plain
from fixtures.sparse import make_sparse
from fixtures.traps import TRAPS
from tests.support.bundles import GAN, small_net
from tests.support.cli import Run
from tests.support.errors import three_parts
from tests.support.files import load
from tests.support.looped import looped
from tests.support.memory import LIMIT, peak_of
from tests.support.same import assert_same_objects
from tests.support.zips import record_starts


@pytest.mark.parametrize("mmap", [False, True])
def test_the_tutorials_layout_loads_in_torch(gan_files: Path, mmap: bool) -> None:
    done = ckptool.bundle(GAN, "gan.tar", values={"epoch": 3, "config": {"lr": [0.1, None]}}, verify=True)
    loaded = torch.load("gan.tar", weights_only=True, mmap=mmap)
    assert_same_objects(loaded["discriminator"], load(gan_files / "D.pt")["state_dict"])
    generator = small_net(64)
    generator.load_state_dict(loaded["generator"])
    torch.optim.Adam(generator.parameters()).load_state_dict(loaded["optimizerA"])
    assert (loaded["epoch"], loaded["config"], done.verified) == (3, {"lr": [0.1, None]}, True)
    assert [member["name"] for member in done.facts["members"]] == list(loaded) == [*GAN, "epoch", "config"]
    nbytes = sum(tensor.nbytes for tensor in loaded["discriminator"].values())
    row = {"name": "discriminator", "kind": "model weights", "tensors": 9, "bytes": nbytes, "file": "D.pt#state_dict"}
    assert done.facts["members"][1] == row


def test_stock_safetensors_reads_the_other_layout(gan_files: Path) -> None:
    ckptool.bundle(GAN, "gan.safetensors", values={"epoch": 3}, verify=True)
    stock, original = safetensors.torch.load_file("gan.safetensors"), load(gan_files / "G.pt")
    assert all(torch.equal(stock[f"generator/{name}"], tensor) for name, tensor in original.items())
    back = ckptool.load("gan.safetensors")
    assert_same_objects(back["generator"], original)
    assert_same_objects(back["optimizerA"], load(gan_files / "optimizer.pt"))
    assert back["epoch"] == 3 and list(back) == [*GAN, "epoch"]


def test_ties_of_parts_of_one_file_stay_and_what_is_taken_twice_is_two(gan_files: Path) -> None:
    shared = torch.randn(4, 4)
    torch.save({"a": {"x.weight": shared, "y.weight": shared}, "b": {"z.weight": shared[1:]}}, "tied.pt")
    ckptool.bundle({"one": "tied.pt#a", "two": "tied.pt#b", "again": "tied.pt#a"}, "out.pt", verify=True)
    loaded = load(gan_files / "out.pt")
    loaded["one"]["x.weight"].fill_(7)
    assert (loaded["one"]["y.weight"] == 7).all() and (loaded["two"]["z.weight"] == 7).all()
    assert torch.equal(loaded["again"]["x.weight"], shared)


def test_in_place_leaves_every_byte_that_is_there(gan_files: Path) -> None:
    ckptool.bundle(GAN, "gan.tar", values={"epoch": 3})
    before = Path("gan.tar").read_bytes()
    done = ckptool.bundle(file="gan.tar", drop=["ema"], rename={"generator": "G"}, in_place=True, verify=True)
    assert done.how == "in place" and Path("gan.tar").read_bytes().startswith(before[: before.rindex(b"PK\x06\x06")])
    assert "unused-record" in [note.code for note in done.notes]
    loaded = load(gan_files / "gan.tar")
    assert list(loaded) == ["G", "discriminator", "optimizerA", "epoch"]
    assert_same_objects(loaded["G"], load(gan_files / "G.pt"))


def test_the_command(gan_files: Path, run: Run) -> None:
    Path("G.pt").rename("epoch=3.pt")  # names of files may have a =
    members = ["generator=epoch=3.pt", "discriminator=D.pt#state_dict", "epoch:=3", 'why:="a=b"']
    assert run("bundle", "-o", "gan.tar", *members).code == 0
    changes = ["--add", "ema=ema.pt", "--add", "step:=[1]", "--drop", "epoch", "--in-place"]
    assert run("bundle", "gan.tar", *changes).code == 0
    facts = json.loads(run("bundle", "gan.tar", "--rename", "generator=G", "-o", "new.tar", "--json").out)["facts"]
    names = ["G", "discriminator", "why", "ema", "step"]
    assert [member["name"] for member in facts["members"]] == list(load(gan_files / "new.tar")) == names


# Refused, and everything left as it was ------------------------------------------------------------------------------


@looped(
    ("words", "said"),
    [
        ("G.pt ema.pt", "names no member"),
        ("a=G.pt a=ema.pt", "two members are called 'a'"),
        ("a=G.pt a:=1", "two members are called 'a'"),
        ("=G.pt", "names no member"),
        ("a=", "names no member"),
        ("epoch:=tree", "is not JSON"),
        ("epoch=3", "For the value: 'epoch:=3'"),
        ("epoch=tree", "cannot read tree"),
        ("a=G.pt b=ema.pt --drop a", "change one bundle"),
        ("b.tar --rename x", "is not of the form OLD=NEW"),
        ("b.tar --rename a=b --rename a=c", "was given 'a' twice"),
        ("", "no members"),
    ],
)
def test_words_that_make_no_sense(gan_files: Path, words: str, said: str, run: Run) -> None:
    done = run("bundle", *words.split(), "-o", "out.pt")
    assert done.code == 2 and said in done.err and not Path("out.pt").exists(), done


BAD_NAMES = ["../../x", "/abs", "CON", "nul.tar", "Lpt1", "a/", "a\\b", ".", "..", "a.", " a", "", "C:x", "a:b", "a\0b"]
BAD_NAMES += ["\x1b[31m", "a\u202eb", "a\nb", "a\ud800", "x" * 201, "-rf"]


@looped("name", BAD_NAMES, ids=ascii)
def test_member_names_that_cannot_be_files_are_a_conflict(gan_files: Path, name: str) -> None:
    ckptool.bundle({"a": "ema.pt", "b": "G.pt"}, "two.pt", overwrite=True)
    for call in (
        lambda: ckptool.bundle({"a": "ema.pt", name: "G.pt"}, "out.pt"),
        lambda: ckptool.bundle({"a": "ema.pt"}, "out.pt", values={name: 1}),
        lambda: ckptool.bundle(file="two.pt", out="out.pt", rename={"a": name}),
    ):
        with pytest.raises(Conflict, match="a member cannot be called") as caught:
            call()
        three_parts(caught.value)
        assert str(caught.value).replace("\n", "").isprintable() and not Path("out.pt").exists()


CHANGE = {"file": "b.tar", "out": "out.pt"}
# Members, options, and what is said. An output of its own where none is given.
REFUSED: list[tuple[dict[str, str] | None, dict[str, Any], type[CkptoolError], str]] = [
    ({}, {}, UsageError, "no members"),
    (GAN, {"out": None}, UsageError, "needs to know where"),
    ({"a": "none.pt"}, {}, errors.FileProblem, "none.pt"),
    ({"a": "D.pt#nowhere"}, {}, UsageError, "there is no nowhere"),
    ({"a": "G.pt"}, {"values": {"a": 1}}, Conflict, "two members are called 'a'"),
    ({"A": "G.pt"}, {"values": {"a": 1}}, Conflict, "one name where case"),
    ({"ema": "G.pt"}, {"file": "b.tar"}, Conflict, "two members are called 'ema'"),
    (None, {**CHANGE, "drop": ["x"]}, UsageError, "no member 'x'"),
    (None, {**CHANGE, "rename": {"x": "y"}}, UsageError, "no member 'x'"),
    (None, {**CHANGE, "rename": {"ema": "generator"}}, Conflict, "two members are called 'generator'"),
    (None, {**CHANGE, "rename": {"ema": "x", "generator": "x"}}, Conflict, "two members are called 'x'"),
    (None, {**CHANGE, "drop": ["ema"], "rename": {"ema": "x"}}, UsageError, "dropped and renamed"),
    (None, {**CHANGE, "drop": ["generator", "ema"]}, UsageError, "no"),
    (None, {"file": "numbers.pt", "drop": ["0"]}, errors.Ambiguous, "'0' names 2 members"),
    (None, CHANGE, UsageError, "nothing to do"),
    (None, {"drop": ["a"]}, UsageError, "no bundle whose members"),
    (None, {"file": "G.pt", "drop": ["0.weight"]}, UsageError, "one set of model"),
    (None, {"file": "optimizer.pt", "drop": ["state"]}, UsageError, "Adam state"),
    (None, {"file": "b.tar#ema", "drop": ["x"]}, UsageError, "part of a file"),
    (GAN, {"out": "out.npz"}, UsageError, "a bundle cannot be npz"),
    (GAN, {"out": "out", "container": "sharded"}, UsageError, "a bundle cannot be sharded"),
    ({"a": "G.pt#0.weight"}, {}, Conflict, "together would be one set"),
    (GAN, {"out": "G.pt"}, Conflict, "is the input itself"),
    (GAN, {"out": "b.tar"}, errors.OutputExists, "b.tar"),
    (None, {"file": "b.tar", "from_folder": "."}, UsageError, "both"),
    (None, {"from_folder": "."}, Unsupported, "has no bundle.json"),
    (GAN, {"values": {"x": lambda: 0}}, Unsupported, "cannot be imported by name"),
    ({"a": "G.pt", "odd": "odd.pt"}, {}, errors.UnsafeObject, "odd/"),
    ({"a": "G.pt", "bad": "damaged.pt"}, {}, CkptoolError, "checksum"),
]


@looped(("members", "options", "error", "words"), REFUSED)
def test_refused(
    members: dict[str, str] | None, options: dict[str, Any], error: type[CkptoolError], words: str, gan_files: Path
) -> None:
    ckptool.bundle({"generator": "G.pt", "ema": "ema.pt"}, "b.tar", overwrite=True)
    torch.save({0: {"a.weight": torch.ones(2)}, "0": {"b.weight": torch.ones(3)}, "x": 1}, "numbers.pt")
    torch.save(TRAPS["20-unknown-call"](), "odd.pt")
    raw = bytearray(Path("ema.pt").read_bytes())
    raw[next(at for name, at in record_starts(Path("ema.pt")).items() if name.endswith("data/0"))] ^= 1
    Path("damaged.pt").write_bytes(raw)
    before = {path.name: path.read_bytes() for path in gan_files.iterdir()}
    with pytest.raises(error) as caught:
        ckptool.bundle(members, **{"out": "out.pt", **options})
    assert words in str(caught.value)
    three_parts(caught.value) if error not in (errors.OutputExists, errors.FileProblem, CkptoolError) else None
    assert {path.name: path.read_bytes() for path in gan_files.iterdir()} == before


def test_an_input_that_changes_meanwhile(gan_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptool.formats import torch_zip

    write = torch_zip.write

    def meddle(*given: Any, **options: Any) -> Any:
        Path("D.pt").write_bytes(Path("D.pt").read_bytes() + b" ")
        return write(*given, **options)

    monkeypatch.setattr(torch_zip, "write", meddle)
    with pytest.raises(errors.FileChanged, match=r"D\.pt"):
        ckptool.bundle(GAN, "out.pt")
    assert not Path("out.pt").exists()


# Names and plain values, whatever they are ---------------------------------------------------------------------------


@given(st.text(max_size=30))
def test_names_that_pass_are_names_of_files(name: str) -> None:
    try:
        check_names([name])
    except Conflict:
        return
    assert name and name not in (".", "..") and not set(name) & set('/\\:\0*?"<>|') and name.isprintable()
    for other in (name.upper(), name.lower()):
        with pytest.raises(Conflict):
            check_names([name, other])


def test_good_names() -> None:
    names = ["generator", "a.b", "na\u00efve", "\u6a21\u578b", "control", "com", 0, 1, "x y", "x" * 200]
    check_names(names)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda below: st.lists(below) | st.dictionaries(st.text(), below),
    max_leaves=20,
)


@given(JSON)
def test_json_is_plain(value: Any) -> None:
    assert is_plain(value)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
PART = [1]
DEEP: list[Any] = []
for _ in range(100):
    DEEP = [DEEP]
NOT_PLAIN = [(1,), b"a", float("nan"), float("inf"), 1j, "\ud800", {1: 2}, {"a": {"\ud800": 1}}, OrderedDict()]
NOT_PLAIN += [[object()], CYCLE, [PART, PART], DEEP, "x" * (MAX_PLAIN + 1), ["x" * 1000] * 70, [0] * 20_000]


@looped("value", [*NOT_PLAIN, {"state": {}, "param_groups": []}], ids=lambda value: type(value).__name__)
def test_what_is_not_plain(value: Any) -> None:
    assert not is_plain(value)


# Memory --------------------------------------------------------------------------------------------------------------

PROGRAM = """
ckptool.bundle({"a": "a.pt", "b": "b.pt"}, "out.tar")
ckptool.unbundle("out.tar", "parts")
ckptool.bundle(out="again.tar", from_folder="parts")
"""


@pytest.mark.parametrize(
    ("nbytes", "limit"), [(50_000_000, LIMIT + 2_000 * 200), pytest.param(2 << 30, 128_000_000, marks=pytest.mark.soak)]
)
def test_memory_does_not_grow_with_the_files(tmp_path: Path, nbytes: int, limit: int) -> None:
    for name in ("a", "b"):
        make_sparse(tmp_path / f"{name}.pt", nbytes)
    assert peak_of(PROGRAM, tmp_path) < limit
    assert ckptool.inspect(tmp_path / "again.tar").bytes == (tmp_path / "out.tar").stat().st_size
