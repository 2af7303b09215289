"""What holds for the words and the shape of the source, read once: `python -m tests.lint`, which `make lint` runs.

It prints one line for each thing that is wrong. How the package is built is counted by `make house`: what that has
reached may not be lost.
"""

import ast
import builtins
import gc
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from ckptool import commands
from ckptool import errors as _errors
from ckptool.analysis.findings import known_errors, table
from ckptool.cli.parser import parser as parser_of
from ckptool.cli.parser import typed_parameters
from ckptool.commands import VERBS, function_of, signature_of
from ckptool.verbs._explain import all_codes
from tests.support.house import House, Module, lost

ROOT = Path(__file__).parents[1]
LINES = 500  # of a file of tests

FILLED = "X"  # for what a text is filled with


def place(module: Module, node: ast.AST) -> str:
    return f"{module.name}:{getattr(node, 'lineno', 0)}"


def calls(module: Module, *names: str) -> Iterator[ast.Call]:
    for node in module.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node


def texts(module: Module, left_out: set[int]) -> Iterator[tuple[str, str]]:
    """Every text of a module that is no docstring, with its place."""
    inner = left_out.copy()
    for node in module.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inner.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            inner |= {id(value) for value in node.values}
    for node in module.nodes:
        if isinstance(node, ast.JoinedStr) and id(node) not in left_out:
            parts = (part.value if isinstance(part, ast.Constant) else FILLED for part in node.values)
            yield place(module, node), "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield place(module, node), node.value


# The shape --------------------------------------------------------------------------------------------------------


def of_tests() -> Iterator[str]:
    """How the tests are kept: helpers in one place, with one name each; short files; telling names."""
    homes = Counter[str]()
    for path in (ROOT / "tests").rglob("*.py"):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        if re.search(r"^ *(?:from|import) tests\.(?:\w+\.)*test_", text, re.MULTILINE):
            yield f"{name}: imports from a module of tests"
        if text.count("\n") > LINES:
            yield f"{name}: more than {LINES} lines"
        defined = re.findall(r"^(?:def|class) (\w+)", text, re.MULTILINE)
        yield from (f"{name}: {each} says a number" for each in defined if re.match(r"test_rows?_\d", each))
        if "support" in path.parts or path.name == "conftest.py":
            homes.update(each for each in defined if not each.startswith("_") and each != "main")
    yield from (f"{each} is defined by {count} files of tests/support" for each, count in homes.items() if count > 1)


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def built_anew(module: Module) -> Iterator[str]:
    """Collections that a comprehension builds again for each item, only to look whether the item is in it: of 50,000
    names that is a minute. Capitals are constants."""
    for each in (node for node in module.nodes if isinstance(node, COMPREHENSIONS)):
        bound = {name.id for name in ast.walk(each) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
        for node in (inner for condition in each.generators for inner in condition.ifs for inner in ast.walk(inner)):
            looks = isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn))
            for value in node.comparators if looks else []:
                makes = isinstance(value, (*COMPREHENSIONS, ast.Set, ast.List, ast.Tuple, ast.Call, ast.BinOp))
                parts = [part for part in ast.walk(value) if isinstance(part, ast.Name)] if makes else []
                varies = any(not part.id.isupper() and part.id not in dir(builtins) for part in parts)
                copies = any(isinstance(part, (ast.Starred, *COMPREHENSIONS, ast.BinOp)) for part in ast.walk(value))
                copies |= getattr(getattr(value, "func", None), "id", "") in ("set", "list", "tuple", "dict", "sorted")
                if varies and copies and not bound & {part.id for part in parts}:
                    yield f"{place(module, node)}: built again for each item: {ast.unparse(node)}"


# Words ------------------------------------------------------------------------------------------------------------

FLAG = re.compile(r"(?<![\w'-])--?[a-z][a-z-]*")
A_COMMAND = re.compile(r"(?:: |or )?(?:ckptool|pip|torchrun) [a-z-]+(?: (?:'[^']*'|[^\s;])+)*")
# Commands that no function does, and programs with options of their own.
NO_FUNCTION = re.compile(
    r"(?:: |or )?(?:pip|torchrun) |ckptool |: ckptool (?:bundle NAME=|[a-z-]+ --(?:init|list|global)\b)"
)
OTHERS = re.compile(
    r"^(gzip|bzip2|xz|zstd|lz4|unzip|mkdir|[a-z]+) -[a-z]+$|: (head|zip|ls) -|--(ckpt-format|num_proc)|ls -lt"
)


