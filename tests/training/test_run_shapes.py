"""`ckptool.Run` in the shapes in which people write loops, killed at any line: the run ends with the same files.

A script is put together from a shape, a kind of data, a window of accumulation, a place of `run.save` and what stands
after the inner loop. A forked process runs it, and is killed, or asked to stop, before a line of it; another one goes
on. The judge is the run that nobody killed: the same checkpoints, byte for byte, and the same metrics.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy
import pytest
import torch

import ckptool
from tests.support.killed_loops import import_needed, run_and_exit

BEGIN = """
torch.manual_seed(3); random.seed(3); numpy.random.seed(3)
nn = torch.nn
model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
given = torch.Generator().manual_seed(5)
class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.rand(4) + random.random() + float(numpy.random.rand()) + index
def validate():
    return float(model(torch.rand(3, 4)).sum().detach())
loader = {loader}
run = ckptool.Run(folder, model=model, optimizer=optimizer, scheduler=scheduler, say=str, keep_last=2,
                  keep_best=("val", "min"), **options)
run.log(begun=1)
"""
LOADERS = {
    "shuffled": "torch.utils.data.DataLoader(Noisy(), batch_size=3, shuffle=True)",
    "with a generator": "torch.utils.data.DataLoader(Noisy(), batch_size=3, shuffle=True, generator=given)",
    "a worker": "torch.utils.data.DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=1)",
    "a function": "lambda: (torch.rand(3, 4) + number for number in range(4))",
    "a list": "[torch.full((3, 4), float(number)) for number in range(4)]",
}
# The body of a step; `{save}` where run.save stands. Accumulated gradients are used in every third step of the loop.
BODIES = {
    "plain": "optimizer.zero_grad()\nmodel(batch).pow(2).mean().backward()\n{middle}\noptimizer.step()\n{last}",
    "accumulating": "model(batch).pow(2).mean().backward()\n{middle}\n"
    "if step % 3 == 0:\n    optimizer.step()\n    optimizer.zero_grad()\n{last}",
    "kept gradients": "if step % 3 == 1:\n    optimizer.zero_grad(set_to_none=False)\n"
    "model(batch).pow(2).mean().backward()\n{middle}\nif step % 3 == 0:\n    optimizer.step()\n{last}",
}
SAVES = {
    "at the end of the step": ("", "run.save(every=3, val=validate)", ""),
    "in the middle of the step": ("run.save(every=2)", "", ""),
    "in each step": ("", "run.save()", ""),
    "after the inner loop": ("", "", "run.save(val=validate)"),
    "in both": ("", "run.save(every=3)", "run.save(every=4, val=validate)"),
    "nowhere": ("", "", ""),
}
# What follows the inner loop, or comes in each step of a flat one.
AFTER = {
    "nothing": "pass",
    "schedule": "scheduler.step()\nvalidate()",
    "values": "run['seen'] = run.get('seen', 0) + run.step\nscheduler.step()",
    "early stop": "scheduler.step()\nif run.step >= 8:\n    break",
}
SHAPES = {
    "nested": "for epoch in run.epochs(3):\n    for step, batch in run.batches(loader):\n{body2}\n{after1}\n{save1}",
    "nested with a start": "for epoch in run.epochs(3):\n    run['correct'] = 0\n    scheduler.step()\n"
    "    for step, batch in run.batches(loader):\n        run['correct'] += step\n{body2}\n{after1}\n{save1}",
    "nested, cut short": "for epoch in run.epochs(4):\n    for step, batch in run.batches(loader):\n{body2}\n"
    "        if step % 3 == 0:\n            break\n{after1}\n{save1}",
    "steps": "for step, batch in run.batches(loader, steps=11):\n{body1}\n{after1}",
    "flat epochs": "for step, batch in run.batches(loader, epochs=3):\n{body1}\n{after1}",
    "own batches": "for step in run.steps(10):\n    batch = torch.rand(3, 4) + random.random()\n{body1}\n{after1}",
    "prefetched": "batch = run['batch'] if run.resumed else torch.rand(3, 4)\nfor step in run.steps(10):\n{body1}\n"
    "    run['batch'] = batch = torch.rand(3, 4)\n{after1}",
    "whole epochs": "for epoch in run.epochs(5):\n    step, batch = epoch, torch.rand(3, 4)\n{body1}\n"
    "{after1}\n{save1}",
}


def script(shape: str, loader: str, body: str, save: str, after: str) -> str:
    """The source of a loop."""
    middle, last, outer = SAVES[save]
    step = BODIES[body].format(middle=middle or "pass", last=f"run.log(loss=float(step))\n{last or 'pass'}")
    parts = {"body": step, "after": AFTER[after], "save": outer or "pass"}
    nested = {f"{name}{depth}": indent(text, "    " * depth) for name, text in parts.items() for depth in (1, 2)}
    return (
        BEGIN.replace("{loader}", LOADERS[loader])
        + SHAPES[shape].format(**nested)
        + "\nrun.log(ended=run.step, drawn=torch.rand(()) + random.random())\n"
    )


FACTS = ("step", "epoch", "loss", "metrics", "stop", "parent", "logged_bytes")
Which = tuple[str, str, str, str, str]
ALL: list[Which] = list(itertools.product(SHAPES, LOADERS, BODIES, SAVES, AFTER))
OPTIONS: list[dict[str, Any]] = [{}, {"seed": 7}, {"save_async": True}]  # of `ckptool.Run`, one after the other


def runs(
    source: str, folder: Path, options: dict[str, Any], kill: int | None = None, number: int = signal.SIGKILL
) -> int:
    """Runs a script in a process of its own, ended before its line number `kill`; returns the exit code."""
    import_needed()
    if not (child := os.fork()):
        names = {"torch": torch, "random": random, "numpy": numpy, "ckptool": ckptool}
        run_and_exit(source, {**names, "folder": folder, "options": options}, kill, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def files(folder: Path) -> dict[str, Any]:
    """What must be the same: the checkpoints, what their sidecars say of them, the metrics."""
    kept = {path.name: path.read_bytes() for path in (folder / "checkpoints").glob("*.pt")}
    sidecars = {path.name: json.loads(path.read_text()) for path in (folder / "checkpoints").glob("*.json")}
    facts = {name: [each.get(key) for key in FACTS] for name, each in sidecars.items()}
    return {**kept, **facts, "metrics.jsonl": (folder / "metrics.jsonl").read_bytes()}


def trial(folder: Path, which: Which, kills: list[tuple[int, int]]) -> None:
    """kills: before which line, and by which signal; all of them come in one run, one after the other."""
    source, options = script(*which), OPTIONS[ALL.index(which) % len(OPTIONS)]
    compare(folder, source, options, kills)
    compare(folder, source, options, [])  # it is finished


def compare(folder: Path, source: str, options: dict[str, Any], kills: list[tuple[int, int]]) -> None:
    if not (folder / "whole").exists():
        assert runs(source, folder / "whole", options) == 0
    for line, number in kills:
        code = runs(source, folder / "killed", options, line, number)
        assert code in (0, -signal.SIGKILL, -signal.SIGTERM, 143), line
    whole = files(folder / "whole")
    assert runs(source, folder / "killed", options) == 0
    killed = files(folder / "killed")
    assert sorted(whole) == sorted(killed)
    assert [name for name in whole if whole[name] != killed[name]] == []


def seeded(which: Which, count: int, number: int) -> list[tuple[int, int]]:
    rng = random.Random("/".join(which))
    return [(rng.randrange(25, 130), number) for _ in range(count)]


@pytest.mark.parametrize("which", random.Random(0).sample(ALL, 6), ids=", ".join)
def test_a_loop_killed_at_any_line_ends_with_the_same_files(tmp_path: Path, which: Which) -> None:
    trial(tmp_path, which, seeded(which, 2, signal.SIGKILL))


@pytest.mark.parametrize("which", random.Random(1).sample(ALL, 3), ids=", ".join)
def test_a_loop_stopped_at_any_line_ends_with_the_same_files(tmp_path: Path, which: Which) -> None:
    trial(tmp_path, which, seeded(which, 2, signal.SIGTERM))


MANY = random.Random(2).sample(ALL, 240)  # all of them would take hours; of these, each pair of parts is in some


@pytest.mark.soak
@pytest.mark.parametrize("first", range(12))
def test_many_loops_killed_at_any_lines(tmp_path: Path, first: int) -> None:
    for number, which in enumerate(MANY[first::12]):
        kills = seeded(which, 1, signal.SIGTERM) + seeded(which, 2, signal.SIGKILL)
        trial(tmp_path / str(number), which, kills)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(0, len(ALL), 577))
def test_a_loop_killed_at_each_line(tmp_path: Path, number: int) -> None:
    for line in range(1, 160):
        shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        trial(tmp_path, ALL[number], [(line, signal.SIGKILL)])


STEP = "loss = model(batch).pow(2).mean(); optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
COUNTING = """
class Counting(torch.utils.data.Dataset):
    seen = 0
    def __len__(self):
        return 12
    def __getitem__(self, index):
        self.seen += 1
        return torch.full((4,), float(self.seen % 7)) + index
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, state):
        self.seen = state["seen"]
