"""`browse`: a checkpoint in the terminal: its tree, values and histograms, and what differs in another one."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

from ckptool.analysis.diff import aspect_rows, diff_of_parts, entry_rows
from ckptool.analysis.inspect import STATISTICS, Listing, TensorRow, listing, summary_of, with_statistics
from ckptool.analysis.outline import DEEPEST, Branch
from ckptool.analysis.values import values_of
from ckptool.analysis.words import FEW, array_text, tensor_text, value_text
from ckptool.checkpoint import Composite, TensorEntry
from ckptool.checkpoint.files import unchanged
from ckptool.checkpoint.jobs import ENDS, signals_held
from ckptool.checkpoint.numpy_arrays import array_entry
from ckptool.checkpoint.paths import is_url, selected
from ckptool.checkpoint.strided import corners, to_numpy
from ckptool.checkpoint.tree import Path
from ckptool.commands import FILE, command, verb
from ckptool.conventions.state_dicts import PLAIN, StateDict
from ckptool.errors import CkptoolError, MissingExtra, NoMatch, UsageError, counted, escaped, printable, quoted
from ckptool.facts import WHOLE, Marked, Page, bars, bold, dataclass, dim, number, size
from ckptool.formats import Opened, open_file
from ckptool.render.lines import columns, cut, error_text, lines
from ckptool.verbs._options import File

AT_ONCE = 1 << 26, 1 << 20  # bytes up to which statistics are read unasked: of files, of URLs
PAUSE = 0.15  # seconds without another letter, after which a pattern is looked for
SIBLINGS = 1_000  # shown at most: textual draws more of them too slowly


@verb(("ckptool browse model.pt", "arrows and Enter move, / filters, d compares, Esc goes back, q quits"))
def browse(file: File) -> Page:
    """Walks through a checkpoint in the terminal: its tree, values, histograms, and what differs in another.

    Values are read for the tensor at the cursor. Returns the addresses that were copied. Raises `UsageError` where
    there is no terminal, `MissingExtra` without textual.
    """
    if not all(stream is not None and stream.isatty() for stream in (sys.__stdin__, sys.__stderr__)):
        name = os.fspath(file) if isinstance(file, (str, os.PathLike)) else FILE
        raise UsageError(f"browse needs a terminal; without one, use {command('inspect', name)}")
    if find_spec("textual") is None:
        raise MissingExtra("browse needs textual, which is not installed", "", "pip install 'ckptool[browse]'")
    app = browser(open_file(file))
    gc.enable()  # it may live long
    with signals_held() as signals:  # the app takes them when it can give the terminal back
        app.run()
        signals += [app.return_code - 128] * (app.return_code > 128)
    return Page("\n".join(app.copied))


class Plain(NamedTuple):
    """A plain value in the place of a line's tensor."""

    value: Any
    dtype: None = None
    shape: None = None
    location: str = "cpu"
    kind: str = "value"
    nbytes: int = 0
    numel: int = 0


@dataclass(slots=True, eq=False)
class Line(TensorRow):
    """A tensor or plain value of the tree.  change, colour: how it differs in another file."""

    change: str = ""
    colour: str = ""


def lines_of(contents: Listing) -> Iterator[Line]:
    """Every tensor, then every value, except the parts of objects."""
    yield from (Line(row.path, row.tensor, row.storage) for row in contents.tensors)
    parent: Path | None = None
    for row in contents.entries:
        if not row.repeated and (parent is None or row.path[: len(parent)] != parent):
            yield Line(row.path, Plain(row.value), None)  # type: ignore[arg-type]
            parent = row.path


def lines_of_diff(diff: Any, base: Path) -> Iterator[Line]:
    """The differences, at their places in the first file, of which the part at `base` was compared."""
    texts = {name: text for pairs in (aspect_rows(diff), entry_rows(diff)) for name, text in pairs}
    rows: list[tuple[Path, Any, str, str]] = []
    for change in diff.changed:
        delta, remarks = change.values, [texts[change.address]] if change.address in texts else []
        if delta is not None:
            remarks.insert(0, f"{delta.changed:,} of {delta.total:,} changed, max |a-b| {number(delta.max_abs)}")
        rows.append((change.path, change.left, ", ".join(remarks) or "differs", "yellow"))
    rows += [(entry.path, entry.node, "only here", "red") for entry in diff.only_left]
    rows += [(entry.path, entry.node, "only in the other", "green") for entry in diff.only_right]
    for path, node, *words in rows:
        tensor: Any = node if isinstance(node, (TensorEntry, Composite)) else Plain(node)
        yield Line(base + path, tensor, id(node.storage) if isinstance(node, TensorEntry) else None, None, *words)


