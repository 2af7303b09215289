"""Random rules that change tensors: what comes out is what torch makes of them, and `--reverse` gives it all back."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckptool
from ckptool.errors import CkptoolError, Conflict, Unsupported
from tests.support.looped import looped
from tests.support.random_rules import FLOATS, RandomRules, values
from tests.support.same import assert_same_objects

SEEDS = range(24)


def bits(tensor: Tensor) -> tuple[Any, ...]:
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
    return tensor.dtype, tuple(tensor.shape), plain.view(torch.uint8).numpy().tobytes()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        assert bits(value) == bits(other[key]), key


def ties(state: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    for one, a in state.items():
        for other, b in state.items():
            if one < other and a.numel() and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr():
                yield one, other


@looped("seed", SEEDS)
def test_random_rules_there_and_back(seed: int, tmp_path: Path) -> None:
    given = RandomRules(seed)
    torch.save({"model": given.state, "epoch": 3}, tmp_path / "in.pt")
    numbers: Any = given.numbers
    ckptool.translate(tmp_path / "in.pt", given.rules, tmp_path / "out.pt", set=numbers, verify=True)
    after = torch.load(tmp_path / "out.pt")
    same(after["model"], given.translated(given.state))
    assert after["epoch"] == 3
    ckptool.translate(tmp_path / "out.pt", given.rules, tmp_path / "back.pt", set=numbers, reverse=True, verify=True)
    back = torch.load(tmp_path / "back.pt")["model"]
    same(back, given.state)
    assert list(ties(back)) == list(ties(given.state))


def untied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that an optimizer has: of tied ones the first."""
    seen: dict[Any, str] = {}
    for name in state:
        seen.setdefault(name.replace(".b.", ".a."), name)
    return {name: state[name] for name in seen.values()}


def adam(state: dict[str, Tensor], named: bool) -> dict[str, Any]:
    """The state of an optimizer as torch's Adam saves it, or one by name with a single moment, as Lion's."""
    slots = {}
    for number, (name, tensor) in enumerate(state.items()):
        if not named:
            more = {"step": torch.tensor(3.0), "exp_avg_sq": values(tensor.shape, tensor.dtype)}
        else:
            more = {"step": 3}
        slots[name if named else number] = {**more, "exp_avg": values(tensor.shape, tensor.dtype)}
    return {"state": slots, "param_groups": [{"lr": 0.1, "params": list(slots)}]}


@looped("seed", SEEDS)
def test_the_average_and_the_moments_follow(seed: int, tmp_path: Path) -> None:
    given = RandomRules(seed, dtypes=FLOATS)
    named = bool(seed % 2)
    parameters = untied(given.state)
    optimizer = adam(parameters, named)
    average = {name: value.clone() for name, value in given.state.items()}
    tree = {"model": given.state, "ema": average, "optimizer": optimizer, "step": 7}
    torch.save(tree, tmp_path / "in.pt")
    numbers: Any = given.numbers
    try:
        ckptool.translate(tmp_path / "in.pt", given.rules, tmp_path / "out.pt", set=numbers)
    except Conflict as error:  # a few that look as if they were sorted by name: then numbers say nothing
        assert "it is unclear which slots" in str(error) and not named
        return
    after = torch.load(tmp_path / "out.pt")
    same(after["ema"], given.translated(average))
    names = after["optimizer"]["param_groups"][0]["params" if named else "param_names"]
    assert names == list(untied(after["model"]))
    for field in ("exp_avg", *(() if named else ("exp_avg_sq",))):
        old = {name: slot[field] for name, slot in zip(parameters, optimizer["state"].values(), strict=True)}
        new = {name: slot[field] for name, slot in zip(names, after["optimizer"]["state"].values(), strict=True)}
        same(new, given.translated(old))
    ckptool.translate(tmp_path / "out.pt", given.rules, tmp_path / "back.pt", set=numbers, reverse=True)
    back = torch.load(tmp_path / "back.pt")
    same(back["model"], given.state)
    assert [list(slot) for slot in back["optimizer"]["state"].values()] == [
        list(slot) for slot in optimizer["state"].values()
    ]
    for one, other in zip(back["optimizer"]["state"].values(), optimizer["state"].values(), strict=True):
        same({"": one["exp_avg"]}, {"": other["exp_avg"]})


