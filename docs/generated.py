"""Writes the pages of the site that come from the program itself, while mkdocs builds it: they cannot go stale.

A page for each message in `messages.txt`, for each command, one with every schema; the README is the first page. Links
between the pages are those that GitHub follows too; what the site does not hold is left out of them.
"""

from __future__ import annotations

import html
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ckptool
from ckptool.analysis.findings import KnownError, of_error_text, recognised
from ckptool.cli.parser import about as help_of
from ckptool.cli.parser import called, typed_parameters, usage
from ckptool.commands import VERBS, function_of
from ckptool.verbs._explain import all_codes
from ckptool.verbs._schema import schema

HOME = Path(__file__).resolve().parents[1]
MESSAGES = [
    line.split("\t")[2]
    for line in (HOME / "docs" / "messages.txt").read_text(encoding="utf-8").splitlines()
    if line[:1] not in ("#", "")
]
GROUPS = {"look": "Look", "change": "Change", "combine": "Combine", "use": "Use", "setup": "Set up"}
# Pages of the repository outside of docs/ -> their place on the site.
OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changes.md", "examples/README.md": "examples.md"}


def pages() -> dict[str, str]:
    """The path of every generated page, and its Markdown."""
    found = {there: moved((HOME / here).read_text(encoding="utf-8"), here) for here, there in OUTSIDE.items()}
    found |= {f"errors/{slug(message)}.md": message_page(message) for message in MESSAGES}
    found |= {f"reference/{VERBS[name].function}.md": verb_page(name) for name in VERBS}
    return found | {
        "errors/index.md": messages_page(),
        "reference/index.md": verbs_page(),
        "schemas.md": schemas_page(),
    }


def moved(text: str, here: str) -> str:
    """A page with its links as they are on the site; those to what is not there are plain text."""

    def link(match: re.Match[str]) -> str:
        shown, target = match[1], match[2]
        if "://" in target or target.startswith("#"):
            return match[0]
        name, _, anchor = target.partition("#")
        path = (HOME / here).parent.joinpath(name).resolve().relative_to(HOME).as_posix()
        aim = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
        return f"[{shown}]({aim}{'#' * bool(anchor)}{anchor})" if aim else shown

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", link, text)


# Fix this error -------------------------------------------------------------------------------------------------------


def slug(message: str) -> str:
    """The file name of a message's page: its first words and, so that no two are the same, its number."""
    words = re.sub(r"[^a-z0-9]+", "-", message.lower()).strip("-")
    return f"{words[:60].rstrip('-')}-{MESSAGES.index(message) + 1}"


def code_span(text: str) -> str:
    """A text as code, whatever backticks are in it."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " * (len(ticks) > 1)
    return f"{ticks}{space}{text}{space}{ticks}"


def message_page(message: str) -> str:
    """A message, what it means, and the commands that fix it, as `doctor --error` says."""
    known, (finding,) = recognised(message), of_error_text(message).findings
    assert isinstance(known, KnownError), message
    same = [each for each in MESSAGES if each != message and recognised(each) is known]
    title = f"---\ntitle: {json.dumps(message)}\n---\n\n"
    lines = [f"# {code_span(message)}", finding.what, "## What fixes it"]
    lines += [block("sh", fix) for fix in finding.fixes]
    lines += [finding.advice] if finding.advice else []
    lines += ["`FILE` is your checkpoint, `OUT` a new file; nothing is changed in place."] if finding.fixes else []
    lines += [
        "Not sure that this is it? `ckptool doctor FILE` looks at the file, and prints the commands for it by name."
    ]
    lines += ["Your message in other words? Pipe it: `python train.py 2>&1 | ckptool explain -`."]
    lines += ["## Also seen as", *(f"- [{code_span(each)}]({slug(each)}.md)" for each in same)] if same else []
    code = all_codes()[finding.code]
    lines += [
        "## In the program",
        f"The code is `{code.code}`: {code.facts['what it means']} [All codes](../codes.md).",
    ]
    return title + "\n\n".join(lines) + "\n"


def messages_page() -> str:
    """The list of messages, by what they mean."""
    lines = [
        "# Fix this error",
        "Find your message; its page says what it means and what to type. Or let the program do it:",
    ]
    lines += [block("sh", "python train.py 2>&1 | ckptool explain -\nckptool doctor model.pt")]
    groups: dict[str, list[str]] = {}
    for message in MESSAGES:
        groups.setdefault(of_error_text(message).findings[0].what, []).append(message)
    for meaning, messages in groups.items():
        lines += [
            f"**{html.escape(meaning, quote=False)}**",
            "\n".join(f"- [{code_span(m)}]({slug(m)}.md)" for m in messages),
        ]
    return "\n\n".join(lines) + "\n"


# Commands -------------------------------------------------------------------------------------------------------------


def verb_page(name: str) -> str:
    """A command as its parser knows it: usage, arguments, options, examples, exit codes, Python, JSON."""
    function = function_of(name)
    parameters = [each for each in typed_parameters(function) if not each.option.hidden]
    what, codes = split_exit_codes(VERBS[name].about)
    lines = [f"# ckptool {name}", what, block("text", usage(name, parameters).removeprefix("Usage: ")), "## Examples"]
    lines += [block("sh", "\n".join(f"# {purpose}\n{line}" for line, purpose in function.verb.examples))]
    rows = [(each.option.flags, called(each), help_of(each)) for each in parameters]
    lines += table("Arguments", ((name, text) for flags, name, text in rows if not flags))
    lines += table("Options", ((name, text) for flags, name, text in rows if flags))
    lines += ["## Exit codes", codes]
    lines += ["## More", f"[{name} in the page of commands](../commands.md#{name.replace(' ', '-')})."]
    if VERBS[name].in_python:
        call = getattr(ckptool, VERBS[name].function)
        doc = inspect.cleandoc(call.__doc__ or "")
        lines += ["## In Python", block("py", f"ckptool.{call.__name__}{signature(call)}"), block("text", doc)]
    printed = [each.schema for each in schema().schemas if name in each.verbs]
    links = ", ".join(f"[`{each}`](../schemas.md#{re.sub('[./]', '', each)})" for each in printed)
    lines += [
        "## JSON",
        f"With `--json` it prints {links}; several answers, and an error, are the same for all commands.",
    ]
    return "\n\n".join(line for line in lines if line) + "\n"


def split_exit_codes(text: str) -> tuple[str, str]:
    """A command's description, and the sentences in it that say its exit codes."""
    about, _, codes = " ".join(text.split()).partition("Exit ")
    common = "0: done. 1: the answer is no. 2: it could not be done; the error says why."
    return html.escape(
        about.strip(), quote=False
    ), f"{'Exit ' * bool(codes)}{codes} {'In general, ' * bool(codes)}{common}".strip()


