"""Saving in the background keeps at most one copy of the state, without waiting for garbage to be collected."""

from __future__ import annotations

import gc
import hashlib
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from ckptool.training import run_folder
from ckptool.training.parallel import World
from ckptool.training.saving import Saver, state_digest, to_cpu
from ckptool.training.store import Retention, commit_file
from tests.support.small_runs import CONV, GAN, IMAGES, run_to_end, scheduled

SEVERAL: dict[str, dict[str, Any]] = {
    "mlp": {"optim": scheduled("warmup_cosine"), "train": {"steps": 16, "ema": 0.9}},
    "conv, fp16": {"data": IMAGES, "models": {"main": CONV}, "train": {"steps": 16, "precision": "fp16"}},
    "gan": {**GAN, "train": {"steps": 16}},
}


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ():
        yield from tensors(part)


@pytest.mark.parametrize("name", SEVERAL)
def test_copies_of_the_state_are_gone_with_their_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before a copy is made, none of an earlier one is left; and none is at the end. The collector of garbage does not
    run."""
    copies, left = [], []

    def copied(tree: Any, **options: Any) -> Any:
        left.append(sum(any(each() is not None for each in copy) for copy in copies))
        copy = to_cpu(tree, **options)
        copies.append([weakref.ref(tensor) for tensor in tensors(copy)])
        return copy

    monkeypatch.setattr("ckptool.training.saving.to_cpu", copied)
    gc.collect()
    gc.disable()
    try:
        run_to_end(tmp_path, "save.every=1", "save.async=true", "eval.every=5", **SEVERAL[name])
        assert left == [0] * 16
        assert not any(each() is not None for copy in copies for each in copy)
    finally:
        gc.enable()


def odd_state() -> dict[str, Any]:
    """Tensors that share memory, in part and whole; of several types, layouts and signs; and plain values."""
    base = torch.arange(60.0)
    return {
        "views": [base[:10], base[5:20].view(3, 5).t(), base],
        "tied": {"a": base, "b": torch.nn.Parameter(base)},
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(7, dtype=torch.int16),
        "half": torch.ones(3, 3, dtype=torch.bfloat16).expand(2, 3, 3),
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.tensor([1 + 2j]).conj(),
        "plain": (1, "text", None),
    }


def test_a_copy_is_saved_as_what_it_is_a_copy_of(tmp_path: Path) -> None:
    """Also one that was made into the memory of another; whatever was written into the state since."""
    memory, state = list[torch.UntypedStorage](), odd_state()
    to_cpu({"other": torch.zeros(60), "more": torch.zeros(7, dtype=torch.int16)}, copied=True, memory=memory)
    for name, tree in (("live", state), ("copy", to_cpu(state, copied=True, memory=memory))):
        commit_file(to_cpu(tree), str(tmp_path / name), str(tmp_path / f"{name}.json"), {"step": 1}, {})
        state["views"][2].zero_()
    assert (tmp_path / "live").read_bytes() == (tmp_path / "copy").read_bytes()


def test_a_copy_of_a_tensor_that_is_made_of_others() -> None:
    """It has a storage without bytes; its parts are copied."""
    made = TwoTensor(torch.ones(3), torch.zeros(3))
    copy = to_cpu({"made": made}, copied=True)["made"]
    made.a.zero_()
    assert type(copy) is TwoTensor and copy.a.tolist() == [1, 1, 1] and copy.b.tolist() == [0, 0, 0]


def test_the_memory_of_a_copy_serves_the_next(tmp_path: Path) -> None:
    """Allocated once; what has another size gets its own, and what is not needed is given back."""
    memory = list[torch.UntypedStorage]()

    def places(state: dict[str, Any]) -> set[int]:
        copy = to_cpu(state, copied=True, memory=memory)
        return {tensor.data_ptr() for tensor in tensors(copy) if tensor.layout is torch.strided}

    first = places({"a": torch.zeros(1000), "b": torch.zeros(1000), "c": torch.zeros(9)})
    assert places({"c": torch.zeros(9), "b": torch.ones(1000), "a": torch.ones(1000)}) == first
    assert len(places({"a": torch.zeros(1000), "b": torch.zeros(5000)}) & first) == 1
    assert [storage.nbytes() for storage in memory] == [4000, 20_000]


def test_a_save_in_the_background_has_the_state_of_its_step(tmp_path: Path) -> None:
    """Training goes on while it is written: the thread waits until the state has changed. At the end no memory is
    left, without the collector of garbage."""
    changed = threading.Event()

    class Late(Saver):
        def _commit(self, *arguments: Any) -> None:
            assert changed.wait(60)
            super()._commit(*arguments)

    weight = torch.zeros(1000)
    run = run_folder.create(str(tmp_path / "run"), {}, Retention(9, 0, 0, "", "min"))
    saver = Late(run, World(), True, None)
    gc.collect()
    gc.disable()
    try:
        for step in range(1, 4):
            changed.clear()
            saver.save(step, partial(dict, w=weight), {})
            weight.add_(1)
            changed.set()
            (memory,) = map(weakref.ref, saver._memory or ())
        saver.finish()
        assert memory() is None
    finally:
        gc.enable()
    saved = [torch.load(each.path)["w"] for each in run.all()]
    assert [float(each[0]) for each in saved] == [0.0, 1.0, 2.0]
    assert all(
        each.sidecar["sha256"] == hashlib.sha256(Path(each.path).read_bytes()).hexdigest()
        for each in run.all()
        if each.sidecar
    )


def test_equal_states_have_one_digest_however_they_were_made() -> None:
    """By it processes tell which of their states differ: neither the order of a set nor what is one object counts."""
    word = "".join(["a", "b"])
    sets = {0, 8}, {8, 0}
    assert [*sets[0]] != [*sets[1]]
    assert state_digest({"seen": sets[0], "names": [word, word]}) == state_digest(
        {"seen": sets[1], "names": ["ab", word]}
    )
    assert state_digest({"seen": {0, 8}}) != state_digest({"seen": {0, 9}}) != state_digest({"seen": [0, 9]})
