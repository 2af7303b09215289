"""Where the output goes, what is never overwritten, what a dry run says, what `--verify` finds: one test for all verbs
that write."""

import os
import pickle
import random
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import nn

import ckptool
from ckptool import formats
from ckptool.errors import CkptoolError, Conflict, Corrupt, UsageError, VerifyFailed
from ckptool.formats import read
from ckptool.pickles import calls, encode
from ckptool.verbs._save import Written
from fixtures.make import make
from fixtures.torch_tar import save_tar
from fixtures.traps import TRAPS
from tests.support.errors import refused
from tests.support.files import contents, load, saved, written
from tests.support.looped import looped
from tests.support.same import assert_same_objects
from tests.support.zips import damaged

Verb = Callable[..., Written]
VERBS: dict[str, Verb] = {
    "strip-module": ckptool.strip_module,
    "add-module": ckptool.add_module,
    "rename": lambda file, out=None, **options: ckptool.rename(file, ["module.* => net.*"], out, **options),
    "remap": lambda file, out=None, **options: ckptool.remap(file, out, to="cuda:5", **options),
    "cast": lambda file, out=None, **options: ckptool.cast(file, out, dtype="bf16", **options),
    "edit": lambda file, out=None, **options: ckptool.edit(file, out, set={"epoch": 1}, drop=["optimizer"], **options),
    "convert": ckptool.convert,
}
each = pytest.mark.parametrize("verb", VERBS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make("training_sgd.pt", tmp_path)


@each
def test_the_same_bytes_every_time(verb: str, file: Path, tmp_path: Path) -> None:
    VERBS[verb](file, tmp_path / "a.pt")
    VERBS[verb](file, tmp_path / "b.pt", verify=True)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    file.write_bytes(file.read_bytes()[:-100])
    assert refused(CkptoolError, tmp_path, lambda: VERBS[verb](file, tmp_path / "out.pt")).exit_code == 2


@each
def test_a_dry_run_writes_nothing_and_says_the_same(verb: str, file: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    plan = VERBS[verb](file, tmp_path / "out.pt", dry_run=True, verify=True)
    assert contents(tmp_path) == before and plan.dry_run and not plan.verified
    done = VERBS[verb](file, tmp_path / "out.pt")
    assert (plan.summary, plan.how, plan.file_bytes) == (done.summary, done.how, done.file_bytes)


@each
def test_an_output_that_exists_is_refused(verb: str, file: Path, tmp_path: Path) -> None:
    out = written(b"precious", tmp_path / "out.pt")
    for dry_run in (False, True):
        refused("output-exists", tmp_path, lambda dry_run=dry_run: VERBS[verb](file, out, dry_run=dry_run))
    done = VERBS[verb](file, out, overwrite=True)
    assert done.how == "new file" and "file replaced)" in str(done) and len(contents(tmp_path)) == 2
    (tmp_path / "link.pt").symlink_to("nowhere.pt")
    assert "new file)" in str(VERBS[verb](file, tmp_path / "link.pt"))


@each
def test_the_input_as_output_is_refused(verb: str, file: Path, tmp_path: Path) -> None:
    before = file.read_bytes()
    os.link(file, tmp_path / "link.pt")
    for out in (file, tmp_path / "." / file.name, tmp_path / "link.pt"):
        error = refused("conflict", tmp_path, lambda out=out: VERBS[verb](file, out), "is the input itself")
        assert ("--in-place" in error.fix) == (verb != "convert") or out.name == "link.pt"
    (tmp_path / "link.pt").unlink()
    done = VERBS[verb](file, file, overwrite=True, verify=True)
    assert done.how == "new file" and len(contents(tmp_path)) == 1
    assert (file.read_bytes() == before) == (verb == "convert")  # the file is compact already
    load(file)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "convert"])
def test_in_place(verb: str, file: Path, tmp_path: Path) -> None:
    again = lambda: VERBS[verb](file, in_place=True, container="safetensors")  # noqa: E731
    refused("usage", tmp_path, again, "in_place=True keeps the container")
    VERBS[verb](file, tmp_path / "out.pt")
    size = file.stat().st_size
    plan = VERBS[verb](file, in_place=True, dry_run=True)
    assert file.stat().st_size == size
    done = VERBS[verb](file, in_place=True, verify=True)
    assert done.how == plan.how and done.output == str(file) and done.verified
    assert done.file_bytes == file.stat().st_size
    if verb != "cast":  # whose values are new
        assert done.how == "in place" and done.bytes_written == file.stat().st_size - size == plan.bytes_written
    assert_same_objects(load(tmp_path / "out.pt"), load(file))
    assert sorted(contents(tmp_path)) == ["out.pt", "training_sgd.pt"]


