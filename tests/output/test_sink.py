"""The sink: every kind of segment ends up where the plan says, joined where it can be, summed and checked on the
way."""

from __future__ import annotations

import errno
import os
import random
import threading
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ckptool.checkpoint import Computed, Data, FileRange, InlineBytes, Storage
from ckptool.checkpoint.blocks import Checksummed, Crc, Deferred, Plan, Segment
from ckptool.checkpoint.files import Source
from ckptool.errors import Corrupt, FileChanged
from ckptool.output import sink
from ckptool.output.sink import Sink
from tests.support.errors import refused
from tests.support.looped import looped


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def source(folder: Path, data: bytes, name: str = "in") -> Source:
    (folder / name).write_bytes(data)
    return Source(folder / name)


def computed(data: bytes, *inputs: Storage, asked: list[tuple[int, int]] | None = None) -> Computed:
    def read(offset: int, length: int) -> bytes:
        if asked is not None:
            asked.append((offset, length))
        return data[offset : offset + length]

    return Computed(len(data), read, inputs)


def wrote(folder: Path, segments: list[Segment], checks: list[Storage] | None = None, **options: Any) -> bytes:
    plan = Plan({"": segments}, checks or [])
    fd = os.open(folder / "out", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        Sink(fd, 0, plan.nbytes, options.get("progress")).write(plan.files[""], plan.checks)
    finally:
        os.close(fd)
    return (folder / "out").read_bytes()


def bytes_of(segment: Segment) -> bytes:
    if isinstance(segment, Deferred):
        return segment.make()
    data: Data = segment.data if isinstance(segment, Checksummed) else segment
    return data.read(0, data.length)


@looped("seed", range(40))
def test_random_plans(seed: int, tmp_path: Path) -> None:
    chosen = random.Random(seed)
    files = [source(tmp_path, noise(3_000_000, seed + n), f"in{n}") for n in range(2)]
    segments: list[Segment] = []
    at = 0
    for _ in range(chosen.randrange(1, 25)):
        size = chosen.choice([0, 1, 100, 65_535, 65_536, 70_000, 1 << 20, 1_200_000])
        kind = chosen.choice(["literal", "range", "next", "next", "computed", "late"])
        if kind == "literal":
            data: Any = InlineBytes(noise(size, chosen.randrange(99)))
        elif kind == "computed":
            data = computed(noise(size, chosen.randrange(99)))
        elif kind == "late":
            data = Deferred(size, lambda size=size: noise(size))
        else:
            begin = at if kind == "next" and at + size <= 3_000_000 else chosen.randrange(3_000_000 - size)
            data = FileRange(files[0 if kind == "next" else chosen.randrange(2)], begin, size)
            at = begin + size
        if kind != "late" and chosen.random() < 0.4:
            data = Checksummed(data, Crc(expected=zlib.crc32(bytes_of(data)) if chosen.random() < 0.5 else None))
        segments.append(data)
    told: list[tuple[int, int]] = []
    expected = b"".join(map(bytes_of, segments))
    assert wrote(tmp_path, segments, progress=lambda done, total: told.append((done, total))) == expected
    assert not expected or told[-1] == (len(expected), len(expected))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    for segment in segments:
        if isinstance(segment, Checksummed):
            assert segment.crc.value == zlib.crc32(bytes_of(segment))


def test_adjacent_ranges_are_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = source(tmp_path, noise(1_000_000))
    copies: list[tuple[int, int]] = []
    real = sink.copy_range

    def counted(source: Source, offset: int, fd: int, at: int, length: int, progress: Any) -> None:
        copies.append((offset, length))
        real(source, offset, fd, at, length, progress)

    monkeypatch.setattr(sink, "copy_range", counted)
    ranges: list[Segment] = [FileRange(file, at, 100) for at in range(70_000, 900_000, 100)]
    first: list[Segment] = [InlineBytes(b"head"), FileRange(file, 0, 70_000)]
    assert wrote(tmp_path, [*first, *ranges]) == b"head" + noise(1_000_000)[:900_000]
    assert copies == [(0, 900_000)]
    copies.clear()
    other = source(tmp_path, noise(200_000, 5), "other")
    expected = noise(1_000_000)[:100_000] + noise(200_000, 5)[100_000:]
    assert wrote(tmp_path, [FileRange(file, 0, 100_000), FileRange(other, 100_000, 100_000)]) == expected
    assert len(copies) == 2


@pytest.mark.parametrize("size", [100, 5_000_000])  # summed in passing, and in a thread
def test_late_segments_are_made_when_all_sums_before_them_are_known(tmp_path: Path, size: int) -> None:
    data = noise(size)
    crc = Crc()
    late = Deferred(4, lambda: crc.value.to_bytes(4, "little"))
    written = wrote(
        tmp_path, [Checksummed(FileRange(source(tmp_path, data), 0, size), crc), late, InlineBytes(b"end"), late]
    )
    total = zlib.crc32(data).to_bytes(4, "little")
    assert written == data + total + b"end" + total


def test_a_late_segment_of_another_length_is_our_own_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="3 bytes where 4"):
        wrote(tmp_path, [Deferred(4, lambda: b"abc")])