def spelling(module: Module) -> Iterator[str]:
    """Options that a text of an error spells as a shell does, and so would in Python: `arg` and `command` do both.

    Looked at are the functions that make errors, and what modules name in capitals.
    """
    setup = [verb.module for verb in VERBS.values() if not verb.in_python]
    if module.room in ("cli", "render", "facts", "commands") or module.name in setup:  # speak to a shell alone
        return
    hooks = {ast.unparse(word.value) for call in calls(module, "verb") for word in call.keywords}
    errors = {name for name in vars(_errors) if is_error(name)}
    known = calls(module, *"arg command other_program Command option repeated _output argument verb Note".split())
    both = {id(part) for call in known for part in ast.walk(call)}
    rows = (node for node in module.nodes if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "append")
    shell = (call for call in calls(module, "Text") if call.keywords)
    both |= {id(part) for call in (*rows, *shell) for part in ast.walk(call)}
    looked = set[int]()
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef):
            inner = list(ast.walk(node))
            if node.name not in hooks and any(
                isinstance(each, ast.Call) and getattr(each.func, "id", "") in errors for each in inner
            ):
                looked |= {id(each) for each in inner}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).isupper():
            looked |= {id(each) for each in ast.walk(node)}
    left_out = {id(node) for node in module.nodes} - looked | both
    for at, text in texts(module, left_out):
        rest = A_COMMAND.sub(lambda match: "" if NO_FUNCTION.match(match[0]) else f" --{match[0]}", text)
        if " " in text and FLAG.search(rest) and not OTHERS.search(text):
            yield f"{at}: an option as only a shell has it: {text}"


def is_error(name: str) -> bool:
    kind = vars(_errors)[name]
    return isinstance(kind, type) and issubclass(kind, _errors.CkptoolError)


PLURAL = re.compile(r"^ (?:[a-z]+ )?([a-z]+s)\b")
NO_PLURAL = {"its", "is", "was", "has", "as", "this", "bytes", "others", "does", "ends", "says", "holds", "stands"}


def is_count(value: ast.FormattedValue) -> bool:
    """True for `{n:,}` and `{len(x)}`; a limit, which is written in capitals, is never one."""
    spec = value.format_spec
    parts = spec.values if isinstance(spec, ast.JoinedStr) else []
    commas = "".join(str(each.value) for each in parts if isinstance(each, ast.Constant)) == ","
    length = isinstance(value.value, ast.Call) and getattr(value.value.func, "id", "") == "len"
    return (commas or length) and not ast.unparse(value.value).isupper()


def plurals(module: Module) -> Iterator[str]:
    """Counts with a plural behind them that does not know one."""
    for node in module.nodes:
        for value, after in pairwise(node.values if isinstance(node, ast.JoinedStr) else []):
            if isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant) and is_count(value):
                word = PLURAL.match(str(after.value))
                if word and word[1] not in NO_PLURAL:
                    yield f"{place(module, node)}: a plural behind a count: {ast.unparse(value.value)}{after.value}"


# Codes ------------------------------------------------------------------------------------------------------------


def named_constants(module: Module) -> dict[str, set[str]]:
    """Name -> the texts that a module gives it, in a tuple too."""
    found: dict[str, set[str]] = {}
    for node in module.nodes:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            for name, text in zip(target.elts, value.elts, strict=False) if both else [(target, value)]:  # type: ignore[attr-defined]
                if isinstance(name, ast.Name) and isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found.setdefault(name.id, set()).add(text.value)
    return found


def codes_of(module: Module) -> Iterator[str]:
    """The codes that a module names: of a class of errors, or in making a note, finding or problem."""
    makers = {"Note": 0, "noted": 0, "Finding": 0, "Problem": 0}
    names = named_constants(module)
    for call in calls(module, *makers):
        for value in call.args[makers[call.func.id] :][:1]:  # type: ignore[attr-defined]
            for each in [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]:
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield each.value
                elif isinstance(each, ast.Name):
                    yield from names.get(each.id, ())
    for node in module.nodes:
        if isinstance(node, ast.ClassDef):
            codes = (word.value for word in node.keywords if word.arg == "code")
            yield from (each.value for each in codes if isinstance(each, ast.Constant) and isinstance(each.value, str))


def codes(house: House) -> Iterator[str]:
    """Each is explained, and no other is."""
    modules, explained = house.modules.values(), set(all_codes())
    made = {code for module in modules for code in codes_of(module)} | {known.finding.code for known in known_errors()}
    made |= {name.partition(",")[0] for name in table("findings")["findings"]}
    words = {node.value for module in modules for node in module.nodes if isinstance(node, ast.Constant)}
    if len(made) <= 110:
        yield f"only {len(made)} codes were found"
    yield from (f"the code {code} is not explained" for code in sorted(made - explained))
    # Codes that reach a note in a variable: the text is in the program at least.
    yield from (f"nothing has the code {code}, which is explained" for code in sorted(explained - made - words))
    if len(explained - made) >= 8:
        yield f"codes that no note, finding or error names: {sorted(explained - made)}"


