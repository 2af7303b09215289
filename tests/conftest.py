"""What every test can have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptool.cli import main
from tests.support.cli import Ran, Run

pytest_plugins = ["tests.guard"]


def pytest_sessionfinish() -> None:
    if ranks := sys.modules.get("tests.support.ranks"):
        ranks.close()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process: `run("inspect", path)`."""

    def ran(*words: str | Path) -> Ran:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return Ran(code, *capsys.readouterr())

    return ran


@pytest.fixture
def harness() -> Iterator[None]:
    """For tests that train: one thread, since two spin on a loaded machine, and torch's switches given back."""
    import torch

    from ckptool.training.start import switches_given_back

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with switches_given_back():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts processes that begin with everything imported, and compute with one thread."""
    from ckptool.training.prove.fork_server import ForkServer

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        made = ForkServer(str(tmp_path_factory.mktemp("server") / "stderr"))
    with made:
        yield made
