"""`make bench`: each claim as a ratio against its peer, whole processes in turn in one run. It prints, and never fails
a build.

python -m benchmarks [--runs 5] [--folder DIR] [--only TEXT]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import loading, training
from benchmarks.files import prepare
from tests.support.range_server import RangeServer

CKPTOOL = str(Path(sys.executable).with_name("ckptool"))
MB = 1e6


@dataclass(frozen=True)
class Claim:
    """A command, what it is measured against (None: only its own time counts), and the goal in words.

    In commands, {out} is a name that does not exist yet, {url} where the folder is served on this machine; `fresh` is a
    file that is copied to {copy} before every run.
    """

    name: str
    command: str
    peer: str | None
    goal: str
    fresh: str = ""


@dataclass(frozen=True)
class Run:
    seconds: float
    peak: float  # bytes


PEER = f"{sys.executable} -m benchmarks.peers"
CP = "sh -c 'cp --reflink=never big.pt {out} && sync {out}'"

GET = "import fsspec, sys; fs, path = fsspec.core.url_to_fs(sys.argv[1]); fs.get(path, sys.argv[2])"

QKV = "'*c_attn.weight => *{{q,k,v}}.weight : transpose | split 0' '*c_attn.bias => *{{q,k,v}}.bias : split 0'"

CLAIMS = (
    Claim("strip-module, 2 GB, against cp + sync", f"{CKPTOOL} strip-module big.pt -o {{out}}", CP, "≤ 0.5 ×, ≤ 40 MB"),
    Claim("remap, 2 GB, against cp + sync", f"{CKPTOOL} remap big.pt --to cuda:0 -o {{out}}", CP, "≤ 0.5 ×, ≤ 40 MB"),
    Claim(
        "rename, 2 GB, against cp + sync",
        f"{CKPTOOL} rename big.pt 'module.* => net.*' -o {{out}}",
        CP,
        "≤ 0.5 ×, ≤ 40 MB",
    ),
    Claim(
        "strip-module, 2 GB, against a torch script",
        f"{CKPTOOL} strip-module big.pt -o {{out}}",
        f"{PEER} rename big.pt {{out}}",
        "≤ 0.33 ×",
    ),
    Claim(
        "strip-module, 50,000 tensors, against a torch script",
        f"{CKPTOOL} strip-module many.pt -o {{out}}",
        f"{PEER} rename_many many.pt {{out}}",
        "≤ 0.2 ×",
    ),
    Claim(
        "strip-module --in-place, 100 GB sparse",
        f"{CKPTOOL} strip-module {{copy}} --in-place",
        None,
        "≤ 0.3 s, ≤ 64 MB",
        fresh="sparse.pt",
    ),
    Claim(
        "strip-module --in-place, 50,000 tensors",
        f"{CKPTOOL} strip-module {{copy}} --in-place",
        None,
        "",
        fresh="many.pt",
    ),
    Claim(
        "convert to safetensors, 2 GB, against save_file + sync",
        f"{CKPTOOL} convert big.pt -o {{out}}.safetensors",
        f"{PEER} to_safetensors big.pt {{out}}.safetensors",
        "≤ 0.4 ×",
    ),
    Claim(
        "inspect, 50,000 tensors, against torch.load(mmap)",
        f"{CKPTOOL} inspect many.pt",
        f"{PEER} inspect many.pt",
        "≤ 0.15 ×",
    ),
    Claim("inspect, 2 GB", f"{CKPTOOL} inspect big.pt", None, "≤ 0.2 s, ≤ 48 MB"),
    Claim(
        "diff of equal files, 2 GB, against cmp", f"{CKPTOOL} diff big.pt equal.pt", "cmp big.pt equal.pt", "≤ 0.6 ×"
    ),
    Claim(
        "diff with statistics, 2 GB, against a torch script",
        f"{CKPTOOL} diff big.pt other.pt",
        f"{PEER} diff big.pt other.pt",
        "≤ 0.25 ×",
    ),
    *(
        Claim(
            f"report, {what}, against inspect --stats",
            f"{CKPTOOL} report {file} -o {{out}}.html",
            f"{CKPTOOL} inspect {file} --stats",
            "≤ 1.2 ×, ≤ 64 MB",
        )
        for what, file in (
            ("320 tensors, 2 GB", "big.pt"),
            ("10,000 tensors, 160 MB", "blocks.pt"),
            ("four tensors, 1 GB", "wide.pt"),
        )
    ),
    Claim(
        "report of two files, 2 GB each, against diff and twice inspect --stats",
        f"{CKPTOOL} report big.pt other.pt -o {{out}}.html",
        f"sh -c '{CKPTOOL} diff big.pt other.pt; {CKPTOOL} inspect big.pt other.pt --stats'",
        "≤ 1.2 ×",
    ),
    Claim(
        "average of three files of 0.5 GB, against a torch script",
        f"{CKPTOOL} average step1.pt step2.pt step3.pt -o {{out}}",
        f"{PEER} average step1.pt step2.pt step3.pt {{out}}",
        "≤ 0.33 ×, ≤ 128 MB",
    ),
    Claim(
        "translate, 2 GB of f16, qkv split and all transposed, against a torch script",
        f"{CKPTOOL} translate gpt2.pt {QKV} '*.weight => *.weight : transpose' '* => *' -o {{out}}",
        f"{PEER} translate gpt2.pt {{out}}",
        "≤ 0.33 ×, ≤ 64 MB",
    ),
    Claim(
        "lora merge, rank 16, a billion values of bf16, against a torch script",
        f"{CKPTOOL} lora merge base.safetensors adapter -o {{out}}.safetensors",
        f"{PEER} lora_merge base.safetensors adapter {{out}}.safetensors",
        "≤ 0.5 ×, ≤ 64 MB",
    ),
    Claim("cast to bf16, 2 GB", f"{CKPTOOL} cast big.pt --dtype bf16 -o {{out}}", None, "≤ 64 MB"),
    Claim(
        "scan --full of 8 × 200 MB, --jobs 2 against one",
        f"{CKPTOOL} scan several --full --jobs 2",
        f"{CKPTOOL} scan several --full",
        "",
    ),
    Claim(
        "verify of 8 × 200 MB, --jobs 2 against one",
        f"sh -c '{CKPTOOL} verify several/*.pt --jobs 2'",
        f"sh -c '{CKPTOOL} verify several/*.pt'",
        "",
    ),
    Claim(
        "verify behind a URL, 1 GB, against fsspec's get and verify",
        f"{CKPTOOL} verify {{url}}wide.pt",
        f"sh -c '{sys.executable} -c \"{GET}\" {{url}}wide.pt {{out}} && {CKPTOOL} verify {{out}}'",
        "≤ 1.1 ×",
    ),
    Claim(
        ".dcp of eight ranks to .pt, 4 GB, against dcp_to_torch_save",
        f"{CKPTOOL} convert ranks.dcp -o {{out}}.pt",
        f"{PEER} from_dcp ranks.dcp {{out}}.pt",
        "≤ 0.5 ×, ≤ 64 MB anonymous",
    ),
    Claim(
        ".dcp of eight ranks to safetensors, 4 GB, against a torch script",
        f"{CKPTOOL} convert ranks.dcp -o {{out}}.safetensors",
        f"{PEER} dcp_to_safetensors ranks.dcp {{out}}.safetensors",
        "≤ 0.5 ×, ≤ 64 MB anonymous",
    ),
    Claim(
        ".pt to .dcp, 4 GB, against torch_save_to_dcp",
        f"{CKPTOOL} convert joined.pt -o {{out}}.dcp",
        f"{PEER} to_dcp joined.pt {{out}}.dcp",
        "≤ 0.5 ×, ≤ 64 MB anonymous",
    ),
    Claim(
        ".pt to .dcp for eight ranks, 4 GB, against torch_save_to_dcp",
        f"{CKPTOOL} convert joined.pt -o {{out}}.dcp --ranks 8",
        f"{PEER} to_dcp joined.pt {{out}}.dcp",
        "≤ 0.5 ×, ≤ 64 MB anonymous",
    ),
    Claim("inspect of .dcp, 50,000 tensors × 8 ranks", f"{CKPTOOL} inspect manyranks.dcp", None, "≤ 20 s, ≤ 200 MB"),
    Claim(
        ".pt to .dcp for eight ranks, 50,000 tensors",
        f"{CKPTOOL} convert many.pt -o {{out}}.dcp --ranks 8",
        None,
        "≤ 20 s, ≤ 200 MB anonymous",
    ),
    Claim("scan of 1,000 small files", f"{CKPTOOL} scan small", None, ""),
    Claim(
        "completion of an address, 10,000 tensors",
        f"{CKPTOOL} --complete zsh 'ckptool show tenthousand.pt#state_dict/la'",
        None,
        "≤ 0.3 s",
    ),
    Claim("ckptool --help", f"{CKPTOOL} --help", None, "≤ 0.2 s"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("build/bench"))
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    claims = [claim for claim in CLAIMS if options.only in claim.name]
    if claims:
        prepare(options.folder)
    print(machine(), flush=True)
    print(f"\nMedians of {options.runs} runs in turn, after one that is not counted; [least–most].\n")
    print("| work | ckptool | peak memory | peer | ratio | goal |\n| --- | --- | --- | --- | --- | --- |")
    with RangeServer(options.folder) as server:
        for claim in claims:
            print(row(claim, options.folder, options.runs, server.url), flush=True)
    for line in loading.rows(options.only, options.runs, options.folder):
        print(line, flush=True)
    for found in training.rows(options.only, options.runs):
        print(training.printed(found), flush=True)


def machine() -> str:
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    system = f"{platform.system()} {platform.release()}, {os.cpu_count()} cores {model or platform.machine()}"
    return f"{system}, Python {platform.python_version()}"


def row(claim: Claim, folder: Path, runs: int, url: str) -> str:
    ours: list[Run] = []
    theirs: list[Run] = []
    for number in range(runs + 1):
        ours.append(measured(claim.command.replace("{url}", url), claim.fresh, folder))
        if claim.peer is not None:
            theirs.append(measured(claim.peer.replace("{url}", url), "", folder))
        if number == 0:  # the first of each warms the caches
            ours.clear()
            theirs.clear()
    peak = f"{max(run.peak for run in ours) / MB:.0f} MB"
    ratio = (
        f"{statistics.median(a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True)):.2f} ×" if theirs else ""
    )
    return f"| {claim.name} | {spread(ours)} | {peak} | {spread(theirs) if theirs else ''} | {ratio} | {claim.goal} |"


def spread(runs: list[Run]) -> str:
    times = [run.seconds for run in runs]
    return f"{statistics.median(times):.2f} s [{min(times):.2f}–{max(times):.2f}]"


def measured(command: str, fresh: str, folder: Path) -> Run:
    """One run as a whole process; what it writes is removed, and the disk is idle before the next."""
    for left in outputs(folder):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    copy = folder / "out-copy.pt"
    if fresh:
        subprocess.run(["cp", "--sparse=always", str(folder / fresh), str(copy)], check=True)
    os.sync()
    arguments = shell_words(command.format(out="out", copy=copy.name))
    for named in {folder / word for word in arguments if (folder / word).exists()}:
        for path in named.iterdir() if named.is_dir() else (named,):
            cached(path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = os.getcwd()
    start = time.perf_counter()
    process = subprocess.Popen(arguments, cwd=folder, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):  # 1: a diff that found something
        print(f"  (ended with {process.returncode}: {command})", file=sys.stderr)
    return Run(seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def cached(path: Path) -> None:
    """Reads a file, so that it is in the page cache whatever ran before; not the holes of the sparse one."""
    if path.stat().st_blocks * 512 >= path.stat().st_size:
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(1 << 20)
            while file.readinto(buffer):
                pass


def shell_words(command: str) -> list[str]:
    import shlex

    words = shlex.split(command)
    words[0] = shutil.which(words[0]) or words[0]
    return words


def outputs(folder: Path) -> Iterator[Path]:
    yield from folder.glob("out*")


if __name__ == "__main__":
    main()
