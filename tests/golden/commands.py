"""The command lines for one file: every verb, with its usual options and a good set of the others, each on what the
ones before wrote."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.cli import command_lines

Words = list[str]
VERBS = """
    inspect show diff verify scan doctor explain plot report spec git-check git-setup schema demo
    strip-module add-module rename remap cast edit convert slim bake average bundle unbundle translate warm-start
    recover lora train resume eval prove prune completion
"""


@dataclass(frozen=True)
class Facts:
    """What the commands need to know of a file.

    weights: the address of a set of weights, or "".  tensor: that of a tensor, or "".  key: its own part of that.
    """

    file: str
    weights: str = ""
    tensor: str = ""
    key: str = ""
    model: str = "net.py:build"

    @property
    def at(self) -> str:
        """The file's weights, as an argument."""
        return f"{self.file}#{self.weights}" if self.weights else self.file

    @property
    def place(self) -> Words:
        return ["--at", self.weights] if self.weights else []


def facts_of(file: str, inspection: dict[str, Any] | None, model: str) -> Facts:
    """The facts from what `inspect --json` printed, or None where it was refused."""
    parts = (inspection or {}).get("parts") or (inspection or {}).get("roots")  # the latter until inspect/2
    if inspection is None or not parts:
        return Facts(file, model=model)
    weights = next((part["path"] for part in parts if part["kind"] == "model weights"), [])
    tensors = [fact["path"] for fact in inspection["tensors"] if fact["path"][: len(weights)] == weights]
    tensor = tensors[0] if tensors else []
    plain = all(isinstance(segment, str) and not set(segment) & set("/\\# \n") for segment in [*weights, *tensor])
    if not plain:
        return Facts(file, model=model)
    return Facts(file, "/".join(weights), "/".join(tensor), "/".join(tensor[len(weights) :]), model)


def lines(text: str) -> Iterator[Words]:
    """Command lines without quotes: words between blanks; bars and ends of lines part them."""
    return (line.split() for line in command_lines(text))


def all_verbs(facts: Facts) -> Iterator[Words]:
    """All of them, in order. Outputs are called after the command, so that none replaces another's."""
    yield from looks(facts)
    yield from few_changes(facts)
    yield from changes(facts)
    yield from combined(facts)
    yield from damaged(facts)
    yield from used(facts)
    yield ["scan", ".", "--json"]


def few_verbs(facts: Facts) -> Iterator[Words]:
    """Each verb with its usual options."""
    yield from looks(facts)
    yield from few_changes(facts)
    yield from used(facts)
    yield ["scan", ".", "--json"]


def hostile(facts: Facts) -> Iterator[Words]:
    """What looks, and what would write."""
    yield from lines(f"""
        inspect {facts.file} --json
        show {facts.file} --json
        verify {facts.file} --json
        doctor {facts.file} --json
        scan {facts.file} --json | scan {facts.file}
        diff {facts.file} ref.pt --json
        convert {facts.file} --all -o all.safetensors --json | convert {facts.file} -o c.pt --json
        remap {facts.file} --to cpu -o cpu.pt --json
        warm-start {facts.file} --against ref.pt --json
        recover {facts.file} -o saved.pt --json
    """)


def usage(facts: Facts) -> Iterator[Words]:
    """What is asked of a verb that it cannot do, or that makes no sense."""
    for verb in VERBS.split():
        yield from lines(f"""
            {verb} --help | {verb} {facts.file} --jsom | {verb} {facts.file} -o | {verb} missing.pt --json
            {verb} missing.pt -o out.pt | {verb} {facts.file}#nowhere -o out.pt --json
            {verb} {facts.file} -o {facts.file} --json | {verb} {facts.file} -o missing/out.pt
            {verb} {facts.file} -o out.pt --in-place | {verb} {facts.file} -d out -o out.pt
            {verb} {facts.file} {facts.file} {facts.file} {facts.file} | {verb} net.py --json
            {verb} net.py -o out.pt | {verb} . | {verb} . -o out.pt | {verb} {facts.file} --json --format markdown
            {verb} {facts.file} -n -q -f --all --at state_dict
        """)
        yield [verb]
        yield [verb, ""]
    yield from lines("""
        --version
        --help
        inspct training.pt
        training.pt
        explain no-match | explain no-such-code
        schema | schema inspect | schema nonsense
    """)


def looks(facts: Facts) -> Iterator[Words]:
    file = facts.file
    yield from lines(f"""
        inspect {file} --json --stats
        show {file} --json
        inspect {file} | inspect {file} --all --depth 2
        show {file} --all
        verify {file}
        doctor {file}
        scan {file}
        diff {file} ref.pt
        verify {file} --json --finite --digest | verify {file} --write-digest d.digests --json
        verify {file} --against d.digests --json
        doctor {file} --json | doctor {file} --against {facts.model} --json
        scan {file} --json | scan {file} --full --json
        diff {file} ref.pt --json
        spec {file} -o all.spec.json --json
    """)
    if facts.weights:
        yield ["inspect", facts.at, "--json"]
        yield ["spec", facts.at, "--json"]
        yield ["diff", facts.at, "ref.pt#state_dict", "--ignore", "prefix,device,dtype", "--json"]
    if facts.tensor:
        yield ["show", f"{file}#{facts.tensor}", "--json"]
        yield ["show", file, "--at", facts.tensor, "--slice", "0:1", "--json"]


