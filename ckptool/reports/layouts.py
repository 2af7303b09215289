"""The layouts that ship, for people who look for theirs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShippedSide:
    """One side of a layout. has: what tells a set of weights of it, all together: names, and equations of sizes.

    lacks: names that it does not have.  refused: what has no place in the other side, and why.
    """

    name: str
    has: tuple[str, ...]
    lacks: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ShippedLayout:
    """A layout that ships: rules between two libraries' names and shapes for one model. name: for `--rules`.

    source: of its facts.  variables: the numbers that it takes from the configuration, else from `--set`.
    notes: what the other library needs beside the weights.  file: its YAML file.
    """

    name: str
    title: str
    source: str
    old: ShippedSide
    new: ShippedSide
    variables: tuple[str, ...]
    notes: tuple[str, ...]
    file: str


@dataclass(frozen=True, slots=True)
class LayoutList:
    """All of them, by name."""

    layouts: tuple[ShippedLayout, ...]
