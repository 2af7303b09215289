"""`verify`: everything that is wrong is said, with its place; what cannot be known is said too. Digests, bit for bit,
however values are stored."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import subprocess
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch

import ckptool
from ckptool.analysis.digests import (
    Digests,
    TensorDigest,
    digests_file,
    read_digests,
    root_digests,
    table,
    tensor_digest,
)
from ckptool.analysis.verify import NonFinite, Verification, check_storages
from ckptool.checkpoint import Composite, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import BY_TORCH, DTYPES, by_name
from ckptool.cli import main
from ckptool.errors import Corrupt, LimitExceeded, OutputExists, Unsupported, UsageError
from ckptool.formats import read
from ckptool.verbs.convert import convert
from ckptool.verbs.verify import verify
from fixtures.make import make
from tests.support.cli import Run
from tests.support.errors import refused
from tests.support.files import opened, saved, torch_bytes, weights, written
from tests.support.looped import looped
from tests.support.zips import damaged, record_starts


def codes(found: Verification) -> list[str]:
    return [problem.code for problem in found.problems]


@looped("name", "training.pt old_zip.pt rezipped_deflated.pt rezipped_zip64.pt big_endian.pt protocol5.pt".split())
def test_a_whole_file(name: str, tmp_path: Path) -> None:
    path = make(name, tmp_path)
    before = path.read_bytes()
    found = verify(path, finite=True)
    assert found.fine and not found.problems and found.non_finite == () and found.checksums == "all"
    with zipfile.ZipFile(path) as archive:
        assert found.checked == len(archive.namelist())
        assert found.checked_bytes == sum(info.file_size for info in archive.infolist())
    assert "fine" in str(found) and path.read_bytes() == before


def test_where_there_are_no_checksums_it_says_so(tmp_path: Path) -> None:
    """A flipped byte there cannot be noticed, and no report may sound as if it were."""
    found = verify(make("crc_off.pt", tmp_path))
    assert found.fine and (found.checksums, found.checked) == ("none", 0) and "no checksums stored" in str(found)
    path = tmp_path / "a.safetensors"
    ckptool.convert(saved(weights("a.w", "b.w"), tmp_path / "a.pt"), path)
    for change in (0, 1):
        data = bytearray(path.read_bytes())
        data[-1] ^= change
        found = verify(written(bytes(data), path))
        assert found.fine and (found.checksums, found.checked, found.checked_bytes) == ("none", 0, 0)
        assert "no checksums stored: damage to the data cannot be detected" in str(found)
        assert found.to_dict()["checksums"] == "none"


@looped(
    "suffix, connections, holes",
    [("safetensors", 1, False), ("safetensors", 4, True), ("pt", 1, False), ("pt", 1, True)],
)
def test_a_download_that_was_broken_off(suffix: str, connections: int, holes: bool, tmp_path: Path) -> None:
    """Made at its full size, and filled by several connections, each of which was cut somewhere."""
    torch.manual_seed(1)
    random, tree = Random(1), {f"l{number}.weight": torch.randn(2, 33_000) for number in range(4)}
    is_legacy = suffix == "pt"  # where a cut before the last storage shows in its counts
    data = torch_bytes(tree, _use_new_zipfile_serialization=False) if is_legacy else safetensors.torch.save(tree)
    first = max(data.index(values.numpy().tobytes()) for values in tree.values()) + 8 if is_legacy else 8192
    begins = [0, *(len(data) // connections * number for number in range(1, connections))]
    for _ in range(20):
        ends = [
            random.randrange(max(first, a), b - 4096) for a, b in zip(begins, [*begins[1:], len(data)], strict=True)
        ]
        path = tmp_path / f"a.{suffix}"
        path.write_bytes(b"" if holes else bytes(len(data)))
        with path.open("r+b") as file:
            file.truncate(len(data))
            for begin, end in zip(begins, ends, strict=True):
                file.seek(begin)
                file.write(data[begin:end])
        with path.open("rb") as file:
            report = verify(file)
            (message,) = (note.message for note in report.notes if note.code == "zeros-half-way")
            assert report.exit() == 1 and not report.fine
            assert file.tell() == len(data)  # as all functions leave it, whatever holes were looked for
        assert f"(byte {len(data[: ends[-1]].rstrip(bytes(1))):,})" in message
    assert [file.state for file in ckptool.scan(path, full=True).files] == ["zeros-half-way"]


@looped("number", range(12))
def test_zeros_of_the_model_are_no_broken_download(number: int, tmp_path: Path) -> None:
    """Rows that pad a vocabulary or were not trained, tensors that begin at zero; as the file system stores them."""
    random = Random(number)
    tree = {f"l{index}.weight": torch.randn(random.randrange(1, 200), random.randrange(1, 1500)) for index in range(4)}
    for tensor in tree.values():
        tensor[random.randrange(tensor.shape[0] + 1) :] = 0
    if number % 2:
        tree["z.bias"] = torch.zeros(5000)
    path, sparse = tmp_path / "a.safetensors", tmp_path / "sparse.safetensors"
    safetensors.torch.save_file(tree, path)
    subprocess.run(["cp", "--sparse=always", path, sparse], check=True)
    assert [note.code for file in (path, sparse) for note in verify(file).notes] == []


@looped("transposed", [False, True])
def test_zeros_at_the_end_of_every_row_are_of_the_model(transposed: bool, tmp_path: Path) -> None:
    """Padded columns, a mask, targets; in either order of the elements. The last row alone is damage."""
    padded = torch.randn(64, 9001)
    padded[:, 7001:] = 0
    damaged = torch.randn(64, 9001)
    damaged[-1, 7001:] = 0
    mask, targets, prompt = torch.ones(3000, 3000).tril(-1500), torch.eye(50, 5000), torch.eye(1, 5000)
    for number, values in enumerate((padded, mask, targets, prompt, damaged)):
        array = values.numpy().T if transposed else values.numpy()
        numpy.save(tmp_path / "a.npy", array)
        view = torch.cat([torch.ones(7), values.flatten()])[7:].view_as(values)  # not where its storage begins
        tree = {"first": view[:1], "w": view.t() if transposed else view}
        torch.save(tree, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
        safetensors.torch.save_file({"empty": torch.ones(0), "w": values.clone()}, tmp_path / "a.safetensors")
        for name in ("a.npy", "a.pt", "a.safetensors"):
            codes = [note.code for note in verify(tmp_path / name).notes]
            assert codes == ["zeros-half-way"] * (number == 4), (name, number)


def test_some_data_has_a_checksum_and_some_has_none() -> None:
    summed, other = (Storage(InlineBytes(bytes(4)), "cpu", crc) for crc in (zlib.crc32(bytes(4)), None))
    for storages, extent in (((summed,), "all"), ((summed, other), "some"), ((other,), "none")):
        tree = {number: TensorEntry(each, by_name("u8"), (4,), (1,)) for number, each in enumerate(storages)}
        count = storages.count(summed)
        assert check_storages(tree) == ([], extent, count, 4 * count)


ONE = "archive/data/1"
# The bits that are flipped, in a file's bytes with records that start there; and the problems: code, record, tensors.
DAMAGE: dict[str, tuple[Callable[[bytes, dict[str, int]], list[int]], list[tuple[str, str, tuple[str, ...]]]]] = {
    "data": (
        lambda data, starts: [starts["archive/data/0"], starts["archive/data/2"]],
        [("checksum", "archive/data/0", ("m/a", "m/b")), ("checksum", "archive/data/2", ("m/d",))],
    ),
    "a checksum in the directory": (
        lambda data, starts: [data.rindex(ONE.encode()) - 46 + 16],
        [("corrupt", ONE, ("m/c",)), ("checksum", ONE, ("m/c",))],
    ),
    "a name in a header": (lambda data, starts: [data.index(ONE.encode()) + 13], [("ambiguous", ONE, ("m/c",))]),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_every_damaged_record_is_named_with_its_tensors(what: str, tmp_path: Path) -> None:
    tied, (places, expected) = torch.ones(3), DAMAGE[what]
    path = saved({"m": {"a": tied, "b": tied, "c": torch.zeros(4), "d": torch.ones(5)}}, tmp_path / "a.pt")
    starts, data = record_starts(path), bytearray(path.read_bytes())
    for at in places(bytes(data), starts):
        data[at] ^= 1
    found = verify(written(bytes(data), path))
    assert [(each.code, each.record, each.tensors) for each in found.problems] == expected
    assert all(each.offset == starts[each.record] for each in found.problems)
    assert found.problems[0].why and found.fixes[0][:2] == ("ckptool", "recover")
    kept = tmp_path / "digests.json"
    assert verify(path, digest=True, write_digest=kept).digest is None and not kept.exists()
    text = str(found)
    assert f"damaged, {len(expected)} problem" in text and f"at byte {found.problems[0].offset:,}" in text


def test_hundreds_of_losses_are_said_in_a_few_lines_and_nothing_hides_the_rest(tmp_path: Path) -> None:
    data = torch_bytes({f"w{i}": torch.ones(3) for i in range(400)})
    found = verify(written(data[: len(data) // 2], tmp_path / "cut.pt"))
    assert len(found.problems) > 100 and len(str(found).splitlines()) < 14
    path = damaged(saved(weights("a", "b"), tmp_path / "a.pt"), "archive/version", "archive/data/1")
    assert {"archive/version", "archive/data/1"} <= {problem.record for problem in verify(path).problems}


def test_a_file_that_cannot_be_opened_is_damaged_not_unreadable(tmp_path: Path) -> None:
    path = saved({"m": weights(*"abcdefgh")}, tmp_path / "a.pt")
    data = path.read_bytes()
    starts = record_starts(path)
    found = verify(written(data[: starts["archive/data/5"]], path))
    assert codes(found)[0] == "truncated" and codes(found).count("lost") == 3
    assert [name for problem in found.problems for name in problem.tensors] == ["m/f", "m/g", "m/h"]
    assert "ckptool recover" in str(found) and main(["verify", str(path)]) == 1
    cut = tmp_path / "a.safetensors"
    ckptool.convert(saved(weights("a", "b"), tmp_path / "b.pt"), cut, at="")
    found = verify(written(cut.read_bytes()[:-1], cut))
    assert codes(found) == ["truncated", "lost"] and found.problems[1].tensors in (("a",), ("b",))


def test_a_best_value_that_is_not_set_yet_is_no_damage(tmp_path: Path, run: Run) -> None:
    inf, nan, weights = torch.tensor(float("inf")), torch.tensor(float("nan")), {"fc.weight": torch.eye(2)}
    optimizer = {"state": {0: {"step": inf}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    callback = {"ModelCheckpoint{'monitor': None}": {"kth_value": inf, "best_model_path": ""}}  # as Lightning writes it
    cases: list[tuple[Any, list[str]]] = [
        ({"state_dict": weights, "callbacks": callback, "best": -inf}, []),
        ({"state_dict": weights, "loss": nan}, ["loss"]),
        ({"state_dict": weights, "losses": inf[None]}, ["losses"]),
        ({"state_dict": weights | {"logit_scale": inf}, "epoch": 1}, ["state_dict/logit_scale"]),
        ({"state_dict": weights, "optimizer": optimizer}, ["optimizer/state/0/step"]),
        ({"best": [inf, 2], "epoch": 1}, ["best/0"]),
        (inf, [""]),
    ]
    for tree, names in cases:
        path = saved(tree, tmp_path / "a.pt")
        ends = [run(verb, str(path), *more) for verb, *more in (("verify", "--finite"), ("git-check",))]
        assert [end.code for end in ends] == [bool(names)] * 2, (names, ends)
        assert ("but for what has no value yet: " in ends[0].out) is (not names)
        assert list(ckptool.inspect(path, stats=True).non_finite) == names
        page = tmp_path / "page.html"
        assert ("no problems" in run("report", str(path), "-o", str(page), "-f").out) is (not names)
        verdict = "1 tensor with NaN or Inf" if names else "All but 2 without a value yet"
        assert verdict in page.read_text()


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]


@looped("dtype", FLOATS, ids=str)
def test_non_finite_values_are_counted(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.arange(200.0)
    x[[3, 7]], x[[9, 10, 11]] = float("nan"), float("inf")
    x[12] = float("-inf")
    x = x.to(dtype)
    path = saved({"w.x": x.reshape(10, 20).t(), "w.part": x[:5], "w.fine": torch.ones(3).to(dtype)}, tmp_path / "a.pt")
    found = verify(path, finite=True)
    nans, infs = int(x.isnan().sum()), 0 if dtype is torch.float8_e4m3fn else int(x.isinf().sum())
    assert found.non_finite == (NonFinite("w.x", nans, infs, 200), NonFinite("w.part", 1, 0, 5))
    assert not found.fine and not found.problems
    assert verify(path).non_finite is None and verify(path).fine
    assert "not finite (2 of 3 tensors)" in str(found)


@pytest.mark.parametrize("dtype", ["f8", ">f4", "c16", "f2"])
def test_pickled_arrays_are_searched_too(dtype: str, tmp_path: Path) -> None:
    array = numpy.array([1, float("nan")], dtype)
    for value in ({"model": {"a.weight": torch.ones(2)}, "stats": [array, array]}, {"w": array}):
        file = written(pickle.dumps(value), tmp_path / "a.pkl") if "w" in value else saved(value, tmp_path / "a.pt")
        found = verify(file, finite=True)
        assert {(row.nans, row.count) for row in found.non_finite or ()} == {(1, 2)} and not found.fine


def test_complex_and_composite_values(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    z = torch.tensor([complex(nan, 1), complex(1, inf), complex(nan, inf), 1j], dtype=torch.complex64)
    sparse = torch.tensor([[0.0, nan], [inf, 0.0]]).to_sparse()
    tree = {"z": z, "c": z.to(torch.complex32), "s": sparse, "i": torch.ones(2, dtype=torch.int64)}
    found = verify(saved(tree, tmp_path / "a.pt"), finite=True)
    assert found.non_finite is not None
    assert {row.address: (row.nans, row.infs) for row in found.non_finite} == {"z": (2, 1), "c": (2, 1), "s": (1, 1)}


def test_the_quick_look_at_exponents_misses_nothing(tmp_path: Path) -> None:
    exponents = ((torch.float64, "i8", 0x7FF0 << 48), (torch.float32, "i4", 0x7F80 << 16))
    for dtype, kind, mask in (*exponents, (torch.float16, "i2", 0x7C00), (torch.bfloat16, "i2", 0x7F80)):
        for bits in (mask, mask | 1, mask >> 1, mask ^ (mask & -mask), 0, 1):
            x = torch.from_numpy(numpy.array([0, bits], kind)).view(dtype)
            row = NonFinite("w.x", int(x.isnan().sum()), int(x.isinf().sum()), 2)
            found = verify(saved({"w.x": x}, tmp_path / "a.pt"), finite=True)
            assert found.non_finite == ((row,) if row.nans or row.infs else ()), (dtype, hex(bits))


def test_an_endless_view_is_not_searched_for_nan(tmp_path: Path) -> None:
    path = saved({"w.x": torch.ones(1).expand(10**6, 10**6), "w.y": torch.full((2,), float("nan"))}, tmp_path / "a.pt")
    found = verify(path, finite=True)
    assert found.unsearched == ("w.x",) and found.non_finite == (NonFinite("w.y", 2, 0, 2),)
    assert "not searched for NaN: w.x" in str(found)


def test_digests_are_kept_and_compared(tmp_path: Path) -> None:
    tree = {"model": weights("a.w", "b.w", "c.w"), "epoch": 3}
    path, kept = saved(tree, tmp_path / "a.pt"), tmp_path / "digests.json"
    first = verify(path, digest=True, write_digest=kept)
    assert first.fine and first.digest is not None and first.digest.at == "model" and len(first.digest.tensors) == 3
    again = kept.read_bytes()
    refused(OutputExists, tmp_path, lambda: verify(path, write_digest=kept))
    verify(path, write_digest=kept, overwrite=True)
    assert kept.read_bytes() == again
    ckptool.convert(path, tmp_path / "a.safetensors")
    for other in (path, tmp_path / "a.safetensors"):
        found = verify(other, against=kept)
        assert found.fine and found.against is not None and found.against.same
        assert "same as" in str(found)
    verify(tmp_path / "a.safetensors", write_digest=tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == again


def test_what_differs_is_named(tmp_path: Path) -> None:
    kept = tmp_path / "digests.json"
    verify(saved(weights("a.w", "b.w", "c.w", "e.w"), tmp_path / "a.pt"), write_digest=kept)
    changed = {**weights("a.w"), "b.w": torch.zeros(2, 3), "d.w": torch.ones(1), "e.w": torch.zeros(3).half()}
    path = saved(changed, tmp_path / "b.pt")
    found = verify(path, against=kept)
    assert found.against is not None and not found.fine and not found.problems
    assert (found.against.differing, found.against.missing, found.against.new) == (
        (("b.w", "values"), ("e.w", "type f32 → f16, shape [2, 3] → [3]")),
        ("c.w",),
        ("d.w",),
    )
    text = str(found)
    assert "differs: b.w (values)" in text and "missing: c.w" in text and "new: d.w" in text
    assert main(["verify", str(path), "--against", str(kept)]) == 1


def test_which_root(tmp_path: Path) -> None:
    both = {"model": weights("a.w"), "model_ema": {"a.w": torch.zeros(1)}}
    path = saved(both, tmp_path / "a.pt")
    found = verify(path, digest=True)
    assert found.digest is not None and found.digest.at == "model"
    assert "took model, not its average" in found.digest.remark and "took model" in str(found)
    assert verify(f"{path}#model_ema", digest=True).digest == verify(path, at="model_ema", digest=True).digest
    two = saved({"G": weights("a.w"), "D": weights("a.w")}, tmp_path / "b.pt")
    refused(UsageError, tmp_path, lambda: verify(two, digest=True), "2 sets of model weights")
    assert verify(two).fine


def test_what_may_have_been_there_is_said(tmp_path: Path) -> None:
    """Nothing says how many ranks there were, or what the optimizer had: `fine` alone would say too much."""
    engines = Path(__file__).parents[2] / "fixtures" / "engines"
    pieces = Path(shutil.copytree(engines / "hf-pieces" / "checkpoint", tmp_path / "pieces"))
    max(pieces.glob("shard-*")).unlink()
    assert "sizes-from-pieces" in str(verify(pieces))
    zero = Path(shutil.copytree(engines / "deepspeed-zero1" / "checkpoint", tmp_path / "zero"))
    for path in zero.rglob("*_optim_states.pt"):
        path.unlink()
    assert "no-optimizer-files" in str(verify(zero))


def test_the_files_that_are_not_fine_are_named(tmp_path: Path, run: Run) -> None:
    whole, cut = saved(weights("a"), tmp_path / "a.pt"), tmp_path / "cut.pt"
    cut.write_bytes(whole.read_bytes()[:-40])
    assert run("verify", "-q", whole, cut)[:2] == (1, f"{cut}\n") and run("verify", "-q", whole)[:2] == (0, "")


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def bits(tensor: torch.Tensor) -> bytes:
    """Row-major bytes, as torch resolves and orders them."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return bytes(plain.flatten().view(torch.uint8).tolist()) if plain.numel() else b""