def few_changes(facts: Facts) -> Iterator[Words]:
    file = facts.file
    yield from lines(f"""
        convert {file} -o c.safetensors --json | convert {file} --all -o all.safetensors --json
        convert {file} --ties copy -o copied.safetensors --json
        convert {file} --all --ties copy -o allcopied.safetensors --json | convert {file} -o c.pt --json
        convert {file} --weights-only -o plain.pt --json | convert {file} -o c.npz --json
        convert all.safetensors --all -o back.pt --json
        slim {file} -o dedup.pt --json
        strip-module {file} -o strip.pt --json
        add-module {file} -o add.pt --json
        remap {file} --to cpu -o cpu.pt --json
        cast {file} --dtype bf16 -o bf16.pt --json
        bake {file} -o bake.pt --json
        average {file} {file} -o mean.pt --json
        bundle a={file} b=ref.pt n:=3 -o bundle.pt --json | bundle a={file} b=ref.pt n:=3 -o bundle.safetensors --json
        verify all.safetensors --json | verify c.pt --json --digest
        inspect dedup.pt --json
        diff {file} back.pt --json
        unbundle bundle.pt -d parts --json
        bundle --from parts -o again.pt --json
    """)
    if facts.weights:
        yield ["convert", facts.at, "-o", "at.safetensors", "--json"]
        yield ["cast", facts.at, "--dtype", "f16", "-o", "f16.safetensors", "--extract", "--json"]


def changes(facts: Facts) -> Iterator[Words]:
    file, place = facts.file, facts.place
    yield from lines(f"""
        strip-module {file} --partial -o strip2.pt --json
        strip-module {file} --prefix fc1. --partial -o strip3.pt --json
        strip-module add.pt -o strip4.pt --verify --json | strip-module {file} -n -o strip5.pt --json
        strip-module {file} -o strip6.safetensors --json | strip-module {file} -d stripped --json
        add-module {file} --prefix net.inner. -o add2.pt --json
        rename {file} --rules rules.yaml -o renamed2.pt --json
        remap {file} --map cuda:0=cuda:1 -o cuda1.pt --json | remap {file} --to cuda:3 -o cuda3.pt --json
        remap {file} --to meta -o meta.pt --json
        cast {file} --dtype f16 --only *weight -o f16.pt --json
        cast {file} --dtype float8_e4m3fn --exclude *bias -o f8.pt --json
        cast {file} --dtype f64 -o f64.pt --to torch-zip --json
        edit {file} --set note:={{"a":[1,2.5,null]}} -o set.pt --json | edit {file} --drop epoch -o dropped.pt --json
        slim {file} -o slim.pt --json | slim {file} --keep-optimizer -o kept.pt --json
        slim {file} --dedup -o dedup.safetensors --json
        convert dedup.pt -o dedup2.safetensors --json | convert dedup.pt --all -o dedup3.safetensors --json
        convert {file} --all --ties record -o record.safetensors --json
        convert {file} --ties copy -o copied.pt --json | convert {file} --ties copy -o copied.npz --json
        convert {file} --all -o all.npz --json | convert {file} --all -o all.pt --json
        convert {file} --shard-size 1KB -o shards --json | convert {file} --all --shard-size 1KB -o allshards --json
        convert {file} --to sharded -o whole --json | convert {file} --to torch-legacy -o legacy.pt --json
        convert {file} --only *weight -o only.safetensors --json
        convert {file} --exclude *weight -o exclude.safetensors --json
        convert {file} -d converted --to safetensors --json | convert {file} -d converted --to npz --json
        convert {file} ref.pt -d several --to safetensors --skip-refused --json
        convert {file} -o c.safetensors --json | convert {file} -f -o c.safetensors --verify --json
        convert {file} -f --part -o part.safetensors --json | convert {file} --keep-unknown --all -o unknown.pt --json
        convert shards -o unsharded.pt --json | convert allshards --all -o allback.pt --json
        convert all.npz -o npzback.pt --json | convert bf16.pt -o bf16.npz --json
        inspect shards --json | inspect allshards --json
        verify shards --json | verify c.npz --json --digest
        inspect plain.pt --json --stats
        diff {file} c.pt --json | diff {file} c.safetensors --atol 1e-3 --rtol 1e-3 --json
        diff {file} bf16.pt --json
        scan . --latest-good --json
        :copy {file} inplace-a.pt
        strip-module inplace-a.pt --in-place --json
        :copy {file} inplace-b.pt
        edit inplace-b.pt --set x:=3 --in-place --json | edit inplace-b.pt --set x:=4 --in-place --verify --json
        :copy {file} inplace-c.pt
        cast inplace-c.pt --dtype f16 --in-place --json
        :copy {file} inplace-d.pt
        slim inplace-d.pt --in-place --json
        :copy all.safetensors inplace-e.safetensors
        edit inplace-e.safetensors --set x:=3 --in-place --json
        convert {file} --in-place --json
    """)
    yield ["rename", file, "*weight => *w", "-o", "renamed.pt", "--json"]
    yield ["rename", file, "fc{n}.* => layers.{n}.*", *place, "-o", "renamed3.pt", "--json"]
    if facts.weights:
        yield ["strip-module", facts.at, "-o", "stripat.pt", "--extract", "--json"]
        yield ["add-module", facts.at, "-o", "addat.pt", "--json"]
        yield ["convert", file, *place, "--shard-size", "1KB", "-o", "shardsat", "--json"]
        yield ["slim", facts.at, "--dedup", "-o", "slimat.pt", "--json"]
        yield ["edit", facts.at, "--set", "x:=1", "-o", "setat.pt", "--json"]
    if facts.key:
        yield ["edit", file, *place, "--drop", facts.key, "-o", "notensor.pt", "--json"]
        yield ["edit", file, "--tensor", f"{facts.tensor}=ones.npy", "-o", "tensor.pt", "--json"]


