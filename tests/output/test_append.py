"""In-place edits: whatever was written of one when it stopped, readers find the old state or the new one."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.blocks import Plan
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.files import Source
from ckptool.errors import CkptoolError, Conflict, DiskFull, FileChanged, FileProblem, VerifyFailed
from ckptool.formats import read, torch_zip
from ckptool.output.edits import append_in_place
from tests.support.errors import refused
from tests.support.files import load, rewritten, torch_bytes, written
from tests.support.folder_plans import free_space
from tests.support.same import assert_same_objects, assert_same_tree
from tests.support.zips import record_starts, rezipped

Operation = tuple[str, int, bytes]


def value(size: int, prefix: str = "") -> dict[str, Any]:
    """A checkpoint with a pickle of about `size` bytes."""
    w = torch.arange(300, dtype=torch.float32)
    return {
        f"{prefix}w": w,
        f"{prefix}tied": w,
        f"{prefix}v": torch.ones(3).half(),
        "note": random.Random(1).randbytes(size // 2).hex(),
    }


def edit(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> tuple[Plan, Source]:
    checkpoint = read(path)
    assert checkpoint.source is not None
    changed = Checkpoint(
        change(checkpoint.tree), torch_zip.NAME, checkpoint.metadata, checkpoint.source, checkpoint.origin
    )
    plan = torch_zip.append(changed)
    assert plan is not None
    return plan, checkpoint.source


def prefixed(tree: dict[str, Any]) -> dict[str, Any]:
    return {key if key == "note" else f"module.{key}": part for key, part in tree.items()}


def with_a_new_tensor(tree: dict[str, Any]) -> dict[str, Any]:
    return {**tree, "new": TensorEntry(Storage(InlineBytes(bytes(range(40)))), by_name("u8"), (40,), (1,))}


def codes(path: Path) -> list[str]:
    return [note.code for note in read(path).notes]


def archive_of(kind: str, size: int, folder: Path) -> Path:
    if kind == "by torch":
        return written(torch_bytes(value(size)), folder / "a.pt")
    how = zipfile.ZIP_DEFLATED if "deflated" in kind else zipfile.ZIP_STORED
    return rezipped(written(torch_bytes(value(size)), folder / "t.pt"), folder / "a.pt", how)


ARCHIVES = ["by torch", "rezipped", "rezipped, deflated"]


# When nothing goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("archive", ARCHIVES)
@pytest.mark.parametrize("size", [10, 64_000, 300_000])
def test_edits_append_and_every_reader_sees_them(archive: str, size: int, tmp_path: Path) -> None:
    path = archive_of(archive, size, tmp_path)
    before = path.read_bytes()
    mmap = "deflated" not in archive
    told: list[tuple[int, int]] = []
    plan, source = edit(path, prefixed)
    append_in_place(plan, source, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (plan.nbytes, plan.nbytes)
    expected = value(size, "module.")
    assert path.read_bytes()[: len(before)] == before
    assert_same_objects(load(path), expected)
    if mmap:
        assert_same_objects(load(path, mmap=True), expected)
    with zipfile.ZipFile(path) as stock:
        assert stock.testzip() is None
    assert "superseded-pickle" in codes(path) and "interrupted-edit" not in codes(path)
    rewritten(path, tmp_path / "compact.pt")
    assert "superseded-pickle" not in codes(tmp_path / "compact.pt")
    assert_same_tree(read(path), read(tmp_path / "compact.pt"))
    assert_same_objects(load(tmp_path / "compact.pt", mmap=True), expected)
    for n in range(2, 6):
        append_in_place(*edit(path, prefixed))
        assert_same_objects(load(path), value(size, "module." * n))
        assert next(iter(read(path).tree)) == "module." * n + "w"
        with zipfile.ZipFile(path) as stock:
            assert stock.testzip() is None
    assert read(path).origin.archive.edits == 5


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("archive", ARCHIVES)
def test_new_values_are_computed_from_the_file_that_is_edited(archive: str, verify: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    weights = {"fc.weight": torch.randn(16, 8), "fc.bias": torch.randn(16), "ids": torch.arange(60_000)}
    torch.save({"state_dict": weights}, tmp_path / "t.pt")
    how = zipfile.ZIP_DEFLATED if "deflated" in archive else zipfile.ZIP_STORED
    rezipped(tmp_path / "t.pt", path, how)
    before = path.stat().st_ino
    ckptool.cast(path, dtype="f16", in_place=True, verify=verify)
    ckptool.edit(path, set={"epoch": 3}, in_place=True, verify=verify)
    assert path.stat().st_ino == before
    expected = {name: tensor.half() if name != "ids" else tensor for name, tensor in weights.items()}
    assert_same_objects(load(path), {"state_dict": expected, "epoch": 3})


def test_the_bytes_added_are_few(tmp_path: Path) -> None:
    path = written(torch_bytes({f"w{i}": torch.ones(2) for i in range(500)}), tmp_path / "a.pt")
    before = path.stat().st_size
    with zipfile.ZipFile(path) as stock:
        pickle = stock.getinfo("archive/data.pkl").file_size
        directory = before - stock.start_dir
    append_in_place(*edit(path, prefixed))
    assert path.stat().st_size - before <= 2 * (pickle + directory) + (64 << 10)


def test_new_storages_are_appended_and_aligned(tmp_path: Path) -> None:
    path = archive_of("by torch", 10_000, tmp_path)
    append_in_place(*edit(path, with_a_new_tensor))
    assert_same_objects(load(path, mmap=True), value(10_000) | {"new": torch.arange(40, dtype=torch.uint8)})
    assert all(start % 64 == 0 for start in record_starts(path).values())


def test_much_new_data_is_better_off_in_a_new_file(tmp_path: Path) -> None:
    checkpoint = read(archive_of("by torch", 10, tmp_path))
    large = TensorEntry(Storage(InlineBytes(bytes(100_000))), by_name("u8"), (100_000,), (1,))
    changed = Checkpoint(
        {**checkpoint.tree, "new": large}, torch_zip.NAME, checkpoint.metadata, checkpoint.source, checkpoint.origin
    )
    assert torch_zip.append(changed) is None


def test_an_archive_without_checksums_has_none_afterwards(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = written(torch_bytes(value(10)), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    append_in_place(*edit(path, prefixed))
    assert "no-checksums" in codes(path)
    assert_same_objects(load(path, mmap=True), value(10, "module."))


# Crash points ---------------------------------------------------------------------------------------------------------
# Kills of whole commands, and power cuts that lose what was not synced, are in `test_faults`.


def recorded(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """Carries an edit out, and gives what it did to the file, in order."""
    operations: list[Operation] = []
    pwrite, ftruncate, fsync = os.pwrite, os.ftruncate, os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "pwrite", lambda fd, data, at: operations.append(("write", at, bytes(data))) or pwrite(fd, data, at)
        )
        patch.setattr(os, "ftruncate", lambda fd, size: operations.append(("cut", size, b"")) or ftruncate(fd, size))
        patch.setattr(os, "fsync", lambda fd: operations.append(("sync", 0, b"")) or fsync(fd))
        patch.setattr(os, "copy_file_range", lambda *args: pytest.fail("an operation that is not recorded"))
        append_in_place(*edit(path, prefixed))
    return operations


def replay(data: bytearray, operation: Operation) -> None:
    kind, at, new = operation
    if kind == "cut":
        del data[at:]
        data.extend(bytes(at - len(data)))
    elif kind == "write":
        data.extend(bytes(max(0, at - len(data))))
        data[at : at + len(new)] = new


def torn(operation: Operation) -> list[Operation]:
    """The same, stopped in the middle: at the borders of pages, within the first and last bytes, and at random."""
    kind, at, new = operation
    if kind != "write":
        return []
    chosen = random.Random(at)
    places = {1, 4, 19, 20, 21, 24, -at % 4096, *(len(new) - back for back in (1, 22, 23, 42, 43))}
    places |= {chosen.randrange(1, len(new)) for _ in range(6)}
    return [("write", at, new[:size]) for size in sorted(places) if 0 < size < len(new)]


def crash_states(before: bytes, operations: list[Operation]) -> list[bytes]:
    data, states = bytearray(before), [before]
    for operation in operations:
        for part in torn(operation):
            half = bytearray(data)
            replay(half, part)
            states.append(bytes(half))
        replay(data, operation)
        states.append(bytes(data))
    return list(dict.fromkeys(states))


def check_state(path: Path, old: Any, new: Any) -> bool:
    """Stock torch and ckptool find one of the two states; True if it is the new one."""
    checkpoint = read(path)
    clean = path.stat().st_size == checkpoint.origin.archive.end
    assert ("interrupted-edit" in [note.code for note in checkpoint.notes]) is not clean
    found = load(path)
    is_new = "module.w" in found
    assert_same_objects(found, new if is_new else old)
    assert list(checkpoint.tree) == list(found)
    return is_new


@pytest.mark.parametrize(
    ("archive", "size"),
    [("by torch", 10), ("by torch", 66_000), ("edited before", 66_000), ("rezipped", 64_000), ("rezipped", 200_000)],
)
def test_an_edit_stopped_at_or_in_any_operation_is_old_or_new(
    archive: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = archive_of("rezipped" if archive == "rezipped" else "by torch", size, tmp_path)
    if archive == "edited before":
        append_in_place(*edit(path, dict))
    before = path.read_bytes()
    operations = recorded(path, monkeypatch)
    after, old, new = path.read_bytes(), value(size), value(size, "module.")
    states = crash_states(before, operations)
    assert states[-1] == after
    outcomes = []
    for number, state in enumerate(states):
        written(state, path)
        outcomes.append(check_state(path, old, new))
        if number % 5 == 0 and not outcomes[-1]:  # the next run works, and what it leaves is what it always leaves
            append_in_place(*edit(path, prefixed))
            assert path.read_bytes() == after
    assert outcomes == sorted(outcomes) and not outcomes[0] and outcomes[-1]


# When something goes wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EFBIG])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "ftruncate"])
def test_an_error_at_any_operation_leaves_the_file_as_it_was(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = archive_of("by torch", 150_000, tmp_path)
    before = path.read_bytes()
    operations = recorded(path, monkeypatch)
    count = sum(kind == {"pwrite": "write", "fsync": "sync", "ftruncate": "cut"}[call] for kind, _, _ in operations)
    assert count > 1
    for failing in range(count):
        written(before, path)
        plan, source = edit(path, prefixed)
        real, calls = getattr(os, call), []

        def broken(*args: Any, real: Any = real, calls: list[int] = calls, failing: int = failing) -> Any:
            calls.append(1)
            if len(calls) == failing + 1:
                raise OSError(number, "no")
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, broken)
            with pytest.raises(FileProblem) as caught:
                append_in_place(plan, source)
        assert isinstance(caught.value, DiskFull) is (number in (errno.ENOSPC, errno.EFBIG))
        assert path.read_bytes() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), VerifyFailed("differs", "why")])
def test_an_interrupt_or_a_failed_check_leaves_the_file_as_it_was(error: BaseException, tmp_path: Path) -> None:
    def stop(*args: Any) -> None:
        raise error

    path = archive_of("by torch", 10, tmp_path)
    before = path.read_bytes()
    for options in ({"progress": stop}, {"verify": stop}):
        with pytest.raises(type(error)):
            append_in_place(*edit(path, prefixed), **options)  # type: ignore[arg-type]
        assert path.read_bytes() == before
    seen: list[list[str]] = []
    append_in_place(*edit(path, prefixed), verify=lambda found: seen.append(list(load(Path(found)))))
    assert seen == [["module.w", "module.tied", "module.v", "note"]]
    assert_same_objects(load(path), value(10, "module."))


def test_links_are_refused(tmp_path: Path) -> None:
    path = archive_of("by torch", 10, tmp_path)
    before = path.read_bytes()
    (tmp_path / "soft.pt").symlink_to(path)
    refused(Conflict, tmp_path, lambda: append_in_place(*edit(tmp_path / "soft.pt", prefixed)), "is a symbolic link")
    os.link(path, tmp_path / "hard.pt")
    for name in (path, tmp_path / "hard.pt"):
        with pytest.raises(Conflict, match="one of 2 hard links"):
            append_in_place(*edit(name, prefixed))
    assert path.read_bytes() == before


def test_a_second_name_that_a_killed_run_left_is_no_link(tmp_path: Path) -> None:
    """A new file gets its name by a hard link from its temporary one; killed in between, both are there."""
    from ckptool.output import durable

    path = archive_of("by torch", 10, tmp_path)
    os.link(path, durable.hidden_name(str(path)))
    append_in_place(*edit(path, prefixed))
    assert_same_objects(load(path), value(10, "module."))
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_a_second_edit_at_the_same_time_is_refused(tmp_path: Path) -> None:
    path = archive_of("by torch", 10, tmp_path)
    before = path.read_bytes()
    plan, source = edit(path, prefixed)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused(Conflict, tmp_path, lambda: append_in_place(plan, source), "edited by another process")
    assert path.read_bytes() == before
    append_in_place(plan, source)


def test_a_plan_for_a_file_that_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    path = archive_of("by torch", 10, tmp_path)
    stale = edit(path, prefixed)
    append_in_place(*edit(path, prefixed))
    after = path.read_bytes()
    refused(FileChanged, tmp_path, lambda: append_in_place(*stale))
    assert path.read_bytes() == after
    stale = edit(path, prefixed)
    other = written(after, tmp_path / "other")
    os.utime(other, ns=(path.stat().st_mtime_ns, path.stat().st_mtime_ns))
    os.replace(other, path)  # the same bytes and time, but another file under the name
    refused(FileChanged, tmp_path, lambda: append_in_place(*stale))


def test_a_file_that_may_not_be_written_or_is_gone(tmp_path: Path) -> None:
    path = archive_of("by torch", 10, tmp_path)
    plan, source = edit(path, prefixed)
    path.unlink()
    error = refused(CkptoolError, tmp_path, lambda: append_in_place(plan, source))
    assert error.code == "io" and "No such file" in error.what


def test_not_enough_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive_of("by torch", 10, tmp_path)
    before = path.read_bytes()
    plan, source = edit(path, prefixed)
    free_space(monkeypatch, 1)
    with pytest.raises(DiskFull):
        append_in_place(plan, source)
    assert path.read_bytes() == before
