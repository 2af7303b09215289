"""What a loop of `ckptool.Run` does that a checkpoint cannot know is named once, with what to write."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckptool import Run
from ckptool.errors import Conflict
from tests.support.own_loops import Killed, seeded

# Loops over `loader` with a `model` and `optimizer`; the variables that are named, and the kind.
LEFT = {
    "a hidden state": (
        (
            "h = torch.zeros(4)\nfor step, x in run.batches(loader, steps=4):\n"
            "    h = (model(x + h).mean(0) * torch.ones(4)).detach() if step % 2 else h + x.sum()\n    run.save()"
        ),
        "h (variable)",
    ),
    "a graph that hangs on it": (
        "total = 0\nfor step, x in run.batches(loader, steps=4):\n    total = total + model(x).sum()\n    run.save()",
        "total (variable)",
    ),
    "a batch that was fetched ahead": (
        "x = torch.rand(3, 4)\nfor step in run.steps(4):\n    model(x)\n    x = torch.rand(3, 4)\n    run.save()",
        "x (variable)",
    ),
    "an order that is shuffled in place": (
        (
            "order = list(range(12))\nfor epoch in run.epochs(3):\n    random.shuffle(order)\n"
            "    for step, x in run.batches(loader):\n        part = order[step:]\n    run.save()"
        ),
        "order (variable)",
    ),
    "meters of an epoch": (
        (
            "class Meter: n = 0\nfor epoch in run.epochs(3):\n    meter, seen = Meter(), []\n"
            "    for step, x in run.batches(loader):\n        meter.n += 2; seen.append(step); run.save()"
        ),
        "seen, meter.n (variable)",
    ),
    "an iterator": (
        (
            "def again():\n    while True:\n        yield from loader\nendless = again()\nfor step in run.steps(4):\n"
            "    x = next(endless)\n    run.save()"
        ),
        "endless (generator)",
    ),
    "a cache": (
        (
            "class Data(list): pass\ndata = Data(loader)\ndata.known = [torch.rand(2)]\n"
            "for step, x in run.batches(data, steps=4):\n    data.known.append(x)\n    run.save()"
        ),
        "loader.known (attribute)",
    ),
    "a window of the last values": (
        (
            "from collections import deque\nlast = deque(maxlen=3)\nfor step, x in run.batches(loader, steps=4):\n"
            "    last.append(x.sum())\n    run.save()"
        ),
        "last (variable)",
    ),
    "nothing": (
        (
            "import collections, time\nclass Shell:\n    def ask(self): self.asked += 1\n"
            "shell = Shell(); shell.asked = 0; ask = shell.ask; del shell\nheld = {**model.state_dict()}\n"
            "for epoch in run.epochs(3):\n    perm = torch.randperm(12)\n    half = 1\n"
            "    run['best'] = best = run.get('best', 0.0) + 1\n    more = torch.utils.data.DataLoader(perm, 3)\n"
            "    for at, (step, rows) in enumerate(run.batches(more)):\n"
            "        ask(); model.weight.data += 1\n        x = [row * at for row in rows]\n"
            "        loss = sum(x)\n"
            "        with run.evaluating():\n            value = model(torch.rand(3, 4)).sum()\n"
            "        run['bag'] = run.get('bag', []) + [loss]; bag = run['bag']; run.save()"
        ),
        "",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_a_loop_leaves_in_variables_is_named_once(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seeded()
    loop, wanted = LEFT[name]
    model = nn.Linear(4, 1)
    names = {"torch": torch, "random": random, "model": model, "loader": DataLoader(torch.rand(12, 4), batch_size=3)}
    exec(loop, {**names, "run": Run(tmp_path, model=model, say=print), "__name__": "loop"})
    said = capsys.readouterr().out.splitlines()[1:]
    assert [line.removeprefix("seen in the script and not saved: ").partition(")")[0] + ")" for line in said] == [
        *filter(None, [wanted])
    ], said


def test_groups_that_an_optimizer_gets_later_are_named_before_a_resumed_run_cannot_load_them(tmp_path: Path) -> None:
    model, head, said = nn.Linear(4, 4), nn.Linear(4, 1), list[str]()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    with Run(tmp_path, model=model, head=head, optimizer=optimizer, say=said.append) as run:
        run.save()
        optimizer.add_param_group({"params": list(model.parameters()), "lr": 0.01})
        run.save()
        run.save()
    assert [line[:48] for line in said if "groups" in line] == ["optimizer has other groups of parameters than at"], (
        said
    )
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    with pytest.raises(Conflict, match=r"2 parameters .*; 2 parameters") as raised:
        Run(tmp_path, model=model, head=head, optimizer=optimizer, say=str)
    assert "before its state is loaded" in str(raised.value.fix)


@pytest.mark.parametrize("around", ["enumerate({})", "islice({}, 2)", "(each for each in zip(range(9), {}))", "{}"])
@pytest.mark.parametrize("loop", ["run.batches(loader)", "run.batches(loader, steps=7)", "run.steps(7)"])
def test_what_counts_anew_around_a_resumed_loop_is_named(tmp_path: Path, around: str, loop: str) -> None:
    model, loader, said = nn.Linear(4, 1), [torch.ones(3, 4)] * 4, list[str]()
    for kill in (2, None):
        run = Run(tmp_path, model=model, say=said.append)
        with suppress(Killed), run:
            for _ in run.epochs(1) if loop == "run.batches(loader)" else range(1):
                for _ in eval(around.format(loop), {"run": run, "loader": loader, "islice": islice}):
                    run.save()
                    if run.step == kill:
                        raise Killed
    kinds = [line.split("`")[1] for line in said if "counts anew" in line]
    assert kinds == ([re.split(r"\W", around.replace("(each for each in ", ""))[0]] if around != "{}" else []), said


def test_steps_that_are_not_saved_as_what_is_around_the_loop_ended_it_are_named(tmp_path: Path) -> None:
    said: list[str] = []
    run = Run(tmp_path, model=nn.Linear(4, 1), say=said.append)
    for _ in islice(run.steps(9), 5):
        run.save(every=2)
    assert said[-1].startswith("step 5 was not saved: what is around run.steps ended the loop")
