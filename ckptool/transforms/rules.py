"""Rules for new keys: `OLD => NEW`, both for the whole key, from the command line or a YAML file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint.patterns import match_within_limit
from ckptool.errors import UsageError, printable


@dataclass(frozen=True, slots=True)
class Rule:
    """`old => new` for whole keys. `text` is the rule as given, `place` where it was read (`rules.yaml, line 3`).

    sums: what follows the template: a group whose number is changed by so much, and the template after it.
    """

    text: str
    pattern: re.Pattern[str]
    template: str
    place: str = ""
    sums: tuple[tuple[str, int, str], ...] = ()

    def __call__(self, key: str) -> str | None:
        """The new key, or None if the rule does not match. Raises `UsageError` where a number would be negative."""
        match = match_within_limit(self.pattern.fullmatch, key, self.pattern)
        if match is None:
            return None
        rest = [_sum(key, match[group], by) + match.expand(template) for group, by, template in self.sums]
        return "".join([match.expand(self.template), *rest])


def _sum(key: str, number: str, by: int) -> str:
    """The number changed by so much, with as many digits as it had where it begins with a zero."""
    made = int(number) + by
    if made < 0:
        raise UsageError(
            f"{printable(key)}: {number}{by:+} is below zero", "No layer has such a number. Nothing was written."
        )
    return str(made).zfill(len(number) if number.startswith("0") else 0)


MAX_RULES = 16 << 20  # bytes of a file of them
RULES_LOOK = "A line of it: - 'blocks.{n}.* => layers.{n}.*'"
_ARROW = re.compile(r"\s*=>\s*")
_TOKEN = re.compile(r"\*|\{(\w+)(?:\s*([+-])\s*([0-9]{1,9}))?\}|\\(.)|(\{)")


def parse_rule(text: str, place: str = "") -> Rule:
    """A rule from its text: `'blocks.{n}.attn.* => layers.{n}.self_attn.*'`, or `'re:^enc\\.(.*)$ => encoder.\\1'`.

    `*` stands for anything, dots included; `{name}` for something without a dot. `{n+1}` on the right is a sum; `{n}` is then digits.
    Raises `UsageError` for a rule without `=>`, with a variable on the right that the left does not have, with a brace that is no
    variable (`\\{` is a brace), or a regular expression that is none.
    """
    where = f"{place}: " if place else ""
    sides = _ARROW.split(text.strip())
    if len(sides) != 2 or not sides[0] or not sides[1]:
        cut = not place and text.rstrip().endswith("=")
        raise UsageError(
            f"{where}{printable(text)!r} is not a rule",
            "A rule is OLD => NEW, both for the whole key."
            + " In a shell it needs quotes: without them > sends the output into a file." * cut,
            "For example: 'blocks.{n}.* => layers.{n}.*'",
        )
    old, new = sides
    try:
        pattern, template, sums = _of_expression(old[3:], new) if old.startswith("re:") else _compile_glob(old, new)
        for part in (template, *(after for _, _, after in sums)):
            _check_template(pattern, part)
    except (re.error, IndexError, UsageError) as error:
        reason = error.what if isinstance(error, UsageError) else str(error)
        raise UsageError(
            f"{where}the rule {printable(text)!r} cannot work: {reason}",
            "Every variable on the right must be bound on the left.",
        ) from None
    return Rule(text, pattern, template, place, sums)


Compiled = tuple[re.Pattern[str], str, tuple[tuple[str, int, str], ...]]


def _of_expression(old: str, new: str) -> Compiled:
    """A regular expression, and its template. Raises `UsageError` for a variable in that, which would become a part of the key."""
    if found := re.search(r"(?<!\\)\{\w+\s*([+-]\s*\w+\s*)?\}", new):
        raise UsageError(f"{found[0]} is for rules without re:; what a regular expression matched is \\1 or \\g<name>")
    return re.compile(old), new, ()


def _compile_glob(old: str, new: str) -> Compiled:
    """The pattern for the left side, the template for the right, and for each sum on the right its group, number and the template after."""
    summed = {match[1] for match in _TOKEN.finditer(new) if match[2]}
    stars = 0
    seen: set[str] = set()

    def group(match: re.Match[str]) -> str:
        nonlocal stars
        _refuse_brace(match)
        if match[4] is not None:
            return re.escape(match[4])
        if match[1] is None:
            stars += 1
            return f"(?P<star{stars}>.*)"
        if match[2]:
            raise UsageError(f"{match[0]} is a sum, which stands on the right side")
        if match[1] in seen:
            return f"(?P=v_{match[1]})"
        seen.add(match[1])
        return f"(?P<v_{match[1]}>{'[0-9]+' if match[1] in summed else '[^.]+'})"

    pattern = re.compile("".join(_substituted(old, group, re.escape)), re.DOTALL)
    bound, stars = stars, 0

    def reference(match: re.Match[str]) -> str | tuple[str, int]:
        nonlocal stars
        _refuse_brace(match)
        if match[4] is not None:
            return match[4].replace("\\", "\\\\")
        if match[1] is None:
            stars += 1
            if stars > bound:
                raise UsageError(f"the right side has more * than the left ({bound})")
            return f"\\g<star{stars}>"
        if match[1] not in seen:
            raise UsageError(f"{{{match[1]}}} is not on the left side")
        return (f"v_{match[1]}", int(match[2] + match[3])) if match[2] else f"\\g<v_{match[1]}>"

    template = ""
    sums: list[tuple[str, int, str]] = []
    for part in _substituted(new, reference, lambda text: text.replace("\\", "\\\\")):
        if isinstance(part, tuple):
            sums.append((*part, ""))
        elif sums:
            sums[-1] = (*sums[-1][:2], sums[-1][2] + part)
        else:
            template += part
    return pattern, template, tuple(sums)


def _refuse_brace(match: re.Match[str]) -> None:
    if match[5] is not None:
        raise UsageError("a { begins a variable, {n}, or a sum, {n+1}; a brace itself is \\{")


def _substituted(text: str, special: Callable[[re.Match[str]], Any], literal: Callable[[str], str]) -> list[Any]:
    parts, at = [], 0
    for match in _TOKEN.finditer(text):
        parts += [literal(text[at : match.start()]), special(match)]
        at = match.end()
    return [*parts, literal(text[at:])]


def _check_template(pattern: re.Pattern[str], template: str) -> None:
    """Raises where the template refers to a group that the pattern does not have."""
    probe = re.compile(f"{pattern.pattern}\n|", pattern.flags).fullmatch("")  # the line break ends a comment of (?x)
    if probe is not None:
        probe.expand(template)


def read_rules(path: str) -> list[Rule]:
    """The rules of a YAML file: a list of `OLD => NEW` texts, a mapping of OLD to NEW, or either under `rules:`.

    Raises `UsageError` that points at the line, `FileProblem` if the file cannot be read.
    """
    import yaml

    from ckptool.checkpoint.files import read_small_text

    text = read_small_text(path, "a file of rules", MAX_RULES)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        line, problem = _place_in(text, error)
        raise UsageError(
            f"{printable(path)}, line {line}: {problem}", "The rules file is not valid YAML.", RULES_LOOK
        ) from None
    except RecursionError:
        raise UsageError(f"{printable(path)} is nested too deep", "Rules are texts in one list.", RULES_LOOK) from None
    if isinstance(node, yaml.MappingNode) and len(node.value) == 1 and node.value[0][0].value == "rules":
        node = node.value[0][1]
    if isinstance(node, yaml.MappingNode):
        pairs = [(f"{_scalar_text(old)} => {_scalar_text(new)}", old) for old, new in node.value]
    elif isinstance(node, yaml.SequenceNode):
        pairs = [(_scalar_text(item), item) for item in node.value]
    else:
        raise UsageError(
            f"{printable(path)}, line 1: no rules",
            "A rules file is a list of 'OLD => NEW' or a mapping of OLD to NEW.",
            RULES_LOOK,
        )
    return [parse_rule(text, f"{printable(path)}, line {item.start_mark.line + 1}") for text, item in pairs]


def _place_in(text: str, error: Any) -> tuple[int, str]:
    """The line of a YAML error and what is wrong there; of a character that YAML does not have, PyYAML gives the offset."""
    if (mark := getattr(error, "problem_mark", None)) is not None:
        return mark.line + 1, printable(str(error.problem))
    if isinstance(at := getattr(error, "position", None), int):
        return text.count("\n", 0, at) + 1, f"the character {printable(text[at : at + 1])!r} cannot be in YAML"
    return 1, printable(str(error))


def _scalar_text(node: Any) -> str:
    """The text of a YAML scalar as it was written; nothing for a list or mapping, which no rule can be."""
    return node.value if isinstance(node.value, str) else ""
