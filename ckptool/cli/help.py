"""The help, of the program and of each verb: written from what the verbs declare, without the parser."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from ckptool.commands import ALIASES, VERBS, Declared, Parameter
from ckptool.render.lines import Style

FLAGS = ("-h", "--help")
WIDEST = 100  # columns; longer lines are hard to read
MORE = "More options"
ABOUT = """\
Open any PyTorch checkpoint without running its code, without importing torch, without loading it into memory.

See it, compare it, fix it, convert it. Nothing is written without -o, -d or --in-place, or replaced without -f."""
_ROOM = 24  # columns for the names; what is longer has a line of its own


def program_help(style: Style, verbs: Sequence[str] = tuple(VERBS)) -> str:
    """The verbs by their groups, each with its line."""
    is_whole = len(verbs) == len(VERBS)
    prose = [textwrap.wrap(text, _width(style)) for text in ABOUT.split("\n\n")] if is_whole else []
    lines = [
        "Usage: ckptool COMMAND [OPTIONS] …",
        *(["       ckptool FILE            what is in it: inspect"] * is_whole),
    ]
    blocks = [lines, *prose]
    for group in dict.fromkeys(VERBS[verb].group for verb in verbs):
        rows = [(verb, VERBS[verb].about) for verb in verbs if VERBS[verb].group == group]
        blocks.append(_table(style, group.capitalize(), rows))
    rows = [("-h, --help", "Show this message; for one command: ckptool help inspect")]
    rows += [("--version", "Print the version.")] if is_whole else []
    return _page([*blocks, _table(style, "Options", rows)])


def verb_help(verb: str, declared: Declared, parameters: Sequence[Parameter], style: Style) -> str:
    """All that a verb takes, by the parts of the help, and its examples."""
    blocks = [[usage(verb, parameters)], textwrap.wrap(VERBS[verb].about, _width(style))]
    shown = [each for each in parameters if not each.option.hidden]
    own = [(called(each), about(each)) for each in shown if not each.option.flags]
    blocks += [_table(style, "Arguments", own)] if own else []
    several = sum(each.option.rare for each in shown) > 1  # one alone stands with the others
    options = [
        (MORE if each.option.rare and several else each.option.panel, each) for each in shown if each.option.flags
    ]
    for panel in sorted(dict.fromkeys([None, *(panel for panel, _ in options)]), key=lambda panel: panel == MORE):
        rows = [(called(each), about(each)) for at, each in options if at == panel]
        rows += [("-h, --help", "Show this message.")] if panel is None else []
        blocks.append(_table(style, panel or "Options", rows))
    examples = [part for line, purpose in declared.examples for part in (f"  # {purpose}", f"  {line}")]
    blocks.append([style.bold("Examples" if len(examples) > 2 else "Example"), *examples])
    others = [f"ckptool {alias}" for alias, meant in ALIASES.items() if meant == verb]
    return _page([*blocks, *([[f"Also: {', '.join(others)}"]] if others else [])])


def usage(verb: str, parameters: Iterable[Parameter]) -> str:
    """`Usage: ckptool diff [OPTIONS] A B`."""
    arguments = [each for each in parameters if not each.option.flags]
    words = [called(each) if each.is_needed else f"[{called(each).strip('[]')}]" for each in arguments]
    return " ".join(["Usage: ckptool", verb, "[OPTIONS]", *words])


def called(parameter: Parameter) -> str:
    """A parameter as its help calls it: `-o, --out OUT`, `FILE…`."""
    option = parameter.option
    if not option.flags:
        is_repeated = (option.several or option.each) and not option.metavar.endswith("…")
        return f"{option.metavar}…" if is_repeated else option.metavar
    value = "|".join(option.choices) or option.metavar
    return ", ".join(option.flags) + (f" {value}" if parameter.kind is not bool else "")


def about(parameter: Parameter) -> str:
    option, default = parameter.option, parameter.default
    words = [option.help]
    if option.flags and option.several:
        words.append("Repeatable.")
    if option.least is not None and option.least > 0:
        words.append(f"[at least {option.least:g}]")
    if parameter.is_needed and option.flags:
        words.append("[required]")
    if option.show_default and type(default) in (str, int, float) and default not in ("", *option.flags):
        words.append(f"[default: {default}]")
    return " ".join(words)


def _table(style: Style, title: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    room = min(_ROOM, max(len(name) for name, _ in rows))
    lines = [style.bold(title)]
    for name, text in rows:
        indent = " " * (room + 4)
        wrapped = textwrap.wrap(text, _width(style) - len(indent), break_on_hyphens=False) or [""]
        first, *rest = wrapped if len(name) <= room else ["", *wrapped]
        lines += [f"  {name:{room}}  {first}".rstrip(), *(indent + line for line in rest)]
    return lines


def _width(style: Style) -> int:
    return max(min(style.width or 80, WIDEST), 40)


def _page(blocks: Iterable[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"
