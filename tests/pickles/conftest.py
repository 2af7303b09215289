"""A folder of decoys, and all verbs run in it on a hostile file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.hostile_inputs import Decoy
from tests.support.watched import LOOKING, WRITING, Seen, Watched, watched


@pytest.fixture(scope="module")
def decoy(tmp_path_factory: pytest.TempPathFactory) -> Decoy:
    return Decoy(tmp_path_factory.mktemp("decoy"))


@pytest.fixture(scope="module")
def watch(decoy: Decoy) -> Iterator[Watched]:
    with watched(decoy.folder) as process:
        yield process


@pytest.fixture
def see(watch: Watched, decoy: Decoy) -> Callable[..., Seen]:
    """Runs all verbs on a file with this pickle, in the folder of the decoys, within the limits."""

    def seen(contents: bytes, *commands: str, bounded: bool = True) -> Seen:
        file = decoy.folder / "input.pt"
        file.write_bytes(contents)
        found = watch.run(file, commands or LOOKING + WRITING)
        if bounded:
            found.assert_bounded()
        assert not found.violations and not decoy.trace.exists()
        return found

    return seen
