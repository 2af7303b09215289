"""`bundle`, and `unbundle`, the way back: what others read of them, byte for byte what it was for every trap;
`bundle.json` is not trusted, and what is refused leaves everything as it was."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
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
from ckptool.errors import CkptoolError, Conflict, Corrupt, Unsupported, UsageError
from ckptool.formats import torch_zip
from ckptool.transforms.bundles import MAX_PLAIN, check_names, is_plain
from fixtures.traps import TRAPS
from tests.support.cli import Run
from tests.support.errors import refused
from tests.support.files import load, torch_bytes
from tests.support.looped import looped
from tests.support.part_files import accelerate_folder
from tests.support.same import assert_same_objects
from tests.support.small_models import GAN, SHARED, net_state, small_net
from tests.support.zips import damaged, record_starts


def test_what_lies_beside_weights_and_is_left_out_is_named(tmp_path: Path, run: Run) -> None:
    folder = accelerate_folder(tmp_path / "state")
    weights = {path.name for path in folder.glob("*.safetensors")}
    said = run("bundle", f"G={folder}", "-o", tmp_path / "out.tar")
    (line,) = [line for line in said.out.splitlines() if line.startswith("members: left out")]
    assert {Path(name).name for name in line.partition("written: ")[2].split(", ")} == set(os.listdir(folder)) - weights
    assert "left out" not in run("bundle", f"G={folder}#fc.weight", "-o", tmp_path / "part.tar").out
    said = run("bundle", f"G={folder}", f"opt={folder / 'optimizer.bin'}", "-n", "-o", tmp_path / "two.tar")
    assert (
        "scheduler.bin" in said.out.partition("left out")[2]
        and "optimizer.bin" not in said.out.partition("left out")[2]
    )


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
    whole = ckptool.bundle({"all": {"epoch": 1, "state_dict": loaded["generator"], "loss": 2.0}}, "all.tar")
    listed = ckptool.bundle({"list": {"all": [torch.ones(2)]}}, "list.tar")
    assert [each.facts["members"][0]["kind"] for each in (whole, listed)] == ["model weights", "other values"]


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


GOOD_NAMES = ["generator", "a.b", "na\u00efve", "\u6a21\u578b", "control", "com", 0, 1, "x y", "x" * 200]
BAD_NAMES = ["../../x", "/abs", "CON", "nul.tar", "Lpt1", "a/", "a\\b", ".", "..", "a.", " a", "", "C:x", "a:b", "a\0b"]
BAD_NAMES += ["\x1b[31m", "a\u202eb", "a\nb", "a\ud800", "x" * 201, "-rf"]


@looped("name", BAD_NAMES, ids=ascii)
def test_member_names_that_cannot_be_files_are_a_conflict(gan_files: Path, name: str) -> None:
    check_names(GOOD_NAMES)
    ckptool.bundle({"a": "ema.pt", "b": "G.pt"}, "two.pt", overwrite=True)
    for call in (
        lambda: ckptool.bundle({"a": "ema.pt", name: "G.pt"}, "out.pt"),
        lambda: ckptool.bundle({"a": "ema.pt"}, "out.pt", values={name: 1}),
        lambda: ckptool.bundle(file="two.pt", out="out.pt", rename={"a": name}),
    ):
        error = refused("conflict", gan_files, call, "a member cannot be called")
        assert str(error).replace("\n", "").isprintable()


CHANGE = {"file": "b.tar", "out": "out.pt"}
# Members, options, and what is said. An output of its own where none is given.
REFUSED: list[tuple[dict[str, str] | None, dict[str, Any], type[CkptoolError], str]] = [
    ({}, {}, UsageError, "no members"),
    (GAN, {"out": None}, UsageError, "needs an output"),
    ({"a": "none.pt"}, {}, errors.FileProblem, "none.pt"),
    ({"a": "D.pt#nowhere"}, {}, UsageError, "there is no nowhere"),
    ({"a": "G.pt"}, {"values": {"a": 1}}, Conflict, "two members are called 'a'"),
    ({"A": "G.pt"}, {"values": {"a": 1}}, Conflict, "the same name where case"),
    ({"ema": "G.pt"}, {"file": "b.tar"}, Conflict, "two members are called 'ema'"),
    (None, {**CHANGE, "drop": ["x"]}, UsageError, "no member 'x'"),
    (None, {**CHANGE, "rename": {"x": "y"}}, UsageError, "no member 'x'"),
    (None, {**CHANGE, "rename": {"ema": "generator"}}, Conflict, "two members are called 'generator'"),
    (None, {**CHANGE, "rename": {"ema": "x", "generator": "x"}}, Conflict, "two members are called 'x'"),
    (None, {**CHANGE, "drop": ["ema"], "rename": {"ema": "x"}}, UsageError, "dropped and renamed"),
    (None, {**CHANGE, "drop": ["generator", "ema"]}, UsageError, "no"),
    (None, {"file": "numbers.pt", "drop": ["0"]}, errors.Ambiguous, "'0' names 2 members"),
    (None, CHANGE, UsageError, "nothing to do"),
    (None, {"drop": ["a"]}, UsageError, "no member 'a'"),
    (None, {"file": "G.pt", "drop": ["0.weight"]}, UsageError, "but model weights"),
    (None, {"file": "optimizer.pt", "drop": ["state"]}, UsageError, "Adam state"),
    (None, {"file": "b.tar#ema", "drop": ["x"]}, UsageError, "part of a file"),
    (GAN, {"out": "out.npz"}, UsageError, "a bundle cannot be npz"),
    (GAN, {"out": "out", "container": "sharded"}, UsageError, "a bundle cannot be sharded"),
    ({"a": "G.pt#0.weight"}, {}, Conflict, "together would be model weights"),
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
    Path("damaged.pt").write_bytes(Path("ema.pt").read_bytes())
    damaged(Path("damaged.pt"), "ema/data/0")
    found = refused(error, gan_files, lambda: ckptool.bundle(members, **{"out": "out.pt", **options}))
    assert words in str(found)


def test_an_input_that_changes_meanwhile(gan_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = torch_zip.write

    def meddle(*given: Any, **options: Any) -> Any:
        Path("D.pt").write_bytes(Path("D.pt").read_bytes() + b" ")
        return write(*given, **options)

    monkeypatch.setattr(torch_zip, "write", meddle)
    with pytest.raises(errors.FileChanged, match=r"D\.pt"):
        ckptool.bundle(GAN, "out.pt")
    assert not Path("out.pt").exists()


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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda below: st.lists(below) | st.dictionaries(st.text(), below),
    max_leaves=20,
)


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


@given(JSON)
def test_json_is_plain(value: Any) -> None:
    assert is_plain(value)


# `unbundle`.
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
    damaged(gan_bundle, next(name for name in record_starts(gan_bundle) if "/data/" in name))
    for verify in (False, True):
        unbundle = partial(ckptool.unbundle, gan_bundle, "parts", verify=verify)
        refused(CkptoolError, gan_bundle.parent, unbundle, "checksum")
        assert unbundle(dry_run=True).dry_run
    assert not Path("parts").exists() and not [name for name in os.listdir() if name.startswith(".")]
    Path("parts").mkdir()
    Path("parts/mine.txt").write_text("precious")
    refused("output-exists", gan_bundle.parent, partial(ckptool.unbundle, gan_bundle, "parts", dry_run=True))


def test_tensors_that_members_share_are_written_for_each_and_said(tmp_path: Path) -> None:
    model, critic = {"emb.weight": SHARED, "b.bias": torch.ones(2)}, {"rows.weight": SHARED[2:4].t()}
    torch.save({"model": model, "critic": critic, "sparse": torch.eye(2).to_sparse()}, tmp_path / "tied.pt")
    (note,) = ckptool.unbundle(tmp_path / "tied.pt", parts := tmp_path / "parts").notes
    assert note.code == "sharing-lost" and note.message.endswith(": model, critic")
    record = json.loads((parts / "bundle.json").read_text())
    for ties, codes in ((None, []), ([["model/emb.weight", "critic/rows.weight"]], ["sharing-lost"])):  # of 0.1.0
        (parts / "bundle.json").write_text(json.dumps(record | ({"ties": ties} if ties else {})))
        done = ckptool.bundle(out=tmp_path / "out.pt", from_folder=parts, overwrite=True)
        assert [note.code for note in done.notes] == codes
    after = load(tmp_path / "out.pt")
    after["model"]["emb.weight"].zero_()
    assert torch.equal(after["critic"]["rows.weight"], SHARED[2:4].t())


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


@looped(
    ("tree", "error", "words"),
    [
        (net_state(1), UsageError, "but model weights"),
        ([net_state(1)], UsageError, "is not a bundle: it is of type list"),
        ({"a": net_state(1), None: net_state(2)}, Conflict, "cannot be called None"),
        ({"a": net_state(1), None: 3}, Conflict, "neither a string nor a number"),
        (torch.ones(2), UsageError, "not a bundle"),
    ],
)
def test_what_is_no_bundle(tmp_path: Path, tree: Any, error: type[CkptoolError], words: str) -> None:
    torch.save(tree, tmp_path / "in.pt")
    refused(error, tmp_path, lambda: ckptool.unbundle(tmp_path / "in.pt", tmp_path / "parts"), words)


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
    refused(error, gan_bundle.parent, lambda: ckptool.bundle(out="out.pt", from_folder="parts"), words)


def test_a_record_of_any_bytes_and_any_size(gan_bundle: Path) -> None:
    Path("parts").mkdir()
    for raw in (b"", b"{", b"[]", b'{"a":1,"a":2}', b"[" * 100_000, b'{"schema":"\\ud800"}'):
        Path("parts/bundle.json").write_bytes(raw)
        with pytest.raises((Corrupt, errors.Ambiguous)):
            ckptool.bundle(out="out.pt", from_folder="parts")
    os.truncate("parts/bundle.json", 1 << 40)
    with pytest.raises(errors.LimitExceeded):
        ckptool.bundle(out="out.pt", from_folder="parts")


def test_the_command_that_takes_apart(gan_bundle: Path, run: Run) -> None:
    done = run("unbundle", "gan.tar", "--only", "ema", "--only", "epoch", "-d", "parts", "--json").json
    assert [(m["name"], m["file"]) for m in done["facts"]["members"]] == [("ema", "ema.pt"), ("epoch", "3")]
    assert run("unbundle", "gan.tar", "-d", "parts").code == 2
    assert run("unbundle", "gan.tar", "-d", "parts", "-f", "--verify").code == 0
    assert run("bundle", "--from", "parts", "-o", "again.tar").code == 0
    assert Path("again.tar").read_bytes() == gan_bundle.read_bytes()
    assert "unbundle writes a folder" in run("unbundle", "gan.tar").err
