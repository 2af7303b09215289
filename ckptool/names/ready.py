"""Ready translations: the prefixes that wrappers and other modules put before names, off and on.

Who suggests tries them: what each makes of the names that there are is compared with those that are wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from ckptool.conventions.state_dicts import without_wrappers
from ckptool.errors import Conflict

_TRIED = 8  # names by which prefixes are looked for


class Tried(NamedTuple):
    """What a prefix taken off, or put on, makes of names. names: those after it -> those before, without the rest.

    rest: how many names do not have it.
    """

    prefix: str
    names: dict[str, str]
    rest: int = 0


def without_prefixes(names: Mapping[str, str], wanted: Collection[str]) -> Iterator[Tried]:
    """Names without a prefix under which some that are wanted stand among them. names: -> what they are of."""
    for prefix in _prefixes(wanted, names):
        inside = {name[len(prefix) :]: of for name, of in names.items() if name.startswith(prefix)}
        yield Tried(prefix, inside, len(names) - len(inside))


def with_prefixes(names: Mapping[str, str], wanted: Collection[str]) -> Iterator[Tried]:
    """Names with a prefix under which some of them stand among those that are wanted."""
    for prefix in _prefixes(names, wanted):
        yield Tried(prefix, {prefix + name: of for name, of in names.items()})


def _prefixes(names: Iterable[str], longer: Collection[str]) -> dict[str, None]:
    few = [name for name, _ in zip(names, range(_TRIED), strict=False)]
    return dict.fromkeys(long[: -len(name)] for name in few for long in longer if long.endswith(f".{name}"))


def paired(names: Iterable[str], wanted: Iterable[str], fix: Callable[[str], str] = lambda name: "") -> dict[str, str]:
    """The name for each of those that are wanted: an equal one, else the one that is equal without wrappers' prefixes.

    Raises `Conflict` where two names would be one. fix: by leaving out the one of them.
    """
    names = dict.fromkeys(names)
    wanted = dict.fromkeys(wanted)
    pairs = {name: name for name in wanted if name in names}
    bare = [(without_wrappers(name), name) for name in wanted if name not in pairs]
    counts = Counter(short for short, _ in bare)
    goals = {short: name for short, name in bare if counts[short] == 1}
    for name in names if goals else ():
        if name in wanted or (goal := goals.get(without_wrappers(name))) is None:
            continue
        if goal in pairs:
            what = f"{pairs[goal]} and {name} would both be {goal!r}"
            why = "Without the prefixes of wrappers they are the same name. Nothing was changed."
            raise Conflict(what, why, fix(name))
        pairs[goal] = name
    return pairs
