"""Files of rules: YAML as a tree with the lines in which its parts stand."""

from __future__ import annotations

from typing import Any

from ckptool.errors import UsageError, printable

MAX_RULES = 16 << 20  # bytes of a file of them


def rules_tree(path: str, look: str) -> Any:
    """The tree of a YAML file of rules, with its lines; nothing is constructed. look: a file of them.

    Raises `UsageError` that points at the line, `FileProblem` if the file cannot be read.
    """
    import yaml

    from ckptool.checkpoint.files import read_small_text

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # with which a few lines stand for millions
                what = "an alias (names that begin with * are in quotes)"
                mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
                raise yaml.composer.ComposerError(None, None, what, mark)
            return super().compose_node(parent, index)

    text = read_small_text(path, "a file of rules", MAX_RULES)
    try:
        return yaml.compose(text, Loader=Loader)
    except yaml.YAMLError as error:
        line, problem = _place_in(text, error)
        raise UsageError(f"{path}, line {line}: {problem}", "The rules file is not valid YAML.", look) from None
    except RecursionError:
        raise UsageError(f"{path} is nested too deep", "Rules are not nested like this.", look) from None


def _place_in(text: str, error: Any) -> tuple[int, str]:
    """The line of a YAML error and the problem; for an invalid character, PyYAML gives the offset only."""
    if (mark := getattr(error, "problem_mark", None)) is not None:
        return mark.line + 1, str(error.problem)
    if isinstance(at := getattr(error, "position", None), int):
        return text.count("\n", 0, at) + 1, f"the character {text[at : at + 1]!r} cannot be in YAML"
    return 1, str(error)


def scalar_text(node: Any) -> str:
    """The text of a YAML scalar as it was written; nothing for a list or mapping, which no rule can be."""
    return node.value if isinstance(node.value, str) else ""


def line_of(node: Any, path: str) -> str:
    """Where a part of a file stands: `rules.yaml, line 3`."""
    return f"{printable(path)}, line {node.start_mark.line + 1}"
