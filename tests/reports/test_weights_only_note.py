"""The note `weights-only`: just where torch's default refuses a file, and no other fact says it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

import ckptool
from tests.support.object_graphs import saved_graph

THREE = {"unsafe-global", "custom-class", "weights-only"}


def taken(data: bytes) -> bool:
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001 (whatever it refuses a file with)
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 3000), marks=pytest.mark.soak)])
def test_it_is_there_just_where_torch_refuses(seeds: range, tmp_path: Path) -> None:
    said = {True: 0, False: 0}
    for seed in seeds:
        graph = saved_graph(seed)
        # Importing torch's nested tensors allows their names in this process. Bytes in protocol 3, which torch refuses,
        # are written as protocol 2 has them, and are not said.
        if graph is None or "nested" in graph.kinds or ("raw" in graph.kinds and graph.protocol == 3):
            continue
        file = tmp_path / "a.pt"
        file.write_bytes(graph.data)
        codes = {note.code for note in ckptool.inspect(file).notes}
        assert len(codes & THREE - {"custom-class"}) <= 1, codes
        if not codes & {"unsafe-global", "custom-class", "pickle-protocol"}:
            assert ("weights-only" not in codes) is taken(graph.data), (seed, graph.kinds)
            said["weights-only" in codes] += 1
    assert said[False] and said[True] >= 5, said
