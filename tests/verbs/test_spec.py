"""`spec`: what is written, what it is good for, and what is not taken for one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool import formats
from ckptool.analysis.targets import Target
from ckptool.errors import Ambiguous, CkptoolError, Conflict, Corrupt, NotACheckpoint, Unsupported
from ckptool.verbs._options import find_target
from fixtures.make import TiedLanguageModel, make
from tests.support.errors import refused, three_parts
from tests.support.files import saved
from tests.support.looped import looped

GOOD: dict[str, Any] = {
    "schema": "ckptool.spec/1",
    "kinds": "stated",
    "tensors": [
        {"name": "a.weight", "dtype": "f32", "shape": [2, 3], "kind": "parameter"},
        {"name": "b.weight", "dtype": "f32", "shape": [2, 3], "kind": "parameter"},
        {"name": "count", "dtype": "i64", "shape": [], "kind": "buffer"},
    ],
    "ties": [["a.weight", "b.weight"]],
}


def facts(target: Target) -> list[tuple[Any, ...]]:
    return [(e.name, e.dtype, e.shape, e.kind, e.tied_to) for e in target.tensors.values()]


def test_a_spec_says_the_same_as_what_it_is_of(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("from fixtures.make import TiedLanguageModel, mlp\n")
    for name in (f"{tmp_path}/model.py:TiedLanguageModel", f"{tmp_path}/model.py:mlp", make("training.pt", tmp_path)):
        made = ckptool.spec(name, tmp_path / "spec.json", overwrite=True)
        again = find_target(tmp_path / "spec.json")
        assert facts(again) == facts(made.target) == facts(find_target(name))
        assert again.kinds_known == made.target.kinds_known
        assert again.values is None and again.kind == "spec"
        first = (tmp_path / "spec.json").read_bytes()
        ckptool.spec(tmp_path / "spec.json", tmp_path / "copy.json", overwrite=True)
        assert (tmp_path / "copy.json").read_bytes() == first


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    file = saved(TiedLanguageModel().state_dict(), tmp_path / "tied.pt")
    assert ckptool.spec(file, tmp_path / "spec.json").output == str(tmp_path / "spec.json")
    refused("output-exists", tmp_path, lambda: ckptool.spec(file, tmp_path / "spec.json"))
    assert ckptool.spec(file, tmp_path / "dry.json", dry_run=True).dry_run and not (tmp_path / "dry.json").exists()


def changed(**more: Any) -> dict[str, Any]:
    return {**GOOD, **more}


def with_tensor(**more: Any) -> dict[str, Any]:
    return changed(tensors=[*GOOD["tensors"], {"name": "d", "dtype": "f32", "shape": [1], "kind": "parameter", **more}])


@looped(
    ("spec", "kind", "words"),
    [
        (changed(schema="ckptool.spec/2"), Unsupported, "an unsupported version: ckptool.spec/2"),
        (changed(schema="ckptool.spec/\x1b[31m"), Unsupported, r"an unsupported version: ckptool.spec/\\x1b"),
        (changed(tensors={}), Corrupt, "no list of tensors"),
        (changed(ties=None), Corrupt, "no list of ties"),
        (changed(tensors=[1]), Corrupt, "tensor 0 has no name"),
        (with_tensor(shape="2"), Corrupt, r"tensor 3 \(d\) has no shape"),
        (with_tensor(shape=[-1]), Corrupt, "has no shape"),
        (with_tensor(shape=[True]), Corrupt, "has no shape"),
        (with_tensor(shape=[1 << 70]), Corrupt, "has no shape"),
        (with_tensor(dtype="f33"), Corrupt, "unknown dtype 'f33'"),
        (with_tensor(dtype=None), Corrupt, "unknown dtype"),
        (with_tensor(kind="weight"), Corrupt, "neither a parameter nor a buffer"),
        (with_tensor(name="count"), Corrupt, "'count' twice"),
        (changed(ties=[["a.weight"]]), Corrupt, "ties names"),
        (changed(ties=[["a.weight", "z"]]), Corrupt, "ties names"),
        (changed(ties=[["a.weight", "count"]]), Corrupt, "cannot be tied to"),
        (changed(ties=[["a.weight", "a.weight"]]), Corrupt, "cannot be tied to"),
        (changed(ties=[["a.weight", "b.weight"], ["b.weight", "a.weight"]]), Corrupt, "cannot be tied to"),
    ],
)  # fmt: skip
def test_a_spec_that_is_none(tmp_path: Path, spec: dict[str, Any], kind: type[CkptoolError], words: str) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    with pytest.raises(kind, match=words) as found:
        find_target(tmp_path / "spec.json")
    three_parts(found.value) if found.value.why or found.value.fix else None
    assert found.value.code in ("unsupported", "corrupt") and "\x1b" not in str(found.value)


def test_cut_short_anywhere(tmp_path: Path) -> None:
    whole = json.dumps(GOOD).encode()
    for end in range(1, len(whole)):
        (tmp_path / "spec.json").write_bytes(whole[:end])
        with pytest.raises((Corrupt, NotACheckpoint)) as found:
            find_target(tmp_path / "spec.json")
        three_parts(found.value)
        assert found.type is NotACheckpoint or found.value.fix.startswith("Make it again: ckptool spec")
    (tmp_path / "spec.json").write_bytes(whole[:-1] + b', "ties": []}')
    refused(Ambiguous, tmp_path, lambda: find_target(tmp_path / "spec.json"))


@looped(
    "write",
    [
        lambda file, out, **more: ckptool.spec(f"{file}#model", out, **more),
        lambda file, out, **more: ckptool.report(file, out=out, **more),
        lambda file, out, **more: ckptool.verify(file, write_digest=out, **more),
        lambda file, out, **more: ckptool.find_rules(f"{file}#other", f"{file}#model", out, **more),
        lambda file, out, **more: ckptool.warm_start(f"{file}#other", f"{file}#model", suggest=out, **more),
    ],
)
def test_no_text_takes_the_name_of_a_checkpoint(write: Any, tmp_path: Path) -> None:
    weights = {"a.weight": torch.ones(2, 2), "b.weight": torch.zeros(3, 3)}
    renamed = {key.replace("weight", "w"): value for key, value in weights.items()}
    file = saved({"model": weights, "other": renamed}, tmp_path / "m.pt")
    (tmp_path / "link.txt").symlink_to(file)
    for suffix in formats.SUFFIXES:
        with pytest.raises(Conflict, match="has the name of a checkpoint"):
            write(file, tmp_path / f"out{suffix.upper()}")
    for name in ("m.pt", "link.txt"):
        with pytest.raises(Conflict):
            write(file, tmp_path / name, overwrite=True)
    assert torch.load(file)["model"].keys() == weights.keys() and len(list(tmp_path.iterdir())) == 2
