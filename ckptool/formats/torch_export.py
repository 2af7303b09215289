"""`torch-export`: what `torch.export.save` writes (`.pt2`), a zip of graphs as JSON, and of tensors that tables name.

Source: torch/export/pt2_archive/_package.py, torch/_export/serde/schema.py and serialize.py, torch 2.8 to 2.13; before
that the tensors were files of `torch.save`. The tree is what `torch.export.load(...)` has as `state_dict` and as
`constants`, detached, of each model under its name where there are several. A graph is never run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from ckptool.checkpoint import Checkpoint, Note, Storage, TensorEntry
from ckptool.checkpoint.blocks import blocks
from ckptool.checkpoint.dtypes import BY_TORCH
from ckptool.checkpoint.nodes import Global, Object, OrderedDict, fields, items
from ckptool.checkpoint.tree import detached
from ckptool.commands import command
from ckptool.errors import Ambiguous, Corrupt, Unsupported, counted
from ckptool.formats import torch_zip
from ckptool.formats.strict_json import members
from ckptool.formats.zip.directory import Archive, Record
from ckptool.pickles.calls import PROGRAM
from ckptool.pickles.torch_objects import check_view

NAME = "torch-export"
MAX_TABLE, MAX_GRAPH = 1 << 25, 1 << 26  # bytes; graphs of any size are judged
_DTYPES = "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16"
_NEWER = "uint16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu uint32 uint64"
_BY_NUMBER = dict(enumerate(_DTYPES.split(), 1)) | dict(enumerate(_NEWER.split(), 28))  # schema.ScalarType
_STRIDED = 7  # schema.Layout
# What loading looks up and evaluates in a graph; JSON that spells ASCII letters as numbers may hide it.
_EVALUATED = re.compile(rb'"(target|expr_str)"(?:\s{0,9}:\s{0,9}(?:"((?:[^"\\]|\\.){0,4000})"|null))?|\\u00[2-7]')
_LONGEST = 1 << 13  # bytes of such a match
_OF_BITS = r"__i?(?:and|or|xor|[lr]shift)__"  # `torch.ops.aten.__and__.Tensor`; nothing of Python's
_OPERATOR = re.compile(rf"torch\.ops(\.({_OF_BITS}|(?!__)\w+)){{2,}}|(_operator|math)\.(?!__)\w+|torch\._?sym_\w+|\w*")
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.keyword, ast.Name, ast.Constant)
_SIGNS = (ast.operator, ast.unaryop, ast.cmpop, ast.expr_context)
_FUNCTION = re.compile("[A-Z][A-Za-z]*|floor|ceiling|sqrt")  # sympy's and torch's classes; none of Python's functions


def read(archive: Archive) -> Checkpoint:
    """The tensors of exported programs, which `torch_zip` opened. Reads tables and graphs, no tensor data.

    Raises `Ambiguous` for an archive that is a plain checkpoint as well, `Corrupt` and `BadTensor` for a table that
    does not fit the records, `Unsupported` for compiled programs and what torch does not write on usual machines.
    """
    program = _Program(archive)
    tree = {model: program.parts(model) for model in program.graphs}
    if not tree:
        what = f"{archive.source} is a program of torch.export that was compiled (AOTInductor)"
        raise Unsupported(what, "Its weights are in, or beside, machine code that only torch can load.")
    what = f"holds a program as well ({counted(len(tree), 'graph')}), which is never run; to see it: {PROGRAM}"
    note = Note(NAME, what, command("show", f"{archive.source.file.path}#{PROGRAM}"))
    values, discarded = tree if len(tree) > 1 else next(iter(tree.values())), (*program.discarded, *program.runs())
    notes, beside = (*archive.notes, *program.notes, note), {PROGRAM: program.texts}
    return Checkpoint(values, NAME, {}, archive.source.file, None, notes, discarded, extras=beside)


class _Program:
    """The records of an archive by their names in its folder; those of the graphs by their models' names.

    discarded: what loading makes beside the tensors.
    """

    def __init__(self, archive: Archive) -> None:
        self.source, self.notes, self.discarded = archive.source, list[Note](), list[Any]()
        formats = [name for name in archive.records if re.fullmatch("[^/]+/archive_format", name)]
        folder = formats[0].removesuffix("archive_format") if formats else ""
        for name in archive.records:
            if not name.startswith(folder) or name.endswith("/data.pkl"):
                raise Ambiguous(f"{self.source} is a program of torch.export with a record of something else: {name}")
        self.records = {name.removeprefix(folder): record for name, record in archive.records.items()}
        archive.confirm()
        for record in self.records.values():
            if record.method:
                raise Unsupported(f"{self.source}: its {record} is compressed", "torch.export compresses none.")
        for name, content in {"archive_format": b"pt2", "byteorder": b"little"}.items() if folder else ():
            if (actual := self.record(name).contents(64)) != content:
                raise Unsupported(f"{self.source}: its {name} is {actual[:20]!r}", f"Only {content.decode()} is read.")
        graph = re.compile(r"models/(?P<model>.+)\.json" if folder else r"serialized_exported_progra(?P<model>m)\.json")
        matches = [(graph.fullmatch(name), record) for name, record in self.records.items()]
        self.graphs = {match["model"]: record for match, record in matches if match}

    def record(self, name: str) -> Record:
        if (record := self.records.get(name)) is None:
            raise Corrupt(f"{self.source} has no record {name[:200]}", "A table in it names one.")
        return record

    def parts(self, model: str) -> dict[str, Any]:
        """The state dict and the constants of a model: from files of `torch.save`, or as tables name them."""
        parts: dict[str, Any] = {}
        for part, kind in ("state_dict", "weights"), ("constants", "constants"):
            saved = [name for name in (f"data/{kind}/{model}.pt", f"serialized_{part}.pt") if name in self.records]
            table = self.saved(saved[0]) if saved else self.listed(f"data/{kind}/", f"{model}_{kind}_config.json")
            parts[part] = OrderedDict((name, detached(value) or value) for name, value in fields(table).items())
        for name in f"data/sample_inputs/{model}.pt", "serialized_example_inputs.pt":
            if name in self.records and self.records[name].size:
                self.discarded.append(self.saved(name))
        return parts

    def saved(self, name: str) -> Any:
        """What is in a record that `torch.save` wrote."""
        record, source = self.record(name), self.source
        record.confirm()
        checkpoint = torch_zip.read(source.file.part(source.start + record.data_at, record.stored))
        self.discarded += checkpoint.discarded
        self.notes += [Note(note.code, f"{name}: {note.message}") for note in checkpoint.notes]
        return checkpoint.tree

    def listed(self, folder: str, table: str) -> dict[str, Any]:
        """The tensors that a table names, those of one record on one storage; what is no tensor goes to `discarded`."""
        raw, what = self.record(folder + table).contents(MAX_TABLE), f"{self.source}: {table}"
        if (config := re.fullmatch(rb'\s*\{\s*"config"\s*:\s*(\{.*\})\s*\}\s*', raw, re.DOTALL)) is None:
            raise Corrupt(f"{what} is no table of tensors")
        values, storages = dict[str, Any](), dict[str, Storage]()
        for name, payload in members(config[1], what, "", lambda _: False):
            if name in values:
                raise Ambiguous(f"{what} names {name} twice")
            match payload:
                case {"use_pickle": False, "path_name": str(path), "tensor_meta": {"device": dict(device), **meta}}:
                    record, place = self.record(folder + path), [device.get("type"), device.get("index")]
                    location = ":".join(str(part) for part in place if part is not None)
                    storage = storages.setdefault(path, Storage(record.data, location, record.sum))
                    values[name] = _tensor(name, storage, meta)
                case {"use_pickle": True, "path_name": str(path), "tensor_meta": dict()}:
                    values[name] = self.saved(folder + path)
                case {"use_pickle": True, "path_name": str(path)}:
                    self.discarded.append(Object(Global("torch.export", path), (name,)))
                case _:
                    raise Corrupt(f"{what}: its {name[:200]} is no tensor")
        return values

    def texts(self) -> dict[str, str]:
        """The graphs as they are written, by model."""
        return {model: record.contents(MAX_GRAPH).decode("utf-8", "replace") for model, record in self.graphs.items()}

    def runs(self) -> Iterator[Any]:
        """What loading would run: compiled code, and in graphs whatever is neither an operator nor plain arithmetic.

        torch looks up each `target` by its attributes, and has sympy evaluate each `expr_str`.
        """
        for name in self.records:
            if name.startswith("data/aotinductor/") and not name.endswith((".json", ".txt")):
                yield Object(Global("torch.export", name), (name,))
        for record in self.graphs.values():
            text, at = b"", 0
            for block in blocks(record.data):
                text, at = text[-_LONGEST:] + bytes(block), at + len(block)
                for match in _EVALUATED.finditer(text):
                    if match.start() >= len(text) - _LONGEST and at < record.size:
                        break  # the next block has all of it
                    kind, value = match.groups()
                    name = value.decode("utf-8", "replace") if value is not None else "escaped or long text"
                    fits = _OPERATOR.fullmatch(name) if kind == b"target" else _is_arithmetic(name)
                    if not (fits if value is not None else match[0].endswith(b"null")):
                        yield Object(Global("torch.export", name[:80]), (str(record),))


def _tensor(name: str, storage: Storage, meta: dict[Any, Any]) -> TensorEntry:
    dtype = BY_TORCH.get(_BY_NUMBER.get(meta["dtype"], "")) if type(meta.get("dtype")) is int else None
    if dtype is None or meta.get("layout") != _STRIDED:
        what = f"{name} has the element type {meta.get('dtype')} and the layout {meta.get('layout')} of torch.export"
        raise Unsupported(what, "Only strided tensors of known types are read.")
    sizes, strides = (meta.get(key) for key in ("sizes", "strides"))
    shape, stride = (tuple[Any, ...](fields(n).get("as_int") for n in items(numbers)) for numbers in (sizes, strides))
    if not storage.nbytes and 0 not in shape:
        raise Unsupported(f"{name} has no values", "The program was exported from a model without them.")
    offset: Any = fields(meta.get("storage_offset")).get("as_int")
    check_view(storage.nbytes, dtype, shape, stride, offset)
    return TensorEntry(storage, dtype, shape, stride, offset)


def _is_arithmetic(text: str) -> bool:
    """True for an expression of numbers, names, signs and classes of sympy alone, as its `srepr` writes it."""
    try:
        nodes = [*ast.walk(ast.parse(text.strip(), mode="eval"))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return (
        all(isinstance(node, _ARITHMETIC + _SIGNS) for node in nodes)
        and all(isinstance(call, ast.Name) and _FUNCTION.fullmatch(call.id) for call in calls)
        and all(re.fullmatch(r"[\w.-]+", str(node.value)) for node in nodes if isinstance(node, ast.Constant))
    )
