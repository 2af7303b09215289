"""A part of a checkpoint is told by name, read by the verbs that look, and never taken for a whole by the others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.commands import VERBS
from ckptool.errors import OnlyAPart
from tests.support.cli import Run
from tests.support.engine_folders import write_zero
from tests.support.files import contents, saved
from tests.support.looped import looped
from tests.support.part_files import (
    DISTRIBUTED,
    FOLDERS,
    MADE,
    NOT_JOINED,
    accelerate_folder,
    megatron_folder,
    pipeline_folder,
    random_weights,
    safe_file,
    saved_below,
    saved_by_two_ranks,
    sharded_folder,
    trainer_folder,
    ungathered,
)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_by_two_ranks(tmp_path_factory.mktemp("ranks"))


KINDS = [*MADE, *DISTRIBUTED.values(), "sharded_1.pt", "optim_world_size_2_rank_0.pt"]


def made(kind: str, folder: Path, ranks: Path) -> tuple[Path, str]:
    """The path of a part of that kind, and what it is to be called."""
    if kind in MADE:
        make, label = MADE[kind]
        return make(folder), label
    shutil.copy(ranks / kind, folder / kind)
    return folder / kind, "rank 0 of 2" if "0." in kind else "rank 1 of 2"


# Verbs: their words before and after the file. TAKES: those that take a checkpoint for a whole.
LOOKS = (("inspect", ()), ("inspect", ("--all",)), ("verify", ()), ("show", ()), ("scan", ()), ("report", ("--json",)))
TAKES = (
    ("convert", ("-o", "out.safetensors")),
    ("convert", ("-o", "out.pt")),
    ("convert", ("-o", "out.pt", "--weights-only")),
    ("convert", ("-o", "out.safetensors", "--all")),
    ("average", ("{file}", "-o", "out.pt")),
    ("lora merge", ("{file}", "-o", "out.pt")),
    ("lora extract", ("{file}", "--rank", "1", "-o", "out/")),
    ("lora resize", ("--rank", "1", "-o", "out/")),
    ("lora convert", ("--to", "peft", "-o", "out/")),
    ("warm-start", ("--against", "whole.pt", "-o", "out.pt")),
    ("warm-start", ("--against", "{file}")),
    ("spec", ("-o", "out.json")),
    ("unbundle", ("-d", "out")),
    ("bundle", ("--add", "n:=1", "-o", "out.tar")),
)
CHANGES = (
    ("strip-module", ("-o", "out.pt")),
    ("add-module", ("-o", "out.safetensors")),
    ("rename", ("* => x.*", "-o", "out.safetensors")),
    ("translate", ("* => x.*", "-o", "out.safetensors")),
    ("cast", ("--dtype", "bf16", "-o", "out.safetensors")),
    ("cast", ("--dtype", "bf16", "--in-place")),
    ("edit", ("--drop", "*.bias", "--in-place")),
    ("slim", ("-o", "out.safetensors")),
    ("remap", ("--to", "cpu", "-o", "out.safetensors")),
    ("bake", ("-o", "out.safetensors")),
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_verb_on_every_kind_of_part(
    kind: str, tmp_path: Path, ranks: Path, run: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    part, label = made(kind, tmp_path / "in", ranks)
    saved_below(random_weights("fc.weight"), tmp_path / "whole.pt")
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    file = str(part.relative_to(tmp_path))

    def ran(verb: str, words: tuple[str, ...]) -> object:
        return run(verb, file, *(word.replace("{file}", file) for word in words))

    for verb, words in LOOKS:
        found = ran(verb, words)
        calls = verb == "scan" and "would run unknown code" in found.out
        assert found.code == (1 if calls else 0), (verb, found)
        assert verb == "show" or label in found.out, (verb, found.out)
    for verb in ("inspect", "verify"):
        told = json.loads(ran(verb, ("--json",)).out)
        assert told["part"]["label"] == label, told["part"]
    assert run("diff", file, file).code == 0
    for verb, words in TAKES:
        found = ran(verb, words)
        assert found.code == 2, (verb, words, found)
        assert "error[part]" in found.err and label in found.err and "--part" in found.err, (verb, found.err)
    assert run("bundle", f"one={file}", "-o", "out.tar").code == 2
    with pytest.raises(OnlyAPart):
        ckptool.load(part)
    with pytest.raises(OnlyAPart):
        ckptool.load_into(torch.nn.Linear(4, 3), part)
    if kind == "shard in its folder":
        for verb, words in CHANGES:
            found = ran(verb, words)
            assert found.code == 2 and "error[part]" in found.err and "index" in found.err, (verb, found)
    assert contents(tmp_path) == before
    (tmp_path / "alone").mkdir()
    shutil.copy(part, tmp_path / "alone" / part.name)
    found = run("scan", str(tmp_path / "alone"), "--latest-good", "-q")
    assert (found.code, found.out) == (1, "")


# Names of two ranks' files, as programs that no layout knows write them.
OF_TWO_RANKS = {
    "vllm": "model-rank-{}-part-0.safetensors",
    "tensorrt-llm": "rank{}.safetensors",
    "fairseq": "checkpoint_last-model_part-{}.pt",
    "fairseq2": "step_10/model/pp_00/tp_0{}/sdp_00.pt",
    "internevo": "model_tp{}_wp0_pp0.pt",
    "nemo": "tp_rank_0{}_pp_rank_000/model.ckpt",
    "neuronx": "dp_rank_00_tp_rank_0{}_pp_rank_00.pt",
    "sagemaker": "model.pt_{}_0",
    "mmengine": "epoch_1.pth/rank{}.pth",
    "colossal": "pytorch_model-stage-0000{}-shard-00001.bin",
    "a loop": "epoch3_rank{}.pt",
    "folders": "rank_{}/model.safetensors",
}


@pytest.mark.parametrize("program", OF_TWO_RANKS)
@pytest.mark.parametrize("damaged", [None, 30, 1_000_000])
def test_a_rank_is_known_by_the_file_of_another(program: str, damaged: int | None, tmp_path: Path, run: Run) -> None:
    names = [tmp_path / OF_TWO_RANKS[program].format(rank + (program == "colossal")) for rank in range(2)]
    weights = [random_weights("a.weight") | {"a.bias": torch.zeros(3)} for _ in names]
    for path, share in zip(names, weights, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(share, path) if path.suffix == ".safetensors" else torch.save(share, path)
    if damaged:
        names[1].write_bytes(names[1].read_bytes()[:-damaged] or b"version https://git-lfs.github.com/spec/v1")
    part = ckptool.inspect(names[0]).part
    if program == "folders":
        assert ckptool.inspect(names[0].parent).part == part
    assert part.count == 2 and (" cannot be read" if damaged else "weights of its own") in part.meaning
    refused = run("convert", str(names[0]), "-o", str(tmp_path / "out.pt"))
    assert refused.code == 2 and part.label in refused.err, refused
    assert run("convert", str(names[0]), "-o", str(tmp_path / "out.pt"), "--part").code == 0
    assert run("scan", str(tmp_path / names[0].relative_to(tmp_path).parts[0]), "--latest-good").code == 1


def test_files_beside_ranks_are_no_obstacle(tmp_path: Path) -> None:
    for rank in range(2):
        saved_below(random_weights("a.weight"), tmp_path / f"b_rank{rank}.pt")
    saved_below(random_weights("a.weight"), tmp_path / "a_rank0-of-4.pt")
    saved_below(random_weights("a.weight"), tmp_path / f"b_rank{'1' * 200}.pt")
    assert ckptool.open(tmp_path / "b_rank1.pt").part.label == "rank 1 of 2"


def test_placeholders_are_never_written_as_weights(tmp_path: Path) -> None:
    states = write_zero(tmp_path / "zero", 3, 2) / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    for out in ("out.safetensors", "out.pt", "out.npz"):
        with pytest.raises(OnlyAPart, match="have no values"):
            ckptool.convert(f"{states}#module", tmp_path / out, part=True)
    with pytest.raises(OnlyAPart, match="have no values"):
        ckptool.average([f"{states}#module"] * 2, tmp_path / "out.pt", part=True)
    assert not list(tmp_path.glob("out*"))
    ckptool.convert(f"{states}#module", tmp_path / "out.safetensors", part=True, only=["places"])


def test_placeholders_of_a_module_and_those_of_a_file_that_is_renamed(tmp_path: Path) -> None:
    model = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    for take in (ckptool.save_for_cpu, ckptool.convert):
        with pytest.raises(OnlyAPart, match=r"values|placeholders"):
            take(model, tmp_path / "out.safetensors")
    with pytest.raises(OnlyAPart, match="gather their values first"):
        ckptool.convert(model, tmp_path / "out.safetensors", part=True)
    assert not list(tmp_path.glob("out*"))
    file = saved(model.state_dict(), tmp_path / "in.pt")
    with pytest.raises(OnlyAPart, match=r"ckptool\.convert\('.*in\.pt', part=True"):  # which has no such option itself
        ckptool.lora_extract(file, file, tmp_path / "out", rank=1)
    ckptool.strip_module(file, tmp_path / "out.pt")
    assert list(ckptool.open(tmp_path / "out.pt")) == list(model.module.state_dict())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["state dict", "parameters", "module"])
def test_weights_on_the_meta_device_have_no_values(kind: str, nested: bool, tmp_path: Path, run: Run) -> None:
    """As `init_empty_weights` and offloading leave them; torch loads such a file, and copies nothing of it."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    value = model if kind == "module" else model.state_dict(keep_vars=kind == "parameters")
    file = saved({"model": value, "epoch": 3} if nested else value, tmp_path / "in.pt")
    good = saved({name: torch.ones(entry.shape) for name, entry in model.state_dict().items()}, tmp_path / "good.pt")
    assert run("doctor", str(file)).code == 1
    found = ckptool.verify(file, finite=True)
    assert [name.endswith(("1.weight", "1.bias", "1/_parameters/weight", "1/_parameters/bias"))
            for name in found.unsearched] == [True, True]  # fmt: skip
    for take in (ckptool.save_for_cpu, ckptool.convert):
        with pytest.raises(OnlyAPart, match="values"):
            take(model, tmp_path / "out.safetensors")
    if nested and kind != "module":
        with pytest.raises(OnlyAPart, match="2 of the tensors have no values in it"):
            ckptool.convert(f"{file}#model", tmp_path / "out.pt", part=True)
    if kind != "module":
        report = ckptool.warm_start(file, good, part=True, on_mismatch="skip", min_loaded=0.5)
        assert [fact.target for fact in report.loaded] == ["0.weight", "0.bias"]