@each
def test_a_damaged_tensor_is_not_passed_on_as_good(verb: str, tmp_path: Path) -> None:
    """Copies carry the stored checksum along; what reads the values checks it."""
    path = saved({"net": {"module.a.w": torch.arange(1000.0)}, "epoch": 0, "optimizer": 1}, tmp_path / "in.pt")
    damaged(path, 0)
    if verb == "cast":
        refused(CkptoolError, tmp_path, lambda: VERBS[verb](path, tmp_path / "out.pt"), "does not match its checksum")
        return
    VERBS[verb](path, tmp_path / "out.pt")
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() is not None


@each
def test_unknown_calls(verb: str, tmp_path: Path) -> None:
    value = {"state_dict": {"module.a.w": torch.ones(2)}, "danger": TRAPS["20-unknown-call"]()["danger"]}
    path = saved(value | {"optimizer": 1}, tmp_path / "in.pt")
    says = r"calls fixtures\.traps\.classes\.add_up at danger"
    error = refused("unsafe-global", tmp_path, lambda: VERBS[verb](path, tmp_path / "out.pt"), says)
    assert "--keep-unknown" in error.fix
    VERBS[verb](path, tmp_path / "out.pt", keep_unknown=True)
    assert [place for _, place in calls.uses_of(read(tmp_path / "out.pt"))] == ["danger"]


@looped("seed", range(40))
def test_of_several_files_each_is_written_as_if_alone_or_none_is(seed: int, tmp_path: Path) -> None:
    """Whatever links there are among the inputs, and in the folder of the outputs."""
    rng, folders = random.Random(seed), (tmp_path / "in", tmp_path / "out")
    for folder in folders:
        folder.mkdir()
    files = [saved({f"{number}.w": torch.full((2,), float(number))}, folders[0] / f"{number}.pt") for number in "012"]
    for name in "lmn":
        (folders[0] / f"{name}.pt").symlink_to(rng.choice(files))
    for name in rng.sample("012lmn", 3):
        (folders[1] / f"{name}.pt").symlink_to(rng.choice([*files, folders[1] / "other.pt"]))
    chosen, out = [folders[0] / f"{name}.pt" for name in rng.sample("012lmn", 3)], rng.choice(folders)
    before = contents(tmp_path)
    wanted = {path.name: {f"module.{key}": value for key, value in load(path).items()} for path in chosen}
    try:
        ckptool.add_module(chosen, folder=out, overwrite=True)
    except Conflict:
        assert contents(tmp_path) == before
    else:
        for name, tree in wanted.items():
            assert_same_objects(tree, load(out / name))


def test_already_clean_is_a_copy_byte_for_byte(tmp_path: Path) -> None:
    for name in ("rezipped_deflated.pt", "crc_off.pt", "old_zip.pt", "model.safetensors"):
        file, out = make(name, tmp_path), tmp_path / f"out-{name}"
        done = ckptool.strip_module(file, out, verify=True)
        assert done.how == "copy" and done.summary.startswith("already clean") and out.read_bytes() == file.read_bytes()
        before = os.stat(file)
        nothing = ckptool.strip_module(file, in_place=True)
        assert (nothing.how, nothing.bytes_written, nothing.verified) == ("nothing", 0, False)
        assert os.stat(file).st_mtime_ns == before.st_mtime_ns


def test_shards_are_not_called_like_their_index_and_permissions_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make("dp.pt", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: False)
        refused("io", tmp_path, lambda: ckptool.strip_module(file, in_place=True), "no permission")
    for options in ({"shard_size": "1MB"}, {"container": "sharded"}):
        with pytest.raises(UsageError, match="is an index's name"):
            ckptool.convert(file, tmp_path / "D" / "model.safetensors.index.json", **options)


