"""The loops of examples/loops that learn in an environment, with one of gymnasium: killed, they end the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.engines
SCRIPT = Path(__file__).parent / "scripts" / "gymnasium_loop.py"
STEPS = 40


def start(folder: Path, name: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, str(SCRIPT), str(folder), str(STEPS), name]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(folder: Path, name: str) -> tuple[str, bytes]:
    process = start(folder, name)
    _, words_of_it = process.communicate(timeout=300)
    assert process.returncode == 0, words_of_it
    newest = max((folder / "checkpoints").glob("*.pt"))
    return newest.name, newest.read_bytes()


def logged(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines()[-1:] if path.exists() else []
    return int(json.loads(lines[0])["step"]) if lines else 0


@pytest.mark.parametrize("name", ["reinforce", "ppo"])
def test_a_loop_around_gymnasium_is_killed_and_ends_the_same(tmp_path: Path, name: str) -> None:
    pytest.importorskip("gymnasium")
    rng, whole = random.Random(0), finish(tmp_path / "whole", name)
    for at in sorted(rng.randrange(1, STEPS) for _ in range(6)):
        process = start(tmp_path / "killed", name)
        while logged(tmp_path / "killed") < at and process.poll() is None:
            time.sleep(0.002)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert finish(tmp_path / "killed", name) == whole
