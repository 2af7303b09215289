"""`translate --find`: the rules between two checkpoints, found by value; applied, they give the same bytes."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

import ckptool
from tests.support.cli import Run
from tests.support.files import saved
from tests.support.layouts import LAYOUT_CASES, counting
from tests.support.looped import looped
from tests.support.random_rules import RandomRules

Weights = dict[str, numpy.ndarray]
Pair = tuple[Weights, Weights]
D, HEADS, KV, HD = 32, 4, 2, 8


def random(*shape: int) -> numpy.ndarray:
    return RNG.standard_normal(shape).astype(numpy.float32)


RNG = numpy.random.default_rng(12)


def vit() -> Pair:
    a, b = Weights(), Weights()
    pairs = {"mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"}
    pairs |= {"norm1": "layernorm_before", "norm2": "layernorm_after"}
    a["pos_embed"] = b["vit.position_embeddings"] = random(1, 17, D)
    a["patch.proj.weight"] = b["vit.patch.weight"] = random(D, 3, 8, 8)
    a["patch.proj.bias"] = b["vit.patch.bias"] = numpy.zeros(D, "f4")
    for i in range(3):
        for part, bias in (("weight", D), ("bias", 0)):
            three = [random(D, D) if bias else numpy.zeros(D, "f4") for _ in range(3)]
            a[f"blocks.{i}.attn.qkv.{part}"] = numpy.concatenate(three)
            for name, value in zip(("query", "key", "value"), three, strict=True):
                b[f"vit.layer.{i}.attention.{name}.{part}"] = value
        for old, new in pairs.items():
            value = numpy.ones(D, "f4") if "norm" in old else random(D, D)
            a[f"blocks.{i}.{old}.weight"] = b[f"vit.layer.{i}.{new}.weight"] = value
            a[f"blocks.{i}.{old}.bias"] = b[f"vit.layer.{i}.{new}.bias"] = numpy.zeros(D, "f4")
    return a, b


def halves(weight: numpy.ndarray, heads: int) -> numpy.ndarray:
    return weight.reshape(heads, -1, 2, D).swapaxes(1, 2).reshape(-1, D)


def llama() -> Pair:
    a, b = Weights(), Weights()
    a["tok_embeddings.weight"] = b["model.embed_tokens.weight"] = random(64, D)
    for i in range(3):
        for old, new, rows, heads in (("wq", "q", HEADS, HEADS), ("wk", "k", KV, KV), ("wv", "v", KV, 0)):
            value = a[f"layers.{i}.attention.{old}.weight"] = random(rows * HD, D)
            b[f"model.layers.{i}.self_attn.{new}_proj.weight"] = halves(value, heads) if heads else value
        a[f"layers.{i}.ffn_norm.weight"] = b[f"model.layers.{i}.post_attention_layernorm.weight"] = random(D)
    return a, b


def gpt_oss() -> Pair:
    """Gate and up in alternate columns, transposed and stacked; projections as 1 x 1 convolutions; unequal parts."""
    a, b = Weights(), Weights()
    for i in range(2):
        experts = [(random(24, D), random(24, D)) for _ in range(3)]
        b[f"l.{i}.experts.gate_up"] = numpy.stack([numpy.stack(two, 1).reshape(-1, D).T for two in experts])
        for e, (gate, up) in enumerate(experts):
            a[f"l.{i}.experts.{e}.gate.weight"], a[f"l.{i}.experts.{e}.up.weight"] = gate, up
        a[f"l.{i}.to_q.weight"] = random(D, D)
        b[f"l.{i}.q.weight"] = a[f"l.{i}.to_q.weight"][:, :, None, None]
        b[f"l.{i}.x.weight"] = random(D, 32)
        a[f"l.{i}.x1.weight"], a[f"l.{i}.x2.weight"] = numpy.split(b[f"l.{i}.x.weight"], [8], 1)
    return a, b


def keras() -> Pair:
    """Kernels with their channels last: of one and two dimensions, and turned in a circle."""
    a, b = Weights(), Weights()
    for i in range(3):
        for rank, axes in ((1, (2, 1, 0)), (2, (3, 2, 0, 1))):
            a[f"c{rank}.{i}.kernel"] = random(*range(3, 3 + rank), 6, 7)
            b[f"conv{rank}d.{i}.weight"] = a[f"c{rank}.{i}.kernel"].transpose(axes)
        a[f"turned.{i}.kernel"] = random(3, 4, 5)
        b[f"other.{i}.weight"] = a[f"turned.{i}.kernel"].transpose(1, 2, 0)
    return a, b


PAIRS: dict[str, tuple[Callable[[], Pair], int]] = {
    "vit": (vit, 8),
    "llama": (llama, 5),
    "gpt-oss": (gpt_oss, 3),
    "keras": (keras, 3),
}


def written(folder: Path, *sides: Weights) -> list[str]:
    names = []
    for name, side in zip("ab", sides, strict=True):
        names.append(str(folder / f"{name}.safetensors"))
        ckptool.save({key: numpy.ascontiguousarray(value) for key, value in side.items()}, names[-1], overwrite=True)
    return names


def same(one: str, other: str) -> bool:
    return ckptool.diff(one, other).same


@looped(("name", "back"), [(name, back) for name in PAIRS for back in (False, True)])
def test_rules_of_a_layout_are_found_and_reproduce_the_bytes(name: str, back: bool, tmp_path: Path) -> None:
    make, rules = PAIRS[name]
    sides = make()
    old, new = written(tmp_path, *(sides[::-1] if back else sides))
    out = tmp_path / "rules.yaml"
    found = ckptool.find_rules(old, new, out)
    total = len(sides[0] if back else sides[1])
    assert (found.by_value, found.total, found.missing, found.dropped, found.notes) == (total, total, (), (), ())
    assert len(found.rules) <= rules
    ckptool.translate(old, out=tmp_path / "c.safetensors", rules_file=out)
    assert same(str(tmp_path / "c.safetensors"), new)
    assert out.read_text().startswith(f"# a.safetensors → b.safetensors: {total} of {total} by value.\n")


def test_values_that_differ_are_marked_and_what_is_not_made_is_listed(tmp_path: Path) -> None:
    a, b = vit()
    b["vit.layer.1.intermediate.dense.weight"] = random(D, D)
    b["extra.weight"], a["old.rotary.0.inv_freq"], a["old.rotary.1.inv_freq"] = random(5), random(4), random(4)
    old, new = written(tmp_path, a, b)
    found = ckptool.find_rules(old, new)
    assert found.by_name == ("vit.layer.1.intermediate.dense.weight",) and found.missing == ("extra.weight",)
    assert found.drop == ("old.rotary.*.inv_freq",) and found.by_value == found.total - 2
    rule = next(rule for rule in found.rules if "fc1" in rule.text)
    assert rule.text == "blocks.{n}.mlp.fc1.* => vit.layer.{n}.intermediate.dense.*"
    assert (rule.tensors, rule.by_value) == (6, 5)
    text = str(found)
    assert f"{found.by_value} of {found.total} by value, 1 by name and shape, 1 not made" in text
    assert "5 of 6 tensors by value; 1 by name and shape only: the values differ" in text
    assert "not made: extra.weight" in text and found.to_dict()["missing"] == ["extra.weight"]


def test_command_writes_rules_and_exits_1_if_a_tensor_is_not_made(run: Run, tmp_path: Path) -> None:
    a, b = vit()
    old, new = written(tmp_path, a, b)
    out = tmp_path / "rules.yaml"
    done = run("translate", "--find", old, new, "-o", str(out), "-n")
    assert done.code == 0 and not out.exists() and "would write" in done.out
    done = run("translate", "--find", old, new, "-o", str(out), "--json")
    assert done.code == 0 and done.json["by_value"] == len(b) and out.exists()
    assert run("translate", "--find", old, new, "-o", str(out)).code == 2
    written(tmp_path, a, {**b, "extra": random(3)})
    assert run("translate", "--find", old, new, "-o", str(out), "-f").code == 1
    assert run("translate", "--find", old).code == 2
    parts = [f"{saved({'a': a, 'b': b}, tmp_path / 'both.pt')}#{name}" for name in "ab"]
    assert f"{parts[0]} → {parts[1]}" in run("translate", "--find", *parts).out


@looped("seed", range(40))
def test_what_is_said_of_random_rules_is_true(seed: int, tmp_path: Path) -> None:
    """Whatever the rules were that made B: those that are found make of A what the report says."""
    made = RandomRules(seed)
    wanted = made.translated(made.state)
    torch.save(made.state, tmp_path / "a.pt")
    torch.save(wanted, tmp_path / "b.pt")
    out, result = tmp_path / "rules.yaml", tmp_path / "c.pt"
    found = ckptool.find_rules(tmp_path / "a.pt", tmp_path / "b.pt", out)
    assert found.by_value + len(found.by_name) + len(found.missing) == found.total == len(wanted)
    if found.rules:
        ckptool.translate(tmp_path / "a.pt", out=result, rules_file=out)
        a, b = values_of(result), values_of(tmp_path / "b.pt")
        assert sum(a.get(key) == value for key, value in b.items()) == found.by_value


def values_of(file: Path) -> dict[str, tuple[Any, ...]]:
    return {key: (entry.dtype, entry.shape, entry.numpy().tobytes()) for key, entry in ckptool.open(file).tree.items()}


@looped("name", sorted({path.name for path in LAYOUT_CASES.iterdir()} - {"llama-meta"}))
def test_rules_of_layouts_that_ship_are_found_again(name: str, tmp_path: Path) -> None:
    case = json.loads((LAYOUT_CASES / name / "case.json").read_text())
    old, new = LAYOUT_CASES / name / "model.safetensors", tmp_path / "new.safetensors"
    if "shapes" in case:
        save_file(counting(case["shapes"]), old := tmp_path / "old.safetensors")
    ckptool.translate(old, out=new, rules_file=case["layout"], set=case.get("set", ()))
    for one, other in ((old, new), (new, old)):
        found = ckptool.find_rules(one, other, tmp_path / "rules.yaml", overwrite=True)
        tied = [note for note in found.notes if note.code == "second-name"]
        cut = case.get("kept", {})  # rows that the other layout does not have: nothing is found for these
        assert found.by_value == found.total - len(found.missing) and len(found.missing) == len(tied) + len(cut), found


@pytest.mark.parametrize("tied", [True, False])
def test_only_what_is_tied_is_a_second_name(tied: bool, tmp_path: Path) -> None:
    """Zeros have the values of other zeros; a model that has both needs both."""
    weight, zeros = torch.randn(4, 4), torch.zeros(4)
    torch.save({"a.weight": weight, "a.bias": zeros}, tmp_path / "old.pt")
    more = zeros if tied else torch.zeros(4)
    torch.save({"b.weight": weight, "b.bias": zeros, "b.more": more}, tmp_path / "new.pt")
    found = ckptool.find_rules(tmp_path / "old.pt", tmp_path / "new.pt", tmp_path / "rules.yaml")
    assert [note.code for note in found.notes] == ["second-name"] * tied
    assert found.missing == ("b.more",) and ("ckptool translate " in str(found)) == tied


KINDS = ("heads", "rows", "columns", "transposed", "halves", "tuned", "lora", "unrelated", "other tensor", "same")


def model(rng: numpy.random.Generator, wide: int) -> Weights:
    made = {"embed.weight": rng.standard_normal((3 * wide, wide)), "head.bias": rng.standard_normal(4)}
    for i in range(2):
        made |= {f"layers.{i}.{name}.weight": rng.standard_normal((wide, wide)) for name in ("q", "k", "up")}
        made |= {f"layers.{i}.norm.weight": numpy.ones(wide), f"layers.{i}.norm.bias": numpy.zeros(wide)}
    return {key: (value * 0.1).astype("f4") if "norm" not in key else value.astype("f4") for key, value in made.items()}


def changed(rng: numpy.random.Generator, kind: str, base: Weights) -> Weights:
    """Another model."""
    key = str(rng.choice([key for key in base if key.endswith(("q.weight", "k.weight", "up.weight"))]))
    value, wide = base[key], len(base[key])
    if kind in ("tuned", "lora"):
        step = 10 ** rng.uniform(-3, -0.52)
        made = {k: v + step * (v.std() or 0.1) * rng.standard_normal(v.shape).astype("f4") for k, v in base.items()}
        low = rng.standard_normal((wide, 2)) @ rng.standard_normal((2, wide))
        lora = {**base, key: value + (step * value.std() / low.std() * low).astype("f4")}
        return made if kind == "tuned" else lora
    if kind == "unrelated":
        return model(rng, wide)
    orders = {
        "heads": lambda: value.reshape(4, -1, wide)[[2, 0, 3, 1]].reshape(wide, wide),
        "rows": lambda: value[rng.permutation(wide)],
        "columns": lambda: value[:, rng.permutation(wide)],
        "transposed": lambda: value.T[rng.permutation(wide)],
        "halves": lambda: value.reshape(4, -1, 2, wide).swapaxes(1, 2).reshape(wide, wide)[:, rng.permutation(wide)],
        "other tensor": lambda: rng.standard_normal((wide, wide)).astype("f4") * 0.1,
        "same": lambda: value,
    }
    return {**base, key: numpy.ascontiguousarray(orders[kind]())}


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_has_the_same_bytes_is_proved(kind: str) -> None:
    for seed in range(3):
        rng = numpy.random.default_rng(seed)
        base = model(rng, int(rng.choice([16, 32, 64])))
        other = changed(rng, kind, base)
        found = ckptool.find_rules(base, other)
        differ = {key for key, value in base.items() if not numpy.array_equal(value, other[key])}
        assert {*found.by_name} == differ and found.complete == (not differ), (seed, found)
        lines = [line for line in str(found).splitlines() if "values differ: " in line]
        assert len(lines) == bool(differ) and all(name in lines[0] for name in [*differ][:1] if len(differ) == 1)


def test_equal_values_under_names_that_stay_are_not_doubtful() -> None:
    base = model(numpy.random.default_rng(0), 16)
    moved = {f"net.{key}": value for key, value in base.items()}
    turned = {key: value.T.copy() if "up" in key else value for key, value in base.items()}
    fewer = ({key: value for key, value in base.items() if key != lacking} for lacking in base)
    for other, doubtful in (
        *((other, 0) for other in (base, turned, *fewer)),
        (moved, 4),  # four norms, two of ones and two of zeros
    ):
        found = ckptool.find_rules(base, other)
        assert found.complete and sum(rule.alike for rule in found.rules) == doubtful, str(found)


@pytest.mark.parametrize("renamed", [{}, {"gate": "router"}, {"q": "query", "norm": "ln"}])
def test_names_that_stay_take_no_rule_for_each_layer(renamed: dict[str, str], tmp_path: Path) -> None:
    counts = set()
    for layers in (2, 9):
        a = {"tok.weight": random(8, D), "head.weight": random(8, D), "norm.weight": numpy.ones(D, "f4")}
        a |= {f"h.{n}.{part}.weight": random(D, D) for n in range(layers) for part in ("q", "k", "mlp.gate", "mlp.up")}
        a |= {f"h.{n}.norm.weight": numpy.ones(D, "f4") for n in range(layers)}
        b = {".".join(renamed.get(word, word) for word in key.split(".")): value for key, value in a.items()}
        old, new = written(tmp_path, a, b)
        found = ckptool.find_rules(old, new, tmp_path / "rules.yaml", overwrite=True)
        counts.add(len(found.rules))
        ckptool.translate(old, rules_file=found.output, out=tmp_path / "made.safetensors", overwrite=True)
        assert found.complete and same(str(tmp_path / "made.safetensors"), new)
    assert len(counts) == 1 and counts <= {*range(9)}, counts


@pytest.mark.parametrize(("parts", "most"), [(30, 2 << 20), (200, 8 << 20)])
def test_long_names_take_little_memory(parts: int, most: int) -> None:
    """What names might have in common at one place is not kept for all of them at once."""
    rng = numpy.random.default_rng(parts)
    names = [".".join(row) for row in rng.choice([*"abcdefgh"], (100, parts))]
    old, new = (
        {name: numpy.zeros(at) for at, name in enumerate(some, at)}
        for at, some in ((1, names[::2]), (500, names[1::2]))
    )
    tracemalloc.start()
    try:
        found = ckptool.find_rules(old, new)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
    assert found.missing == (*new,)
