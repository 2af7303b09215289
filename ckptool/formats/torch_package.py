"""`torch-package`: what `torch.package.PackageExporter` writes, a zip of pickles, their storages, and source code.

Source: torch/package/package_exporter.py and package_importer.py, torch/jit/_script.py, torch 1.9 to 2.13. The tree has
each pickle under its name, and in it a TorchScript module as `torchscript` has it. No code is run or imported here;
`torch.package` does both when it loads a pickle.
"""

from __future__ import annotations

import re
from typing import Any

from ckptool.checkpoint import Checkpoint, Note
from ckptool.checkpoint.nodes import Global, Object
from ckptool.commands import command
from ckptool.errors import Ambiguous, Corrupt, Unsupported, counted
from ckptool.formats.archives import in_folders
from ckptool.formats.torch_zip import RecordStorages, decoded_record, inflated_limit
from ckptool.formats.torchscript import SCRIPT_BUILDERS, Program, is_script, module_tree
from ckptool.formats.zip.directory import Archive
from ckptool.pickles.calls import PROGRAM

NAME = "torch-package"
MARK = ".data/extern_modules"
_UNPACK = Global("torch.jit._script", "unpackage_script_module")  # which takes the place of a TorchScript module


def read(archive: Archive) -> Checkpoint:
    """What is in the pickles of a package, which `torch_zip` opened. Reads the pickles, no tensor data.

    Raises `Ambiguous` for records outside of its folder, `Unsupported` for a package without pickles, `Corrupt` for
    modules that are not there, and what `decode` raises.
    """
    source, records = archive.source, archive.records
    folder = next(name for name in records if name.endswith(f"/{MARK}")).removesuffix(MARK)
    if odd := [name for name in records if not name.startswith(folder) or name == f"{folder}data.pkl"]:
        raise Ambiguous(f"{source} is a package of torch.package with a record of something else: {odd[0]}")
    archive.confirm()
    scripts = f"{folder}{MARK.partition('/')[0]}/ts_code/"
    program: Program | None = None
    modules = dict[str, Any]()
    discarded = list[Any]()

    def persistent(pid: Any) -> Any:
        match pid:
            case ("reduce_package", *_, Global() as function, (str(number),)) if function == _UNPACK:
                if number not in modules:
                    modules[number] = module(number)
                return modules[number]
            case ("reduce_package", *_, function, arguments):
                return Object(function, arguments)
        return storage(pid)

    def storage(pid: Any) -> Any:
        match pid:
            case ("storage", kind, str() | int() as key, *rest):  # of a module of TorchScript it has the suffix already
                pid = ("storage", kind, f"{str(key).removesuffix('.storage')}.storage", *rest)
        return storages.load(pid)

    def module(number: str) -> dict[str, Any]:
        nonlocal program
        program = program or Program(archive, scripts, storages.big_endian)
        pickles = [records.get(f"{scripts}{number}/{name}.pkl") for name in ("data", "constants")]
        top, constants = (decoded_record(record, storage, SCRIPT_BUILDERS) if record else None for record in pickles)
        if top is None or constants is None or not is_script(top.root):
            raise Corrupt(f"{source} has no TorchScript module {number[:40]}", "A pickle in it names one.")
        discarded.extend((*top.discarded, constants.root, *constants.discarded, *program.runs()))
        return module_tree(top.root, program.classes())

    order = records.get(f"{folder}byteorder")
    storages = RecordStorages(archive, f"{folder}.data/", order is not None and order.contents(64) == b"big")
    tree, notes = dict[str, Any](), [*archive.notes]
    for name, record in records.items():
        inner = name.removeprefix(folder)
        if inner.startswith(".data/") or not record.size:
            continue
        if re.match(rb"\x80[\2-\5]", record.data.read(0, 2)) and record.data.read(record.size - 1, 1) == b".":
            decoded = decoded_record(record, persistent)
            tree[inner] = decoded.root
            discarded += decoded.discarded
            notes += decoded.notes
    if not tree:
        raise Unsupported(f"{source} is a package of torch.package without a pickle", "It holds source code alone.")
    code = [name.removeprefix(folder) for name in records if name.endswith(".py") and not name.startswith(scripts)]
    runs = [Object(Global("torch.package", name), (name,)) for name in code]
    words = f"holds {counted(len(code), 'file')} of source code as well, which torch.package runs; to see it: {PROGRAM}"
    notes.append(Note(NAME, words, command("show", f"{source.file.path}#{PROGRAM}")))

    def texts() -> dict[str, Any]:
        contents = ((name, records[folder + name].contents(inflated_limit(1))) for name in code)
        return in_folders({name: content.decode("utf-8", "replace") for name, content in contents})

    discarded = [name for name in discarded if name != _UNPACK]
    return Checkpoint(tree, NAME, {}, source.file, None, tuple(notes), (*discarded, *runs), extras={PROGRAM: texts})