def test_a_cut_file_of_placeholders_is_not_recovered_as_weights(tmp_path: Path) -> None:
    path = ungathered(tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(OnlyAPart, match="have no values"):
        ckptool.recover(path, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    ckptool.recover(path, tmp_path / "out.pt")
    assert ckptool.open(tmp_path / "out.pt").part.label == "weights without values"


@looped("kind", KINDS)
def test_doctor_advises_nothing_that_refuses_a_part(kind: str, ranks: Path, tmp_path: Path) -> None:
    saved(random_weights("other.weight"), target := tmp_path / "other.pt")
    (folder := tmp_path / "part").mkdir()
    advice = [finding.advice for finding in ckptool.doctor(made(kind, folder, ranks)[0], against=target).findings]
    assert not [each for each in advice if "ckptool.load(" in each or "warm-start" in each]


def test_every_command_is_judged() -> None:
    tried = {verb for verb, _ in (*LOOKS, *TAKES, *CHANGES)} | {"diff", "recover", "doctor"}
    of_runs = {"train", "resume", "eval", "prove", "prune", "plot"}
    looks = {"browse"}  # as `inspect` does
    judged = {name for name, verb in VERBS.items() if verb.group != "setup"}
    assert judged - tried - looks == of_runs, "a new command: does it look at parts, take them, or change them?"


def copies_of_ranks(folder: Path) -> Path:
    """Files of ranks that have one model, and running means, random states and shares of an optimizer of their own."""
    weights = random_weights("a.weight", "a.bias")
    (folder / "rank_1").mkdir()  # of logs
    folder = folder / "rank_0"
    for rank in range(2):
        model = weights | {"norm.running_mean": torch.full((3,), float(rank))}
        optimizer = {"state": {0: {"exp_avg": torch.randn(3, 4)}}, "param_groups": [{"params": [0]}]}
        saved_below({"model": model, "optimizer": optimizer, "rng": torch.randn(3)}, folder / f"copy_rank{rank}.pt")
    saved_below({"rng": torch.randn(3)}, folder / "copy_rank2.pt")
    return folder / "copy_rank0.pt"


def lora_of_rank(folder: Path, rank: int) -> Path:
    return saved_below({"a.weight": torch.randn(rank, 4)}, folder / f"lora_rank{rank}.pt")


HEALTHY: dict[str, Callable[[Path], Path]] = {
    "one shard of one": lambda f: safe_file(f / "model-00001-of-00001.safetensors"),
    "numbers in a name": lambda f: saved_below({"state_dict": random_weights("a.weight")}, f / "e-00003-of-00010.pt"),
    "a rank's copy": lambda f: saved_below(random_weights("a.weight", "a.bias"), f / "model_rank_0.pt"),
    "a copy beside others": copies_of_ranks,
    "LoRA of two ranks": lambda f: [lora_of_rank(f, rank) for rank in (2, 1)][1],
    "an empty bias": lambda f: saved_below({"a.weight": torch.ones(2, 2), "a.bias": torch.empty(0)}, f / "m.pt"),
    "empty tables": lambda f: saved_below(random_weights("a.weight") | dict.fromkeys("xy", torch.empty(0)), f / "m.pt"),
    "a world of one": lambda f: saved_below(random_weights("a.weight"), f / "model_world_size_1_rank_0.pt"),
    "no model parallelism": lambda f: megatron_folder(f, 1) / "mp_rank_00" / "model_optim_rng.pt",
    "zero-2 weights": lambda f: write_zero(f, 2, 2) / "mp_rank_00_model_states.pt",
    "one consolidated": lambda f: saved_below(random_weights("a.weight"), f / "consolidated.00.pth"),
    "the folder of the shards": sharded_folder,
    "another index beside": lambda f: safe_file(sharded_folder(f) / "merged.safetensors"),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_whole_checkpoints_are_not_called_parts(kind: str, tmp_path: Path) -> None:
    path = HEALTHY[kind](tmp_path)
    assert ckptool.open(path).part is None
    assert ckptool.inspect(path).part is None


def test_a_replica_is_whole(ranks: Path) -> None:
    assert ckptool.open(ranks / "replica_rank0.pt").part is None


# Folders of several files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_of_members_is_one_line_and_says_how_many_are_whole(
    kind: str, tmp_path: Path, run: Callable[..., object]
) -> None:
    make, count, member = FOLDERS[kind]
    folder = make(tmp_path / "step-500")
    row = f"{count:,} of {count:,} members"
    for place in (folder, tmp_path):
        (file,) = ckptool.scan(place).files
        assert (file.path, file.state) == (str(folder), "good"), file
    for verb in ("scan", "inspect", "verify"):
        found = run(verb, str(folder))
        assert found.code == 0 and row in found.out, found
    assert (ckptool.open(folder).part is None) == (kind not in NOT_JOINED)
    assert run("scan", str(folder), "--latest-good", "-q").out == f"{folder}\n"
    path = folder / member
    path.write_bytes(path.read_bytes()[:-60])
    found = run("scan", str(folder))
    assert found.code == 1 and f"{count - 1:,} of {count:,} members" in found.out, found.out
    assert (run("scan", str(folder), "--latest-good", "-q").code, run("verify", str(folder)).code) == (1, 1)
    inspected = run("inspect", str(folder))
    assert inspected.code == 0 and f"{count - 1:,} of {count:,} members" in inspected.out
    assert member.split("/")[0] in inspected.out
    before = contents(tmp_path)
    for verb, words in TAKES[:5]:
        found = run(verb, str(folder), *(word.replace("{file}", str(folder)) for word in words))
        assert found.code == 2 and "error[part]" in found.err, (verb, words, found)
    with pytest.raises(OnlyAPart):
        ckptool.load(folder)
    assert contents(tmp_path) == before
    path.unlink()
    if kind == "diffusers":
        shutil.rmtree(folder / "vae")
    if kind not in ("accelerate", "sentence-transformers", "trainer"):  # in which nothing tells that it was there
        found = run("inspect", str(folder))
        assert f"{count - 1:,} of {count:,} members" in found.out and member.split("/")[0] in found.out, found
        verified = run("verify", str(folder))
        assert verified.code == 1 and "incomplete, 1 problem" in verified.out


def test_weights_of_a_whole_folder_are_converted_as_ever(tmp_path: Path, run: Callable[..., object]) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-500")
    (folder / "optimizer.pt").rename(folder / "optimizer.bin")  # as with FSDP and full state dicts
    assert run("convert", str(folder), "-o", str(tmp_path / "w.safetensors")).code == 0
    (folder / "optimizer.bin").write_bytes(b"PK")
    assert run("convert", str(folder), "-o", str(tmp_path / "x.safetensors")).code == 2
    assert run("convert", str(folder), "--part", "-o", str(tmp_path / "x.safetensors")).code == 0
    assert run("convert", str(folder / "model.safetensors"), "-o", str(tmp_path / "y.safetensors")).code == 0


def test_what_lies_beside_weights_is_never_the_latest_good(tmp_path: Path, run: Callable[..., object]) -> None:
    whole = trainer_folder(tmp_path / "whole")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        shutil.move(whole / name, tmp_path / name)
    shutil.rmtree(whole)
    shutil.move(accelerate_folder(tmp_path / "other") / "random_states_0.pkl", tmp_path / "random_states_0.pkl")
    shutil.rmtree(tmp_path / "other")
    found = run("scan", str(tmp_path), "--latest-good", "-q")
    assert (found.code, found.out) == (1, "")
    saved_below(random_weights("fc.weight"), tmp_path / "model.pt")
    saved_below({"_snapshot": {}}, tmp_path / "data.pt")  # of a data loader; newer
    assert run("scan", str(tmp_path), "--latest-good", "-q").out == f"{tmp_path / 'model.pt'}\n"


def test_tables_of_ranks_are_one_and_pieces_are_not_called_damaged(
    ranks: Path, tmp_path: Path, run: Callable[..., object]
) -> None:
    for verb in ("inspect", "verify", "convert"):
        found = run(verb, str(ranks / "tables"), *(("-o", str(tmp_path / "out.pt")) if verb == "convert" else ()))
        assert found.code == 0, found
    assert run("inspect", str(ranks / "pieces")).code == run("verify", str(ranks / "pieces")).code == 0
    assert ckptool.open(ranks / "pieces").part is None
    piece = next((ranks / "pieces").glob("shard-00002-*"))
    assert ckptool.open(piece).part.label == "rank 1 of 2"


def test_folders_that_lead_back_to_themselves_end(tmp_path: Path, run: Callable[..., object]) -> None:
    folder = tmp_path / "loop"
    pipeline_folder(folder)
    saved_below(random_weights("a.weight"), folder / "x.bin")
    shutil.rmtree(folder / "unet")
    (folder / "unet").symlink_to(folder, target_is_directory=True)
    for verb in ("inspect", "verify", "scan"):
        assert run(verb, str(folder)).code in (0, 1, 2)
    found = run("inspect", str(folder))
    assert "1 of 2 members" in found.out and "unet" in found.out


@pytest.mark.parametrize(
    "name", ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin", "state_world_size_2_rank_0.pt"]
)
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("as_zip", [False, True])
def test_every_command_that_inspect_prints_of_a_part_runs(
    name: str, indexed: bool, as_zip: bool, tmp_path: Path, run: Run
) -> None:
    """Old shards have no checksums, slices in them drag their storages along, names have prefixes, places are of a
    GPU."""
    weights = {f"module.l{n}.weight": torch.zeros(600_000)[:2] for n in range(2)}
    for file in (tmp_path / name, tmp_path / name.replace("00001", "00002").replace("rank_0", "rank_1")):
        torch.save(weights, file, _use_new_zipfile_serialization=as_zip)
        data = file.read_bytes()
        file.write_bytes(data.replace(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:0") if not as_zip else data)
    if indexed:
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
        (tmp_path / "x.bin.index.json").write_text(json.dumps(index))
    printed = [note.fix for note in ckptool.inspect(tmp_path / name).notes if note.fix]
    assert printed or name != "x.bin" or indexed
    for fix in printed:
        words = fix.with_words({"FILE": str(tmp_path / name), "OUT": str(tmp_path / "out.pt")})
        assert run(*words[1:], *(["-f"] if fix.writes else [])).code == 0, str(words)