def line_of(branch: Branch) -> Any:
    """The tensor or value that a branch is; None for one with several."""
    return branch.part.rows[branch.leaf] if branch.leaf is not None and not branch.members else None


def facts_of(branch: Branch) -> tuple[str, str, str]:
    """What a branch is, its size, and its colour."""
    if line := line_of(branch):
        is_plain, is_tied = isinstance(line.tensor, Plain), branch.leaf in branch.part.tied
        what = value_text(line.tensor.value, 40) if is_plain else tensor_text(line.tensor)
        return line.change or what, "" if is_plain else "tied" if is_tied else size(branch.size), line.colour
    tensors = sum(not isinstance(branch.part.rows[row].tensor, Plain) for _, row, _ in branch.items) * branch.times
    what = counted(tensors, "tensor") if tensors else counted(len(branch.items) * branch.times, "entry", "entries")
    return what, size(branch.size) if tensors else "", ""


def about(branch: Branch, width: int, limit: int) -> Iterator[str | tuple[str, ...]]:
    """The facts, statistics and values of a branch, which are read here.  limit: bytes that statistics may read."""
    line, tied = line_of(branch), branch.part.tied
    yield (bold(branch.address or WHOLE),)
    if line is None:
        yield ", ".join(filter(None, facts_of(branch)))
        return
    yield (Marked(line.change, line.colour),) if line.change else ""
    value = line.tensor.value if isinstance(line.tensor, Plain) else line.tensor
    entry = array_entry(value) or value
    is_tensor = isinstance(entry, (TensorEntry, Composite))
    yield f"{tensor_text(entry)}, {size(entry.nbytes)}" if is_tensor else value_text(value, 100_000)
    yield f"strides {list(entry.stride)}" if isinstance(entry, TensorEntry) and not entry.is_contiguous else ""
    first = tied.get(branch.leaf or 0, branch.leaf or 0)
    names = [branch.part.rows[row].address for row in (first, *tied) if tied.get(row, row) == first]
    yield (dim("tied: "), ", ".join(names[:20])) if len(names) > 1 else ""
    if not isinstance(entry, TensorEntry) or not entry.numel or entry.dtype.numpy is None:
        return
    if entry.nbytes > limit:
        yield (dim(f"press s to read all {size(entry.nbytes)}: statistics and a histogram"),)
    else:
        statistics, picture, _ = values_of(entry, 0, 1 << 14)
        numbers = [(name, getattr(statistics, name)) for name in STATISTICS[1:]]
        yield "  ".join(f"{name} {number(value)}" for name, value in numbers if value or name in STATISTICS[1:6])
        if statistics.min != statistics.max:
            yield from ((Marked(row, "$primary"),) for row in bars(picture.counts, 4, 2))
            yield (dim(f"{number(statistics.min)} … {number(statistics.max)}"),)
    is_cut = entry.numel > FEW
    yield from array_text(corners(entry, check=False) if is_cut else to_numpy(entry), width, is_cut).split("\n")