def signature(call: Any) -> str:
    """The arguments of a function, a line each where they do not fit one."""
    shown = re.sub(r"'([^']*)'", r"\1", str(inspect.signature(call)).replace("\n", " "))
    shown = re.sub(r"\b(?:ckptool|typing|collections|numpy|os)\.(?:\w+\.)*(?=[A-Z])", "", shown)
    return (
        shown
        if len(shown) < 80
        else "(\n    " + ",\n    ".join(top_level(shown)) + "\n)" + shown[shown.rindex(")") + 1 :]
    )


def top_level(shown: str) -> Iterator[str]:
    """The arguments between the outer parentheses."""
    depth, word = 0, ""
    for letter in shown[1 : shown.rindex(")")]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            yield word.strip()
            word = ""
        else:
            word += letter
    yield word.strip()


def verbs_page() -> str:
    """The list of commands, by their group in the help."""
    lines = ["# Each command", "Generated from the program's own parser."]
    for group, title in GROUPS.items():
        names = [name for name, verb in VERBS.items() if verb.group == group]
        first = {name: split_exit_codes(VERBS[name].about)[0] for name in names}
        rows = "\n".join(f"| [{name}]({VERBS[name].function}.md) | {cell(first[name])} |" for name in names)
        lines += [f"## {title}", f"| command | what it does |\n| --- | --- |\n{rows}"] if names else []
    return "\n\n".join(lines) + "\n"


def schemas_page() -> str:
    """Every schema in full."""
    lines = ["# Every schema", "Printed by `ckptool schema`; [what they promise](json.md)."]
    for name, about, verbs in schema().schemas:
        document = textwrap.indent(block("json", json.dumps(schema(name).to_dict(), indent=2)), "    ")
        by = f" Printed by {', '.join(verbs)}." if verbs else ""
        lines += [f"## {name}", f"{about}{by}", f'??? note "The schema"\n\n{document}']
    return "\n\n".join(lines) + "\n"


def table(title: str, rows: Iterator[tuple[str, str]]) -> list[str]:
    """A chapter with a row for each name and what it does; nothing for none."""
    body = "\n".join(f"| <code>{cell(name)}</code> | {cell(text)} |" for name, text in rows)
    return [f"## {title}", f"| {title.lower().rstrip('s')} | |\n| --- | --- |\n{body}"] if body else []


def cell(text: str) -> str:
    return " ".join(html.escape(text, quote=False).replace("|", "&#124;").split())


def block(kind: str, text: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{kind}\n{text}\n{fence}"


# What mkdocs calls ----------------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages to those in docs/."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_config(config: Any) -> Any:
    """Fills the two chapters of the navigation that have a page for each message and command."""
    errors = ["errors/index.md", *({short(message): f"errors/{slug(message)}.md"} for message in MESSAGES)]
    verbs: list[Any] = ["reference/index.md", *({name: f"reference/{VERBS[name].function}.md"} for name in VERBS)]
    config.nav = [filled(each, {"errors/": errors, "reference/": verbs}) for each in config.nav]
    return config


def filled(item: Any, chapters: dict[str, list[Any]]) -> Any:
    if isinstance(item, dict):
        return {title: filled(below, chapters) for title, below in item.items()}
    return [filled(each, chapters) for each in item] if isinstance(item, list) else chapters.get(item, item)


def short(message: str) -> str:
    """A message for the navigation: without the class of the error, at most a line."""
    text = re.sub(r"^[\w.]*(?:Error|Exception): ", "", message)
    text = re.sub(r"^Error\(s\) in loading state_dict for \w+: ", "", text)
    return text if len(text) <= 60 else f"{text[:58]}…"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of pages in docs/ to those outside of it, which are on the site under other names."""
    path = f"docs/{page.file.src_uri}"
    return moved(markdown, path) if (HOME / path).exists() else markdown