def combined(facts: Facts) -> Iterator[Words]:
    file = facts.file
    yield from lines(f"""
        average {file} {file} --weights 0.25,0.75 -o mean2.pt --json
        average {file} {file} {file} --ema 0.9 -o ema.pt --json | average {file} bf16.pt -o mixed.safetensors --json
        average {facts.at} {facts.at} -o meanat.pt --json
        bundle a={facts.at} b={facts.at} -o tied.pt --json | bundle a={file} b={file} -o deduped.pt --json
        bundle a={facts.at} n:=[1,2] -o one.npz --json | bundle bundle.pt --add c=ref.pt -o added.pt --json
        bundle bundle.pt --drop b --rename a=first -o less.pt --json | bundle bundle.pt --add m:=4 --in-place --json
        bundle bundle.safetensors --drop n -o less.safetensors --json
        unbundle {file} -d members --json | unbundle {file} -d tensors --to safetensors --json
        unbundle bundle.safetensors --only b -d onlyb --json | unbundle bundle.pt -n -d none --json
        bundle --from members -o members.pt --json | bundle --from tensors -o tensors.pt --json
        inspect deduped.pt --json | inspect members --json | inspect added.pt --json
    """)


def damaged(facts: Facts) -> Iterator[Words]:
    file = facts.file
    for share in ("0.4", "0.85", "0.99"):
        name = f"cut{share[2:]}.pt"
        yield [":cut", file, name, share]
        yield from lines(f"""
            inspect {name} --json
            doctor {name} --json
            recover {name} -o saved-{name} --json | recover {name} -o filled-{name} --json
            convert {name} -o from-{name} --json
        """)
    for share in ("0.1", "0.5", "0.8", "0.995"):
        name = f"flip{share[2:]}.pt"
        yield [":flip", file, name, share]
        yield from lines(f"""
            verify {name} --json
            scan {name} --json
            doctor {name} --json
            recover {name} -o saved-{name} --json
            convert {name} --all -o all-{name} --json
        """)
    yield from lines(f"""
        recover {file} -o saved.pt --json | recover {file} -n -o saved.pt --json
        inspect saved.pt --json | inspect filled-cut85.pt --json
        convert filled-cut85.pt --all -o filled.safetensors --json
    """)


def used(facts: Facts) -> Iterator[Words]:
    file = facts.file
    yield from lines(f"""
        warm-start {file} --against {facts.model} --json | warm-start {file} --against add.pt -o warm.pt --json
        warm-start {file} --against ref.pt --on-mismatch skip -o warmref.pt --json
        warm-start add.pt --against all.spec.json --strict -o warmspec.safetensors --json
        warm-start {file} --against ref.pt --on-mismatch skip --suggest suggested.yaml --json
        warm-start {file} --against ref.pt --on-mismatch skip --min-loaded 0.2 -o warmopt.pt --json
    """)


def training(_: Facts) -> Iterator[Words]:
    """A run of the harness: its checkpoints are files like others."""
    yield from lines("""
        train --schema | train run.yaml -q | train run.yaml -n --json
        inspect run --json
        scan run --json
        train run.yaml --set train.steps=3 --set run=short -q
        resume short --set train.steps=6 -q | resume run -q
        prune run --set save.keep_last=1 -n --json | prune run --set save.keep_last=1 --json
        scan run/checkpoints --json
    """)
