"""The adapters in two processes: resumed inside an epoch they end with the same bytes, and on one they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.killed_scripts import Scripts

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("name", ["accelerate_loop.py", "lightning_fit.py", "trainer.py"])
def test_two_processes_of_a_data_set_that_draws(tmp_path: Path, name: str) -> None:
    options = {"draws": True} | ({"devices": 2, "stateful": False} if name == "lightning_fit.py" else {})
    scripts = Scripts(name, tmp_path / "scripts")
    try:
        for out, ends in {"unbroken": [20], "broken": [7, 20]}.items():
            for steps in ends:
                scripts.finish(tmp_path / out, steps, options=options, world=2)
        files = [next((tmp_path / out).glob("final*")) for out in ("unbroken", "broken")]
        files = [path / "model.safetensors" if path.is_dir() else path for path in files]
        states = [path.read_bytes() if path.suffix != ".pt" else repr(torch.load(path)) for path in files]
        assert states[0] == states[1]
        answer = scripts.run(
            tmp_path / "broken", 30, options={**options, **({"devices": 1} if "devices" in options else {})}
        )
        assert answer["status"] == 1 and "was saved by 2 processes, and this run has 1" in answer["stderr"]
    finally:
        scripts.close()
