"""What a loop of `ckptool.Run` does that a checkpoint cannot know is named once, with what to write."""

from __future__ import annotations

import itertools
import random
import re
import threading
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

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
    "what an early stop counts": (
        (
            "best, bad = 9.0, 0\nfor epoch in run.epochs(4):\n    for step, x in run.batches(loader): run.save()\n"
            "    if x.sum() < best:\n        best, bad = x.sum(), 0\n    else:\n        bad += 1"
        ),
        "best, bad (variable)",
    ),
    "a count that is the run's, too": (
        "mine = 0\nfor step, x in run.batches(loader, steps=4):\n    mine += 1\n    run.save()",
        "mine (variable)",
    ),
    "the best weights, for what follows": (
        (
            "for epoch in run.epochs(3):\n    for step, x in run.batches(loader): pass\n    if epoch != 1:\n"
            "        kept = {key: each + 1 for key, each in model.state_dict().items()}\n    run.save()\n"
            "model.load_state_dict(kept)"
        ),
        "kept (variable)",
    ),
    "a generator around the loop": (
        (
            "def around(each):\n    prev = None\n    for it in each:\n        if prev is not None: yield prev\n"
            "        prev = it\nfor step, x in around(run.batches(loader, steps=5)):\n    run.save()"
        ),
        "prev (variable)",
    ),
    "a file": (
        (
            "log = open(__file__, 'a')\nfor step, x in run.batches(loader, steps=4): log.write('x'); run.save()\n"
            "log.close()"
        ),
        "log (TextIOWrapper)",
    ),
    "a count": (
        "ticks = itertools.count()\nfor step, x in run.batches(loader, steps=4):\n    next(ticks)\n    run.save()",
        "ticks (count)",
    ),
    "an attribute of a function": (
        (
            "def scale(): scale.by = getattr(scale, 'by', 1.0) / 2\nfor step, x in run.batches(loader, steps=4):\n"
            "    scale()\n    run.save()"
        ),
        "scale.by (variable)",
    ),
    "the epoch of a sampler inside of a wrapper, which is the loop's": (
        (
            "class Order(list):\n    epoch = 0\n    def set_epoch(self, epoch): self.epoch = epoch\n"
            "class Around:\n    def __init__(self, of): self.of = of\n    def __iter__(self): return iter(self.of)\n"
            "data = Around(torch.utils.data.DataLoader(torch.rand(12, 4), 3, sampler=Order(range(12))))\n"
            "for epoch in run.epochs(4):\n    data.of.sampler.set_epoch(epoch)\n"
            "    for step, x in run.batches(data): run.save()"
        ),
        "",
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
    names = {"torch": torch, "random": random, "itertools": itertools, "model": model}
    names |= {
        "loader": DataLoader(torch.rand(12, 4), batch_size=3),
        "__name__": "loop",
        "__file__": str(tmp_path / "log"),
    }
    with Run(tmp_path / "run", model=model, say=print) as run:
        exec(loop, {**names, "run": run})
    said = capsys.readouterr().out.splitlines()[1:]
    assert [line.removeprefix("seen in the script and not saved: ").partition(")")[0] + ")" for line in said] == [
        *filter(None, [wanted])
    ], said


ENGINE = """
class State: n = 0
state, scale, fixed = State(), 1, [3]
def loop(run):
    global scale
    for step in run.steps(4):
        state.n += 2
        scale *= 3
        run.save()
"""


@pytest.mark.parametrize("start", [lambda loop, run: loop(run), lambda loop, run: threaded(loop, run)])
def test_the_variables_of_the_module_of_a_loop_are_seen(tmp_path: Path, start: Any) -> None:
    """Of another file, or of a thread, which no frame of the module has called."""
    engine, said = {"__name__": "engine"}, list[str]()
    exec(compile(ENGINE, str(tmp_path / "engine.py"), "exec"), engine)
    start(engine["loop"], Run(tmp_path, model=nn.Linear(4, 1), say=said.append))
    assert said[1].startswith("scale (variable) changes") and any("state.n" in text for text in said[2:]), said


def threaded(loop: Any, run: Run) -> None:
    thread = threading.Thread(target=loop, args=(run,))
    thread.start()
    thread.join()


class Part(list[torch.Tensor]):
    def __init__(self, offset: int) -> None:
        super().__init__([torch.full((3, 4), float(offset))] * 2)
        self.offset = offset


class Trainer:
    epoch = 0


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of weight_norm
def test_options_weights_that_are_computed_and_what_is_made_anew_are_not_named(tmp_path: Path) -> None:
    model, said, trainer = nn.utils.weight_norm(nn.Linear(4, 1)), list[str](), Trainer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Run(tmp_path, model=model, optimizer=optimizer, say=said.append) as run:
        for epoch in run.epochs(6):
            trainer.epoch = epoch
            for _step, batch in run.batches(Part(epoch)):  # often where the one before it was
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
                for group in optimizer.param_groups:
                    group["lr"] /= 2
                run.save()
            run.save()
    assert len(said) == 1, said


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
    assert said[-1].startswith("step 5 was not saved: the data failed, or what is around run.steps ended the loop")


# Loops that lose a variable, until what the notes say is done.
LOST = {
    "an early stop": "best, bad = 9.0, 0\nfor epoch in run.epochs(9):\n    for step, x in run.batches(loader):\n"
    "        train(x, step)\n    value = 5.0 if epoch else 3.0\n    if value < best:\n        best, bad = value, 0\n"
    "    else:\n        bad += 1\n    if bad > 1:\n        break",
    "a hidden state": "hidden = torch.zeros(4)\nfor step, x in run.batches(loader, steps=9):\n"
    "    hidden = hidden / 2 + x.mean(0)\n    train(x + hidden, step)",
    "a counter": "mine = 0\nfor step, x in run.batches(loader, steps=9):\n    mine += 1\n    train(x / mine, step)",
    "a sum of an epoch": "for epoch in run.epochs(3):\n    total = 0.0\n    for step, x in run.batches(loader):\n"
    "        total += float(x.sum())\n        train(x, step)\n    model.weight.data *= total",
    "a rate": "rate = 1.0\nfor epoch in run.epochs(3):\n    rate *= 0.5\n    for step, x in run.batches(loader):\n"
    "        train(x * rate, step)",
}


def ended(folder: Path, loop: str, kill: int | None = None) -> list[float]:
    """The weights at the end of a loop, or after step `kill`."""
    seeded()
    model, data = nn.Linear(4, 1), torch.rand(12, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    run = Run(folder, model=model, optimizer=optimizer, say=print)

    def train(x: torch.Tensor, step: int) -> None:
        optimizer.zero_grad()
        model(x + torch.rand(1)).sum().backward()
        optimizer.step()
        run.save(every=2)
        if step == kill:
            raise Killed

    names = {"run": run, "train": train, "torch": torch, "model": model, "__name__": "loop"}
    with suppress(Killed), run:
        exec(loop, {**names, "loader": DataLoader(data, batch_size=4, shuffle=True)})
    weights: list[float] = model.weight.flatten().tolist()
    return weights


@pytest.mark.parametrize("name", LOST)
def test_a_loop_resumes_once_what_the_notes_say_is_written(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = LOST[name]
    whole = ended(tmp_path / "whole", text)
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "(variable)" in line]
    assert [ended(tmp_path / "killed", text, kill) for kill in (3, 5, None)][-1] != whole
    for variable in note.partition(" (")[0].split(", "):
        text = re.sub(rf"\b{variable}\b", f'run["{variable}"]', text)
    capsys.readouterr()
    assert ended(tmp_path / "mended", text) == whole
    assert "(variable)" not in capsys.readouterr().out
    assert [ended(tmp_path / "mended and killed", text, kill) for kill in (3, 5, None)][-1] == whole, text


# What the body of run.epochs does before its batches; whether that is named where the run resumes inside the epoch.
BEFORE = {
    "labels of the model's own": ("labels = model(data)", True),
    "in a function": ("labels = labelled()", True),
    "of another model": ("labels = teacher(data)", False),
    "nothing": ("model.train(); optimizer.zero_grad(); order = torch.randperm(3)", False),
}


@pytest.mark.parametrize("name", BEFORE)
def test_a_model_that_is_called_before_the_batches_of_an_epoch_resumed_inside_is_named(
    tmp_path: Path, name: str
) -> None:
    text, wanted = BEFORE[name]
    noted = []
    for kill in (1, None):
        model, teacher, said = nn.Linear(4, 1), nn.Linear(4, 1), list[str]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        names = {"torch": torch, "model": model, "teacher": teacher, "compiled": compiled, "optimizer": optimizer}
        names |= {"data": torch.rand(12, 4), "labelled": lambda of=model: of(torch.rand(12, 4))}
        run = Run(tmp_path, model=compiled, optimizer=optimizer, say=said.append)
        with suppress(Killed), run:
            for _ in run.epochs(2):
                exec(text, names)
                for step, batch in run.batches(torch.rand(3, 2, 4)):
                    compiled(batch)
                    run.save()
                    if step == 2 and kill:
                        raise Killed
        noted.append([line for line in said if line.startswith("a model was called")])
    assert [len(lines) for lines in noted] == [0, wanted], noted


def test_gradients_that_are_never_zeroed_are_named(tmp_path: Path) -> None:
    for zeroed in (None, True, False):
        model, said = nn.Linear(4, 1), list[str]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Run(tmp_path / str(zeroed), model=model, optimizer=optimizer, say=said.append) as run:
            for _ in run.steps(3):
                if zeroed is not None:
                    model.zero_grad(set_to_none=zeroed)
                model(torch.rand(3, 4)).sum().backward()
                optimizer.step()
                run.save()
        assert len([line for line in said if line.startswith("gradients are added")]) == (zeroed is None), said


class Around(torch.optim.Optimizer):
    """An optimizer around another, as those that look ahead or sharpen."""

    def __init__(self, inner: torch.optim.Optimizer, shared: bool) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        if shared:
            self.state = inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("around", ["another", "inside", "shared", "none"])
def test_an_optimizer_that_was_not_given_is_named_and_no_save_waits_for_one_that_was(
    tmp_path: Path, around: str, kind: Any
) -> None:
    model, said = nn.Linear(4, 1), list[str]()
    optimizer = given = kind(model.parameters(), lr=0.1)
    if around in ("inside", "shared"):
        optimizer = given = Around(given, around == "shared")
    run = Run(tmp_path, model=model, optimizer=given, say=said.append)
    for step in run.steps(6):
        if around == "another" and step == 3:
            optimizer = kind(model.parameters(), lr=0.01)
            optimizer.register_step_post_hook(lambda one, *call: one.zero_grad())  # before Run sees the step
        optimizer.zero_grad()
        model(torch.rand(3, 4)).sum().backward()
        optimizer.step()
        run.save()
        assert run._saver.step in (step - 1, None)
    noted = [line for line in said if line.startswith(f"an optimizer ({kind.__name__}) that was not given")]
    has_state = kind is torch.optim.AdamW
    assert len(noted) == (around == "another" or (around == "inside" and has_state)), said
    assert len([line for line in said if "optimizer (" in line and "seen in" in line]) == (around == "another")


def test_a_module_that_grows_is_named_before_a_resumed_run_cannot_load_it(tmp_path: Path) -> None:
    model, said = nn.Sequential(nn.Linear(4, 4)), list[str]()
    with Run(tmp_path, model=model, say=said.append) as run:
        run.save()
        model.append(nn.Linear(4, 1))
        run.save()
        run.save()
    assert len([line for line in said if line.startswith("model has other parameters than at ckptool.Run")]) == 1, said


def test_data_of_another_length_than_an_epoch_began_with_are_named(tmp_path: Path) -> None:
    noted = []
    for size, kill in ((2, 3), (2, 4), (3, None)):
        model, said = nn.Linear(4, 1), list[str]()
        loader = DataLoader(torch.rand(12, 4), batch_size=size)
        with suppress(Killed), Run(tmp_path, model=model, say=said.append) as run:
            for _ in run.epochs(2):
                for step, _ in run.batches(loader):
                    run.save()
                    if step == kill:
                        raise Killed
        noted.append([line for line in said if "the loader has" in line])
    wanted = "the loader has 4 batches, and had 6 when this epoch began: the 3 that are left out are other samples"
    assert [[line.startswith(wanted) for line in each] for each in noted] == [[], [], [True]], noted


SCHEDULES = {
    "StepLR": ({"step_size": 3}, {"step_size": 5}),
    "MultiStepLR": ({"milestones": [2]}, {"milestones": [2, 4]}),
    "CosineAnnealingLR": ({"T_max": 9}, {"T_max": 18}),
    "OneCycleLR": ({"max_lr": 1.0, "total_steps": 9}, {"max_lr": 1.0, "total_steps": 18}),
    "ReduceLROnPlateau": ({"patience": 3}, {"patience": 4}),
    "ExponentialLR": ({"gamma": 0.5}, {"gamma": 0.25}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_argument_of_a_schedule_that_the_script_changed_is_named(tmp_path: Path, name: str) -> None:
    for given in (SCHEDULES[name][0], *SCHEDULES[name]):
        model, said = nn.Linear(4, 1), list[str]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, **given)
        with Run(tmp_path, model=model, optimizer=optimizer, scheduler=schedule, say=said.append) as run:
            optimizer.step()
            schedule.step(*[1.0] * (name == "ReduceLROnPlateau"))
            run.save()
        changed = [line for line in said if "in the script, but was" in line]
        assert changed[: given is not SCHEDULES[name][1]] == [], said
    (key,) = [each for each in SCHEDULES[name][0] if SCHEDULES[name][0][each] != SCHEDULES[name][1][each]]
    assert [line for line in changed if line.startswith(f"scheduler: {key} is ")], said


def test_a_second_loop_of_a_resumed_process_draws_nothing_that_is_named(tmp_path: Path) -> None:
    for kill in (7, None):
        seeded()
        model, said = nn.Linear(4, 1), list[str]()
        loader = DataLoader(torch.rand(12, 4), batch_size=3, shuffle=True)
        run = Run(tmp_path, model=model, say=said.append)
        with suppress(Killed), run:
            for epochs in (1, 2):
                for _ in run.epochs(epochs):
                    for step, _ in run.batches(loader):
                        run.save()
                        if step == kill:
                            raise Killed
    assert [line for line in said if "random numbers were drawn" in line] == []
