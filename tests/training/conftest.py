"""Every test of the harness: one thread, since two spin on a loaded machine, and torch's switches given back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ckptool.training.prove.fork_server import ForkServer
from ckptool.training.start import switches_given_back


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with switches_given_back():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Starts processes that begin with everything imported, and compute with one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        made = ForkServer(str(tmp_path_factory.mktemp("server") / "stderr"))
    with made:
        yield made
