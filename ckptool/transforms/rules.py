"""Rules for new keys: `OLD => NEW`, both for the whole key, from the command line or a YAML file."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptool.checkpoint.patterns import match_within_limit
from ckptool.errors import NoMatch, UsageError, printable

MAX_RULES = 16 << 20  # bytes of a file of them
RULES_LOOK = "A line of one: - 'blocks.{n}.* => layers.{n}.*'"
WHOLE_KEY = "Rules match whole keys; `*` also matches dots."
_ARROW = re.compile(r"\s*=>\s*")
_TOKEN = re.compile(r"\*|\{(\w+)(?:\s*([+-])\s*([0-9]{1,9}))?\}|\\(.)|(\{)")

Sums = tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """`old => new` for whole keys. `text`: the rule as given; `place`: where it was read (`rules.yaml, line 3`).

    sums: a group whose number is changed by so much, and the template after it; they follow `template`.
    """

    text: str
    pattern: re.Pattern[str]
    template: str
    place: str = ""
    sums: Sums = ()

    def __call__(self, key: str) -> str | None:
        """The new key, or None if the rule does not match. Raises `UsageError` where a number would be negative."""
        match = match_within_limit(self.pattern.fullmatch, key, self.pattern)
        if match is None:
            return None
        rest = [_sum(key, match[group], by) + match.expand(template) for group, by, template in self.sums]
        return "".join([match.expand(self.template), *rest])


def _sum(key: str, number: str, by: int) -> str:
    """The number changed by so much, with as many digits as it had where it begins with a zero."""
    total = int(number) + by
    if total < 0:
        raise UsageError(
            f"{printable(key)}: {number}{by:+} is below zero", "No layer has such a number. Nothing was written."
        )
    return str(total).zfill(len(number) if number.startswith("0") else 0)


def refuse_idle(rules: Sequence[Rule], used: Collection[int], matches: str, why: str) -> None:
    """Raises `NoMatch` for the first rule whose number is not in `used`: it matches no key."""
    idle = next((rule for number, rule in enumerate(rules) if number not in used), None)
    if idle is not None:
        place = f" ({idle.place})" if idle.place else ""
        raise NoMatch(
            f"the rule {printable(idle.text)!r}{place} matches {matches}",
            why,
            "See the keys: ckptool inspect FILE --all",
        )


def parse_rule(text: str, place: str = "") -> Rule:
    """A rule from its text: `'blocks.{n}.attn.* => layers.{n}.self_attn.*'`, or `'re:^enc\\.(.*)$ => encoder.\\1'`.

    `*` stands for anything, dots included; `{name}` for something without a dot. `{n+1}` on the right is a sum; `{n}`
    is then digits. Raises `UsageError` for a rule without `=>`, with a variable on the right that the left does not
    have, with a brace that is no variable (`\\{` is a brace), or an invalid regular expression.
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
        pattern, template, sums = _expression(old[3:], new) if old.startswith("re:") else _glob(old, new)
        for part in (template, *(after for _, _, after in sums)):
            _check_template(pattern, part)
    except (re.error, IndexError, UsageError) as error:
        reason = error.what if isinstance(error, UsageError) else str(error)
        raise UsageError(
            f"{where}the rule {printable(text)!r} is invalid: {reason}",
            "Every variable on the right must be bound on the left.",
        ) from None
    return Rule(text, pattern, template, place, sums)


def _expression(old: str, new: str) -> tuple[re.Pattern[str], str, Sums]:
    """A regular expression, and its template. Raises `UsageError` for a variable in that, which would become text."""
    if found := re.search(r"(?<!\\)\{\w+\s*([+-]\s*\w+\s*)?\}", new):
        raise UsageError(f"{found[0]} is for rules without re:; what a regular expression matched is \\1 or \\g<name>")
    return re.compile(old), new, ()


class _Variable(NamedTuple):
    """A `*` (without a name) or `{name}` of a side of a rule. by: the number of a sum."""

    text: str
    name: str
    by: int | None