def browser(opened: Opened) -> Any:
    """The program that browses a checkpoint, not running yet."""
    from textual.app import App, ComposeResult
    from textual.binding import Binding
    from textual.containers import VerticalScroll
    from textual.content import Content
    from textual.widgets import Footer, Input, Static, Tree

    class Names(Tree[Any]):
        """The tree; each line has a name at the left, the kind and size at the right."""

        BINDINGS: ClassVar[list[Any]] = [("right", "select_cursor", ""), ("left", "cursor_parent", "")]

        def get_label_width(self, node: Any) -> int:
            return 1  # a line is as wide as the screen, whatever its name

        def render_label(self, node: Any, base_style: Any, style: Any) -> Any:
            label, ancestor = super().render_label(node, base_style, style), node
            room = self.scrollable_content_region.width
            if node.data is None:
                return label
            while ancestor := ancestor.parent:
                room -= self.guide_depth
            what, total, colour = facts_of(node.data)
            name = printable(node.data.label or "''")
            limit = max(room - min(label.cell_len + columns(name), 16) - 12, 1)
            what = "  " + (what if len(what) <= limit else f"{what[: limit - 1]}…")
            width = max(room - len(what) - 10, 8)
            label.append(cut(name, max(width - label.cell_len, 4)), style=style)  # siblings differ at their ends
            label.truncate(width, overflow="ellipsis", pad=True)
            return label.append(what, style=colour or "dim").append(f"{total:>10}", style="dim")

        def fill(self, node: Any) -> None:
            """Adds a line's children, unless it has them; of very many siblings only the first."""
            children = () if node.children else node.data.below
            for child in children[:SIBLINGS]:
                node.add("", child, allow_expand=line_of(child) is None)
            if children[SIBLINGS:]:
                node.add_leaf(f"… {len(children) - SIBLINGS:,} more (/ filters)")

        def unfold_what_fits(self) -> None:
            """Unfolds, level by level, as much as fits, and the first line whatever is in it."""
            room, queue = self.size.height - 1, [self.root]
            while queue:
                node = queue.pop(0)
                self.fill(node)
                if node is self.root or len(node.children) < room:
                    room -= len(node.children)
                    node.expand()
                    queue += [child for child in node.children if child.allow_expand]

        def on_tree_node_expanded(self, event: Any) -> None:
            self.fill(event.node)

    class Browser(App[None]):
        TITLE, ENABLE_COMMAND_PALETTE = "ckptool", False
        CSS: ClassVar[str] = """
        Names { height: 1fr; background: $background; scrollbar-gutter: stable; }
        #about { height: 11; max-height: 50%; border-top: solid $primary; padding: 0 1; }
        Input { display: none; dock: bottom; }
        .-wide { layout: horizontal; } .-wide Names { width: 1fr; }
        .-wide #about { width: 56; height: 1fr; max-height: 100%; border-top: none; border-left: solid $primary; }
        """
        BINDINGS: ClassVar[list[Any]] = [
            Binding("slash", "ask('filter')", "Filter", key_display="/"),
            ("d", "ask('other')", "Differences"),
            ("s", "statistics", "Statistics"),
            ("y", "copy", "Copy address"),
            ("q", "quit", "Quit"),
            ("escape", "leave", ""),
            Binding("ctrl+c", "interrupt", show=False, priority=True),
        ]
        pattern = verdict = purpose = ""

        def __init__(self) -> None:
            super().__init__()
            self.contents = with_statistics(listing(opened.checkpoint, opened.at or ""), {}, opened.path)
            self.lines, self.sources = [*lines_of(self.contents)], [opened.checkpoint.source]
            self.differing, self.copied = list[Line](), list[str]()
            self.worker = ThreadPoolExecutor(1)  # reads one thing after the other, while keys are answered
            self.here: Any = None
            self.overview = [*lines(self.contents.told(depth=0))]

        def compose(self) -> ComposeResult:
            self.names, self.field, self.text = Names(""), Input(), Static("", markup=False)
            self.names.guide_depth = 3
            yield self.names
            with VerticalScroll(id="about"):
                yield self.text
            yield self.field
            yield Footer()

        def on_mount(self) -> None:
            ends = {signal.SIGINT, *ENDS}
            for end in ends:
                asyncio.get_running_loop().add_signal_handler(end, self.exit, None, 128 + end)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
            self.call_after_refresh(self.show)

        def on_resize(self, event: Any) -> None:
            self.screen.set_class(event.size.width >= 110, "-wide")

        def on_unmount(self) -> None:
            self.worker.shutdown(wait=False, cancel_futures=True)

        def show(self) -> None:
            """Rebuilds the tree: of all lines, or of those that differ, as far as they match the pattern."""
            lines, words = self.differing if self.verdict else self.lines, self.pattern
            if words:
                is_whole = words.startswith("re:") or not {*"*?["}.isdisjoint(words)
                try:
                    chosen = selected((line.address for line in lines), [words if is_whole else f"*{words}*"])
                except (NoMatch, UsageError):
                    chosen = set()
                lines = [line for line in lines if line.address in chosen]
            facts = [os.path.basename(self.contents.file) or "in memory", self.verdict, f"/{words}" if words else ""]
            part, places = summary_of(StateDict((), None, PLAIN, ""), lines), [line.address for line in lines]
            items = [(name.replace("/", ".").split(".", DEEPEST), row, name) for row, name in enumerate(places)]
            self.names.reset("", Branch(part, items, 0, ", ".join(filter(None, facts)), 1, part.bytes))
            self.names.unfold_what_fits()
            self.look(self.names.root.data)

        def on_tree_node_highlighted(self, event: Any) -> None:
            self.look(event.node.data)

        def look(self, data: Any) -> None:
            self.here = data
            if not isinstance(data, Branch) or not data.depth:
                self.tell(self.overview)
            else:
                self.action_statistics(AT_ONCE[is_url(opened.path)])

        def action_statistics(self, limit: int = sys.maxsize) -> None:
            """Shows the facts about a line as soon as they are read, if the cursor is still there."""
            branch, width = self.here, max(self.text.size.width, 20)

            def read() -> None:
                if branch is self.here:
                    with unchanged(*self.sources):
                        texts = list(about(branch, width, limit))
                    self.call_from_thread(lambda: self.tell(texts) if branch is self.here else None)

            if isinstance(branch, Branch) and branch.depth:
                self.worker.submit(self.work, read)

        def work(self, function: Callable[[], None]) -> None:
            try:
                function()
            except Exception as error:  # noqa: BLE001 (whatever it is, it is shown)
                message = error_text(error) if isinstance(error, CkptoolError) else repr(error)
                self.call_from_thread(self.tell, message.split("\n"))

        def tell(self, lines: Any) -> None:
            parts = [(line,) if isinstance(line, str) else line for line in lines if line]
            shown = [[(str(escaped(piece)), getattr(piece, "mark", "")) for piece in part] for part in parts]
            self.text.update(Content("\n").join(Content.assemble(*line) for line in shown))

        def action_ask(self, what: str) -> None:
            self.purpose, self.field.display = what, True
            self.field.placeholder = "part of a name, or a pattern" if what == "filter" else "file to compare with"
            self.field.value = self.pattern if what == "filter" else ""
            self.field.focus()

        def on_input_changed(self, event: Any) -> None:
            if self.purpose == "filter" and event.value != self.pattern:
                self.pattern = event.value
                self.set_timer(PAUSE, lambda: self.show() if self.pattern == event.value else None)

        def on_input_submitted(self, event: Any) -> None:
            self.field.display = False
            self.names.focus()
            if self.purpose == "other" and event.value:
                self.tell([f"comparing with {event.value} …"])
                self.worker.submit(self.work, lambda: self.compare(os.path.expanduser(event.value)))

        def compare(self, other: str) -> None:
            diff, parts = diff_of_parts(opened.taken, other)
            self.sources += [part.source for part in parts]
            self.differing, name = [*lines_of_diff(diff, parts[0].base)], os.path.basename(other)
            self.verdict = f"the same as {name}" if diff.same else f"what differs in {name}"
            self.call_from_thread(self.show)

        def action_leave(self) -> None:
            if not self.field.display and (self.pattern or self.verdict):
                self.pattern = self.verdict = ""
                self.show()
            self.field.display = False
            self.names.focus()

        def action_copy(self) -> None:
            address = self.here.address if isinstance(self.here, Branch) else ""
            is_pattern = address.endswith("*") and line_of(self.here) is None
            self.copied.append(quoted(address if is_pattern else "#".join(filter(None, (opened.path, address)))))
            self.copy_to_clipboard(self.copied[-1])
            self.notify(self.copied[-1], title="copied", markup=False)

        def action_interrupt(self) -> None:
            self.exit(return_code=130)

    return Browser()