@looped("seed", SEEDS)
def test_what_is_lost_is_said(seed: int, tmp_path: Path) -> None:
    given = RandomRules(seed, lossy=True)
    torch.save(given.state, tmp_path / "in.pt")
    numbers: Any = given.numbers
    plan = ckptool.translate(tmp_path / "in.pt", given.rules, tmp_path / "out.pt", set=numbers, dry_run=True)
    assert not (tmp_path / "out.pt").exists()
    ckptool.translate(tmp_path / "in.pt", given.rules, tmp_path / "out.pt", set=numbers)
    same(torch.load(tmp_path / "out.pt"), given.translated(given.state))
    try:
        ckptool.translate(tmp_path / "out.pt", given.rules, tmp_path / "back.pt", set=numbers, reverse=True)
        back = torch.load(tmp_path / "back.pt")
        same(back, given.state)
        assert list(ties(back)) == list(ties(given.state))
    except (CkptoolError, AssertionError) as error:
        assert any(line.startswith("not reversible: ") for line in plan.details), str(error)
        assert not plan.facts["reversible"]
    else:
        assert plan.facts["reversible"], plan.details


@pytest.mark.parametrize("out", ["out.safetensors", "folder/", "in place", "part", "extract"])
def test_every_output(out: str, tmp_path: Path) -> None:
    given = RandomRules(5, dtypes=FLOATS)
    other = {"x": torch.ones(3)}
    file, made = tmp_path / "in.pt", str(tmp_path / out)
    torch.save({"model": given.state, "other": other} if out in ("part", "extract") else given.state, file)
    numbers: Any = given.numbers
    if out == "in place":
        ckptool.translate(file, given.rules, set=numbers, in_place=True, verify=True)
        same(torch.load(file), given.translated(given.state))
    elif out in ("part", "extract"):
        ckptool.translate(
            f"{file}#model", given.rules, made, set=numbers, extract=out == "extract", container="torch-zip"
        )
        after = torch.load(made)
        same(after if out == "extract" else after["model"], given.translated(given.state))
        assert out == "extract" or torch.equal(after["other"]["x"], other["x"])
    else:
        ckptool.translate(file, given.rules, made, set=numbers, verify=True)
        after, expected = ckptool.load(made), given.translated(given.state)
        assert {key: bits(value) for key, value in after.items()} == {
            key: bits(value) for key, value in expected.items()
        }


@pytest.mark.parametrize(("out", "noted"), [("out.npz", True), ("out.safetensors", False)])
def test_ties_that_a_container_cannot_hold_are_said(out: str, noted: bool, tmp_path: Path) -> None:
    weight = torch.ones(2, 3)
    torch.save({"wte.weight": weight, "head.weight": weight}, tmp_path / "in.pt")
    made = ckptool.translate(tmp_path / "in.pt", ["wte.weight => embed.weight"], tmp_path / out, rest="keep")
    assert [note.code for note in made.notes] == ["ties-copied"] * noted


def test_versions_of_modules_follow_with_and_without_tensors(tmp_path: Path) -> None:
    """The `_metadata` of a real model: what torch reads of it there, and all of it after the way back."""
    block = torch.nn.Sequential(torch.nn.Linear(4, 12), torch.nn.GELU(), torch.nn.BatchNorm1d(12), torch.nn.Dropout())
    state = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block]), "drop": torch.nn.Dropout()}).state_dict()
    file, there, back = tmp_path / "in.pt", tmp_path / "there.pt", tmp_path / "back.pt"
    torch.save(state, file)
    rules = ["blocks.{n}.0.{p} => body.layers.{n}.{q,k,v}.{p} : split 0", "blocks.{n}.2.* => body.layers.{n}.norm.*"]
    ckptool.translate(file, rules, there)
    metadata = torch.load(there)._metadata
    assert metadata["body.layers.0.norm"] == {"version": 2} and {"drop", "body.layers.0.q"} <= metadata.keys()
    ckptool.translate(there, rules, back, reverse=True)
    assert dict(torch.load(back)._metadata) == dict(state._metadata)


# Values that are easy to mix up: variables of sizes, moments ----------------------------------------------------------


