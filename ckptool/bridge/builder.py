"""What makes the live objects of one tree; `tensors` and `objects` say how one of each kind is made, and use what is here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckptool.bridge.devices import Restorer
from ckptool.bridge.storages import Storages, is_faking
from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.commands import OUT_SAFETENSORS, Advice, Command, command, input_of
from ckptool.checkpoint.graph import After, Done, Made, Remake
from ckptool.checkpoint.state_dicts import find_state_dicts
from ckptool.checkpoint.tree import address, walk
from ckptool.errors import CkptoolError, Corrupt, UnsafeObject, Unsupported, listed, printable
from ckptool.pickles.calls import uses


class Builder:
    """Makes the live objects of one tree. What it does not know is collected and named at the end, all at once."""

    def __init__(self, checkpoint: Checkpoint, restorer: Restorer, kinds: Kinds, map_files: bool) -> None:
        self.checkpoint, self.kinds = checkpoint, kinds
        self.storages = Storages(restorer, map_files)
        self.remake = Remake(self.begin)
        self.unknown: list[tuple[Any, str]] = []

    def build(self) -> Any:
        made = self.remake.run(self.checkpoint.tree)
        self.unknown += [
            (None, f"{use.name}, which is {use.how} and thrown away") for use in uses(self.checkpoint.discarded)
        ]
        if not self.unknown and (use := next(uses(self.checkpoint.tree), None)):
            self.unknown.append((None, f"{use.name} at {address(use.path) or 'the top'}"))
        if self.unknown:
            raise self._refusal()
        return made

    def _refusal(self) -> UnsafeObject:
        wanted = {id(node) for node, _ in self.unknown}
        places: dict[int, str] = {}
        for path, node in walk(self.checkpoint.tree):
            if id(node) in wanted:
                places.setdefault(id(node), address(path) or "the top")
        names = [
            f"{printable(name)}{' at ' + printable(places[id(node)]) if id(node) in places else ''}"
            for node, name in self.unknown
        ]
        source = str(self.checkpoint.source or "the checkpoint")
        return UnsafeObject(
            f"{source} holds {listed(names)}",
            "Making these would run code that the file names; ckptool does not.",
            Advice(
                *self._advice(places.values()),
                "See what is there: ",
                command("inspect", input_of(self.checkpoint.source)),
            ),
        )

    def _advice(self, bad: Iterable[str]) -> tuple[str | Command, ...]:
        """How to load the first dictionary at the top that holds nothing unknown, if there is one."""
        tops = {place.partition("/")[0] for place in bad}
        tree, source = self.checkpoint.tree, self.checkpoint.source
        for key, value in tree.items() if isinstance(tree, dict) and source else ():
            if isinstance(value, dict) and value and address((key,)) not in tops:
                return (f"Load a part that holds none: ckptool.load({f'{source}#{printable(address((key,)))}'!r}). ",)
        if source and any(root.module is not None for root in find_state_dicts(self.checkpoint)):
            return "Take its weights: ", command("convert", input_of(source), out=OUT_SAFETENSORS), ". "
        return ()

    def refuse(self, node: Any, name: str) -> Made:
        """Stands something in for a node that is not made, and remembers what to call it."""
        self.unknown.append((node, name))
        return Done(_Unknown())

    def begin(self, node: Any) -> Made:
        kind = self.kinds.get(type(node))
        try:
            return kind(self, node) if kind is not None else Done(node)
        except CkptoolError as error:
            raise self._placed(error, node) from None

    def _placed(self, error: CkptoolError, node: Any) -> CkptoolError:
        """The error with the address of the node that it is about."""
        place = next((address(path) for path, found in walk(self.checkpoint.tree) if found is node), "")
        where = ": ".join(part for part in (str(self.checkpoint.source or ""), printable(place)) if part)
        return error.within(where) if where else error

    def guarded(self, node: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes of a tensor's description; raises `Corrupt` where torch will not have it."""
        try:
            return make()
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
            why = printable(str(error).splitlines()[0])[:300] if str(error) else ""
            if is_faking():
                raise Unsupported(
                    f"torch cannot make {printable(repr(node))} under FakeTensorMode",
                    why,
                    "Load it outside of that mode.",
                ) from error
            raise Corrupt(f"torch cannot make {printable(repr(node))}", why) from error

    def parts(self, node: Any, args: tuple[Any, ...], make: Callable[..., Any]) -> After:
        """`make` called with the live arguments of a tensor; where one of them is refused, so is the tensor."""

        def whole(parts: list[Any]) -> Any:
            if any(isinstance(part, _Unknown) for part in parts):
                return _Unknown()
            return self.guarded(node, lambda: make(*parts))

        return After(args, whole)


class _Unknown:
    """Stands in for what is not made, until the refusal names it."""


# Type of a node -> what begins one of it.
Kinds = Mapping[type, Callable[[Builder, Any], Made]]
