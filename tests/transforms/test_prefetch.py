"""`BlockReader`: the bytes of the sources in any order of asking, their checksums looked at once whatever that order
was."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.blocks import BLOCK, ROOM, BlockReader, Prefetcher
from ckptool.errors import Corrupt
from ckptool.formats import read


def tensors(folder: Path, count: int, length: int) -> list[TensorEntry]:
    """As many tensors of `length` random bytes, each in a file of its own."""
    entries = []
    for number in range(count):
        path = folder / f"{number}.pt"
        torch.save({"w": torch.randint(256, (length,), dtype=torch.uint8)}, path)
        entries.append(read(path).tree["w"])
    return entries


def damaged(folder: Path, length: int) -> TensorEntry:
    """The tensor 0 of `folder`, its first byte another than when it was written."""
    path = folder / "0.pt"
    entry = read(path).tree["w"]
    raw = bytearray(path.read_bytes())
    raw[entry.storage.data.offset] ^= 1
    path.write_bytes(raw)
    found: TensorEntry = read(path).tree["w"]
    return found


def copies(blocks: list[Any], place: int) -> list[bytes]:
    return [block.tobytes() for block in blocks]


def places(length: int, block: int) -> list[int]:
    return list(range(0, length, block))


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_blocks_are_the_files_bytes(tmp_path: Path, length: int, count: int) -> None:
    entries = tensors(tmp_path, count, length)
    sources = BlockReader(entries, Prefetcher(), copies)
    assert sources.length == length and sources.block * count <= max(ROOM, BLOCK) and sources.unchecked == ()
    made = [sources.made(place) for place in places(length, sources.block)]
    assert [b"".join(parts) for parts in zip(*made, strict=True)] == [entry.bytes() for entry in entries]


def test_with_very_many_sources_blocks_are_short(tmp_path: Path) -> None:
    (entry,) = tensors(tmp_path, 1, 20_000)
    sources = BlockReader([entry] * 2_000, Prefetcher(), copies)
    assert sources.block == 4096
    assert sources.made(0) == [entry.bytes()[:4096]] * 2_000


def test_two_that_share_a_reader_do_not_disturb_each_other(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    ahead, length = Prefetcher(), 3 * BLOCK
    one, two = tensors(tmp_path / "one", 2, length), tensors(tmp_path / "two", 2, length)
    a, b = BlockReader(one, ahead, copies), BlockReader(two, ahead, copies)
    for place in (0, 2 * BLOCK, BLOCK, 0):
        for sources, entries in ((a, one), (b, two)):
            assert sources.made(place) == [entry.bytes()[place : place + BLOCK] for entry in entries]


def test_what_is_changed_in_a_block_stays_there(tmp_path: Path) -> None:
    def negative(blocks: list[Any], place: int) -> bytes:
        numpy.negative(blocks[0], out=blocks[0])
        return bytes(blocks[0])

    (entry,) = tensors(tmp_path, 1, 2 * BLOCK)
    sources, expected = BlockReader([entry], Prefetcher(), negative), (-entry.numpy()).tobytes()
    assert [sources.made(place) for place in (0, BLOCK, 0)] == [expected[:BLOCK], expected[BLOCK:], expected[:BLOCK]]


@pytest.mark.parametrize(
    "order", [[0, 1, 2], [0, 2], [2], [1, 2], [0, 0, 1, 1, 2], [0, 1, 0, 2]], ids=lambda order: "".join(map(str, order))
)
def test_damage_is_found_by_the_end_in_any_order(tmp_path: Path, order: list[int]) -> None:
    length = 2 * BLOCK + 5
    _, other = tensors(tmp_path, 2, length)
    sources = BlockReader([damaged(tmp_path, length), other], Prefetcher(), copies)
    for number in order[:-1]:
        with suppress(Corrupt):  # known as soon as the last block was read ahead
            sources.made(number * BLOCK)
    for _ in range(2):  # and is not forgotten
        with pytest.raises(Corrupt, match=r"0\.pt.* does not match its checksum"):
            sources.made(order[-1] * BLOCK)


def test_damage_met_by_what_nobody_waited_for_is_not_forgotten(tmp_path: Path) -> None:
    length = BLOCK + 5
    _, other = tensors(tmp_path, 2, length)
    ahead = Prefetcher()
    sources = BlockReader([damaged(tmp_path, length), other], ahead, copies)
    sources.made(0)  # the last block is being read ahead
    BlockReader([other], ahead, copies).made(0)  # and thrown away
    with pytest.raises(Corrupt):
        sources.made(BLOCK)


def test_parts_of_a_storage_are_left_to_the_writer(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(100.0)[10:20], "t": torch.arange(6.0).reshape(2, 3).t()}, tmp_path / "part.pt")
    tree = read(tmp_path / "part.pt").tree
    for name in ("w", "t"):
        sources = BlockReader([tree[name]], Prefetcher(), copies)
        assert sources.unchecked == (tree[name].storage,)
        assert sources.made(0) == [tree[name].bytes()]
