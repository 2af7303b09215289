"""`ckptool.Run` in the shapes of public scripts: killed anywhere and started again, they end with the same files."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.fork_server import ForkServer
from tests.support.looped import sliced

HOME = Path(__file__).parents[2]
LOOPS = HOME / "examples" / "loops"
BLOCKS = re.findall(r"```python\n(.*?)```", (HOME / "docs" / "own-loop.md").read_text(), re.DOTALL)
# Of each script in examples/loops how many epochs or steps it makes, where it is killed once and where often.
SIZES = {
    "dcgan": (1, 3),
    "imagenet": (2, 4),
    "mingpt": (24, 80),
    "mnist": (2, 4),
    "nanogpt": (16, 60),
    "ppo": (8, 30),
    "reinforce": (24, 120),
    "vae": (2, 4),
    "wgan_gp": (2, 4),
    "word_language_model": (2, 5),
}
SIGNALS = [*[signal.SIGKILL] * 4, signal.SIGTERM, signal.SIGINT]
# Done, killed, stopped after a save, ended by the system: before the loop has begun, or after its end.
ENDS = (0, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    log = tmp_path_factory.mktemp("loops") / "stderr"
    with ForkServer(str(log), module="tests.support.killed_loops", cwd=str(HOME)) as server:
        yield server


def saved(folder: Path) -> dict[str, object]:
    """What a run leaves: its checkpoints, what their sidecars say of them, its metrics, the script's own files."""
    found: dict[str, object] = {path.name: path.read_bytes() for path in folder.glob("metrics.jsonl")}
    found |= {path.name: path.read_bytes() for path in (folder / "checkpoints").iterdir() if path.suffix != ".json"}
    for path in (folder / "checkpoints").glob("*.json"):
        facts = json.loads(path.read_bytes())
        found[path.name] = {name: facts.get(name) for name in ("step", "epoch", "loss", "metrics", "sha256", "stop")}
    return found | {path.name: path.read_bytes() for path in Path(f"{folder}-samples").glob("*")}


def agree(folder: Path, whole: Path) -> None:
    ours, theirs = saved(folder), saved(whole)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def is_killed(server: ForkServer, words: list[str], after: float, number: int) -> bool:
    """Starts the script and sends it a signal after so many seconds. False where it has ended before."""
    group = server.start(words)
    until = time.monotonic() + after
    while time.monotonic() < until and not server.ended():
        time.sleep(0.001)
    came = not server.ended()
    if came:
        with suppress(ProcessLookupError):  # a signal to all of them would end the workers that a script validates with
            (os.killpg if number == signal.SIGKILL else os.kill)(group, number)
    code = server.wait()
    assert code in ENDS, f"exit code {code}: {server.stderr_tail()}"
    return came


def trial(server: ForkServer, tmp_path: Path, script: Path, size: int, kills: int) -> None:
    """Kills runs of a script at random times, each where the last one was resumed, until so many kills came; all that
    reach their end leave what a run leaves that was never killed."""
    rng, whole = random.Random(script.stem), tmp_path / "whole"
    begun = time.monotonic()
    assert server.run([str(script), str(whole), str(size)]) == 0, server.stderr_tail()
    seconds, run = time.monotonic() - begun, 0
    words = [str(script), str(tmp_path / f"killed-{run}"), str(size)]
    while kills:
        if is_killed(server, words, seconds * rng.random() ** 2, rng.choice(SIGNALS)):
            kills -= 1
        else:
            agree(tmp_path / f"killed-{run}", whole)
            run += 1
            words[1] = str(tmp_path / f"killed-{run}")
    assert server.run(words) == 0, server.stderr_tail()
    agree(tmp_path / f"killed-{run}", whole)


OFTEN = [pytest.param(name, 1, marks=pytest.mark.soak) for name in SIZES]


@pytest.mark.parametrize(("name", "often"), [*sliced(((name, 0) for name in SIZES), 6), *OFTEN])
def test_a_loop_that_is_killed_ends_with_the_same_files(
    server: ForkServer, tmp_path: Path, name: str, often: int
) -> None:
    trial(server, tmp_path, LOOPS / f"{name}.py", SIZES[name][often], kills=(1, 20)[often])


def test_every_script_is_killed() -> None:
    assert {path.stem for path in LOOPS.glob("*.py")} == SIZES.keys()


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_loop_of_the_documentation_that_is_killed(server: ForkServer, tmp_path: Path, number: int) -> None:
    script = tmp_path / "block.py"
    script.write_text(re.sub(r'"runs/\w+"', "sys.argv[1]", f"import sys\n{BLOCKS[number]}"))
    trial(server, tmp_path, script, size=0, kills=6)


@pytest.mark.parametrize("every", [241, pytest.param(3, marks=pytest.mark.soak)])
def test_a_loop_killed_at_every_file_system_event_goes_on(every: int, server: ForkServer, tmp_path: Path) -> None:
    """Before each event, and in the middle of each write, of the run's folder, from its making to its end."""
    script, whole = str(LOOPS / "wgan_gp.py"), tmp_path / "whole"
    assert server.run([script, str(whole), "1"]) == 0, server.stderr_tail()
    for number in range(every // 2, 500, every):
        folder = tmp_path / f"event-{number}"
        words = [script, str(folder), "1"]
        code = server.run(words, crash={"folder": str(folder), "at": number})
        if code == 0:
            break
        assert code == -signal.SIGKILL, server.stderr_tail()
        assert server.run(words) == 0, server.stderr_tail()
        agree(folder, whole)
    else:
        pytest.fail("the run has more events than were tried")
