"""What stands below the help of every command: lines that one can type, each with what it is for."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "inspect": (("ckptool inspect model.pt", "what is in it"), ("ckptool inspect model.pt --all", "every tensor")),
    "show": (
        ("ckptool show model.pt#epoch", "a value"),
        ("ckptool show model.pt#state_dict/module.fc.weight --slice '0:2,:5'", "a part of a tensor"),
    ),
    "diff": (("ckptool diff model.pt other.pt --ignore prefix,device", "what else differs"),),
    "verify": (
        ("ckptool verify model.pt --finite", "every checksum, NaN and Inf"),
        ("ckptool verify model.pt --write-digest model.digests", "for a later verify --against model.digests"),
    ),
    "doctor": (
        ("ckptool doctor model.pt", "why it does not load, and what to type"),
        ("ckptool doctor model.pt --against other.pt", "and why it does not fit this model"),
        ("python train.py 2>&1 | ckptool doctor --error -", "what an error message means"),
    ),
    "scan": (("ckptool scan .", "every checkpoint here"), ("ckptool scan --latest-good -q .", "for scripts")),
    "strip-module": (("ckptool strip-module model.pt -o clean.pt", "module.fc.weight becomes fc.weight"),),
    "add-module": (("ckptool add-module model.pt --at ema_state_dict -o wrapped.pt", "for a wrapped model"),),
    "rename": (
        ("ckptool rename model.pt 'module.conv{n}.* => stem.{n}.*' -n -o renamed.pt", "show it, write nothing"),
    ),
    "remap": (
        ("ckptool remap model.pt --to cpu -o cpu.pt", "loads on any machine"),
        ("ckptool remap model.pt --map cuda:0=cuda:1 -o moved.pt", "from one GPU to another"),
    ),
    "cast": (("ckptool cast model.pt --dtype bf16 -o half.pt", "half the size"),),
    "edit": (("ckptool edit model.pt --drop optimizer --set epoch:=0 -o edited.pt", "leave out and set entries"),),
    "slim": (("ckptool slim model.pt -o small.pt", "without optimizer state"),),
    "convert": (
        ("ckptool convert model.pt -o model.safetensors", "the weights"),
        ("ckptool convert model.pt --all -o all.safetensors", "everything, there and back"),
        ("ckptool convert model.pt --weights-only -o plain.pt", "what torch.load takes by default"),
        ("ckptool convert model.pt --shard-size 5GB -o shards", "as Hugging Face has them"),
    ),
    "recover": (("ckptool recover cut.pt -o saved.pt", "what is whole of a file that was cut off"),),
    "bundle": (("ckptool bundle G=a.pt D=b.pt epoch:=3 -o gan.pt", "several models in one file"),),
    "unbundle": (("ckptool unbundle gan.pt -d parts", "a file for each"),),
    "average": (
        ("ckptool average a.pt b.pt c.pt -o mean.pt", "a model soup"),
        ("ckptool average a.pt b.pt --ema 0.99 -o ema.pt", "the later, the more"),
    ),
    "bake": (("ckptool bake normed.pt -o plain.pt", "weight_g and weight_v become weight"),),
    "warm-start": (
        ("ckptool warm-start model.pt --against other.pt", "what fits, and rules for the rest"),
        ("ckptool warm-start model.pt --against net.py:build -o init.pt", "write what fits"),
    ),
    "spec": (("ckptool spec net.py:build -o model.spec.json", "for warm-start --against, without torch"),),
    "train": (
        ("ckptool train --init > run.yaml", "every key, explained"),
        ("ckptool train run.yaml -n", "a rehearsal of one step"),
        ("ckptool train run.yaml --set optim.main.lr=3e-4", "with another value"),
    ),
    "resume": (("ckptool resume runs/basic", "go on where it was killed"),),
    "prove": (("ckptool prove run.yaml --steps 40 --kills 3", "does it end with the same bytes?"),),
    "prune": (("ckptool prune runs/basic -n", "what would be deleted"),),
}


def epilog(command: str) -> str:
    r"""The examples of a command as typer wants them: after `\b` its lines stay lines."""
    lines = [part for line, what in EXAMPLES[command] for part in (f"# {what}", line)]
    return "\n".join(["\b", "Examples:" if len(lines) > 2 else "Example:", *lines])
