"""What every test can have."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from _pytest.pathlib import import_path

from ckptool.cli import main
from ckptool.errors import _MARK
from tests.support.cli import Ran, Run
from tests.support.looped import examples

# What this process has of other tests is not copied for the collections of each child to look at.
os.register_at_fork(before=gc.freeze)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what runs in the background

pytest_plugins = ["tests.guard"]


def pytest_configure(config: pytest.Config) -> None:
    """The disk is not waited for, except in `make soak`: what fsync is for, a cut of the power, no test can make. That
    and when it is called is what tests look at; the programs that they start wait."""
    if "not soak" in config.option.markexpr:
        os.fsync = lambda file: os.fstat(file if isinstance(file, int) else file.fileno()) and None


# How long an example takes says more of the machine than of the code.
hypothesis.settings.register_profile(
    "timeless", max_examples=examples(150), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("timeless")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """The second of two workers begins to read the tests at their end, so that each finds half of them compiled."""
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and not sys.dont_write_bytecode:
        for path in sorted(Path(__file__).parent.rglob("test_*.py"), reverse=True):
            with suppress(Exception, pytest.skip.Exception):  # told when it is collected
                import_path(path, root=session.config.rootpath, consider_namespace_packages=False)


def pytest_collection_finish() -> None:
    """What is there before the first test stays until the last: no collection of garbage looks at it again, and all
    that is left of tests is looked at a tenth as often as by itself."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)


def pytest_sessionfinish() -> None:
    for name, function in (("ranks", "close"), ("programs", "stop_programs")):
        if module := sys.modules.get(f"tests.support.{name}"):
            getattr(module, function)()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process: `run("inspect", path)`."""

    def ran(*words: str | Path) -> Ran:
        capsys.readouterr()
        code = main([str(word) for word in words])
        ran = Ran(code, *capsys.readouterr())
        assert _MARK not in ran.out + ran.err, "a command in a text that nobody spelled"
        return ran

    return ran


@pytest.fixture
def harness() -> Iterator[None]:
    """For tests that train: torch's switches are those of a run, and given back."""
    from ckptool.training.trainer import deterministic

    with deterministic(True):
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts processes that begin with everything imported, and compute with one thread."""
    from tests.support.fork_server import ForkServer

    with ForkServer(str(tmp_path_factory.mktemp("server") / "stderr")) as server:
        yield server
