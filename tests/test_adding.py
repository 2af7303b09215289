"""The verb of docs/adding.md: added to a copy of the package, it is one file and one line."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import torch

HOME = Path(__file__).parents[1]


def test_a_verb_is_one_file_and_one_line(tmp_path: Path) -> None:
    source, line = re.findall(r"```py\n(.*?)```", (HOME / "docs" / "adding.md").read_text(), re.DOTALL)[:2]
    package = tmp_path / "ckptool"
    shutil.copytree(HOME / "ckptool", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "verbs" / "count.py").write_text(source)
    table = package / "commands.py"
    table.write_text(table.read_text().replace("[look takes]\n", f"[look takes]\n{line}", 1))
    torch.save({"a": torch.ones(3), "b": {"c": torch.ones(2, dtype=torch.float16)}}, tmp_path / "m.pt")

    def run(*words: str, code: int = 0) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        program = [sys.executable, *words] if words[0] == "-c" else [sys.executable, "-m", "ckptool", *words]
        ended = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == code, ended.stderr
        return ended.stdout or ended.stderr

    assert run("count", "m.pt") == "m.pt: 2 tensors, 16 B\n"
    assert run("count", "m.pt#b", "m.pt", "-q", "--dtype", "f16") == "1\n1\n"
    assert "error[no-match]: m.pt has no tensors of the dtype i8" in run("count", "m.pt", "--dtype", "i8", code=1)
    assert "--dtype DTYPE" in run("count", "--help") and "Count the tensors" in run("--help")
    assert "--dtype" in run("--complete", "fish", "ckptool count --d")
    found = json.loads(run("count", "m.pt", "--json"))
    assert found == {"schema": "ckptool.count/2", "file": "m.pt", "tensors": 2, "bytes": 16}
    document = json.loads(run("schema", "count"))
    jsonschema.Draft202012Validator(document).validate(found)
    assert document["$defs"]["count"]["properties"]["bytes"] == {
        "type": "integer",
        "description": "of their values, in bytes",
    }
    assert run("-c", "import ckptool; print(ckptool.count('m.pt').tensors)") == "2\n"
