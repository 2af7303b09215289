"""Four times as much takes four times as long, and an answer for people stays one that a person can read.

Each command line is run on files of `n` and `4n` things. Processor time says what counting calls cannot: what is built
again for each item, or searched from the beginning, happens inside of one operation of Python. The least of several
ratios counts, so that other work on the machine does not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.support.budget import Outcome, command_outcome

RATIO, TRIES = 7, 4  # what is quadratic comes near 16
LINES = 250  # of an answer that nobody asked to be complete

Tree = dict[str, Any]


def word(number: int) -> str:
    """A name that is like no other, so that nothing folds."""
    return f"{number * 2_654_435_761 % (1 << 32):08x}"


def weights(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {f"{word(i)}.weight": torch.full((2,), i + seed) / 7 for i in range(count)}


def layers(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {f"module.layers.{i // 4}.{'qkvo'[i % 4]}.weight": torch.full((2,), i + seed) / 7 for i in range(count)}


def trained(count: int, seed: int = 0) -> Tree:
    """Batch norms, their Adam by name, and the names of buffers, as DeepSpeed lists them."""
    named = weights(count, seed)
    buffers = {name.replace(".weight", ".running_mean"): value for name, value in named.items()}
    groups = [{"lr": 0.1, "params": [name]} for name in named]
    state = {name: {"exp_avg": value} for name, value in named.items()}
    optimizer = {"state": state, "param_groups": groups}
    return {"module": named | buffers, "buffer_names": list(buffers), "optimizer": optimizer}


def numbered(count: int, seed: int = 0) -> Tree:
    """The same with numbers in place of the names in the optimizer."""
    tree = trained(count, seed)
    groups = [{"lr": 0.1, "params": list(range(count))}]
    state = {i: {"exp_avg": value} for i, value in enumerate(weights(count).values())}
    return tree | {"optimizer": {"state": state, "param_groups": groups}}


def agents(count: int, seed: int = 0) -> Tree:
    """As many models, each with an optimizer of its own."""
    models = {f"agent{i}": {"fc.weight": torch.full((2,), i + seed + 1.0)} for i in range(count)}
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    return models | {"optimizers": [dict(optimizer) for _ in range(count)]}


def history(count: int, seed: int = 0) -> Tree:
    return {"state_dict": layers(8), "losses": [i + seed + 0.5 for i in range(count)]}


def ties(count: int, seed: int = 0) -> Tree:
    weight = torch.ones(2) * seed
    return {f"{word(i)}.weight": weight for i in range(count)}


def shapes(count: int, seed: int = 0) -> Tree:
    """One family of names, with a shape for each, under names that are partly others."""
    return {f"{'encoder' if seed else 'body'}.{i}.fc.weight": torch.zeros(i + 1 + seed) for i in range(count)}


def renamed(count: int, seed: int = 0) -> Tree:
    """Names that have nothing in common, for the same values; more than the tries of patterns would allow."""
    return {f"{word(2 * i + seed)}.weight": torch.tensor([i / 7, 1.0]) for i in range(count)}


def odd(count: int, seed: int = 0) -> Tree:
    return {f"{word(i)}.weight": (torch.ones(2) * i).to_sparse() for i in range(count)}


def objects(count: int, folder: Path) -> None:
    """An npz file of arrays of Python objects, which are pickles."""
    numpy.savez(folder / "in.npz", **{word(i): numpy.array([None]) for i in range(count)})


def mapping(count: int, folder: Path) -> None:
    """A rule for each key, as a dictionary of names in Python is."""
    torch.save(weights(count), folder / "in.pt")
    (folder / "in.yaml").write_text("".join(f"- {word(i)}.weight => fc{i}.weight\n" for i in range(count)))


def others(count: int, folder: Path) -> None:
    """A folder of one checkpoint among files of another kind, some of them like pickles that were cut off."""
    (folder / "data").mkdir()
    torch.save(layers(4), folder / "data" / "model.pt")
    for i in range(count):
        (folder / "data" / f"{i}.jpg").write_bytes(b"\x80\x02}q\x00" if i % 2 else b"\xff\xd8\xff")


Make = Callable[[int, Path], None]


def files(tree: Callable[..., Any]) -> Make:
    def made(count: int, folder: Path) -> None:
        torch.save(tree(count), folder / "in.pt")
        torch.save(tree(count, 1), folder / "other.pt")

    return made


# What is made of how many, and the command lines on it: IN, OTHER and OUT are files. Those with `+` are for every run.
CASES: list[tuple[Make, int, list[str]]] = [
    (files(weights), 3_000, [
        "+ warm-start IN.pt --against OTHER.pt -o OUT.pt --json", "diff IN.pt OTHER.pt", "spec IN.pt -o OUT.json",
        "doctor IN.pt --against OTHER.pt", "convert IN.pt -o OUT.dcp", "average IN.pt OTHER.pt -o OUT.pt"]),
    (files(layers), 3_000, [
        "doctor IN.pt --fix -o OUT.pt", "edit IN.pt --drop *.q.* -o OUT.pt", "slim IN.pt --dedup -o OUT.pt",
        "bundle -o OUT.tar a=IN.pt b=OTHER.pt", "cast IN.pt --dtype bf16 -o OUT.pt"]),
    (files(trained), 1_500, ["convert IN.pt#optimizer --optimizer-as ids -o OUT.pt", "show IN.pt", "scan IN.pt"]),
    (files(numbered), 1_500, ["convert IN.pt --all --optimizer-as names -o OUT.pt"]),
    (files(agents), 300, [
        "+ slim IN.pt -o OUT.pt", "+ strip-module IN.pt -o OUT.pt", "+ diff IN.pt OTHER.pt", "spec IN.pt -o OUT.json"]),
    (files(ties), 1_500, ["report IN.pt OTHER.pt -o OUT.html", "inspect IN.pt"]),
    (files(shapes), 400, ["+ translate --find IN.pt OTHER.pt -n -o OUT.yaml --json"]),
    (files(renamed), 800, ["+ translate --find IN.pt OTHER.pt -o OUT.yaml"]),
    (files(odd), 1_000, ["+ cast IN.pt --dtype bf16 -o OUT.pt", "convert IN.pt -o OUT.safetensors"]),
    (files(history), 20_000, ["diff IN.pt OTHER.pt", "inspect IN.pt", "remap IN.pt --to cpu -o OUT.pt"]),
    (objects, 1_500, ["inspect IN.npz"]),
    (others, 500, ["+ scan FOLDER/data"]),
    (mapping, 1_500, ["+ translate IN.pt --rules IN.yaml -o OUT.pt", "rename IN.pt --rules IN.yaml -o OUT.pt"]),
]  # fmt: skip


def run(command: str, folder: Path) -> Outcome:
    names = {"IN": "in", "OTHER": "other", "OUT": f"out{len(list(folder.iterdir()))}"}
    words = [command.split()[0]]
    for each in command.split()[1:]:
        for name, file in names.items():
            each = each.replace(f"{name}.", f"{folder}/{file}.")
        words.append(each.replace("FOLDER", str(folder)))
    return command_outcome(*words)


@pytest.mark.parametrize(
    ("make", "count", "command"),
    [
        pytest.param(make, count, line.removeprefix("+ "), id=line, marks=[pytest.mark.soak] * (line[0] != "+"))
        for make, count, lines in CASES
        for line in lines
    ],
)
def test_four_times_as_much_takes_four_times_as_long(make: Make, count: int, command: str, tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    for folder, size in ((few, count), (many, 4 * count)):
        folder.mkdir()
        make(size, folder)
    ratios = list[float]()
    while not ratios or (min(ratios) > RATIO and len(ratios) < TRIES):
        one, four = (run(command, folder) for folder in (few, many))
        assert "error[bug]" not in four.text and four.code == one.code, four
        ratios.append(four.seconds / one.seconds)
    print(f"{command}: {min(ratios):.1f} ×, {four.seconds:.2f} s")
    assert min(ratios) <= RATIO, ratios
    assert four.text.count("\n") <= LINES
