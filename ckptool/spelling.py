"""Options in messages, as they are spelled in Python: `--on-mismatch skip` is `on_mismatch='skip'` there, `-f` is `overwrite=True`.

Messages name options as the command line has them. What Python shows of an error goes through `in_python`, whole commands
(`ckptool inspect FILE --all`) excepted: they are for a shell. A test compares the tables with the parser and the functions.
"""

from __future__ import annotations

import re

# Options that are not called as their argument is.
NAMES = {
    "-f": "overwrite",
    "--force": "overwrite",
    "-o": "out",
    "--out": "out",
    "-d": "folder",
    "--dir": "folder",
    "-n": "dry_run",
    "--map": "moves",
    "--rules": "rules_file",
    "--from": "from_folder",
    "--latest-good": "latest_only",
}
SHELL = frozenset("--help --init --json --schema --skip-refused --version".split())  # what only a shell needs
VALUED = frozenset(
    "-o -d --out --dir --against --at --atol --drop --dtype --ema --error --exclude --fill-from --form --from --ignore --kills --map"
    " --min-loaded --on-mismatch --only --prefix --processes --rename --resume --rtol --rules --seed --set --shard-size --slice --steps"
    " --suggest --tensor --ties --to --weights --write-digest".split()
)
_SEVERAL = frozenset({"--drop", "--exclude", "--ignore", "--only", "--prefix", "--rename", "--set"})
_NUMBERS = frozenset("--atol --ema --kills --min-loaded --processes --rtol --seed --steps".split())
_DEVICE = re.compile(r"'?(cpu|cuda|mps|xpu|meta|DEVICE)\b")

# A value, as against the next word of a sentence: quoted, a PLACEHOLDER, not of small letters alone, or of this list.
_WORDS = "auto|copy|cpu|error|must|never|new|none|npz|old|pad|plain|record|safetensors|sharded|skip|slice"
_VALUE = rf"'[^']*'|(?:{_WORDS})\b|(?=[^\s;]*[^\sa-z;,.)])[^\s;,)]*[^\s;,.:)]"
_OPTION = re.compile(rf"(?<![\w'-])(--?[a-z][a-z-]*)(?:[ =]({_VALUE}))?")
_FOLDER = re.compile(r"(?<!\S)-d\b")
_COMMAND = re.compile(r"((?:ckptool|pip|torchrun) [a-z-]+(?: (?:'[^']*'|[^\s;])+)*)")


def in_python(text: str) -> str:
    """The text, with the options that stand in it as the arguments that they are in Python."""
    parts = getattr(text, "parts", (text,))  # of an advice: its commands stay what they are
    return "".join(_translated(part) if isinstance(part, str) else str(part) for part in parts)


def _translated(text: str) -> str:
    clauses = text.split("; ")
    # Most functions write no several files.
    kept = [clause for clause in clauses if not _FOLDER.search(clause)] or clauses
    pieces = _COMMAND.split("; ".join(kept))
    return "".join(piece if number % 2 else _OPTION.sub(_argument, piece) for number, piece in enumerate(pieces))


def _argument(match: re.Match[str]) -> str:
    flag, value = match[1], match[2]
    name = NAMES.get(flag, flag.lstrip("-").replace("-", "_"))
    if flag in SHELL or (not flag.startswith("--") and flag not in NAMES):
        return match[0]
    if flag not in VALUED:
        return f"{name}=True" + (f" {value}" if value is not None else "")
    if flag == "--to" and (value is None or not _DEVICE.match(value)):
        name = "container"
    return name if value is None else f"{name}={_literal(flag, value)}"


def _literal(flag: str, value: str) -> str:
    """The value as Python has it. A PLACEHOLDER stays one."""
    value = value.strip("'")
    if flag == "--weights":
        return f"[{value.replace(',', ', ')}]"
    if flag in _NUMBERS:
        return value
    if flag in ("--map", "--tensor") or (flag == "--rename" and "=>" not in value and "=" in value):
        old, _, new = value.rpartition("=")
        return f"{{{_quoted(old)}: {_quoted(new)}}}"
    if flag == "--set" and ":=" in value:
        place, _, json = value.partition(":=")
        return f"{{{_quoted(place)}: {json}}}"
    return f"[{_quoted(value)}]" if flag in _SEVERAL else _quoted(value)


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[A-Z]+", text) else repr(text)
