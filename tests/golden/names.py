"""Cases for the verbs that match names: adapters, ranks joined by rules, and rules that rename or change tensors."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.golden.commands import Facts, Words, lines
from tests.support.layouts import LAYOUT_CASES, counting

ROOT = Path(__file__).parents[2]
LORA = ROOT / "fixtures" / "surgery" / "lora"
RANKS = ROOT / "fixtures" / "engines" / "megatron-mp-rank"
Made = tuple[str, Callable[[Path], Path], Callable[[Facts], Iterator[Words]]]


def names_cases() -> Iterator[Made]:
    """Name, maker and command lines of each."""
    yield "names-adapters", adapters, adapter_lines
    yield "names-ranks", ranks, rank_lines
    yield "names-rules", rules, rule_lines
    yield "names-layouts", layouts, layout_lines


def texts(folder: Path, name: str, *files: str) -> None:
    """Numbered YAML files of these texts."""
    for number, text in enumerate(files):
        (folder / f"{name}{number}.yaml").write_text(text)


# Adapters -------------------------------------------------------------------------------------------------------------

KINDS = sorted(path.name for path in LORA.iterdir() if path.is_dir())


def adapters(folder: Path) -> Path:
    for path in LORA.iterdir():
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
        elif (path / "adapter.safetensors").exists():
            shutil.copyfile(path / "adapter.safetensors", folder / f"{path.name}.safetensors")
        else:
            shutil.copytree(path, folder / path.name, copy_function=shutil.copyfile)
    torch.manual_seed(0)
    base = load_file(folder / "base-float32.safetensors")
    tuned = {k: v + torch.outer(v.flatten()[: len(v)], v[0].flatten()).view_as(v) if v.dim() > 1 else v + 1
             for k, v in base.items()}  # fmt: skip
    save_file(tuned, folder / "tuned.safetensors")
    torch.save({"state_dict": {f"module.net.{key}": value for key, value in base.items()}, "n": 1}, folder / "net.pt")
    halves = {"A": (2, 4), "B": (4, 2)}
    place = "mid_block.attentions.0.to_{}.lora_{}.weight"
    unet = {place.format(x, half): torch.randn(shape) for x in "qk" for half, shape in halves.items()}
    save_file({f"unet.{key}": value for key, value in unet.items()}, folder / "unet.safetensors")
    other = {f"text_encoder_2.{key}": value + 1 for key, value in unet.items()}
    save_file({f"unet.{key}": value for key, value in unet.items()} | other, folder / "both.safetensors")
    for name, changes in {"lacks": "lora_B", "nomatch": "lin", "empty": "lora"}.items():
        shutil.copytree(LORA / "linear", folder / name, copy_function=shutil.copyfile)
        state = load_file(LORA / "linear" / "adapter_model.safetensors")
        kept = {key.replace(changes, "x") if name == "nomatch" else key: value for key, value in state.items()}
        kept = {key: value for key, value in kept.items() if name == "nomatch" or changes not in key}
        save_file(kept, folder / name / "adapter_model.safetensors")
    shutil.copytree(LORA / "linear", folder / "rank", copy_function=shutil.copyfile)
    config = json.loads((folder / "rank" / "adapter_config.json").read_text())
    (folder / "rank" / "adapter_config.json").write_text(json.dumps({**config, "r": 77}))
    return folder / "base-float32.safetensors"


def adapter_lines(_: Facts) -> Iterator[Words]:
    yield from lines("""
        lora extract tuned.safetensors base-float32.safetensors --rank 3 -o extracted --json
        lora extract tuned.safetensors base-float32.safetensors --rank 2 --dtype bf16 -o small --json
        lora extract tuned.safetensors base-float32.safetensors --rank 2 --only lin.* -o only --json
        lora extract base-float32.safetensors base-float32.safetensors --rank 2 -o none --json
        lora merge net.pt extracted -o extracted.pt --json
        lora convert both.safetensors --to kohya -o both-kohya.safetensors --json
        lora convert both-kohya.safetensors --to diffusers -o both-diffusers.safetensors --json
        lora convert both.safetensors --to peft -o both-peft --json
    """)
    files = [name if not name.startswith("lycoris") else f"{name}.safetensors" for name in KINDS]
    for name in [*files, "extracted", "lacks", "nomatch", "empty", "rank", "unet.safetensors", "base-net.safetensors"]:
        stem = name.removesuffix(".safetensors")
        for base in ("float32", "bfloat16", "net"):
            yield from lines(f"lora merge base-{base}.safetensors {name} -o {stem}-{base}.safetensors --json")
        yield from lines(f"""
            lora merge net.pt {name} --scale 0.5 -o {stem}-net.pt
            lora convert {name} --to peft -o {stem}-peft --json
            lora convert {name} --to peft --base base-float32.safetensors -o {stem}-peft2 --json
            lora convert {name} --to kohya -o {stem}-kohya.safetensors --json
            lora convert {name} --to diffusers -o {stem}-diffusers.safetensors --json
            lora convert {name} --to diffusers --fold -o {stem}-folded.safetensors
            lora resize {name} --rank 1 -o {stem}-one/ --json
            lora resize {name} --rank 1 -o {stem}-one.safetensors --json
            lora merge base-float32.safetensors {stem}-kohya.safetensors -o {stem}-k.safetensors --json
            lora merge base-float32.safetensors {stem}-diffusers.safetensors -o {stem}-d.safetensors --json
            lora convert {stem}-kohya.safetensors --to peft -o {stem}-peft3 --json
            lora convert {stem}-kohya.safetensors --to peft --base net.pt -o {stem}-peft4 --json
            lora convert {stem}-diffusers.safetensors --to peft -o {stem}-peft5 --json
            inspect {name} --json
        """)


# Ranks ----------------------------------------------------------------------------------------------------------------

JOINS = """
    {'*': replicated}
    {'*': first}
    {'*': skip}
    {'*': column}
    {'*': row}
    {'*': glu}
    {'*': {vocab: 17}}
    {'*': {vocab: 99}}
    {w: {heads: 1}}
    {w: {heads: 2}}
    {w: {heads: 3}}
    {w: {width: n}, n: replicated}
    {w: {qkv_blocks: {heads: 2, kv_heads: 1}}}
    {w: {qkv: {heads: 2, kv_heads: 1, head_dim: 2}}}
    {w: {qkv: {heads: h, kv_heads: 1, head_dim: 2}}}
    {w: {vocab: h or 3}}
    {w: column, n: replicated, '*': skip}
    {w: row, n: first}
    {w: glu, n: column}
    {w: column}
    {'re:^w$': row, 're:n': first}
    {a: col}
    [a]
    {a: row, a: row}
    {w: vocab}
    {w: {vocab: -1}}
    {w: {vocab: 0}}
    {w: {glu: 2}}
    {w: {row: 1, column: 2}}
    {w: {heads: [1]}}
    {'re:(': row}
    {w: {width: 3}}
    {w: {vocab: 'h +'}}
    {w: {qkv: {heads: 4, kv_heads: 3, head_dim: 1}}}
