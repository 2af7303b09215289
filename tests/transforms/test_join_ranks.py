"""Ranks of tensor and pipeline parallelism joined by rules. The judges: Megatron-Core's own model on one rank
(`fixtures/engines/megatron-mp-rank`), and random models that are divided here as its source divides them."""

import shutil
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.errors import CkptoolError, Conflict, Corrupt, NoMatch, OnlyAPart, Truncated, Unsupported, UsageError
from tests.support.cli import Run
from tests.support.engine_cases import ROOT
from tests.support.looped import looped

CASE = ROOT / "megatron-mp-rank"
State = dict[str, torch.Tensor]


def joined(folder: Path, rules: Path | str) -> State:
    """The weights that `convert --rules` writes. rules: a file, or its text."""
    if isinstance(rules, str):
        (path := folder.parent / "rules.yaml").write_text(rules)
        rules = path
    out = folder.parent / "joined.safetensors"
    ckptool.convert(folder, out, rules_file=rules, overwrite=True)
    return load_file(out)


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_ranks_of_megatrons_own_model_are_what_it_loads_on_one_rank(tmp_path: Path, run: Run) -> None:
    shutil.copytree(CASE / "checkpoint", tmp_path / "run" / "iter_0000100")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("100")
    for folder in (tmp_path / "run" / "iter_0000100", tmp_path / "run"):
        out = tmp_path / f"{folder.name}.safetensors"
        done = run("convert", str(folder), "--rules", str(CASE / "rules.yaml"), "-o", str(out))
        assert done.code == 0 and "left out (the input keeps it): ranks" in done.out, done
        assert same(load_file(out), load_file(CASE / "weights.safetensors"))
    done = run("convert", str(folder), "--rules", str(CASE / "rules.yaml"), "-o", str(tmp_path / "all.pt"))
    assert done.code == 0, done
    found = ckptool.open(tmp_path / "all.pt")
    assert list(found["ranks"]["mp_rank_01_000"]) == ["args", "checkpoint_version", "iteration", "opt_param_scheduler",
                                                      "rng_state"]  # fmt: skip


# As Megatron divides a model ---------------------------------------------------------------------------------------

RULES = """
join:
  embedding.weight: {{vocab: {vocab}}}
  '*.qkv.weight': {{qkv: {{heads: {heads}, kv_heads: {groups}, head_dim: 3}}}}
  '*.blocks.weight': {{qkv_blocks: {{heads: {heads}, kv_heads: {groups}}}}}
  '*.fc1.*': glu
  're:^.*\\.(proj|fc2)\\.weight$': row
  '*.up.bias': column
  '*': replicated
layers: [decoder.layers]
"""


def share(name: str, full: torch.Tensor, rank: int, world: int, groups: int, queries: int) -> torch.Tensor:
    """A rank's part of a tensor, by tensor_parallel/layers.py, mlp.py and attention.py."""
    if name.startswith("embedding"):
        padded = torch.cat([full, torch.zeros(-full.shape[0] % (4 * world), full.shape[1])])
        return padded.chunk(world)[rank]
    if ".fc1." in name:
        return torch.cat([half.chunk(world)[rank] for half in full.chunk(2)])
    if ".qkv." in name:
        return full.view(groups, (queries + 2) * 3, -1).chunk(world)[rank].reshape(-1, full.shape[1])
    if ".blocks." in name:
        parts = full.split([3 * groups * queries, 3 * groups, 3 * groups])
        return torch.cat([part.chunk(world)[rank] for part in parts])
    if ".proj." in name or ".fc2." in name:
        return full.chunk(world, dim=1)[rank]
    return full.chunk(world)[rank] if ".up." in name else full