@pytest.mark.parametrize("size", [10, 70_000, 3 * sink.COMPUTE + 5])
def test_a_wrong_sum_is_refused_before_anything_is_made_of_it(size: int, tmp_path: Path) -> None:
    data, later = noise(size), list[int]()
    late = Deferred(4, lambda: later.append(1) or b"late")  # type: ignore[func-returns-value]
    for made in (FileRange(source(tmp_path, data), 0, size), computed(data), InlineBytes(data)):
        wrong = Checksummed(made, Crc(expected=zlib.crc32(data) ^ 1, name="the weights"))
        with pytest.raises(Corrupt, match="the weights does not match its checksum"):
            wrote(tmp_path, [InlineBytes(b"x"), wrong, late])
    assert not later


def test_what_is_read_only_in_part_is_checked_as_a_whole(tmp_path: Path) -> None:
    data = noise(300_000)
    good = Storage(FileRange(source(tmp_path, data), 0, len(data)), crc=zlib.crc32(data))
    bad = Storage(good.data, crc=1)
    assert wrote(tmp_path, [FileRange(good.data.file, 5, 10)], [good]) == data[5:15]
    refused(Corrupt, tmp_path, lambda: wrote(tmp_path, [FileRange(good.data.file, 5, 10)], [bad]))


def test_the_inputs_of_what_is_computed_are_checked_through_all_levels(tmp_path: Path) -> None:
    data = noise(200_000)
    for crc in (zlib.crc32(data), 7):
        lowest = Storage(FileRange(source(tmp_path, data), 0, len(data)), crc=crc)
        top = computed(data[::-1], Storage(computed(data, lowest)))
        with nullcontext() if crc != 7 else pytest.raises(Corrupt):
            assert wrote(tmp_path, [top, top]) == data[::-1] * 2