"""


def ranks(folder: Path) -> Path:
    shutil.copytree(RANKS / "checkpoint", folder / "checkpoint", copy_function=shutil.copyfile)
    shutil.copyfile(RANKS / "rules.yaml", folder / "megatron.yaml")
    shutil.copytree(RANKS / "checkpoint", folder / "lacks", copy_function=shutil.copyfile)
    shutil.rmtree(folder / "lacks" / "mp_rank_01_001")
    (folder / "llama").mkdir()
    (folder / "llama" / "params.json").write_text('{"h": 2}')
    for rank in range(2):
        state = {"w": torch.arange(24.0).reshape(4, 6) + rank, "n": torch.ones(6)}
        torch.save(state, folder / "llama" / f"consolidated.{rank:02d}.pth")
    torch.save({"layers.w": torch.ones(2, 3), "layers.b": torch.ones(2), "n": torch.ones(3)}, folder / "stacked.pt")
    found = [f"join: {line.strip()}" for line in JOINS.strip().splitlines()]
    found += ["unstack: layers", "unstack: [layers., n]", "layers: [[a]]", "joins: {}", "rules: []", "[]", "layers: a"]
    texts(folder, "join", *found, "join: {'*': column}\nrules: ['w => v : transpose', '* => *']")
    return folder / "llama"


def rank_lines(_: Facts) -> Iterator[Words]:
    yield from lines("""
        convert checkpoint --rules megatron.yaml -o all.safetensors --json
        convert checkpoint --rules megatron.yaml --all -o all.pt --json
        convert lacks --rules megatron.yaml -o no.pt --json
        translate checkpoint --rules megatron.yaml -o translated.pt --json
        translate llama --rules llama-meta -o meta.pt --json
    """)
    for number in range(JOINS.count("\n") + 7):
        yield from lines(f"""
            convert llama --rules join{number}.yaml -o a{number}.safetensors --json
            convert checkpoint --rules join{number}.yaml -o b{number}.safetensors --json
            convert stacked.pt --rules join{number}.yaml -o c{number}.pt --json
            translate llama --rules join{number}.yaml --rest keep -o d{number}.pt --json
        """)


# Rules ----------------------------------------------------------------------------------------------------------------

RENAMES = r"""
{x}.* => y.{x}.*
a.{n}.* => a.{n+1}.*
a.{n}.* => a.{n-1}.*
*.weight => *.w
re:a\.(\d+)\.(.*) => b.\1.\2
a.{n}.{p} => x.{p}
no.* => x
a.* =>
a.* = x
* => {n}
a.{n}.* => {n}*
a.{n}.{p} => a.{n}.{p}
a.{n}.q.{p} => a.{n}.{q,k}.{p} : split 0
{
a.{n}.{q,k}.{p} => b.{n}.{k,q}.{p}
* => *.*
net.* => *
a.0.q.weight => a.1.q.weight
re:( => x
a.{n}.{p} => a.{n}.{p}.{m}
* => a*
""".strip("\n").split("\n")
CHANGES = r"""
a.{n}.q.{p} => a.{n}.{u,v}.{p} : split 0
a.{n}.{q,k}.weight => b.{n}.qk.weight : cat 0
a.{n}.q.weight => a.q : stack 0 over n
a.{n}.{q,k}.weight => a.{n}.t : cat 0 [2, 2] | transpose
a.{n}.q.weight => a.{n}.q.weight : slice 0 0:h of 4
a.{n}.q.bias => a.{n}.b : pad 0 9 of 4
a.{n}.q.weight => w.{n} : permute 1 0 | reshape [2, -1]
a.{n}.q.weight => w.{n} : rope h
a.{n}.q.weight => w.{n} : interleave 0 2
a.{n}.q.weight => w.{n}.{m} : unstack 0 over m
a.{n}.q.weight => w.{n} : cast bf16
a.{n}.q.weight => w.{n} : add 1
a.{n}.q.weight => w : add 1
a.{n}.q.weight => w.{n} : repeat 0 2
a.{n}.q.weight => w.{n} : unrepeat 0 2
a.{n}.q.weight => w.{n} : resize [2, -1] rows(mean)
a.{n}.{q,z}.bias => w.{n} : cat 0
a.{n}.q.weight => w.{n} : split 0
a.{n}.* => c.{n}.*
a.{n}.q.bias => a.{n}.q.bias : unsqueeze 0 | squeeze 0 | unflatten 0 [2, 2]
a.{n}.q.bias => a.{2*n}.b : cast f64
""".strip("\n").split("\n")
RENAME_FILES = """
{'a.*': b.*, norm.*: n.*}
---
- 'a.* => b.*'
- 'a.0.* => c.*'
---
rules: ['a.* => b.*']
drop: [norm.*]
---
[[]]
"""
CHANGE_FILES = """
rules: ['a.{n}.{p} => b.{n}.{p}', 'norm.* => n.*']
optional: ['x.* => y.*', ['a.* => c.*', 'z => y']]
---
rules: ['a.{n}.q.weight => b.{n} : split 0 [h, -1]']
variables: {h: "size('a.0.q.weight', 0) // 2"}
---
rules: ['a.{n}.* => b.{n}.*']
drop: ['norm.*', 're:track']
fill: ['b.{n}.z => zeros [d0, 2] like a.{n}.q.weight']
---
rules: ['* => n.*']
tied: {a.1.q.weight: a.0.q.weight}
---
rules: ['a.{n}.* => b.{n}.*']
ranges: {l: 2}
foo: 1
---
rules: ['a.{2*i+j}.* => b.{i}.{j}.*']
ranges: {j: 2}
---
rules: ['a.{i+j}.* => b.{i}.{j}.*']
ranges: {j: 2}
"""


def rules(folder: Path) -> Path:
    torch.manual_seed(3)
    layers = {"q": nn.Linear(6, 4), "k": nn.Linear(6, 4)}
    net = nn.ModuleDict({"a": nn.ModuleList(nn.ModuleDict(layers) for _ in range(2)), "norm": nn.BatchNorm1d(4)})
    for name, parameters in {"numbered": net.parameters(), "named": net.named_parameters()}.items():
        optimizer = torch.optim.Adam(parameters)
        sum(each.sum() for each in net.parameters()).backward()
        optimizer.step()
        state, saved = net.state_dict(), optimizer.state_dict()
        torch.save({"model": state, "optimizer": saved, "epoch": 1}, folder / f"{name}.pt")
        wrapped = {f"module.{key}": value for key, value in state.items()}
        torch.save({"model": wrapped, "ema": dict(state), "optimizer": saved}, folder / f"wrapped-{name}.pt")
    texts(folder, "rename", *RENAME_FILES.strip().split("\n---\n"), "")
    texts(folder, "change", *CHANGE_FILES.strip().split("\n---\n"))
    return folder / "numbered.pt"


def rule_lines(_: Facts) -> Iterator[Words]:
    files = ("numbered", "named", "wrapped-numbered", "wrapped-named")
    for file in files:
        for number, rule in enumerate(RENAMES):
            yield ["rename", f"{file}.pt", rule, "-o", f"r{number}-{file}.pt", "--json"]
            yield ["translate", f"{file}.pt", rule, "--rest", "keep", "-o", f"t{number}-{file}.pt", "--json"]
        for number, rule in enumerate(CHANGES):
            words = ["translate", f"{file}.pt", rule, "--set", "h=2", "--rest", "keep"]
            yield [*words, "-o", f"c{number}-{file}.pt", "--json"]
            other = f"--at model -o d{number}-{file}.pt --json".split()
            yield [*words[:2], rule.replace("a.", "module.a."), *words[3:], *other]
            yield ["translate", f"c{number}-{file}.pt", *words[2:], "--reverse", "-o", f"e{number}-{file}.pt", "--json"]
        for number in range(5):
            yield ["rename", f"{file}.pt", "--rules", f"rename{number}.yaml", "-o", f"f{number}-{file}.pt", "--json"]
            yield ["warm-start", f"{file}.pt", "--against", "named.pt", "--rules", f"rename{number}.yaml", "--json"]
        for number in range(7):
            yield f"translate {file}.pt --rules change{number}.yaml --rest keep -o g{number}-{file}.pt".split()
            yield ["translate", f"{file}.pt", "--rules", f"change{number}.yaml", "-o", f"h{number}-{file}.pt", "--json"]
        yield from lines(f"""
            strip-module {file}.pt -o s-{file}.pt --json
            strip-module {file}.pt --prefix module.a. --partial -o s2-{file}.pt --json
            strip-module {file}.pt --prefix module. --prefix a. --partial -o s3-{file}.pt --json
            strip-module {file}.pt --prefix a. -o s4-{file}.pt --json
            strip-module {file}.pt --prefix nothing. -o s5-{file}.pt --json
            add-module {file}.pt -o m-{file}.pt --json
            add-module {file}.pt --at model --prefix x.y. -o m2-{file}.pt --json
            convert {file}.pt --optimizer-as names -o on-{file}.pt --json
            convert {file}.pt --optimizer-as ids -o oi-{file}.pt --json
            convert {file}.pt --optimizer-as flat -o of-{file}.pt --json
            convert of-{file}.pt --optimizer-as ids -o ofi-{file}.pt --json
            convert on-{file}.pt --optimizer-as ids -o oni-{file}.pt --json
            convert {file}.pt#optimizer --optimizer-as names --against numbered.pt -o oa-{file}.pt --json
        """)


# Layouts --------------------------------------------------------------------------------------------------------------


def layouts(folder: Path) -> Path:
    for path in LAYOUT_CASES.iterdir():
        case = json.loads((path / "case.json").read_text())
        if "shapes" in case:
            (folder / path.name).mkdir()
            save_file(counting(case["shapes"]), folder / path.name / "model.safetensors")
        else:
            shutil.copytree(path, folder / path.name, copy_function=shutil.copyfile)
    return folder / "vit-timm"


def layout_lines(_: Facts) -> Iterator[Words]:
    for path in sorted(LAYOUT_CASES.iterdir()):
        case, name = json.loads((path / "case.json").read_text()), path.name
        there, back = ([word for each in case.get(key, ()) for word in ("--set", each)] for key in ("set", "back"))
        yield ["translate", name, "--rules", case["layout"], *there, "-o", f"{name}.safetensors", "--json"]
        yield ["translate", name, "--rules", case["layout"], *there, "-n"]
        other = ["translate", f"{name}.safetensors", "--rules", case["layout"]]
        yield [*other, *back, "--reverse", "-o", f"{name}-b.safetensors", "--json"]
        yield [*other, "-o", f"{name}-c.safetensors", "--json"]
        for each in sorted(LAYOUT_CASES.iterdir()):
            yield ["translate", name, "--rules", each.name, "-o", f"{name}-{each.name}.safetensors"]
        yield ["translate", "--list", "--rules", case["layout"], "--json"]
        yield ["doctor", f"{name}.safetensors", "--against", name, "--json"]
    yield ["translate", "--list"]
