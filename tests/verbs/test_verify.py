"""`verify`: everything that is wrong is said, with its place; what cannot be known is said too."""

import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

import ckptool
from ckptool.analysis.verify import NonFinite, Verification, check_storages
from ckptool.checkpoint import InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.cli import main
from ckptool.errors import OutputExists, UsageError
from ckptool.verbs.verify import verify
from fixtures.make import make
from tests.support.cli import Run
from tests.support.files import saved, torch_bytes, weights, written
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
        assert "no checksums stored: damage to the data cannot be noticed" in str(found)
        assert found.to_dict()["checksums"] == "none"


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


def test_an_interrupted_edit_is_said(tmp_path: Path) -> None:
    path = saved({"m": weights("a.w"), "n": 1}, tmp_path / "a.pt")
    tail = path.read_bytes()[-42:]
    path.write_bytes(path.read_bytes() + bytes(3000) + tail)
    found = verify(path)
    assert found.fine and [note.code for note in found.notes] == ["interrupted-edit"]


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
    with pytest.raises(OutputExists):
        verify(path, write_digest=kept)
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
    with pytest.raises(UsageError, match="2 sets of model weights"):
        verify(two, digest=True)
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
