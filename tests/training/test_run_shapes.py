"""`ckptool.Run` in the shapes in which people write loops, killed at any line: the run ends with the same files.

A script is put together from a shape, a kind of data, a window of accumulation, a place of `run.save` and what stands
after the inner loop. A forked process runs it, and is killed, or asked to stop, before a line of it; another one goes
on. The judge is the run that nobody killed: the same checkpoints, byte for byte, and the same metrics.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import traceback
import warnings
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo

import ckptool

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
    return BEGIN.replace("{loader}", LOADERS[loader]) + SHAPES[shape].format(**nested) + "\nrun.close()\n"


Which = tuple[str, str, str, str, str]
ALL: list[Which] = list(itertools.product(SHAPES, LOADERS, BODIES, SAVES, AFTER))
OPTIONS: list[dict[str, Any]] = [{}, {"seed": 7}, {"save_async": True}]  # of `ckptool.Run`, one after the other


def runs(
    source: str, folder: Path, options: dict[str, Any], kill: int | None = None, number: int = signal.SIGKILL
) -> int:
    """Runs a script in a process of its own, ended before its line number `kill`; returns the exit code."""
    if not (child := os.fork()):
        code = 9
        try:
            left = kill

            def trace(frame: Any, event: str, argument: Any) -> Any:
                nonlocal left
                if frame.f_code.co_filename != "<loop>":
                    return None
                if event == "line" and left is not None:
                    left -= 1
                    if not left:
                        os.kill(os.getpid(), number)
                return trace

            warnings.simplefilter("ignore")  # of schedules that step before their optimizer
            names = {
                "torch": torch,
                "random": random,
                "numpy": numpy,
                "ckptool": ckptool,
                "folder": folder,
                "options": options,
            }
            sys.settrace(trace if kill else None)
            exec(compile(source, "<loop>", "exec"), {"__name__": "loop", **names})
            code = 0
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        except BaseException:  # noqa: BLE001  pytest shows it
            traceback.print_exc()
        finally:
            sys.settrace(None)
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def files(folder: Path) -> dict[str, bytes]:
    kept = {path.name: path.read_bytes() for path in (folder / "checkpoints").glob("*.pt")}
    metrics = folder / "metrics.jsonl"
    return {**kept, "metrics.jsonl": metrics.read_bytes() if metrics.exists() else b""}


def trial(folder: Path, which: Which, kills: list[tuple[int, int]]) -> None:
    """kills: before which line, and by which signal; all of them come in one run, one after the other."""
    source, options = script(*which), OPTIONS[ALL.index(which) % len(OPTIONS)]
    assert runs(source, folder / "whole", options) == 0
    for line, number in kills:
        code = runs(source, folder / "killed", options, line, number)
        assert code in (0, -signal.SIGKILL, -signal.SIGTERM, 143), line
    assert runs(source, folder / "killed", options) == 0
    whole, killed = files(folder / "whole"), files(folder / "killed")
    assert list(killed) and sorted(whole) == sorted(killed)
    assert [name for name in whole if whole[name] != killed[name]] == []


def seeded(which: Which, count: int, number: int) -> list[tuple[int, int]]:
    rng = random.Random("/".join(which))
    return [(rng.randrange(25, 130), number) for _ in range(count)]


@pytest.mark.parametrize("which", random.Random(0).sample(ALL, 12), ids=", ".join)
def test_a_loop_killed_at_any_line_ends_with_the_same_files(tmp_path: Path, which: Which) -> None:
    trial(tmp_path, which, seeded(which, 2, signal.SIGKILL))


@pytest.mark.parametrize("which", random.Random(1).sample(ALL, 6), ids=", ".join)
def test_a_loop_stopped_at_any_line_ends_with_the_same_files(tmp_path: Path, which: Which) -> None:
    trial(tmp_path, which, seeded(which, 2, signal.SIGTERM))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(48))
def test_all_loops_killed_at_any_lines(tmp_path: Path, first: int) -> None:
    for number, which in enumerate(ALL[first::48]):
        kills = seeded(which, 1, signal.SIGTERM) + seeded(which, 2, signal.SIGKILL)
        trial(tmp_path / str(number), which, kills)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(0, len(ALL), 97))
def test_a_loop_killed_at_each_line(tmp_path: Path, number: int) -> None:
    for line in range(1, 160):
        trial(tmp_path / str(line), ALL[number], [(line, signal.SIGKILL)])


def test_the_metrics_of_the_last_step_are_taken_and_its_function_is_called_where_the_save_is_due_alone(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(1, 1)
    called = []

    def measure() -> float:
        assert not torch.is_grad_enabled() and not model.training
        torch.rand(3)
        called.append(run.step)
        return 1.0 / run.step

    run = ckptool.Run(tmp_path, model=model, say=str, keep_last=1, keep_best=("val", "max"))
    for _ in run.steps(8):
        run.save(every=3, val=measure)
    assert called == [3, 6, 8]
    assert {step: saved.metrics for step, saved in ((each.step, each) for each in run.folder.all())} == {
        3: {"val": 1 / 3},
        8: {"val": 1 / 8},
    }
    with pytest.raises(AttributeError, match=r"run\.save\(every=500"):
        run.due(every=3)
    for name, words in {"force": "each call marks", "evry": r"Did you mean every\?", "second": "seconds"}.items():
        with pytest.raises(ckptool.errors.UsageError, match=f"(?s)run.save has no option {name}.*{words}"):
            run.save(**{name: True})
    with pytest.raises(ckptool.errors.UsageError, match=r"(?s)no option keep_lst.*Did you mean keep_last\?"):
        ckptool.Run(tmp_path / "other", model=model, keep_lst=2)