counting = Counting()
"""
# What is added to the objects of `BEGIN`, the further ones that the run is given, and the loop.
ODD = {
    "what the body changes before its batches": (
        COUNTING,
        ", counting=counting",
        (
            "for epoch in run.epochs(3):\n    counting.seen = 0\n    optimizer.param_groups[0]['lr'] *= 0.5\n"
            "    with torch.no_grad():\n        model[3].weight.mul_(0.5)\n"
            "    for step, batch in run.batches(loader):\n"
            f"        counting.seen += step\n        {STEP}        run.save(every=2)\n    run.log(seen=counting.seen)\n"
        ),
    ),
    "data with a state": (
        COUNTING,
        ", counting=counting",
        (
            "loader = torch.utils.data.DataLoader(counting, batch_size=3, shuffle=True)\n"
            f"for step, batch in run.batches(loader, epochs=4):\n    {STEP}    run.save(every=3)\n"
        ),
    ),
    "a stream that knows its place": (
        (
            "class Stream(torch.utils.data.IterableDataset):\n    place = 0\n    def __iter__(self):\n"
            "        while self.place < 12:\n            self.place += 1\n"
            "            yield torch.full((4,), float(self.place))\n        self.place = 0\n"
            "    def state_dict(self):\n        return {'place': self.place}\n"
            "    def load_state_dict(self, state):\n        self.place = state['place']\nstream = Stream()\n"
        ),
        ", stream=stream",
        (
            "loader = torch.utils.data.DataLoader(stream, batch_size=3)\n"
            "for step, batch in run.batches(loader, epochs=4):\n"
            f"    {STEP}    run.log(sum=float(batch.sum()))\n    run.save(every=3)\n"
        ),
    ),
    "a save of so many steps at the end of each epoch alone": (
        "",
        "",
        (
            f"for epoch in run.epochs(5):\n    for step, batch in run.batches(loader):\n        {STEP}"
            "    run.save(every=5)\n"
        ),
    ),
    "one of two optimizers accumulates": (
        "critic = nn.Linear(4, 1)\nother = torch.optim.SGD(critic.parameters(), lr=0.1)\n",
        ", critic=critic, other=other",
        (
            "for step, batch in run.batches(loader, steps=14):\n    model(batch).mean().backward()\n"
            "    if step % 3 == 0:\n        optimizer.step(); optimizer.zero_grad()\n"
            "    other.zero_grad(); critic(batch).mean().backward(); other.step()\n    run.save(every=2)\n"
        ),
    ),
    "one of two optimizers leaves gradients in the other": (
        "critic = nn.Linear(1, 1)\nother = torch.optim.SGD(critic.parameters(), lr=0.1)\n",
        ", critic=critic, other=other",
        (
            "for step, batch in run.batches(loader, steps=16):\n"
            "    other.zero_grad(); critic(model(batch)).mean().backward(); other.step()\n"
            "    if step % 4 == 0:\n"
            "        optimizer.zero_grad(); critic(model(batch)).mean().backward(); optimizer.step()\n"
            "    run.save(every=3)\n"
        ),
    ),
    "two optimizers in turn keep the tensors of their gradients": (
        "critic = nn.Linear(1, 1)\nother = torch.optim.SGD(critic.parameters(), lr=0.1)\n",
        ", critic=critic, other=other",
        (
            "for step, batch in run.batches(loader, steps=16):\n    each = (optimizer, other)[step % 2]\n"
            "    each.zero_grad(set_to_none=False); critic(model(batch)).mean().backward(); each.step()\n"
            "    run.save(every=3)\n"
        ),
    ),
    "a memory that shares what it holds with a value": (
        (
            "class Memory:\n    seen = []\n    def state_dict(self):\n        return {'seen': self.seen}\n"
            "    def load_state_dict(self, state):\n        self.seen = state['seen']\nmemory = Memory()\n"
        ),
        ", memory=memory",
        (
            f"for step, batch in run.batches(loader, steps=14):\n    {STEP}    memory.seen.append(batch)\n"
            "    run['last'] = batch\n    memory.seen = memory.seen[-5:]\n    run.save(every=3)\n"
        ),
    ),
    "an order that the body draws before its batches": (
        "",
        ", given=given",
        (
            "for epoch in run.epochs(3):\n    order = torch.randperm(12, generator=given)\n    random.random()\n"
            "    for step, at in run.batches(range(0, 12, 3)):\n"
            "        batch = order[at : at + 3, None] + torch.rand(3, 4)\n"
            f"        {STEP}        run.log(sum=float(batch.sum()))\n        run.save(every=3)\n"
        ),
    ),
    "modules that are left in evaluation mode, and parameters that are frozen, on the way": (
        "",
        "",
        (
            "model.train()\nfor epoch in run.epochs(4):\n    if epoch == 1:\n        model[1].eval()\n"
            "        model[0].requires_grad_(False)\n"
            f"    for step, batch in run.batches(loader):\n        {STEP}        run.save(every=3)\n"
            "    if epoch == 2:\n        model.eval(); validate()\n"
        ),
    ),
    "parameters that are frozen or left out on the way, whose gradients are zeroed in place": (
        "",
        "",
        (
            "for epoch in run.epochs(4):\n    model[3].requires_grad_(epoch < 1)\n"
            "    for step, batch in run.batches(loader):\n        optimizer.zero_grad(set_to_none=False)\n"
            "        (model[:2] if random.random() < 0.5 else model)(batch).pow(2).mean().backward()\n"
            "        optimizer.step()\n        run.save(every=3)\n"
        ),
    ),
    "workers that stay, of loaders inside of a function": (
        (
            "loader = torch.utils.data.DataLoader(\n    Noisy(), 3, shuffle=True, num_workers=1, "
            "persistent_workers=True\n)\n"
        ),
        "",
        (
            "for epoch in run.epochs(4):\n    for step, (number, batch) in run.batches(lambda: enumerate(loader)):\n"
            f"        {STEP}        run.log(sum=float(batch.sum()))\n        run.save(every=3)\n"
        ),
    ),
    "epochs, and then steps": (
        "",
        "",
        (
            f"for epoch in run.epochs(2):\n    for step, batch in run.batches(loader):\n        {STEP}"
            "        run.save(every=2)\nrun.log(between=run.step)\n"
            f"for step in run.steps(14):\n    batch = torch.randn(3, 4)\n    {STEP}    run.save(every=2)\n"
        ),
    ),
    "a loop that is left out once it is done": (
        "",
        "",
        (
            f"if run.step < 4:\n    for step, batch in run.batches(loader, steps=4):\n        {STEP}"
            "        run.save(every=2)\n"
            f"for step, batch in run.batches(loader, steps=14):\n    {STEP}    run.save(every=2)\n"
        ),
    ),
}


# Options of `ckptool.Run`, and kills.
ENDED: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "killed": ({}, [(60, signal.SIGKILL), (75, signal.SIGTERM), (72, signal.SIGTERM)]),
    "stopped": ({"save_async": True}, [(line, signal.SIGTERM) for line in (62, 64, 66)]),
    "seeded": ({"seed": 7}, [(line, signal.SIGKILL) for line in (70, 64)]),
}


TURNS = [*zip(ODD, itertools.cycle(ENDED))]  # each loop is ended in one of the ways in every run, in all by `make soak`


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *TURNS,
        *(pytest.param(*each, marks=pytest.mark.soak) for each in itertools.product(ODD, ENDED) if each not in TURNS),
    ],
)
def test_an_odd_loop_ended_at_any_line_ends_with_the_same_files(tmp_path: Path, name: str, how: str) -> None:
    (objects, given, loop), (options, kills) = ODD[name], ENDED[how]
    begin = BEGIN.replace("{loader}", LOADERS["shuffled"]).replace("\nrun =", f"\n{objects}run =")
    begin = begin.replace("scheduler=scheduler", f"scheduler=scheduler{given}").replace("keep_last=2", "keep_last=9")
    compare(tmp_path, f"{begin}{loop}run.log(ended=run.step, drawn=torch.rand(()) + random.random())\n", options, kills)
    assert len(list((tmp_path / "whole/checkpoints").glob("*.pt"))) >= 3  # none waits to the end


def test_after_a_signal_to_all_processes_a_validation_with_workers_is_done_and_the_run_stopped(tmp_path: Path) -> None:
    begin = BEGIN.replace("{loader}", LOADERS["shuffled"])
    loop = (
        "import os, time; os.setpgid(0, 0)\nclass Slow(Noisy):\n    def __getitem__(self, index):\n"
        "        time.sleep(0.02)\n        return super().__getitem__(index)\n"
        "validation = torch.utils.data.DataLoader(Slow(), batch_size=3, num_workers=1)\n"
        f"for epoch in run.epochs(2):\n    for step, batch in run.batches(loader):\n        {STEP}"
        "    for number, batch in enumerate(validation):\n        if number == 0 and epoch == 0 and not run.resumed:\n"
        "            os.killpg(0, 15)\n        run.log(val=batch.sum())\n"
    )
    assert runs(f"{begin}{loop}", tmp_path / "killed", {}) == 143
    assert runs(f"{begin}{loop}", tmp_path / "killed", {}) == 0
    assert runs(f"{begin}{loop}".replace("os.killpg(0, 15)", "pass"), tmp_path / "whole", {}) == 0
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


# What a body does with its two optimizers, and in which steps it saves.
TWO = {
    "one loss leaves gradients in the other optimizer": (
        (
            "other.zero_grad(to_none); critic(ones).mean().backward(); other.step()\n"
            "one.zero_grad(); critic(model(ones)).mean().backward(); one.step()\n"
        ),
        [1, 2, 3, 4, 5, 6],
    ),
    "in turn, each of which begins anew": (
        "each = (one, other)[step % 2]; each.zero_grad(to_none)\ncritic(model(ones)).mean().backward(); each.step()\n",
        [2, 3, 4, 5, 6],
    ),
    "in turn, where both begin anew": (
        (
            "one.zero_grad(to_none); other.zero_grad(to_none)\ncritic(model(ones)).mean().backward()\n"
            "(one, other)[step % 2].step()\n"
        ),
        [2, 3, 4, 5, 6],
    ),
}


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", TWO)
def test_what_one_of_two_optimizers_leaves_in_the_other_is_no_window(tmp_path: Path, name: str, to_none: bool) -> None:
    body, steps = TWO[name]
    model, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    one, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, critic))
    names = {"model": model, "critic": critic, "one": one, "other": other}
    run = ckptool.Run(tmp_path, say=str, keep_last=9, **names)
    for step in run.steps(6):
        exec(body, {**names, "ones": torch.ones(2), "to_none": to_none, "step": step})
        run.save()
    assert [saved.step for saved in run.folder.all()] == steps