@pytest.mark.parametrize("how", ["new file", "in place"])
def test_verify_finds_what_is_not_what_was_meant(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that sees one bit differently stands for a disk that lies."""
    file = saved({"module.a.w": torch.zeros(3)}, tmp_path / "in.pt")
    wrong = saved({"a.w": torch.tensor([0.0, -0.0, 0.0])}, tmp_path / "wrong.pt")
    right, out = formats.read, None if how == "in place" else tmp_path / "out.pt"
    monkeypatch.setattr(formats, "read", lambda path: right(wrong))  # with which outputs are read again
    change = lambda: ckptool.strip_module(file, out, in_place=out is None, verify=True)  # noqa: E731
    refused(VerifyFailed, tmp_path, change, r"a\.w differs in values")


MEANT = {
    "dryrun": "mean dry_run",
    "force": "mean overwrite",
    "zz": "overwrite, dry_run",
    "folder": "mean a list of paths",
}


@pytest.mark.parametrize("option", MEANT)
def test_an_option_that_there_is_not_writes_nothing(option: str, tmp_path: Path) -> None:
    file = make("dp.pt", tmp_path)
    calls: dict[str, Any] = {"strip_module": {}, "convert": {}, "remap": {"to": "cpu"}, "slim": {}}
    calls |= {"edit": {"set": {"x": 1}}, "warm_start": {"against": file}, "unbundle": {}}
    for verb, more in calls.items():
        if (verb, option) == ("unbundle", "folder"):
            continue
        more = {"folder" if verb == "unbundle" else "out": tmp_path / "out", **more, option: True}
        meant = "mean out" if (verb, option) == ("warm_start", "folder") else MEANT[option]
        with pytest.raises(TypeError, match=f"{option}.*{meant}"):
            getattr(ckptool, verb)(file, **more)
    refused(UsageError, tmp_path, lambda: ckptool.convert(file, "safetensors"), "container='torch-zip'")
    assert os.listdir(tmp_path) == ["dp.pt"]


HERE = Path(__file__).parent.parent.parent / "fixtures" / "engines"
STATE = {"fc.weight": torch.arange(12.0).reshape(3, 4), "fc.bias": torch.zeros(3)}


MAKERS: dict[str, Callable[[Path], object]] = {
    "zip": lambda path: torch.save(STATE, path),
    "legacy": lambda path: torch.save(STATE, path, _use_new_zipfile_serialization=False),
    "tar": lambda path: save_tar(STATE, path),
    "pickle": lambda path: path.write_bytes(pickle.dumps({k: v.numpy() for k, v in STATE.items()}, 2)),
    "tensors": lambda path: path.write_bytes(pickle.dumps(STATE, 2)),
    "stable-baselines3": lambda path: path.write_bytes((HERE / "stable-baselines3" / "checkpoint").read_bytes()),
    "npy": lambda path: numpy.save(path.open("wb"), numpy.ones(3, "f4")),
    "npz": lambda path: numpy.savez(path.open("wb"), **{k: v.numpy() for k, v in STATE.items()}),
    "safetensors": lambda path: save_file(STATE, path),
    "script": lambda path: torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path),
}
CLEAN: dict[str, Callable[..., Any]] = {
    "remap": lambda file, out: ckptool.remap(file, out, to="cpu"),
    "cast": lambda file, out: ckptool.cast(file, out, dtype="f32"),
    "strip-module": ckptool.strip_module,
    "slim": ckptool.slim,
}


@pytest.mark.filterwarnings("ignore")
def test_every_container_under_every_suffix(tmp_path: Path) -> None:
    """A file with nothing to change, written under a name: what that promises, as the stock reader of it says."""
    written = set()
    for made, maker in MAKERS.items():
        maker(file := tmp_path / f"in-{made}")
        for verb, run in CLEAN.items():
            for suffix in (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".safetensors", ".npz", ".zip", ".tar", ""):
                out = tmp_path / f"{made}-{verb}{suffix}"
                try:
                    done = run(file, out)
                except CkptoolError:
                    assert not out.exists()
                    continue
                written.add((made, verb))
                if done.container == "safetensors":
                    with safetensors.safe_open(out, "pt") as opened:
                        assert len(list(opened.keys())) > 0
                elif done.container == "npz":
                    assert numpy.load(out).files
                elif made == "script":
                    torch.jit.load(out)
                else:
                    torch.load(out, weights_only=made not in ("pickle", "npy", "stable-baselines3"))
    assert {made for made, _ in written} == {*MAKERS}, written


Change = Callable[..., Any]

# Verbs that change something, and (a second time, of what they wrote) those that find nothing to do.
CHANGES: dict[str, Change] = {
    "strip-module": ckptool.strip_module,
    "strip-module of what has none": lambda file, out, **o: ckptool.strip_module(file, out, at="ema", **o),
    "add-module": lambda file, out, **o: ckptool.add_module(file, out, at="ema", **o),
    "rename": lambda file, out, **o: ckptool.rename(file, ["w => v"], out, at="ema", **o),
    "cast": lambda file, out, **o: ckptool.cast(file, out, dtype="bf16", at="ema", **o),
    "remap": lambda file, out, **o: ckptool.remap(file, out, to="cuda:0", **o),
    "remap to where it is": lambda file, out, **o: ckptool.remap(file, out, to="cpu", **o),
    "edit": lambda file, out, **o: ckptool.edit(file, out, set={"epoch": 4}, **o),
    "slim": ckptool.slim,
}


def checkpoint() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    weights = {f"module.{name}": torch.randn(40, 50, generator=generator) for name in ("a", "b")}
    return {"model": weights, "ema": {"w": torch.randn(3, generator=generator)}, "epoch": 3}


RECORDS = {0: "model/module.a", 2: "ema/w"}  # and what is in them


@looped(("verb", "number"), product(CHANGES, RECORDS))
def test_a_damaged_record_is_told_and_nothing_is_written(verb: str, number: int, tmp_path: Path) -> None:
    path = damaged(saved(checkpoint(), tmp_path / "a.pt"), number)
    calls = [partial(CHANGES[verb], path, tmp_path / "out.pt", verify=True)]
    if verb != "slim":  # which writes new files only
        calls.append(partial(CHANGES[verb], path, None, in_place=True, verify=True))
    for call in calls:
        error = refused(Corrupt, tmp_path, call, RECORDS[number])
        assert "damaged" in error.what and str(path) in error.fix and "verify" in error.fix


@pytest.mark.parametrize(("record", "part"), [(0, "model"), (2, "ema")])
def test_verbs_that_combine_tell_it_too(record: int, part: str, tmp_path: Path) -> None:
    path, good = damaged(saved(checkpoint(), tmp_path / "a.pt"), record), saved(checkpoint(), tmp_path / "b.pt")
    calls: list[Callable[[], Any]] = [
        lambda: ckptool.convert(path, tmp_path / "o.pt", all=True, verify=True),
        lambda: ckptool.convert(f"{path}#{part}", tmp_path / "o.safetensors", verify=True),
        lambda: ckptool.bundle({"one": path, "two": good}, tmp_path / "o.pt", verify=True),
        lambda: ckptool.unbundle(path, tmp_path / "folder", verify=True),
        lambda: ckptool.average([f"{path}#{part}", f"{good}#{part}"], tmp_path / "o.pt", verify=True),
        lambda: ckptool.average([f"{good}#{part}", f"{path}#{part}"], tmp_path / "o.pt", verify=True),
        lambda: ckptool.warm_start(f"{path}#{part}", f"{good}#{part}", tmp_path / "o.pt", verify=True),
    ]
    for call in calls:
        refused(CkptoolError, tmp_path, call, "checksum")


class Outer:
    class Inner:
        pass


def test_a_name_that_the_pickle_cannot_say_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before 0.2: names of nested classes in protocol 2, which torch cannot load."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2), "kind": Outer.Inner}, path, pickle_protocol=4)
    assert load(path, weights_only=False)["kind"] is Outer.Inner

    real = encode.encode

    def at_two(*given: Any) -> bytes:
        return b"\x80\x02" + real(*given)[2:]

    with monkeypatch.context() as patched:
        patched.setattr(encode, "encode", at_two)
        for options in ({"out": tmp_path / "b.pt"}, {"in_place": True}):
            edit = partial(ckptool.edit, path, set={"x": 1}, keep_unknown=True, verify=True, **options)
            refused(VerifyFailed, tmp_path, edit, r"Outer\.Inner")
        ckptool.edit(path, tmp_path / "bad.pt", set={"x": 1}, keep_unknown=True)
    with pytest.raises(AttributeError, match=r"Outer\.Inner"):
        load(tmp_path / "bad.pt", weights_only=False)
    (note,) = (note for note in read(tmp_path / "bad.pt").notes if note.code == "nested-name")
    assert note.fix[:2] == ("ckptool", "convert")
    ckptool.convert(tmp_path / "bad.pt", tmp_path / "mended.pt", all=True, keep_unknown=True, verify=True)
    assert load(tmp_path / "mended.pt", weights_only=False)["kind"] is Outer.Inner


def test_what_was_one_object_and_is_two_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"lr": 0.1}
    path = saved({"w": torch.ones(2), "one": shared, "two": [shared]}, tmp_path / "a.pt")

    class Forgotten(dict[Any, int]):
        def get(self, *_: Any) -> None:  # type: ignore[override]
            return None

    class Forgetful(encode._Encoder):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.memo = Forgotten()

    monkeypatch.setattr(encode, "_Encoder", Forgetful)
    edit = partial(ckptool.edit, path, tmp_path / "b.pt", set={"x": 1}, verify=True)
    refused(VerifyFailed, tmp_path, edit, "two/0 differs in identity")
