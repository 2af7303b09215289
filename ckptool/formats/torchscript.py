"""`torchscript`: what `torch.jit.save` writes, a zip of a pickled module, the program that runs it, and the program's
constants.

Source: torch/csrc/jit/serialization (export_module.cpp, import.cpp, import_source.cpp, python_print.cpp), torch 1.4 to
2.13. The tree is what `torch.jit.load(...).state_dict()` gives, and beside it every other attribute by its dotted name;
which attributes are parameters and buffers is read off the headers of the classes in the program's text. The program is
shown as text, never run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint, Note
from ckptool.checkpoint.graph import visit
from ckptool.checkpoint.nodes import Global, Object, OrderedDict
from ckptool.checkpoint.tree import detached, tensors, walk_modules
from ckptool.commands import command
from ckptool.errors import Ambiguous, CkptoolError, Corrupt, LimitExceeded, counted, form
from ckptool.formats.nested_streams import BUILDERS
from ckptool.formats.torch_zip import RecordStorages, decoded_record, inflated_limit, read_pickled, record_notes
from ckptool.formats.zip.directory import Archive, Record
from ckptool.pickles.arguments import CLASSES, PACKED

NAME = "torchscript"


def read(archive: Archive) -> Checkpoint:
    """The tensors and attributes of a TorchScript file, which `torch_zip` opened. Reads the pickle and the program's
    text, no tensor data.

    Raises `Ambiguous` for an archive that is a plain checkpoint as well, and what `decode` raises.
    """
    source = archive.source
    root, small, storages, decoded = read_pickled(archive, SCRIPT_BUILDERS, script=True)
    if not is_script(decoded.root) or root + "constants.pkl" not in archive.records:
        raise Ambiguous(f"{source} is a checkpoint that also has the records of a TorchScript program")
    program = Program(archive, root, storages.big_endian)
    tree = module_tree(decoded.root, program.classes())
    path = source.file.path
    what = f"holds a program as well ({counted(len(program.files), 'file')} of code), which is never run; to see it"
    shown = command("show", f"{path}#code")
    notes = [Note("torchscript", f"{what}: {', '.join(program.beside())}", shown)]
    if not tree["state_dict"]:
        packed = next(tensors(tree["attributes"]), None) is not None
        why = "frozen and mobile models keep their weights as constants of the program"
        why = "tensors are packed in attributes" if packed else why
        shown = command("show", f"{path}#{'attributes' if packed else 'constants'}")
        notes.append(Note("no-state-dict", f"its state dict is empty: {why}", shown))
    # Notes on the archive: that code is deflated is as it should be, and to write the file anew is not offered.
    archive_notes = [*archive.notes, *record_notes(archive, root, storages)]
    notes += [replace(note, fix=()) for note in archive_notes if note.code != "deflated"]
    metadata = {"class": decoded.root.name, **small}
    try:  # which loading unpickles as well
        constants = program.unpickled("constants")
    except CkptoolError:
        constants = Object(Global("constants", "pkl"), ("which cannot be read",))
    discarded = (*decoded.discarded, constants, *program.runs())
    return Checkpoint(tree, NAME, metadata, source.file, None, tuple(notes), discarded, extras=program.beside())


def is_script(node: Any) -> bool:
    if type(node) is not Object or node.how != "new" or type(node.fn) is not Global:
        return False
    return node.fn.module.partition(".")[0] == "__torch__"


# The module ----------------------------------------------------------------------------------------------------------


class _ScriptClass(NamedTuple):
    """The header of a class in the program. buffers: None where torch did not write them yet (before 1.6)."""

    is_module: bool
    parameters: frozenset[str]
    buffers: frozenset[str] | None


_UNKNOWN = _ScriptClass(True, frozenset(), None)
# Compiled when a program is read: every torch zip is asked whether it is one.
_HEADER = r"(?m)^class (\w+)(?:\((\w*)\))?:\n(?:  __parameters__ = \[([^\n]*)\]\n)?(?:  __buffers__ = \[([^\n]*)\]\n)?"
_QUOTED = r'"([^"\n]*)"'


def module_tree(top: Object, classes: dict[Global, _ScriptClass]) -> dict[str, Any]:
    """`state_dict` with the names and the order that torch gives, `attributes` with everything else."""
    owners: dict[int, _ScriptClass] = {}

    def attributes_of(node: Any) -> dict[Any, Any] | None:
        declared = classes.get(node.fn, _UNKNOWN) if is_script(node) else None
        if declared is None or not declared.is_module or type(node.state) is not dict:
            return None  # a module that pickles itself in its own way stays an object, with the tensors in its state
        if not all(type(name) is str for name in node.state):
            raise Corrupt(f"an attribute of {node.name} that has no name", "The file is probably malicious.")
        owners[id(node.state)] = declared
        return node.state

    def below(attributes: dict[Any, Any]) -> dict[Any, Any]:
        return {name: value for name, value in attributes.items() if is_script(value)}

    names: dict[str, Any] = OrderedDict()
    other_attributes: dict[str, Any] = {}
    for prefix, attributes in walk_modules(top, attributes_of, below):
        declared = owners[id(attributes)]
        declared_names = None if declared.buffers is None else declared.buffers | declared.parameters
        held = {name: tensor for name, value in attributes.items() if (tensor := detached(value))}
        state = {name: tensor for name, tensor in held.items() if declared_names is None or name in declared_names}
        for name in sorted(state, key=lambda name: name not in declared.parameters):
            _add(names, prefix + name, state[name])
        for name, value in attributes.items():
            if name not in state and attributes_of(value) is None:
                _add(other_attributes, prefix + name, value)
    if attributes_of(top) is None:
        other_attributes[""] = top
    return {"state_dict": names, "attributes": other_attributes}


def _add(names: dict[str, Any], name: str, value: Any) -> None:
    if name in names:
        raise Corrupt(f"two attributes called {name}", "Module names have no dots; the file is probably malicious.")
    names[name] = value


def _typed(count: int, args: tuple[Any, ...]) -> Any:
    """A list with the type of its elements, or a value with its type (torch/jit/_pickle.py)."""
    fits = len(args) == count and (type(args[0]) is list if count == 1 else type(args[1]) is str)
    return args[0] if fits else NotImplemented


_TYPED = {"build_intlist": 1, "build_doublelist": 1, "build_boollist": 1, "build_tensorlist": 1, "restore_type_tag": 2}
SCRIPT_BUILDERS = BUILDERS | {
    Global("torch.jit._pickle", name): partial(_typed, count) for name, count in _TYPED.items()
}


# The program ---------------------------------------------------------------------------------------------------------


class Program:
    """The code of an archive and the rest beside its module: constants, a traced module's inputs, mobile bytecode."""

    def __init__(self, archive: Archive, root: str, big_endian: bool) -> None:
        self.archive, self.root, self.big_endian = archive, root, big_endian
        self.files: dict[str, Record] = {}
        self.extra: dict[str, Record] = {}
        self.pickles: dict[str, Record] = {}
        for name, record in archive.records.items():
            inner = name.removeprefix(root)
            lowered = inner.lower()  # torch finds records without regard to case
            if lowered.startswith("code/") and lowered.endswith(".py"):
                self.files[inner[len("code/") :]] = record
            elif lowered.startswith("extra/"):
                self.extra[inner[len("extra/") :]] = record
            elif lowered.endswith(".pkl") and "/" not in lowered and lowered != "data.pkl":
                self.pickles[lowered.removesuffix(".pkl")] = record
        size, stored = (sum(getattr(record, name) for record in self.files.values()) for name in ("size", "stored"))
        if size > inflated_limit(stored):
            files = f"{counted(len(self.files), 'file')} of code {form(len(self.files), 'is', 'are')}"
            raise LimitExceeded(f"{archive.source}: its {files} {size:,} bytes when unpacked")

    def beside(self) -> dict[str, Callable[[], Any]]:
        """The program and its constants, to be shown, by name."""
        extras: dict[str, Callable[[], Any]] = {"code": self.code}
        if self.extra:
            extras["extra"] = lambda: self.texts(self.extra)
        return extras | {name: partial(self.unpickled, name) for name in self.pickles}

    def code(self) -> dict[str, Any]:
        """The program's text, as its files lie in folders."""
        from ckptool.formats.archives import in_folders  # which few who open a program ask for

        return in_folders(self.texts(self.files), f"{self.archive.source}: ")

    def texts(self, records: dict[str, Record]) -> dict[str, str]:
        """The contents of records, as text."""
        return {
            name: record.contents(inflated_limit(record.stored)).decode("utf-8", "replace")
            for name, record in records.items()
        }

    def unpickled(self, name: str) -> Any:
        """A pickle beside the module; of `constants` the tensors' bytes lie in a folder of that name."""
        folder = f"{self.root}{name}/"
        if not any(record.startswith(folder) for record in self.archive.records):
            folder = f"{self.root}constants/"
        storages = RecordStorages(self.archive, folder, self.big_endian)
        return decoded_record(self.pickles[name], storages.load, SCRIPT_BUILDERS).root

    def runs(self) -> Iterator[Any]:
        """What loading runs: the `__setstate__` of classes, unless it only packs quantized parameters.

        torch calls that of any class whose object stands in a pickle, whatever the state is (import.cpp, obj_loader);
        the loader for phones takes it from the bytecode.
        """
        texts = {name: text for name, text in self.texts(self.files).items() if _SETSTATE in text}
        is_checked = sum(map(len, texts.values())) <= _MOST_TEXT
        names, method = set[str](), f".{_SETSTATE}"
        for name, text in texts.items():
            for class_text in re.split(r"(?m)^class ", text):
                if _SETSTATE in class_text and not (is_checked and _only_packs(f"class {class_text}")):
                    owner = re.split(r"\W", class_text)[0]
                    names.add(f"{name[:-3].replace('/', '.')}.{owner}")
        for node in visit(self.unpickled("bytecode")) if "bytecode" in self.pickles else ():
            if type(node) is tuple:
                names |= {text.removesuffix(method) for text in node if type(text) is str and text.endswith(method)}
        for name in sorted(names):
            yield Object(Global(name, _SETSTATE), (name,))

    def classes(self) -> dict[Global, _ScriptClass]:
        """The classes that the code declares; of each only the header is looked at."""
        classes: dict[Global, _ScriptClass] = {}
        for name, text in self.texts(self.files).items():
            module = name[:-3].replace("/", ".")
            for class_name, base, parameters, buffers in map(re.Match.groups, re.finditer(_HEADER, text)):
                parameter_names = frozenset(re.findall(_QUOTED, parameters or ""))
                buffer_names = None if buffers is None else frozenset(re.findall(_QUOTED, buffers))
                classes[Global(module, class_name)] = _ScriptClass(base == "Module", parameter_names, buffer_names)
        return classes