@settings(max_examples=25)
@given(
    world=st.sampled_from([1, 2, 4]),
    stages=st.integers(1, 3),
    virtual=st.integers(1, 2),
    depth=st.integers(1, 2),
    queries=st.integers(1, 3),
    vocab=st.integers(3, 21),
    seed=st.integers(0, 99),
)
def test_a_model_that_is_divided_as_megatron_does_is_joined(
    world: int, stages: int, virtual: int, depth: int, queries: int, vocab: int, seed: int
) -> None:
    torch.manual_seed(seed)
    groups, count = world, stages * virtual * depth
    shapes = {"qkv.weight": (groups * (queries + 2) * 3, 5), "blocks.weight": (groups * (queries + 2) * 3, 5),
              "fc1.weight": (8 * world, 5), "fc1.bias": (8 * world,), "fc2.weight": (5, 4 * world),
              "proj.weight": (5, 2 * world), "up.bias": (world * 3,), "norm.weight": (5,)}  # fmt: skip
    full = {f"decoder.layers.{n}.{name}": torch.randn(shape) for n in range(count) for name, shape in shapes.items()}
    full |= {"embedding.weight": torch.randn(vocab, 5), "decoder.norm.weight": torch.randn(5)}
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "iter"
        for rank in range(world):
            for stage in range(stages):
                chunks = [State() for _ in range(virtual)]
                for name, value in full.items():
                    part = share(name, value, rank, world, groups, queries)
                    if name.startswith("decoder.layers."):
                        number, _, rest = name[15:].partition(".")
                        place, local = divmod(int(number), depth)
                        if place % stages == stage:
                            chunks[place // stages][f"decoder.layers.{local}.{rest}"] = part.clone()
                    elif stage == (0 if name.startswith("embedding") else stages - 1):
                        chunks[0 if name.startswith("embedding") else -1][name] = part.clone()
                own = folder / (f"mp_rank_{rank:02d}" + f"_{stage:03d}" * (stages > 1))
                own.mkdir(parents=True)
                models = {"model": chunks[0]} if virtual == 1 else {f"model{n}": c for n, c in enumerate(chunks)}
                torch.save({**models, "iteration": 7, "rng_state": [torch.ones(3)]}, own / "model_optim_rng.pt")
        rules = RULES.format(vocab=vocab, heads=groups * queries, groups=groups)
        assert same(joined(folder, rules), full)


def test_llamas_files_are_joined(tmp_path: Path, run: Run) -> None:
    (folder := tmp_path / "llama").mkdir()
    full = {"layers.0.wq.weight": torch.randn(8, 6), "layers.0.wo.weight": torch.randn(6, 8), "norm": torch.ones(6)}
    for rank in range(2):
        wq, wo, norm = full.values()
        torch.save(dict(zip(full, (wq.chunk(2)[rank].clone(), wo.chunk(2, 1)[rank].clone(), norm), strict=True)),
                   folder / f"consolidated.{rank:02d}.pth")  # fmt: skip
    assert same(joined(folder, "join: {'*.wq.*': column, '*.wo.*': row, norm: replicated}"), full)
    assert "2 of 2 members" in run("inspect", str(folder)).out
    (folder / "consolidated.01.pth").rename(folder / "consolidated.02.pth")
    with pytest.raises(Truncated, match="3 ranks"):
        joined(folder, "join: {'*': column}")


# Refused -----------------------------------------------------------------------------------------------------------


def ranks(folder: Path, *states: State, **entries: object) -> Path:
    """A folder of tensor-parallel ranks with these models."""
    for rank, state in enumerate(states):
        (own := folder / f"mp_rank_{rank:02d}").mkdir(parents=True)
        torch.save({"model": state, **entries}, own / "model_optim_rng.pt")
    return folder


def refused(folder: Path, rules: str, kind: type[CkptoolError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        joined(folder, rules)
    assert all(word in str(caught.value) for word in words), caught.value
    assert caught.value.why or caught.value.fix
    assert not (folder.parent / "joined.safetensors").exists()


# For one rank with the tensor `a`.
SENSELESS = [
    ("join: [a]", "line 1: not a mapping"),
    ("[1]", "line 1: not a mapping"),
    ("", "not a mapping"),
    ("join:\n  a: col", "line 2: cannot join by 'col'"),
    ("join:\n  a: row\n  a: column", "line 3: 'a' appears twice"),
    ("joins: {}", "line 1: 'joins' is none of join, layers"),
    ("join: {a: vocab}", "line 1: vocab takes rows"),
    ("join: {a: {vocab: x}}", "'x' has no value"),
    ("join: {a: {vocab: 99999999999999}}", "vocab takes rows"),
    ("join: {a: {glu: 2}}", "glu takes no numbers"),
    ("join: {a: {row: 1, column: 2}}", "where a name should be"),
    ("join: {a: {qkv: {heads: 4, kv_heads: 3, head_dim: 1}}}", "multiple of kv_heads"),
    ("join: {a: {qkv: {heads: 4}}}", "qkv takes heads, kv_heads, head_dim"),
    ("join: {'re:(': row}", "line 1: 're:(' is not a regular expression"),
    ("join: {a: !!python/object:os.system row, b: [1}", "not valid YAML"),
    ("layers: [[a]]", "where a name should be"),
]


@looped(("rules", "words"), SENSELESS)
def test_rules_that_make_no_sense_are_named_by_their_line(rules: str, words: str, tmp_path: Path) -> None:
    refused(ranks(tmp_path / "f", {"a": torch.ones(2)}), rules, UsageError, words)


A, W = {"a.weight": torch.ones(3)}, {"w": torch.ones(2)}
TWO = {"a.weight": torch.ones(2), "b.weight": torch.ones(2)}
# What the ranks save, the rules, the error and its words.
REFUSED: list[tuple[list[State], dict[str, Any], str, type[CkptoolError], tuple[str, ...]]] = [
    ([TWO, TWO], {}, "join: {a.*: replicated}", UsageError, ("no rule for 1 tensor: b.weight",)),
    ([TWO, TWO], {}, "join: {'*': replicated, a.*: row}", NoMatch, ("'a.*: row'", "line 1")),
    ([A, A], {}, "join: {a.*: row}", UsageError, ("a.weight", "has 1 dimension", "'a.*: ")),
    ([A, A], {}, "join: {a.*: glu}", UsageError, ("a.weight", "not a multiple of 2")),
    ([A, A], {}, "join: {a.*: {vocab: 7}}", UsageError, ("a.weight", "has 6 rows in all")),
    ([A, A], {}, "join: {a.*: {qkv: {heads: 2, kv_heads: 2, head_dim: 2}}}", UsageError,
        ("a.weight", "6 rows in all, and 12 would be")),
    ([A, A], {}, "join: {a.*: {qkv_blocks: {heads: 2, kv_heads: 1}}}", UsageError, ("a.weight", "not a multiple of 4")),
    ([{"n": torch.ones(2)}, {"n": torch.zeros(2)}], {}, "join: {n: replicated}", Conflict,
        ("n: mp_rank_00 and mp_rank_01 differ", "'n: replicated'")),
    ([W, W], {"args": Namespace(tensor_model_parallel_size=4)}, "join: {w: column}", Truncated,
        ("2 files of 4 ranks",)),
    ([W, {}], {}, "join: {w: column}", UsageError, ("w is not in the files of tensor rank 1",)),
    ([W], {"args": Namespace(expert_model_parallel_size=2)}, "join: {w: column}", Unsupported, ("expert parallelism",)),
    ([{"w": torch.ones(2, 2)}, {"w": torch.ones(2, 3)}], {}, "join: {w: column}", CkptoolError,
        ("w [4, 2]", "mp_rank_01 reaches outside of it")),
]  # fmt: skip


@looped(("states", "entries", "rules", "kind", "words"), REFUSED)
def test_ranks_that_the_rules_do_not_fit_are_named(
    states: list[State], entries: Any, rules: str, kind: type[CkptoolError], words: tuple[str, ...], tmp_path: Path
) -> None:
    refused(ranks(tmp_path / "f", *states, **entries), rules, kind, *words)


def test_tensors_may_be_left_out_and_the_first_of_several_may_do(tmp_path: Path) -> None:
    assert same(
        joined(ranks(tmp_path / "a" / "f", TWO, TWO), "join: {a.*: column, '*': skip}"), {"a.weight": torch.ones(4)}
    )
    folder = ranks(tmp_path / "b" / "f", {"n": torch.ones(2)}, {"n": torch.zeros(2)})
    assert same(joined(folder, "join: {n: first}"), {"n": torch.ones(2)})


def test_ranks_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    folder = ranks(tmp_path / "b", W, W, iteration=1)
    torch.save({"model": W, "iteration": 2}, folder / "mp_rank_01" / "model_optim_rng.pt")
    refused(folder, "join: {w: column}", Conflict, "mp_rank_00 and mp_rank_01", "iteration 1, the other of 2")
    folder = ranks(tmp_path / "iter_0000003", W, W, iteration=1)
    refused(folder, "join: {w: column}", Conflict, "its files are of iteration 1, the folder of 3")
    torch.save([W], folder / "mp_rank_01" / "model_optim_rng.pt")
    refused(folder, "join: {w: column}", Corrupt, "mp_rank_01", "is not a dictionary")
    (folder / "mp_rank_01" / "model_optim_rng.pt").write_bytes(b"")
    refused(folder, "join: {w: column}", Truncated, "mp_rank_01", "empty")
    (folder / "mp_rank_01" / "model_optim_rng.pt").unlink()
    refused(folder, "join: {w: column}", Truncated, "mp_rank_01 has none of model_optim_rng.pt")


@looped("layout", ["llama-meta", "llama-megatron"])
def test_the_file_of_one_rank_is_not_joined(layout: str, tmp_path: Path) -> None:
    folder = ranks(tmp_path / "f", W, W)
    one = folder / "mp_rank_01" / "model_optim_rng.pt"
    if layout == "llama-meta":
        one = one.rename(folder / "consolidated.01.pth")
        shutil.copyfile(folder / "mp_rank_00" / "model_optim_rng.pt", folder / "consolidated.00.pth")
    with pytest.raises(OnlyAPart) as caught:
        ckptool.translate(one, (), tmp_path / "out.safetensors", rules_file=layout)
    assert caught.value.fix == f"Name the folder of all of them: {folder}"


NAMES = ("model{}-mp2.safetensors", "model_tp{}_pp0.pt", "mp_rank_0{}/model_weights.ckpt")


@pytest.mark.parametrize("name", [*NAMES, "rank{}-of-2-model.pt"])
def test_files_of_any_program_whose_names_tell_their_ranks_are_joined(name: str, tmp_path: Path, run: Run) -> None:
    whole = {"tok.weight": torch.randn(6, 3), "layers.0.proj.weight": torch.randn(3, 4), "norm.weight": torch.ones(3)}
    for stage in range(2 if "pp{}" in name else 1):
        for rank in range(2):
            share = {n: v.chunk(2, {"tok": 0, "lay": 1}[n[:3]])[rank] if n[0] in "tl" else v for n, v in whole.items()}
            if "pp{}" in name:
                share = {n: v for n, v in share.items() if n.startswith("tok") == (stage == 0)}
            path = tmp_path / "ranks" / name.format(rank, stage)
            path.parent.mkdir(parents=True, exist_ok=True)
            share = {n: v.contiguous() for n, v in share.items()}
            save_file(share, path) if path.suffix == ".safetensors" else torch.save(share, path)
    rules = "join:\n  tok.weight: column\n  '*.proj.weight': row\n  norm.weight: replicated\n"
    assert same(joined(tmp_path / "ranks", rules), whole)
    if "/" not in name:
        refused = run("convert", str(path), "-o", str(tmp_path / "out.pt"))
        assert f"convert {path.parent} --rules" in refused.err or "of 2" in refused.err, refused
    if "of-2" in name:
        path.unlink()
        with pytest.raises(Corrupt, match="rank 1"):
            joined(tmp_path / "ranks", rules)


def test_without_rules_a_folder_of_ranks_is_said_to_need_them(tmp_path: Path, run: Run) -> None:
    folder = ranks(tmp_path / "f", {"w": torch.ones(2)}, {"w": torch.ones(2)})
    with pytest.raises(OnlyAPart, match=r"rules_file='RULES\.yaml'"):
        ckptool.convert(folder, tmp_path / "out.pt")
    assert run("verify", str(folder)).code == 0
    with pytest.raises(UsageError, match="no files named after model-parallel ranks"):
        joined(tmp_path / "f" / "mp_rank_00", "join: {w: column}")