def _pieces(side: str) -> list[str | _Variable]:
    """The literal texts of a side and its variables."""
    pieces: list[str | _Variable] = []
    at = 0
    for match in _TOKEN.finditer(side):
        name, sign, number, escaped, brace = match.groups()
        if brace is not None:
            raise UsageError("a { begins a variable, {n}, or a sum, {n+1}; a brace itself is \\{")
        by = int(sign + number) if sign else None
        pieces += [side[at : match.start()], _Variable(match[0], name or "", by) if escaped is None else escaped]
        at = match.end()
    return [*pieces, side[at:]]


def _glob(old: str, new: str) -> tuple[re.Pattern[str], str, Sums]:
    """The pattern of the left side, the template of the right, and the sums in it."""
    right = _pieces(new)
    summed = {piece.name for piece in right if isinstance(piece, _Variable) and piece.by is not None}
    groups: list[str] = []
    pattern = ""
    for piece in _pieces(old):
        if isinstance(piece, str):
            pattern += re.escape(piece)
        elif piece.by is not None:
            raise UsageError(f"{piece.text} is a sum, which stands on the right side")
        elif piece.name and f"v_{piece.name}" in groups:
            pattern += f"(?P=v_{piece.name})"
        else:
            groups.append(f"v_{piece.name}" if piece.name else f"star{_stars(groups) + 1}")
            content = ".*" if not piece.name else "[0-9]+" if piece.name in summed else "[^.]+"
            pattern += f"(?P<{groups[-1]}>{content})"
    return re.compile(pattern, re.DOTALL), *_template(right, groups)


def _stars(groups: Collection[str]) -> int:
    return sum(group.startswith("star") for group in groups)


def _template(pieces: Sequence[str | _Variable], groups: Collection[str]) -> tuple[str, Sums]:
    """The template of the right side up to the first sum, and each sum with the template after it."""
    templates, sums, stars = [""], list[tuple[str, int]](), 0
    for piece in pieces:
        if isinstance(piece, str):
            templates[-1] += piece.replace("\\", "\\\\")
        elif not piece.name:
            stars += 1
            if stars > _stars(groups):
                raise UsageError(f"the right side has more * than the left ({_stars(groups)})")
            templates[-1] += f"\\g<star{stars}>"
        elif f"v_{piece.name}" not in groups:
            raise UsageError(f"{{{piece.name}}} is not on the left side")
        elif piece.by is None:
            templates[-1] += f"\\g<v_{piece.name}>"
        else:
            sums.append((f"v_{piece.name}", piece.by))
            templates.append("")
    after = zip(sums, templates[1:], strict=True)
    return templates[0], tuple((group, by, template) for (group, by), template in after)


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

    node = yaml_node(path, MAX_RULES, RULES_LOOK)
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


def yaml_node(path: str, most: int, look: str) -> Any:
    """The tree of a YAML file of at most so many bytes, with its lines; nothing is constructed. look: a file of them.

    Raises `UsageError` that points at the line, `FileProblem` if the file cannot be read.
    """
    import yaml

    from ckptool.checkpoint.files import read_small_text

    text = read_small_text(path, "a file of rules", most)
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        line, problem = _place_in(text, error)
        raise UsageError(
            f"{printable(path)}, line {line}: {problem}", "The rules file is not valid YAML.", look
        ) from None
    except RecursionError:
        raise UsageError(f"{printable(path)} is nested too deep", "Rules are not nested like this.", look) from None


def _place_in(text: str, error: Any) -> tuple[int, str]:
    """The line of a YAML error and the problem; for an invalid character, PyYAML gives the offset only."""
    if (mark := getattr(error, "problem_mark", None)) is not None:
        return mark.line + 1, printable(str(error.problem))
    if isinstance(at := getattr(error, "position", None), int):
        return text.count("\n", 0, at) + 1, f"the character {printable(text[at : at + 1])!r} cannot be in YAML"
    return 1, printable(str(error))


def _scalar_text(node: Any) -> str:
    """The text of a YAML scalar as it was written; nothing for a list or mapping, which no rule can be."""
    return node.value if isinstance(node.value, str) else ""
