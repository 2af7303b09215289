"""`ckptool.Run` with models of transformers, and with torchdata's StatefulDataLoader."""

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
SCRIPT = Path(__file__).parent / "scripts" / "own_loop.py"
STEPS = 40


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, str(SCRIPT), str(folder), str(STEPS), *words]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(folder: Path, *words: str) -> bytes:
    process = start(folder, *words)
    _, words_of_it = process.communicate(timeout=300)
    assert process.returncode == 0, words_of_it
    return (folder / "checkpoints" / f"step-{STEPS:08d}.pt").read_bytes()


def logged(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines()[-1:] if path.exists() else []
    return int(json.loads(lines[0])["step"]) if lines else 0


@pytest.mark.parametrize("loader", ["plain", "stateful"])
def test_a_loop_around_a_model_of_transformers_is_killed_and_ends_the_same(tmp_path: Path, loader: str) -> None:
    if loader == "stateful":
        pytest.importorskip("torchdata")
    rng, kills = random.Random(0), 10 if loader == "plain" else 4
    whole = finish(tmp_path / "whole", loader)
    for at in sorted(rng.randrange(1, STEPS) for _ in range(kills)):
        process = start(tmp_path / "killed", loader)
        while logged(tmp_path / "killed") < at and process.poll() is None:
            time.sleep(0.002)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert finish(tmp_path / "killed", loader) == whole
