"""`examples/quickstart.ipynb`, run by a real kernel: its stored outputs are those that it gives now.

CKPTOOL_UPDATE_README=1 pytest tests/test_notebook.py     stores them
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"

# A process of its own: what the kernel's packages warn of is no concern of these tests.
RUNNER = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": sys.argv[3]}},
               record_timing=False).execute()
nbformat.write(notebook, sys.argv[2])
"""

# What differs from one machine and version to the next: sizes and ages, numbers that were learnt, the bars of curves.
VOLATILE = (
    (r"[\d.,]+ (?:[kMG]?B|ms|s|min|h)\b", "N"),
    (r"-?\d+\.\d+(?:e-?\d+)?", "N"),
    (r"[⠀-⣿]+", "~"),
    (r"width:[^\"]*em", "width"),
    (r"[ \n]+", " "),
)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("notebook")
    out = NOTEBOOK if os.environ.get("CKPTOOL_UPDATE_README") else folder / "executed.ipynb"
    (folder / "work").mkdir()
    command = [sys.executable, "-c", RUNNER, str(NOTEBOOK), str(out), str(folder / "work")]
    environment = {**os.environ, "JUPYTER_PLATFORM_DIRS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    notebook: dict[str, Any] = json.loads(out.read_text())
    return notebook


def outputs(notebook: dict[str, Any]) -> list[tuple[str, Any]]:
    """Each code cell with what it gives, without what differs between machines."""
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            text = json.dumps([{**each, "execution_count": None} for each in cell["outputs"]], ensure_ascii=False)
            for pattern, neutral in VOLATILE:
                text = re.sub(pattern, neutral, text.replace("\\n", "\n"))
            found.append(("".join(cell["source"]), text))
    return found


@pytest.mark.long("a kernel runs the notebook")
def test_the_stored_outputs_are_those_that_it_gives(executed: dict[str, Any]) -> None:
    stored = json.loads(NOTEBOOK.read_text())
    assert sum(bool(cell.get("outputs")) for cell in stored["cells"]) >= 6
    for was, now in zip(outputs(stored), outputs(executed), strict=True):
        assert was == now


def test_it_tells_of_no_machine_and_has_no_script(executed: dict[str, Any]) -> None:
    text = NOTEBOOK.read_text()
    assert not re.search(r"(?<![\w.<>])/(?:home|root|tmp|work|Users|usr|var|private)\b", text)
    assert "<script" not in text and len(text) < 100_000
    assert {cell["cell_type"] for cell in executed["cells"]} == {"markdown", "code"}
    outputs = [each for cell in executed["cells"] for each in cell.get("outputs", ())]
    told = [line for each in outputs if each.get("name") == "stderr" for line in each["text"]]
    assert [line.partition(" holds ")[0] for line in told] == ["ckptool: the checkpoint of step 10"]
