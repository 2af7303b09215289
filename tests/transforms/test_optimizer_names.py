"""`convert --optimizer-as`: slots by name, by number and flattened, judged by torch's own functions for each."""

import copy
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import ckptool
from ckptool.conventions.optimizer_keys import flattened, nested
from ckptool.errors import Conflict, Corrupt, NoMatch, Unsupported, UsageError
from tests.support.cli import Run
from tests.support.files import load, saved
from tests.support.processes import soon
from tests.support.same import assert_same_objects

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Odd(nn.Module):
    """Linear layers of odd sizes, some with a norm, a scale of no dimension, and a head that may be tied."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        sizes = [rng.randint(2, 5) for _ in range(rng.randint(2, 4))]
        self.first = nn.Linear(3, sizes[0], bias=rng.random() < 0.5)
        pairs = pairwise(sizes)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b)) for a, b in pairs)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(sizes[-1], 3, bias=False)
        self.tied = nn.Linear(sizes[-1], 3, bias=False)
        if rng.random() < 0.5:
            self.tied.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x) * self.scale + self.tied(x)
        return out


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def made(seed: int, kind: str, named: bool, groups: int, frozen: bool) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A trained model with its optimizer, and the function that makes another such optimizer for a copy of it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Odd(rng)
    if frozen:
        model.first.weight.requires_grad_(False)

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        every = list(model.named_parameters())
        parts = [every] if groups == 1 else [every[::2], every[1::2]]
        chosen = [[pair if named else pair[1] for pair in part] for part in parts]
        optimizer = OPTIMIZERS[kind]([{"params": part} for part in chosen])
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = group["lr"] / (number + 1)
        return optimizer  # type: ignore[no-any-return]

    optimizer = optimizer_of(model)
    for step in range(2):
        stepped(model, optimizer, step)
    return model, optimizer, optimizer_of


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_form_is_torchs_own(kind: str, tmp_path: Path) -> None:
    for seed in range(6):
        named, groups, frozen = bool(seed & 1), 1 + (seed % 3 == 1), seed % 4 == 3
        model, optimizer, optimizer_of = made(seed, kind, named, groups, frozen)
        file = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{seed}.pt")
        for form, options in (("names", StateDictOptions()), ("flat", FLAT)):
            try:
                ckptool.convert(file, tmp_path / "out.pt", optimizer_as=form, overwrite=True)
            except Conflict:
                assert groups > 1 and not named
                continue
            found = torch.load(tmp_path / "out.pt", weights_only=True)
            theirs = get_optimizer_state_dict(model, optimizer, options=options)
            assert_same_objects(found["optimizer"], theirs)
            ckptool.convert(tmp_path / "out.pt", tmp_path / "back.pt", optimizer_as="ids", overwrite=True)
            back = torch.load(tmp_path / "back.pt", weights_only=True)
            assert [group.pop("param_names", None) for group in back["optimizer"]["param_groups"]] != [None]
            mine = optimizer.state_dict()
            for group in mine["param_groups"]:
                group.pop("param_names", None)
            if form == "names" or groups == 1:
                assert_same_objects(back["optimizer"], mine)

            numbered, by_name = copy.deepcopy(model), copy.deepcopy(model)
            loaded, other = optimizer_of(numbered), optimizer_of(by_name)
            loaded.load_state_dict(back["optimizer"])
            set_optimizer_state_dict(by_name, other, found["optimizer"], options=options)
            after = stepped(*copy.deepcopy((model, optimizer)), 9)
            assert_same_objects(stepped(numbered, loaded, 9), after)
            assert_same_objects(stepped(by_name, other, 9), after)


def test_what_is_not_certain_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weights = model.state_dict()
    some = torch.optim.Adam(list(model.parameters())[1:])
    stepped_once(model, some)
    two = torch.optim.SGD(model.parameters(), momentum=0.9).state_dict()
    lbfgs = torch.optim.LBFGS(model.parameters()).state_dict()
    gan = {"generator": weights, "discriminator": {f"x.{name}": value for name, value in weights.items()}}
    both = {"model": weights, "optimizer": some.state_dict()}
    for tree, form, out, error, words in (
        (both, "names", "o.pt", Conflict, "it is unclear which slots"),
        ({"optimizer": some.state_dict()}, "names", "o.pt", Conflict, "holds no weights"),
        ({**gan, "optimizer": two}, "names", "o.pt", Conflict, "all fit"),
        ({"model": weights, "optimizer": lbfgs}, "names", "o.pt", Unsupported, "LBFGS"),
        (both, "names", "o.safetensors", UsageError, "holds only weights"),
        (weights, "ids", "o.pt", NoMatch, "no optimizer state"),
    ):
        with pytest.raises(error, match=words):
            ckptool.convert(saved(tree, tmp_path / "in.pt"), tmp_path / out, optimizer_as=form)
        assert not (tmp_path / out).exists()
    ckptool.convert(saved(both, tmp_path / "in.pt"), tmp_path / "o.pt", optimizer_as="ids")


def test_the_model_gives_the_order_of_a_trainers_optimizer(tmp_path: Path, run: Run) -> None:
    """transformers' Trainer: weights in safetensors, sorted by name, and an optimizer in a file beside them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    decay = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest}])
    stepped_once(model, optimizer)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    saved(optimizer.state_dict(), tmp_path / "optimizer.pt")
    out, build = tmp_path / "o.pt", "from torch import nn\ndef build():\n    return nn.Sequential("
    (tmp_path / "code.py").write_text(build + "nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))\n")
    by_name = "convert", tmp_path / "optimizer.pt", "-o", out, "-f", "--optimizer-as", "names", "--against"
    for model_named in (f"{tmp_path / 'code.py'}:build", saved(model.state_dict(), tmp_path / "model.pt")):
        assert run(*by_name, model_named).code == 0
        assert_same_objects(torch.load(out, weights_only=True), get_optimizer_state_dict(model, optimizer))
    done = run(*by_name, tmp_path / "model.safetensors")
    assert done.code == 2 and "sorted by name" in done.err
    assert run("convert", tmp_path / "optimizer.pt", "-o", out, "-f", "--against", "x.pt").code == 2


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_twins_in_another_order_keep_their_state(groups: int, named: bool, tmp_path: Path) -> None:
    """The model now declares its layers in another order: numbered in its order, training goes on as if it had not."""
    layers = {name: nn.Linear(4, 4) for name in ("enc", "dec", "head")}

    def model_of(order: str) -> nn.Module:
        return nn.ModuleDict({name: copy.deepcopy(layers[name]) for name in order.split()})

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        every = [pair if named else pair[1] for pair in model.named_parameters()]
        return torch.optim.Adam([{"params": part} for part in ([every] if groups == 1 else [every[::2], every[1::2]])])

    def step(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        optimizer.zero_grad()
        model["head"](model["dec"](model["enc"](torch.ones(2, 4)).tanh())).square().sum().backward()
        optimizer.step()
        return dict(sorted(model.state_dict().items()))

    model, other = model_of("enc dec head"), model_of("head dec enc")
    optimizer = optimizer_of(model)
    step(model, optimizer)
    file = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    against = saved(other.state_dict(), tmp_path / "b.pt")
    ckptool.convert(file, tmp_path / "named.pt", optimizer_as="names", against=against)
    state = torch.load(tmp_path / "named.pt", weights_only=True)["optimizer"]["state"]
    for name, parameter in model.named_parameters():
        assert state[name]["exp_avg"].equal(optimizer.state[parameter]["exp_avg"]), name
    for number, source in enumerate((file, tmp_path / "named.pt")):
        ckptool.convert(source, out := tmp_path / f"{number}.pt", optimizer_as="ids", against=against)
        tree, again = torch.load(out, weights_only=True), copy.deepcopy(other)
        again.load_state_dict(tree["model"])
        (continued := optimizer_of(again)).load_state_dict(tree["optimizer"])
        assert_same_objects(step(again, continued), step(*copy.deepcopy((model, optimizer))))
    with pytest.raises(Conflict, match="no such parameter"):
        less = saved(model_of("enc dec").state_dict(), tmp_path / "less.pt")
        ckptool.convert(tmp_path / "named.pt", tmp_path / "x.pt", optimizer_as="ids", against=less)


def stepped_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_flattened_keys_below_a_prefix(tmp_path: Path) -> None:
    model, optimizer, _ = made(3, "adam", True, 1, False)
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    tree = {**model.state_dict(), **{f"optimizer.{key}": value for key, value in flat.items()}, "step": 3}
    ckptool.convert(saved(tree, tmp_path / "a.pt"), tmp_path / "names.pt", optimizer_as="names")
    found = torch.load(tmp_path / "names.pt", weights_only=True)
    assert_same_objects(found["optimizer"], get_optimizer_state_dict(model, optimizer))
    assert found["step"] == 3 and "optimizer.state.head.weight.exp_avg" not in found
    ckptool.convert(tmp_path / "names.pt", tmp_path / "weights.safetensors")
    assert ckptool.load(tmp_path / "weights.safetensors").keys() == model.state_dict().keys()


@pytest.mark.parametrize("kind", ["momentum", "adam", "adagrad"])
@pytest.mark.parametrize("prefix", ["", "optimizer."], ids=["in a dictionary", "beside the weights"])
def test_flattened_state_follows_its_weights_and_stays_flattened(prefix: str, kind: str, tmp_path: Path) -> None:
    """As torch flattens the state of the same model in another; `cast` and `add-module` do not take it for weights."""
    model, optimizer, _ = made(5, kind, False, 2, False)

    def file_of(model: nn.Module) -> dict[str, Any]:
        flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
        state = dict(model.state_dict())
        both = {**state, **{f"{prefix}{key}": value for key, value in flat.items()}}
        return {**both, "train_state": {"step": 3}} if prefix else {"model": state, "optimizer": flat}

    file, out = saved(file_of(model), tmp_path / "a.pt"), tmp_path / "out.pt"
    around = file_of(nn.ModuleDict({"net": model}))
    for change in (
        lambda: ckptool.rename(file, "* => net.*", out, overwrite=True),
        lambda: ckptool.add_module(file, out, prefix="net.", overwrite=True),
        lambda: ckptool.translate(file, "* => net.*", out, overwrite=True),
    ):
        change()
        assert_same_objects(ordered(load(out)), ordered(around), storages=False)
    ckptool.strip_module(out, tmp_path / "back.pt", prefix="net.")
    assert_same_objects(ordered(load(tmp_path / "back.pt")), ordered(load(file)), storages=False)
    ckptool.translate(file, "first.weight => turned : transpose", out, rest="keep", overwrite=True)
    before, after = load(file), load(out)
    if not prefix:
        before, after = ({**tree["model"], **tree["optimizer"]} for tree in (before, after))
    assert "first.weight" not in after and torch.equal(after["turned"], before["first.weight"].T)
    moments = {key: value for key, value in before.items() if key.startswith(f"{prefix}state.first.weight.")}
    for key, value in moments.items():
        new = after[key.replace("first.weight", "turned")]
        assert torch.equal(new, value.T if value.dim() > 1 else value), key
    assert moments and len(after) == len(before)
    ckptool.cast(file, out, dtype="bf16", overwrite=True)
    state = {key: value for key, value in addresses(load(out)) if "state." in key}
    assert state and not any(value.dtype is torch.bfloat16 for value in state.values())
    ckptool.slim(file, out, overwrite=True)
    assert not [key for key, _ in addresses(load(out)) if "param_groups" in key or ".exp_avg" in key]


def test_flattened_state_under_any_name_is_no_set_of_weights(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    for name in ("g", "d"):
        model, optimizer, _ = made(len(tree), "adam", False, 1, False)
        flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
        tree |= {f"{name}_model": dict(model.state_dict()), f"{name}_opt": flat}
    out = tmp_path / "out.pt"
    done = ckptool.add_module(saved(tree, tmp_path / "a.pt"), out)
    assert [row["root"] for row in done.facts["roots"]] == ["g_model", "d_model"]
    after = load(out)
    for name in ("g", "d"):
        expected = {
            key.replace("state.", "state.module.", 1) for key in tree[f"{name}_opt"] if key.startswith("state.")
        }
        assert {key for key in after[f"{name}_opt"] if key.startswith("state.")} == expected


def ordered(tree: Any) -> Any:
    """A dictionary, and those in it, sorted by their keys."""
    return {key: ordered(tree[key]) for key in sorted(tree)} if isinstance(tree, dict) else tree


def addresses(tree: dict[str, Any]) -> list[tuple[str, Any]]:
    return [item for value in tree.values() if isinstance(value, dict) for item in value.items()] + [*tree.items()]


def test_keys_of_any_shape_are_gone_through_in_linear_time() -> None:
    """Names of 64,000 characters, thousands of prefixes, states nested through each other."""
    long = "param_groups." * 5_000
    with soon(5):
        for keys in (
            [f"{long}{number}." for number in range(20)],
            [f"p{number}.param_groups.a.lr" for number in range(20_000)],
            ["param_groups.a.lr", *(f"state.{'a.' * 30_000}{number}" for number in range(20))],
        ):
            nested(dict.fromkeys(keys, 0.1))
    with pytest.raises(Corrupt, match="leads through another value"):
        nested({"param_groups.a.lr": 1, "state.a.b": 1, "state.a.b.c": 1})
    shampoo = {"state": {"a.w": {"step": 1, "p": {"0": {"m": 2}}}}, "param_groups": [{"lr": [1], "params": ["a.w"]}]}
    assert nested(flattened(shampoo)) == shampoo
    names = [f"layer.{number}" for number in range(3_000)]
    named = {"state": {}, "param_groups": [{"lr": 1, "params": names, "param_names": names}]}
    assert nested(flattened(named)) == named


def test_what_deepspeed_lists_as_buffers_is_no_parameter(tmp_path: Path) -> None:
    """Stage 0 saves torch's own numbers, and the names of the buffers beside the weights."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model.register_buffer("rope", torch.ones(3))
    wide = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.Adam([{"params": wide}, {"params": [p for p in model.parameters() if p.dim() < 2]}])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {"module": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "unsaid.pt")
    with pytest.raises(ckptool.CkptoolError, match="4 slots in 2 groups, 5 parameters"):
        ckptool.convert(tmp_path / "unsaid.pt", tmp_path / "x.pt", optimizer_as="names")
    torch.save({**saved, "buffer_names": ["rope"]}, tmp_path / "said.pt")
    ckptool.convert(tmp_path / "said.pt", tmp_path / "named.pt", optimizer_as="names")
    named = torch.load(tmp_path / "named.pt", weights_only=True)["optimizer"]
    for name, parameter in model.named_parameters():
        assert named["state"][name]["exp_avg"].equal(optimizer.state[parameter]["exp_avg"]), name


def test_names_that_ddp_gives_are_those_of_the_weights_of_its_module(tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))})
    optimizer = torch.optim.Adam(model.named_parameters())
    model["module"](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    inner, out = model["module"], tmp_path / "out.pt"
    file = saved({"model": inner.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    ckptool.convert(file, out, optimizer_as="names")
    again = torch.optim.Adam(inner.parameters())
    set_optimizer_state_dict(inner, again, torch.load(out, weights_only=True)["optimizer"])
    assert_same_objects([*again.state.values()], [*optimizer.state.values()])


def test_the_average_beside_a_model_does_not_make_it_unclear(tmp_path: Path) -> None:
    """`AveragedModel` has other names, and weights that fit as well."""
    model, optimizer, _ = made(1, "adam", False, 1, False)
    average = torch.optim.swa_utils.AveragedModel(model).state_dict()
    tree = {"swa_model": average, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    out = tmp_path / "out.pt"
    ckptool.convert(saved(tree, tmp_path / "a.pt"), out, optimizer_as="names")
    assert_same_objects(load(out)["optimizer"], get_optimizer_state_dict(model, optimizer))
    done = ckptool.translate(
        tmp_path / "a.pt", "*first.weight => *first.w : transpose", out, rest="keep", overwrite=True
    )
    assert done.facts["optimizers"] == 1


def test_rows_and_columns_tell_whose_they_are(tmp_path: Path) -> None:
    """Adafactor of transformers, in one group, or in two with a momentum."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    for groups, momentum in ((1, False), (2, True)):
        slots: dict[int, Any] = {}
        names = sorted(dict(model.named_parameters()), key=lambda name: groups == 2 and name.endswith("bias"))
        for number, name in enumerate(names):
            value = model.get_parameter(name).detach()
            slots[number] = {"step": 3, "RMS": value.norm(), **({"exp_avg": value + 1} if momentum else {})}
            rows = {"exp_avg_sq_row": value.mean(-1), "exp_avg_sq_col": value.mean(-2)} if value.dim() > 1 else {}
            slots[number] |= rows or {"exp_avg_sq": value + 2}
        parts = [[*range(4)]] if groups == 1 else [[0, 1], [2, 3]]
        optimizer = {"state": slots, "param_groups": [{"lr": 0.1, "params": part} for part in parts]}
        file = saved({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "a.pt")
        ckptool.convert(file, tmp_path / "out.pt", optimizer_as="names", overwrite=True)
        state = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["state"]
        assert_same_objects([state[name] for name in names], [*slots.values()])


def test_moments_by_name_are_no_weights(tmp_path: Path) -> None:
    """As loops save them that have no class for an optimizer: `cast` leaves them, `convert` takes the model."""
    weights = {"fc.weight": torch.rand(3, 2), "fc.bias": torch.rand(3)}
    for name, keys in (("opt", "mv"), ("opt_state", ("exp_avg", "exp_avg_sq"))):
        moments = {key: {name: value + 1 for name, value in weights.items()} for key in keys}
        file, out = saved({"model": weights, name: {**moments, "t": 3}}, tmp_path / "a.pt"), tmp_path / "out.pt"
        ckptool.cast(file, out, dtype="bf16", overwrite=True)
        after = load(out)
        assert_same_objects(after[name], {**moments, "t": 3}, storages=False)
        assert {value.dtype for value in after["model"].values()} == {torch.bfloat16}
        ckptool.convert(file, tmp_path / "out.safetensors", overwrite=True)
        assert ckptool.load(tmp_path / "out.safetensors").keys() == weights.keys()
    ckptool.bundle({"opt": saved({"model": weights}, tmp_path / "b.pt")}, tmp_path / "c.pt")  # a model of that name
    assert [root.kind for root in ckptool.inspect(tmp_path / "c.pt").roots] == ["model weights"]


def test_names_that_are_those_of_the_weights_stay_where_a_child_is_called_module(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    model.add_module("module", nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(list(model.named_parameters()), lr=0.1, momentum=0.9)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    file = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    ckptool.convert(file, tmp_path / "b.pt", optimizer_as="names")
    assert list(load(tmp_path / "b.pt")["optimizer"]["state"]) == ["weight", "module.weight"]
