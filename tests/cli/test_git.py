"""`git-setup`: git itself is the judge of the configuration, the text that it compares, and the cache. `git-check`:
what may be committed; with real git and git-lfs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import ckptool
from tests.support.cli import Run, done
from tests.support.looped import looped
from tests.support.repositories import commit, git_output, needs_lfs, run_git

LFS_LINES = b"*.pt filter=lfs diff=lfs merge=lfs -text\n*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
CONTENTS = {"none": None, "no end": b"*.txt text", "line": b"*.txt text\n", "blank": b"\n\n", "lfs": LFS_LINES}
CONTENTS |= {"crlf": b"*.txt text\r\n*.bat eol=crlf\r\n", "bytes": b"\xff\xfe \x00 x\n"}
CONFIG = '# mine\n[diff "other"]\n\tbinary = true ; note\n[alias]\n\tx = y\n'


def state(value: float = 1.0, **more: object) -> dict[str, object]:
    return {"state_dict": {"a.weight": torch.full((2, 3), value), "b.weight": torch.ones(4)}, "epoch": 3, **more}


def textconv_runs(*words: str) -> tuple[str, int]:
    """The output of a git command, and how often it started the text conversion."""
    found = run_git(*words, GIT_TRACE="1")
    assert found.returncode == 0, found.stderr
    return found.stdout, len(re.findall(r"run_command:.*--textconv", found.stderr))


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("content", CONTENTS)
def test_remove_leaves_the_bytes_that_were_there(content: str, everywhere: bool, repository: Path, run: Run) -> None:
    home = Path(os.environ["HOME"])
    flags = ["--global"] if everywhere else []
    attributes = home / ".config" / "git" / "attributes" if everywhere else repository / ".gitattributes"
    configuration = home / ".gitconfig" if everywhere else repository / ".git" / "config"
    configuration.write_text(configuration.read_text() + CONFIG)
    if (before := CONTENTS[content]) is not None:
        attributes.parent.mkdir(parents=True, exist_ok=True)
        attributes.write_bytes(before)
    kept = configuration.read_bytes()
    assert "would set up" in done(run("git-setup", *flags, "-n"))
    assert configuration.read_bytes() == kept and attributes.exists() == (before is not None)
    done(run("git-setup", *flags))
    both = configuration.read_bytes(), attributes.read_bytes()
    assert both[1].startswith(before or b"") and git_output("check-attr", "diff", "x/y.pt").endswith("ckptool\n")
    assert done(run("git-setup", *flags)) == "git-setup: set up already\n"
    assert (configuration.read_bytes(), attributes.read_bytes()) == both
    assert "would remove" in done(run("git-setup", *flags, "--remove", "-n"))
    assert (configuration.read_bytes(), attributes.read_bytes()) == both
    done(run("git-setup", *flags, "--remove"))
    assert configuration.read_bytes() == kept
    ended = before and before + b"\n" * (content == "no end")  # a line without its end has it now
    assert (attributes.read_bytes() if attributes.exists() else None) == ended
    assert done(run("git-setup", *flags, "--remove")) == "git-setup: nothing to remove\n"


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(["add", "setup", "remove", "top", "lfs", "inside"]), min_size=1, max_size=6))
def test_lines_of_others_stay_whatever_is_done_in_between(steps: list[str], repository: Path, run: Run) -> None:
    path = repository / ".gitattributes"
    path.unlink(missing_ok=True)
    theirs: list[str] = []
    for number, step in enumerate(steps):
        line = f"*.x{number} text\n" if step != "lfs" else "*.pt filter=lfs diff=lfs merge=lfs -text\n"
        now = path.read_text() if path.exists() else ""
        if step in ("add", "lfs"):
            path.write_text(now + line)
            theirs.append(line)
        elif step == "inside":
            if "*.npz diff=ckptool\n" in now:  # as `git lfs track` does it
                path.write_text(now.replace("*.npz diff=ckptool\n", line))
                theirs.append(line)
        elif step == "top":
            path.write_text(line + now)
            theirs.insert(0, line)
        else:
            done(run("git-setup", *(["--remove"] if step == "remove" else [])))
        if step == "setup":
            found = git_output("check-attr", "diff", "filter", "--", "m.pt")
            assert "diff: ckptool" in found and ("filter: lfs" in found) == any("lfs" in line for line in theirs)
    done(run("git-setup", "--remove"))
    assert sorted((path.read_text() if path.exists() else "").splitlines(True)) == sorted(theirs)


def test_attributes_that_are_a_link_are_told_as_git_follows_none(repository: Path, run: Run) -> None:
    (repository / "real").write_text("*.pt diff=ckptool\n")
    (repository / ".gitattributes").symlink_to("real")
    assert "unspecified" in git_output("check-attr", "diff", "--", "m.pt")
    ran = run("git-setup")
    assert ran.code == 2 and "is a link" in ran.err
    assert (repository / "real").read_text() == "*.pt diff=ckptool\n"
    assert not run_git("config", "--local", "--get-regexp", "ckptool").stdout


def test_a_subfolder_another_file_of_attributes_and_no_repository(
    repository: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository.parent)
    found = run("git-setup")
    assert found.code == 2 and "not a git repository" in found.err
    (repository / "sub").mkdir()
    monkeypatch.chdir(repository / "sub")
    done(run("git-setup"))
    assert (repository / ".gitattributes").exists() and not (repository / "sub" / ".gitattributes").exists()
    done(run("git-setup", "--remove"))
    git_output("config", "--global", "core.attributesFile", "~/mine")
    done(run("git-setup", "--global"))
    assert b"*.pt diff=ckptool" in (Path(os.environ["HOME"]) / "mine").read_bytes()
    done(run("git-setup", "--global", "--remove"))
    git_output("config", "--global", "core.attributesFile", "mine")
    before = git_output("config", "--list")
    for words in (["-n"], []):
        found = run("git-setup", "--global", *words)
        assert found.code == 2 and "a different file in each repository" in found.err
    assert git_output("config", "--list") == before and not Path("mine").exists()


# What git shows -------------------------------------------------------------------------------------------------------


def test_git_diff_names_the_changed_tensors_and_the_second_time_from_the_cache(repository: Path, run: Run) -> None:
    done(run("git-setup"))
    torch.save(state(), "m.pt")
    commit("one")
    torch.save(state(2.0, epoch=4), "m.pt")
    commit("two")
    first, runs = textconv_runs("diff", "HEAD~", "HEAD")
    changed = [line for line in first.splitlines() if re.match(r"[-+][^-+]", line)]
    digest = {value: ckptool.verify(path(value), digest=True).digest.tensors[0].sha256[:12] for value in (1.0, 2.0)}
    assert changed == [
        "-epoch  3",
        f"-state_dict/a.weight  f32 [2, 3]  {digest[1]}",
        "+epoch  4",
        f"+state_dict/a.weight  f32 [2, 3]  {digest[2]}",
    ]
    assert runs == 2
    assert textconv_runs("diff", "HEAD~", "HEAD") == (first, 0)
    assert textconv_runs("log", "-p", "--", "m.pt")[1] == 0
    assert "Binary files" in git_output("diff", "--no-textconv", "HEAD~", "HEAD")
    tool = git_output("difftool", "-y", "--tool=ckptool", "HEAD~", "HEAD")
    assert "state_dict/a.weight" in tool and "differ: 1 of 2 tensors changed" in tool
    done(run("git-setup", "--remove"))
    assert "Binary files" in git_output("diff", "HEAD~", "HEAD")
    assert run_git("rev-parse", "-q", "--verify", "refs/notes/textconv/ckptool").returncode == 1


def path(value: float) -> Path:
    """A state dict of its own with the tensors of `state(value)`."""
    torch.save(state(value)["state_dict"], "../own.pt")
    return Path("../own.pt")


def shown(file: Path | str, run: Run) -> list[str]:
    return done(run("git-setup", "--textconv", file)).splitlines()


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint8]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.dictionaries(
        st.text("ab.\n\x1b é", min_size=1, max_size=6), st.tuples(st.sampled_from(DTYPES), st.booleans())
    )
)
def test_a_conversion_is_no_change(kinds: dict[str, tuple[torch.dtype, bool]], tmp_path: Path, run: Run) -> None:
    tensors = {
        name: torch.arange(6).reshape(2, 3).to(dtype).t() if turned else torch.arange(6).to(dtype)
        for name, (dtype, turned) in kinds.items()
    }
    torch.save(tensors, tmp_path / "a.pt")
    torch.save(dict(reversed(tensors.items())), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "a.safetensors")
    lines = shown(tmp_path / "a.pt", run)
    assert len(lines) == max(len(tensors), 1) and lines == sorted(lines)
    assert shown(tmp_path / "old.pt", run) == lines
    assert not tensors or shown(tmp_path / "a.safetensors", run) == lines
    if tensors:
        ckptool.convert(tmp_path / "a.pt", tmp_path / "ours.safetensors", overwrite=True)
        assert shown(tmp_path / "ours.safetensors", run) == lines


# A value of each kind, and another of it.
ENTRIES: dict[str, tuple[object, object]] = {
    "text": ("x" * 5000, "x" * 4999 + "y"),
    "bytes": (b"a" * 40, b"a" * 39 + b"b"),
    "array": (numpy.ones((2, 3)), numpy.zeros((2, 3))),
    "texts": (numpy.array(["a", "b"]), numpy.array(["a", "c"])),
    "number": (numpy.float64(3), numpy.float64(4)),
    "list": ([1, {"b": (2.5, None)}], [1, {"b": (2.5, False)}]),
    "object": (torch.Size([2]), torch.Size([3])),
    "lines": ("a\nb\x1b[31m", "a\nb\x1b[32m"),
    "escaped": ("a\nb", "a\\nb"),
    "set": ({"a": {1}}, {"a": {2}}),
}


@looped("kind", ENTRIES)
def test_every_change_of_a_value_is_seen_and_only_in_its_lines(kind: str, tmp_path: Path, run: Run) -> None:
    shared = {"x": 1}  # shown once: before the others, and so are the versions of modules
    first = {"weights": nn.Linear(2, 2).state_dict(), "shared": shared, "again": shared}
    values = first | {name: value for name, (value, _) in ENTRIES.items()}
    torch.save(values, tmp_path / "a.pt")
    torch.save({**values, kind: ENTRIES[kind][1]}, tmp_path / "b.pt")
    one, two = shown(tmp_path / "a.pt", run), shown(tmp_path / "b.pt", run)
    changed = set(one) ^ set(two)
    assert len(changed) == 2 and all(line.startswith(kind) for line in changed)
    assert all(len(line) < 300 and line.isprintable() for line in one)


def test_what_there_is_no_room_to_list_is_seen(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptool.analysis.inspect.MAX_ENTRIES", 2)
    texts = []
    for last in (1, 2):
        torch.save({"a": 1, "b": set(), "c": 3, "d": last}, tmp_path / "a.pt")
        texts.append(shown(tmp_path / "a.pt", run))
    assert texts[0] != texts[1] and texts[0][1].startswith("b  ") and "and 2 more entries" in texts[0][-1], texts


# What is no checkpoint ------------------------------------------------------------------------------------------------


def test_a_cut_file_is_told_and_its_name_is_not(tmp_path: Path, run: Run) -> None:
    torch.save(state(), tmp_path / "m.pt")
    whole = (tmp_path / "m.pt").read_bytes()
    for share in range(0, 10, 2):
        (tmp_path / "cut.pt").write_bytes(whole[: len(whole) * share // 10])
        what, content = shown(tmp_path / "cut.pt", run)
        assert re.fullmatch(r"[a-z-]+: .*", what) and re.fullmatch(r"[\d,]+ bytes  [0-9a-f]{12}", content), share
        assert "cut.pt" not in what


def test_a_text_is_shown_as_it_is(tmp_path: Path, run: Run) -> None:
    (tmp_path / "pt_BR.pt").write_text("olá\tmundo\n\x1b[31mred\n")
    assert shown(tmp_path / "pt_BR.pt", run) == ["olá    mundo", r"\x1b[31mred"]
    (tmp_path / "image.pt").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert shown(tmp_path / "image.pt", run)[0] == "not-a-checkpoint: this file is a PNG image, whatever its name says"


# git-lfs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_lfs(repository: Path, run: Run) -> Path:
    """A repository with two versions of a checkpoint in git-lfs."""
    git_output("lfs", "install", "--local")
    git_output("lfs", "track", "*.pt")
    done(run("git-setup"))
    torch.save(state(), "m.pt")
    commit("one")
    torch.save(state(2.0), "m.pt")
    commit("two")
    return repository


@needs_lfs
def test_files_in_lfs_stay_there_and_are_compared(in_lfs: Path) -> None:
    assert git_output("cat-file", "blob", "HEAD:m.pt").startswith("version https://git-lfs")
    said = git_output("check-attr", "-a", "m.pt")
    assert all(
        f"{name}: {value}\n" in said for name, value in (("diff", "ckptool"), ("filter", "lfs"), ("merge", "lfs"))
    )
    for environment in ({}, {"GIT_LFS_SKIP_SMUDGE": "1"}):  # then git gives us the pointer, and the file is found
        git_output("update-ref", "-d", "refs/notes/textconv/ckptool")
        text = git_output("log", "-p", "--", "m.pt", **environment)
        assert len(re.findall(r"^[-+]state_dict/a.weight  f32", text, re.MULTILINE)) == 3, text


@needs_lfs
def test_a_pointer_says_what_it_points_to_and_how_to_get_it(in_lfs: Path) -> None:
    objects = shutil.move(in_lfs / ".git" / "lfs" / "objects", in_lfs / "away")
    pointer = git_output("cat-file", "blob", "HEAD~:m.pt")
    text = git_output("diff", "HEAD~", "HEAD", GIT_LFS_SKIP_SMUDGE="1")
    assert f"-oid sha256:{re.search('[0-9a-f]{64}', pointer)[0]}" in text and "git lfs pull" in text
    shutil.copytree(objects, in_lfs / ".git" / "lfs" / "objects", dirs_exist_ok=True)
    command = re.search("git lfs pull; (git update-ref .*)", text)[1]
    subprocess.run(shlex.split(command), check=True)
    assert "state_dict/a.weight" in git_output("diff", "HEAD~", "HEAD")


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
def test_each_problem_is_found_and_can_be_allowed(
    kind: str, staged: bool, repository: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.chdir("/")  # which repository it is in depends on the file alone
    assert codes(run, path, "--max-size", "1") == (1, [[kind]])
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    ran = run("git-check", path, "--max-size", "1")
    assert ran.code == 2 and f"  git config --global --add safe.directory {shlex.quote(str(repository))}\n" in ran.err


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