# What runs when an object is loaded --------------------------------------------------------------------------------

# torch calls the `__setstate__` of any object's class in a pickle of the archive, whatever its state is (import.cpp,
# `obj_loader`). That of torch's quantized layers takes the state apart and packs the weights; in such a class each
# statement is looked at.
_SETSTATE = "__setstate__"
_MOST = 1 << 15  # characters of a class whose program is looked at
_MOST_TEXT = 1 << 19  # of all files with one; quantized models have some hundred thousand
_STATEMENTS = (ast.Assign, ast.Expr, ast.If, ast.Return, ast.Pass, ast.expr_context)
_VALUES = (ast.Attribute, ast.Subscript, ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Call)
_CALLS = re.compile(r"ops\.quantized\.\w+_prepack(_fp16)?|ops\.prim\.RaiseException|torch\.(eq|ne)")
_OWN = "set_weight_bias"  # the one method that torch's layers call there
_TYPES = {"Tuple", "List", "Optional", "Tensor", "NoneType", "None", "int", "bool", "float", "str"}
_TYPES |= {f"{PACKED}.{name}" for name in CLASSES}


def _only_packs(text: str) -> bool:
    """True for a class whose `__setstate__`, and the method that torch's layers call in it, do nothing but that."""
    if len(text) > _MOST or any(mark in text for mark in ("#", "\t", "\\\n", "\r", "\f")):
        return False  # which torch's parser may see otherwise, and its printer does not write
    try:
        first, *functions = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if not isinstance(first, ast.ClassDef) or not all(isinstance(function, ast.FunctionDef) for function in functions):
        return False
    methods = set[str]()
    for member in first.body:
        if isinstance(member, ast.FunctionDef):
            is_called = member.name in (_SETSTATE, _OWN)
            fits = member.name not in methods and (not is_called or _is_harmless(member, member.name == _SETSTATE))
            methods.add(member.name)
        else:
            fits = _is_type(member.annotation) if isinstance(member, ast.AnnAssign) else isinstance(member, ast.Assign)
        if not fits:
            return False
    return _SETSTATE in methods


def _is_type(node: ast.expr | None) -> bool:
    """True for a type of Python's own values, tensors and packed parameters: of no class of the program."""
    return node is not None and set(re.findall(r"[\w.]+", ast.unparse(node))) <= _TYPES


def _is_harmless(method: ast.FunctionDef, calls_own: bool) -> bool:
    first, *rest = method.args.args or [ast.arg("")]
    names = {param.arg for param in rest}
    for node in (child for statement in method.body for child in ast.walk(statement)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if node.keywords or not (_CALLS.fullmatch(name) or (calls_own and name == f"self.{_OWN}")):
                return False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif not isinstance(node, (*_STATEMENTS, *_VALUES)):
            return False
    return (
        first.arg == "self" and names.isdisjoint({"self", "ops", "torch"}) and all(_is_type(a.annotation) for a in rest)
    )