# Commands ---------------------------------------------------------------------------------------------------------

WRITTEN = re.compile(rf"\bckptool ({'|'.join(map(re.escape, sorted(VERBS)))})(?![\w.])((?:'[^']*'|[^;'])*)")


@cache
def parser(verb: str) -> Any:
    return parser_of(verb, typed_parameters(function_of(verb)))


def parsed(words: list[str]) -> dict[str, Any]:
    """What the program's parser makes of a command line; it raises where the program would say `usage`."""
    assert words[0] == "ckptool" and words[1] in VERBS, words
    if "--help" in words:
        return {}
    context: Any = parser(words[1]).make_context(words[1], words[2:])
    return dict(context.params)


_WORDS = {"on_mismatch": "skip", "processes": "2", "optimizer_as": "ids"}  # for what is no constant


def built(call: ast.Call) -> None:
    """Raises if a call of `command` builds a command that the parser does not take."""
    verb, *arguments = call.args
    assert isinstance(verb, ast.Constant) and verb.value in VERBS, "there is no such verb"
    words = ["ckptool", verb.value, *("x.pt" for _ in arguments)]
    known = signature_of(function_of(verb.value)).parameters
    flags = {flag: option for option in parser(verb.value).params for flag in option.opts}
    for keyword in call.keywords:
        elsewhere = commands.SHELL_ONLY | commands.PRINTED_ONLY
        is_call = VERBS[verb.value].in_python and (verb.value, keyword.arg) not in elsewhere
        assert not is_call or keyword.arg in known, f"the function has no {keyword.arg}"
        flag = commands.flag(str(keyword.arg))
        if not flag:
            words.append("a=x.pt")
            continue
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        named = isinstance(keyword.value, ast.Name)  # nothing here says whether it is a bool or a text
        assert named or flags[flag].is_flag is (value is True), flag
        text = value if isinstance(value, str) else _WORDS.get(str(keyword.arg), "x.pt")
        words += [flag] if flags[flag].is_flag else [flag, text]
    parsed(words)
    writes = "-o" in flags and verb.value not in ("doctor", "warm-start")  # which look first
    assert not writes or any(keyword.arg == "out" for keyword in call.keywords), "it writes, and does not say where"


def written_out(module: Module) -> Iterator[tuple[str, str]]:
    """The commands in a module's texts, but for examples: tests/cli/test_help.py runs them."""
    for at, text in texts(module, {id(part) for call in calls(module, "verb") for part in ast.walk(call)}):
        for match in WRITTEN.finditer(text):
            if text[: match.start()].rstrip()[-1:] not in ("", ":", "|", "see", "`", ".") and "For example" not in text:
                continue
            line = re.split(r"[`]|\. |, |\.$|\s\(|\s+(?:Resume it|Prove it)", match[0].split("\n")[0])[0]
            yield at, line.split("#  ")[0].strip()


def all_commands(house: House) -> Iterator[tuple[str, Any, str]]:
    """Each with its place, and what is wrong with it where that is more than its words."""
    for module in house.modules.values():
        if module.room != "cli":  # where a command is another thing
            constant = (call for call in calls(module, "command") if not isinstance(call.args[0], ast.Name))
            yield from ((place(module, call), call, "") for call in constant)
        yield from ((at, line, "") for at, line in written_out(module))
    for known in known_errors():
        yield from (("the table of errors", str(fix), "") for fix in known.finding.commands)
        if advised := re.search(r": (ckptool .*)", known.finding.advice):
            yield "the table of errors", advised[1], ""
    for row in table("findings")["findings"].values():
        for line in (*row.get("fixes", ()), *row.get("advised", ())):
            yield "the table of findings", re.sub(r"\{\w+\}", "x", line).replace("FILE#", "FILE"), ""


def taken(house: House) -> Iterator[str]:
    """Every command that the program may print is one that its parser takes."""
    count = 0
    for at, what, wrong in all_commands(house):
        count += 1
        try:
            if isinstance(what, str):
                words = shlex.split(what.replace("> run.yaml", ""), comments=True)
                parsed([{"…": "X", "X": "2"}.get(word, word) for word in words])
            else:
                built(what)
        except Exception as error:  # noqa: BLE001 -- told
            wrong = f"{type(error).__name__} {error}"
        if wrong:
            yield f"{at}: {what if isinstance(what, str) else ast.unparse(what)}: {wrong}"
    if count < 200:
        yield f"only {count} commands were found"


def all_wrong(house: House) -> Iterator[str]:
    yield from lost(house)
    yield from of_tests()
    for module in house.modules.values():
        yield from spelling(module)
        yield from plurals(module)
        yield from built_anew(module)
    yield from codes(house)
    yield from taken(house)


if __name__ == "__main__":
    gc.disable()
    found = list(all_wrong(House(ROOT)))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)