# The definition -------------------------------------------------------------------------------------------------------


def test_keys_that_are_no_text_are_not_taken_for_text(tmp_path: Path) -> None:
    w = torch.ones(1)
    tree = {0: w, "0": w, None: w, "None": w, (1, "a"): w, b"ab": w, 1.5: w, "in": {"x": [w]}}
    names = [json.dumps(tensor.key) for tensor in root_digests(opened(tree, tmp_path).tree).tensors]
    plain = ["0", '"0"', "null", '"None"', '["in", "x", 0]', '{"tuple": [1, "a"]}', '{"bytes": "6162"}']
    assert sorted(names) == sorted([*plain, '{"float": "0x1.8000000000000p+0"}'])


# Values ---------------------------------------------------------------------------------------------------------------


PLAIN_DTYPES = [dtype for dtype in DTYPES if hasattr(torch, dtype.torch) and dtype.kind not in ("quantized", "bits")]


@looped("dtype", PLAIN_DTYPES, ids=str)
def test_every_type(dtype: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    raw = torch.randint(0, 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    kind = getattr(torch, dtype.torch)
    x = (raw > 127)[:6] if kind is torch.bool else raw.view(kind)
    matrix = x.reshape(2, 3)
    tree = {"x": matrix, "turned": matrix.t(), "every other": x[::2], "one": x[3], "wide": x[:1].expand(4)}
    found = opened(tree, tmp_path).tree
    for name, tensor in tree.items():
        assert tensor_digest(found[name]) == sha(bits(tensor)), name


def test_a_negated_view_of_a_type_without_negatives_is_refused() -> None:
    entry = TensorEntry(Storage(InlineBytes(b"ab")), by_name("u8"), (2,), (1,))
    with pytest.raises(Unsupported):
        tensor_digest(TensorEntry(entry.storage, entry.dtype, (2,), (1,), 0, entry.flags._replace(neg=True)))


def test_an_expanded_view_without_end_is_refused_by_name(tmp_path: Path) -> None:
    """Four bytes, shown a million million times."""
    tree = opened({"ok": torch.ones(1).expand(1000), "endless": torch.ones(1).expand(10**6, 10**6)}, tmp_path).tree
    refused(LimitExceeded, tmp_path, lambda: root_digests(tree), "endless")
    assert tensor_digest(tree["ok"]) == sha(bits(torch.ones(1000)))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_composite_of_other_parts_has_another_digest(tmp_path: Path) -> None:
    def quantized(scale: float, zero: int, last: float) -> Any:
        tree = opened(
            {"q": torch.quantize_per_tensor(torch.tensor([0.0, last]), scale, zero, torch.qint8)}, tmp_path
        ).tree
        assert isinstance(tree["q"], Composite)
        return tensor_digest(tree["q"])

    digests = [quantized(0.5, 0, 1.0), quantized(0.25, 0, 1.0), quantized(0.5, 1, 1.0), quantized(0.5, 0, 2.0)]
    assert len(set(digests)) == 4 and quantized(0.5, 0, 1.0) == digests[0]


# Containers -----------------------------------------------------------------------------------------------------------


def test_a_pt_and_its_safetensors_agree(tmp_path: Path) -> None:
    torch.manual_seed(2)
    tree: dict[str, Any] = {}
    for dtype in DTYPES:
        if dtype.safetensors and hasattr(torch, dtype.torch):
            raw = torch.randint(0, 2 if dtype.name == "bool" else 256, (4 * dtype.itemsize,), dtype=torch.uint8)
            tree[f"w.{dtype.name}"] = raw.view(BY_TORCH[dtype.torch] and getattr(torch, dtype.torch)).reshape(2, 2)
    x = torch.arange(24.0).reshape(4, 6)
    z = torch.complex(torch.randn(3), torch.randn(3))
    tree |= {"w.base": x, "w.tied": x, "w.turned": x.t(), "w.part": x[1:3, 2:4], "w.empty": torch.zeros(0, 3)}
    tree |= {"w.scalar": torch.tensor(2.5), "w.conj": z.conj(), "w.neg": torch._neg_view(torch.randn(3))}
    tree |= {"w.parameter": torch.nn.Parameter(torch.ones(2))}
    path = saved(tree, tmp_path / "a.pt")
    for name, options in (("plain", {}), ("copies", {"ties": "copy"}), ("whole", {"all": True})):
        convert(path, tmp_path / f"{name}.safetensors", **options)
        assert root_digests(read(tmp_path / f"{name}.safetensors").tree) == root_digests(read(path).tree), name


# Kept -----------------------------------------------------------------------------------------------------------------


def digests() -> Digests:
    return table((TensorDigest("a", "f32", (2,), "0" * 64), TensorDigest([0, "b"], "f16", None, "1" * 64)))


def test_the_file_is_that_of_version_0_1_0(tmp_path: Path) -> None:
    kept = b'{"schema": "ckptool.digests/1",\n "root": "%s",\n "tensors": [\n' % sha(
        b'["a","f32",[2],"%b"]\n[[0,"b"],"f16",null,"%b"]\n' % (b"0" * 64, b"1" * 64)
    ).encode() + b'  ["a","f32",[2],"%b"],\n  [[0,"b"],"f16",null,"%b"]\n ]\n}\n' % (b"0" * 64, b"1" * 64)
    assert digests_file(digests()) == kept and read_digests(written(kept, tmp_path / "d.json")) == digests()


LONE = table(digests().tensors[:1])
DAMAGED = {
    "not JSON": (b"\x00\x01", Unsupported, "not a file of digests"),
    "a list": (b"[1]", Unsupported, "not a file of digests"),
    "nested without end": (b"[" * 200_000, Unsupported, "not a file of digests"),
    "another schema": (b'{"schema": "ckptool.inspect/1"}', Unsupported, "not a file of digests"),
    "a later version": (b'{"schema": "ckptool.digests/2"}', Unsupported, "an unsupported version"),
    "a changed digest": (digests_file(digests()).replace(b'"1111', b'"2111'), Corrupt, "its own root digest"),
    "a line gone": (
        digests_file(LONE).replace(LONE.root.encode(), digests().root.encode()),
        Corrupt,
        "own root digest",
    ),
    "a short line": (digests_file(digests()).replace(b',"f32"', b""), Corrupt, "its own root digest"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_of_digests(what: str, tmp_path: Path) -> None:
    content, error, words = DAMAGED[what]
    with pytest.raises(error, match=words) as caught:
        read_digests(written(content, tmp_path / "d.json"))
    assert "d.json" in caught.value.what and caught.value.what