def test_an_input_is_summed_up_once(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []
    data = noise(1000)
    storage = Storage(computed(data, asked=asked), crc=zlib.crc32(data))
    wrote(tmp_path, [computed(b"a", storage), computed(b"b", storage), InlineBytes(b"c")], [storage])
    assert asked == [(0, 1000)]


def test_what_is_computed_is_asked_front_to_back_in_bounded_pieces(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []
    data = noise(9_000_000)
    assert wrote(tmp_path, [computed(data, asked=asked)]) == data
    assert [offset for offset, _ in asked] == sorted(offset for offset, _ in asked)
    assert max(length for _, length in asked) <= sink.COMPUTE


def test_a_stream_is_never_read_by_two_threads(tmp_path: Path) -> None:
    """A deflated record keeps its place; its sum must not be added up while its bytes are written."""
    reading, data = threading.Lock(), noise(6_000_000)

    def read(offset: int, length: int) -> bytes:
        assert reading.acquire(blocking=False), "two readers"
        try:
            return data[offset : offset + length]
        finally:
            reading.release()

    stream = Computed(len(data), read)
    checked = Storage(stream, crc=zlib.crc32(data))
    assert wrote(tmp_path, [Computed(len(data), read, (checked,)), stream], [checked]) == data * 2


def test_inputs_that_end_early_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Corrupt, match="10 bytes were expected, 4 arrived"):
        wrote(tmp_path, [Computed(10, lambda offset, length: b"abcd"[offset:])])
    file = source(tmp_path, noise(500_000))
    os.truncate(file.path, 400_000)
    cut = [FileRange(file, at, size) for at, size in ((0, 450_000), (0, 500_000), (450_000, 10))]
    for segment in (*cut, Checksummed(FileRange(file, 300_000, 200_000), Crc())):
        with pytest.raises(FileChanged):
            wrote(tmp_path, [segment])


def test_a_range_is_confirmed_before_it_is_copied(tmp_path: Path) -> None:
    def refuse() -> None:
        raise Corrupt("not what the directory says", "why")

    file = source(tmp_path, noise(200_000))
    for size in (10, 100_000):
        with pytest.raises(Corrupt, match="not what the directory says"):
            wrote(tmp_path, [FileRange(file, 0, size, refuse)])
    assert (tmp_path / "out").read_bytes() == b""


@pytest.mark.parametrize("answer", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, 0, None])
def test_where_the_kernel_cannot_copy_a_buffer_does(
    answer: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no such call, refuses it, or says that it copied nothing."""

    def refused(*args: Any) -> int:
        if answer:
            raise OSError(answer, "no")
        return 0

    data = noise(3_000_000)
    if answer is None:
        monkeypatch.delattr(os, "copy_file_range")
    else:
        monkeypatch.setattr(os, "copy_file_range", refused)
    file = source(tmp_path, data)
    assert wrote(tmp_path, [InlineBytes(b"a"), FileRange(file, 1, 2_900_000)]) == b"a" + data[1:2_900_001]


def test_short_copies_and_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = noise(2_000_000)
    file = source(tmp_path, data)
    copy, write, read = os.copy_file_range, os.pwrite, os.preadv
    monkeypatch.setattr(os, "copy_file_range", lambda a, b, size, *rest: copy(a, b, min(size, 77_777), *rest))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, bytes(data)[:9_999], at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:5_555]], at))
    crc = Crc(expected=zlib.crc32(data[:1_900_000]))
    assert (
        wrote(tmp_path, [InlineBytes(data), Checksummed(FileRange(file, 0, 1_900_000), crc)]) == data + data[:1_900_000]
    )


def test_threads_are_gone_after_an_interrupt(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    data = noise(4_000_000)
    before = threading.active_count()
    copied = Checksummed(FileRange(source(tmp_path, data), 0, len(data)), Crc())
    with pytest.raises(KeyboardInterrupt):
        wrote(tmp_path, [copied, InlineBytes(b"x")], progress=interrupt)
    assert threading.active_count() == before


def test_what_is_made_of_a_late_segment_is_made_after_it(tmp_path: Path) -> None:
    """The sum of two ranges is added up late, as theirs is still under way; then that ends, and it is asked for."""
    data = noise(8 << 20)
    file, parts, sums = source(tmp_path, data), [Crc(), Crc()], [0]
    fd = os.open(tmp_path / "out", os.O_CREAT | os.O_RDWR)
    begun, total = threading.Event(), len(data) + 4
    writer = Sink(fd, 0, total, None)
    wait = writer._sum_up
    writer._sum_up = lambda data, crc: begun.wait(30) and wait(data, crc)  # type: ignore[method-assign,assignment]

    def add_up() -> bytes:
        sums[0] = sum(part.value for part in parts)
        return b""

    def segments() -> Iterator[Segment]:
        for number, part in enumerate(parts):
            yield Checksummed(FileRange(file, number * (4 << 20), 4 << 20), part)
        yield Deferred(0, add_up)
        begun.set()
        for job in writer.jobs:
            job.result()
        yield Deferred(4, lambda: (sums[0] & 0xFFFFFFFF).to_bytes(4, "little"))

    writer.write(segments())
    os.close(fd)
    expected = sum(zlib.crc32(data[at : at + (4 << 20)]) for at in (0, 4 << 20)) & 0xFFFFFFFF
    assert (tmp_path / "out").read_bytes() == data + expected.to_bytes(4, "little")


@pytest.mark.parametrize("failing", range(1, 8))
def test_a_piece_that_cannot_be_written_behind_is_an_error(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever piece it is, of the first tensor or of one after it; no piece is written after the sink has ended."""
    real, calls = sink.write_all, list[int]()

    def full(fd: int, data: Any, at: int) -> None:
        calls.append(at)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, "no space left")
        real(fd, data, at)

    monkeypatch.setattr(sink, "write_all", full)
    with pytest.raises(OSError, match="no space left"):
        wrote(tmp_path, [computed(noise(4 * sink.COMPUTE, seed)) for seed in range(2)])
    assert len(calls) <= failing + sink.BEHIND
