"""`ckptool.Run` in people's own loops: killed anywhere and started again, they end with the same bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fork_server import ForkServer

LOOPS = Path(__file__).parents[2] / "examples" / "loops"
# A signal that comes before the loop has begun, or after its end, is answered by the system.
ENDS = (0, -signal.SIGKILL, 143, -signal.SIGTERM)
STEPS = {"nanogpt": 40, "resnet": 24, "gan": 50}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    log = tmp_path_factory.mktemp("loops") / "stderr"
    with ForkServer(str(log), module="tests.support.loop_server", cwd=str(Path(__file__).parents[2])) as server:
        yield server


def last(folder: Path, steps: int) -> bytes:
    return (folder / "checkpoints" / f"step-{steps:08d}.pt").read_bytes()


def logged(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines()[-1:] if path.exists() else []
    return int(json.loads(lines[0])["step"]) if lines else 0


def killed(server: ForkServer, words: list[str], folder: Path, at: int, number: int) -> int:
    """Starts the script and sends it a signal when it has logged a step."""
    group = server.start(words)
    while logged(folder) < at and not server.ended():
        time.sleep(0.001)
    if not server.ended():
        os.killpg(group, number)
    return server.wait()


def trial(server: ForkServer, tmp_path: Path, name: str, kills: int, seed: int = 0) -> None:
    rng, steps = random.Random(seed), STEPS[name]
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    script = str(LOOPS / f"{name}.py")
    assert server.run([script, str(whole), str(steps)]) == 0, server.stderr_tail()
    words = [script, str(folder), str(steps)]
    for at in sorted(rng.randrange(1, steps) for _ in range(kills)):
        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        assert killed(server, words, folder, at, number) in ENDS, server.stderr_tail()
    assert server.run(words) == 0, server.stderr_tail()
    assert last(folder, steps) == last(whole, steps)
    numbers = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert numbers == list(range(1, steps + 1))
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("name", STEPS)
def test_a_loop_that_is_killed_ends_with_the_same_bytes(server: ForkServer, tmp_path: Path, name: str) -> None:
    trial(server, tmp_path, name, kills=4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", STEPS)
def test_a_loop_that_is_killed_ten_times(server: ForkServer, tmp_path: Path, name: str, seed: int) -> None:
    trial(server, tmp_path, name, kills=10, seed=seed)


@pytest.mark.parametrize("every", [151, pytest.param(3, marks=pytest.mark.soak)])
def test_a_loop_killed_at_every_file_system_event_goes_on(every: int, server: ForkServer, tmp_path: Path) -> None:
    """Before each event, and in the middle of each write, of the run's folder, from its making to its end."""
    script, steps = str(LOOPS / "gan.py"), 11
    whole = tmp_path / "whole"
    assert server.run([script, str(whole), str(steps)]) == 0, server.stderr_tail()
    for number in range(0, 500, every):
        folder = tmp_path / f"event-{number}"
        words = [script, str(folder), str(steps)]
        code = server.run(words, crash={"folder": str(folder), "at": number})
        if code == 0:
            break
        assert code == -signal.SIGKILL, server.stderr_tail()
        assert server.run(words) == 0, server.stderr_tail()
        assert last(folder, steps) == last(whole, steps), number
    else:
        pytest.fail("the run has more events than were tried")
