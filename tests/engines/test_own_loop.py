"""`ckptool.Run` with models of transformers, torchdata's StatefulDataLoader, and environments of gymnasium."""

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
SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 40


def start(script: str, folder: Path, *words: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, str(SCRIPTS / script), str(folder), str(STEPS), *words]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(script: str, folder: Path, *words: str) -> tuple[str, bytes]:
    process = start(script, folder, *words)
    _, words_of_it = process.communicate(timeout=300)
    assert process.returncode == 0, words_of_it
    newest = max((folder / "checkpoints").glob("*.pt"))
    return newest.name, newest.read_bytes()


def logged(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines()[-1:] if path.exists() else []
    return int(json.loads(lines[0])["step"]) if lines else 0


LOOPS = {
    "transformers": ("own_loop.py", "plain", "transformers", 10),
    "stateful": ("own_loop.py", "stateful", "torchdata", 4),
    "reinforce": ("gymnasium_loop.py", "reinforce", "gymnasium", 6),
    "ppo": ("gymnasium_loop.py", "ppo", "gymnasium", 6),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_around_a_library_is_killed_and_ends_the_same(tmp_path: Path, name: str) -> None:
    script, words, library, kills = LOOPS[name]
    pytest.importorskip(library)
    rng, whole = random.Random(0), finish(script, tmp_path / "whole", words)
    for at in sorted(rng.randrange(1, STEPS) for _ in range(kills)):
        process = start(script, tmp_path / "killed", words)
        while logged(tmp_path / "killed") < at and process.poll() is None:
            time.sleep(0.002)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert finish(script, tmp_path / "killed", words) == whole