def trained() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("seed", range(6))
def test_moments_move_with_the_weights_and_are_not_changed(seed: int, tmp_path: Path) -> None:
    """What is added to a weight is not for its moments."""
    rng = random.Random(seed)
    model, optimizer = trained()
    chain = rng.sample(["add 1", "transpose", "add -3"], k=rng.randint(1, 3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    rules = [f"weight => w : {' | '.join(chain)}", "bias => b : add 1"]
    ckptool.translate(tmp_path / "in.pt", rules, tmp_path / "out.pt")
    state = torch.load(tmp_path / "out.pt")["optimizer"]["state"]
    for number, before in enumerate(optimizer.state_dict()["state"].values()):
        for field in ("exp_avg", "exp_avg_sq"):
            wanted = before[field].T if "transpose" in chain and number == 0 else before[field]
            assert torch.equal(state[number][field], wanted)


OPTIMIZERS: dict[str, Any] = {
    "Adam": {},
    "AdamW": {"amsgrad": True},
    "NAdam": {},
    "ASGD": {},
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
}
SHAPES = {(): ["", "unsqueeze 0"], (1,): ["", "unsqueeze 1"], (2, 3): ["", "transpose"], (3, 3): ["", "transpose"]}


@looped("seed", range(40))
def test_torch_trains_on_as_if_nothing_had_happened(seed: int, tmp_path: Path) -> None:
    """Parameters in an order of their own, in groups, some without dimensions: after the same code has made optimizer
    and model with the new names, one more step gives the same weights, turned."""
    rng = random.Random(seed)
    names, shapes = [f"p{n}" for n in range(6)], rng.choices([*SHAPES], k=6)
    new_names = rng.sample(names, k=6) if seed % 2 else [f"q{n}" for n in range(6)]
    chains = [rng.choice(SHAPES[shape]) for shape in shapes]
    turn: dict[str, Any] = {
        "": lambda tensor: tensor,
        "unsqueeze 0": lambda tensor: tensor[None],
        "unsqueeze 1": lambda tensor: tensor[:, None],
        "transpose": lambda tensor: tensor.T,
    }
    named = bool(rng.randrange(3))
    order, cut = rng.sample(range(6), k=6) if named else [*range(6)], rng.randint(1, 5)
    kind = rng.choice([*OPTIMIZERS])

    def optimizer_of(weights: dict[str, Tensor], keys: list[str]) -> torch.optim.Optimizer:
        chosen: list[Any] = [(keys[n], weights[keys[n]]) if named else weights[keys[n]] for n in order]
        made = getattr(torch.optim, kind)
        return made([{"params": chosen[:cut]}, {"params": chosen[cut:]}], **OPTIMIZERS[kind])

    def step(weights: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        for number, weight in enumerate(weights.values()):
            weight.grad = weight.detach() * (number + 1)
        optimizer.step()

    old = {name: torch.randn(shape).requires_grad_() for name, shape in zip(names, shapes, strict=True)}
    optimizer = optimizer_of(old, names)
    step(old, optimizer)
    step(old, optimizer)
    torch.save({"model": old, "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    sides = zip(names, new_names, chains, strict=True)
    rules = [f"{one} => {other}{f' : {chain}' if chain else ''}" for one, other, chain in sides]
    try:
        ckptool.translate(tmp_path / "in.pt", rules, tmp_path / "out.pt")
    except Conflict as error:
        assert "it is unclear which slots" in str(error) and not named
        return
    after = torch.load(tmp_path / "out.pt")
    new = {name: after["model"][name].detach().clone().requires_grad_() for name in new_names}
    continued = optimizer_of(new, new_names)
    continued.load_state_dict(after["optimizer"])
    step(old, optimizer)
    step(new, continued)
    for one, other, chain in zip(names, new_names, chains, strict=True):
        assert torch.equal(turn[chain](old[one].detach()), new[other].detach()), (kind, one, other, chain)


@pytest.mark.parametrize("named", [True, False])
def test_moments_of_names_that_no_weights_have_are_refused(named: bool, tmp_path: Path) -> None:
    """Of an optimizer that was made with the names inside of a submodule."""
    model, optimizer = torch.nn.ModuleDict({"generator": torch.nn.Linear(3, 3)}), None
    optimizer = torch.optim.Adam(model["generator"].named_parameters())
    model["generator"](torch.randn(2, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    if named:
        names = state["param_groups"][0].pop("param_names")
        state["state"] = {names[number]: slot for number, slot in state["state"].items()}
        state["param_groups"][0]["params"] = names
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "in.pt")
    with pytest.raises(Conflict, match="state for weight, bias, which no weights are called"):
        ckptool.translate(tmp_path / "in.pt", "*.weight => *.w : transpose", tmp_path / "out.pt", rest="keep")
    done = ckptool.translate(tmp_path / "in.pt", "*.weight => *.w", tmp_path / "out.pt", rest="keep")
    assert done.facts["optimizers"] == 0
    assert_same_objects(torch.load(tmp_path / "in.pt")["optimizer"], torch.load(tmp_path / "out.pt")["optimizer"])


@pytest.mark.parametrize("named", [True, False])
def test_moments_of_two_models_with_the_same_names_and_lists_that_stay(named: bool, tmp_path: Path) -> None:
    tree: dict[str, Any] = {"ema": {"shadow_params": []}}
    models = {name: torch.nn.Sequential(torch.nn.Linear(2, size)) for name, size in (("generator", 3), ("critic", 1))}
    for name, model in models.items():
        optimizer = torch.optim.Adam(model.named_parameters() if named else model.parameters())
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
        tree |= {name: model.state_dict(), f"optimizer_{name}": optimizer.state_dict()}
        tree["ema"]["shadow_params"] += [parameter.detach().clone() for parameter in model.parameters()][:2]
    del tree["ema"]["shadow_params"][2:]
    torch.save(tree, tmp_path / "in.pt")
    done = ckptool.translate(tmp_path / "in.pt", "0.weight => w : transpose", tmp_path / "out.pt", rest="keep")
    after = torch.load(tmp_path / "out.pt")
    for name in models:
        old, new = (side[f"optimizer_{name}"]["state"][0]["exp_avg"] for side in (tree, after))
        assert torch.equal(old.T, new)
    assert done.facts["lists"] == ["ema/shadow_params"] and any("ema/shadow_params" in line for line in done.details)


def of_layers(width: int, field: Any) -> dict[str, Any]:
    """A model of two layers, one of them square, and the state of an optimizer by number that keeps these fields."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(2, width)}).state_dict()
    slots = {n: {"step": 2, "exp_avg": torch.randn(p.shape), **field(p)} for n, p in enumerate(model.values())}
    return {"model": model, "optimizer": {"state": slots, "param_groups": [{"lr": 0.1, "params": [*slots]}]}}


FIELDS: dict[str, Any] = {  # of Shampoo, Adafactor, Prodigy, NovoGrad, a layer-wise rate, and what is a count
    "precond_0": lambda p: {"precond_0": torch.randn((len(p), len(p)))},
    "col_var": lambda p: {"row_var": p.norm(dim=-1, keepdim=True), "col_var": p.norm(dim=0, keepdim=True)},
    "s": lambda p: {"s": p.flatten()[::3].clone()},
    "norm": lambda p: {"norm": p.norm()},
    "rate": lambda p: {"rate": float(p.norm())},
    "exp_avg_lr_1": lambda p: {"exp_avg_lr_1": 0.25, "is_large": p.dim() > 1},
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "rule", ["a.weight => w : transpose", "b.weight => w : transpose", "a.weight => w, v : split 0 [1, 2]"]
)
def test_fields_that_are_not_of_each_element_do_not_move_as_if_they_were(field: str, rule: str, tmp_path: Path) -> None:
    """Factors may have the shape of a parameter that is square, or a row; a norm is not that of each part."""
    tree = of_layers(1, FIELDS[field])
    torch.save(tree, tmp_path / "in.pt")
    if field == "exp_avg_lr_1" or (field in ("norm", "rate") and "transpose" in rule):
        ckptool.translate(tmp_path / "in.pt", rule, tmp_path / "out.pt", rest="keep")
        slots = torch.load(tmp_path / "out.pt")["optimizer"]["state"]
        old = tree["optimizer"]["state"]["ab".index(rule[0]) * 2]
        parts = [slots[n] for n in slots if slots[n]["exp_avg"].dim() > 1 and n in ((0, 1) if rule[0] == "a" else (2,))]
        assert parts and all(part[field] == old[field] for part in parts)
    else:
        with pytest.raises(Unsupported, match="does not have "):
            ckptool.translate(tmp_path / "in.pt", rule, tmp_path / "out.pt", rest="keep")
    del (
        tree["optimizer"]["param_groups"][0]["params"][-1],
        tree["optimizer"]["state"][3],
    )  # a frozen one: whose is which?
    torch.save(tree, tmp_path / "in.pt")
    done = ckptool.translate(tmp_path / "in.pt", "*.weight => *.w", tmp_path / "named.pt", rest="keep")
    assert done.facts["optimizers"] == 0
    assert_same_objects(torch.load(tmp_path / "named.pt")["optimizer"], tree["optimizer"])


def test_what_is_kept_of_parameters_beside_their_slots_is_refused(tmp_path: Path) -> None:
    """The vectors of LBFGS are those of all parameters; Lookahead keeps slow weights by number."""
    lbfgs = {"params": [*range(4)], "param_names": ["a.weight", "a.bias", "b.weight", "b.bias"]}
    tree = of_layers(2, lambda p: {})
    optimizer = tree["optimizer"]
    for state, words in (
        (
            {**optimizer, "slow_state": {n: {"slow": torch.randn((2,))} for n in range(4)}},
            "more for its parameters in slow_state",
        ),
        (
            {
                "state": {0: {"d": torch.randn((18,))}},
                "param_groups": [{**lbfgs, "history_size": 9, "line_search_fn": None}],
            },
            "LBFGS",
        ),
    ):
        torch.save({**tree, "optimizer": state}, tmp_path / "in.pt")
        with pytest.raises(Unsupported, match=words):
            ckptool.translate(tmp_path / "in.pt", "b.weight => w : transpose", tmp_path / "out.pt", rest="keep")


@pytest.mark.parametrize(
    ("state", "rule", "message"),
    [
        ({"w.0": (2,), "w.9999999": (2,)}, "w.{e} => w : stack 0 over e", "nothing for e = 1, of 10,000,000"),
        (dict.fromkeys(["w.0.0", "w.0.1", "w.1.0"], (2,)), "w.{a}.{b} => w : stack 0 over a | stack 0 over b", "b = 1"),
        ({"w": (0, 3)}, "w => w : reshape [0, 9007199254740992, 9007199254740992]", "is too large"),
    ],
)  # fmt: skip
def test_numbers_that_are_too_large(state: dict[str, Any], rule: str, message: str, tmp_path: Path) -> None:
    torch.save({key: torch.zeros(shape) for key, shape in state.items()}, tmp_path / "in.pt")
    with pytest.raises(CkptoolError, match=message):
        ckptool.translate(tmp_path / "in.pt", rule, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


CHAIN = ", ".join(f"v{n}: v{n + 1}" for n in range(2000))
BACK = "v1999: 0, " + ", ".join(f"v{n}: v{n + 1}" for n in reversed(range(1999)))
TREE = ", ".join(f"v{n}: x or v{n + 1} or v{n + 1}" for n in range(40))
H = "rules: ['a => b : pad 0 v0']\nvariables: "
LAYOUT = "new: {name: y, has: [b]}\nrules: ['a => b']\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{H}{{{CHAIN}}}", "has no value"),
        (f"{H}{{{BACK}}}", "cannot be padded to 0"),
        (f"{H}{{{TREE}}}", "has no value"),
        (f"{H}{{v0: \"size('a')\"}}", "has no value"),
        (f"{H}{{v0: \"size('a', 0, 1)\"}}", "has no value"),
        (f"{H}{{v0: count()}}", "has no value"),
        ("rules: ['a => b']\nfill: ['c => zeros [0-1] like a']", r"line 2: .*\n.*not a shape"),
        ("rules: ['a => b']\nfill: ['c => zeros [9007199254740991, 900] like a']", "more than a rule"),
        ("models: vit\nrules: ['a => b']", "line 1: not a list"),
        ("notes: {a: b}\nrules: ['a => b']", "line 1: not a list"),
        (f"old: {{name: x, has: ['a [x]']}}\n{LAYOUT}", "do not have the layout"),
        (f"old: [x]\n{LAYOUT}", "a side has"),
    ],
)  # fmt: skip
def test_hostile_rules_are_named_errors(text: str, message: str, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2, 3)}, tmp_path / "in.pt")
    (tmp_path / "rules.yaml").write_text(text)
    with pytest.raises(CkptoolError, match=message):
        ckptool.translate(tmp_path / "in.pt", rules_file=tmp_path / "rules.yaml", out=tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()
