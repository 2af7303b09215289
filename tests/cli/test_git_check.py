"""`git-check`: what may be committed; with real git, git-lfs and, in `make soak`, the real pre-commit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.cli import Run, done
from tests.support.repositories import commit, git_output, needs_lfs, run_git

HOME = Path(__file__).parents[2]
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 12345\n"


class Runs:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("TRACE"),)


def make_bad(kind: str, path: Path) -> Path:
    torch.save({"w": torch.ones(100), "odd\x1b[31m": torch.ones(2)}, path)
    whole = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(whole[:-300])
    elif kind == "checksum":
        at = whole.index(torch.ones(100).numpy().tobytes())
        path.write_bytes(whole[:at] + b"\x07" + whole[at + 1 :])
    elif kind == "non-finite":
        torch.save({"odd\x1b[31m": torch.tensor([1.0, float("nan")])}, path)
    elif kind == "unsafe-global":
        torch.save({"w": torch.ones(2), "x": Runs()}, path)
    elif kind == "not-a-checkpoint":
        path.write_text("<!doctype html><p>log in</p>")
    elif kind == "lfs-pointer":
        path.write_text(POINTER)
    elif kind == "large-file":
        torch.save({"w": torch.ones(300_000)}, path)
    return path


KINDS = ["truncated", "checksum", "non-finite", "unsafe-global", "not-a-checkpoint", "lfs-pointer", "large-file"]


def codes(run: Run, *words: str | Path) -> tuple[int, list[list[str]]]:
    ran = run("git-check", "--json", *words)
    found = json.loads(ran.out)
    return ran.code, [[each["code"] for each in one["problems"]] for one in found.get("results", [found])]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_problem_is_found_and_can_be_allowed(kind: str, staged: bool, repository: Path, run: Run) -> None:
    torch.save({"w": torch.ones(2)}, "good.pt")
    path = make_bad(kind, repository / "bad.pt")
    if staged:
        git_output("add", "-A")
    assert codes(run, "good.pt", path, "--max-size", "1") == (1, [[], [kind]])
    if kind == "truncated":  # each worker is a process
        assert codes(run, "good.pt", "bad.pt", "--jobs", "2", "--max-size", "1") == (1, [[], [kind]])
    assert codes(run, "bad.pt", "--allow", kind, "--max-size", "1") == (0, [[]])
    ran = run("git-check", "bad.pt", "--max-size", "1")
    assert ran.code == 1 and ran.out.startswith(f"bad.pt: 1 problem\n  {kind}: ") and "\x1b" not in ran.out
    assert not Path("TRACE").exists()


def test_outside_of_a_repository_the_contents_are_checked(tmp_path: Path, run: Run) -> None:
    assert codes(run, make_bad("large-file", tmp_path / "a.pt"), "--max-size", "1") == (0, [[]])
    assert codes(run, make_bad("non-finite", tmp_path / "b.pt")) == (1, [["non-finite"]])
    assert run("git-check", tmp_path / "nothing.pt").code == 2


@needs_lfs
def test_with_lfs(repository: Path, run: Run) -> None:
    git_output("lfs", "install", "--local")
    git_output("lfs", "track", "*.pt")
    path = make_bad("large-file", repository / "big.pt")
    for _ in range(2):  # not staged, and staged
        assert codes(run, path, "--max-size", "1") == (0, [[]])
        git_output("add", "-A")
    path.write_text(git_output("cat-file", "blob", ":big.pt"))  # a clone without the large files
    assert done(run("git-check", path)) == f"{path}: fine, a git-lfs pointer\n"
    path.unlink()
    git_output("config", "--unset", "filter.lfs.clean")
    git_output("config", "--unset", "filter.lfs.process")
    git_output("config", "--unset", "filter.lfs.required")
    make_bad("large-file", path)
    git_output("add", "-A")  # git-lfs is tracked, and not installed
    ran = run("git-check", path, "--max-size", "1")
    assert ran.code == 1 and "git lfs install; git add --renormalize" in ran.out
    git_output("lfs", "install", "--local", "--force")
    git_output("add", "--renormalize", ".")
    assert codes(run, path, "--max-size", "1") == (0, [[]])


# The action -----------------------------------------------------------------------------------------------------------

ACTION = yaml.safe_load((HOME / "examples" / "github-action.yml").read_text())


def run_action(folder: Path, base: str) -> tuple[int, str, str]:
    """Runs the steps of the workflow that are shell, as GitHub does: `bash -e`, and its variables."""
    summary = folder / "summary.md"
    summary.write_text("")
    (folder / "temp").mkdir(exist_ok=True)
    given = {
        "GITHUB_STEP_SUMMARY": str(summary),
        "RUNNER_TEMP": str(folder / "temp"),
        "GITHUB_ACTIONS": "true",
        "CI": "true",
    }
    for step in ACTION["jobs"]["compare"]["steps"]:
        if "run" not in step or step["run"].startswith("pip "):
            continue
        own = {
            key: value.replace("${{ github.event.pull_request.base.sha }}", base)
            for key, value in step.get("env", {}).items()
        }
        assert "${{" not in step["run"], "an expression in a script is a way in"
        words = ["bash", "-e", "-c", step["run"]]
        ended = subprocess.run(words, env=os.environ | given | own, capture_output=True, text=True, check=False)
        assert not ended.stderr or "error[" in ended.stderr, ended.stderr
    return ended.returncode, summary.read_text(), ended.stdout


@needs_lfs
def test_the_action_compares_files_in_lfs(repository: Path, tmp_path: Path) -> None:
    git_output("lfs", "install", "--local")
    git_output("lfs", "track", "*.pt")
    torch.save({"w": torch.ones(3)}, "m.pt")
    commit("base")
    torch.save({"w": torch.zeros(3)}, "m.pt")
    commit("change")
    code, summary, _ = run_action(tmp_path, git_output("rev-parse", "HEAD~").strip())
    assert code == 0 and "differ: 1 of 1 tensor changed" in summary
    assert run_git("status", "--porcelain").stdout == ""
