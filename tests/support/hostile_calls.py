"""Pickles that would call something: a marker that leaves a trace."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.decoys import CALL, MARKER
from tests.support.hostile_inputs import HOOKS, name, pickle_zip, program, state_pickle, storage, tensor, text


def pops(value: bytes) -> bytes:
    """A dictionary with one entry; before it, a value that is made and thrown away."""
    return program(value + b"0}" + text("w") + tensor((4,), (1,)) + b"s")


CALLS: dict[str, bytes] = {
    "53-global": state_pickle({"x": CALL}),
    "53-stack-global": program(b"\x8c\x0eckptool_marker\x8c\x03run\x93" + text("trace") + b"\x85R", 4),
    "53-inst": program(b"(" + text("trace") + b"ickptool_marker\nrun\n"),
    "53-obj": program(b"(" + MARKER + text("trace") + b"o"),
    "53-build": program(MARKER + b")R}" + text("a") + b"K\x01sb"),
    "53-nested-in-a-tensor-key": program(b"}" + CALL + tensor((4,), (1,)) + b"s"),
    "53-as-the-function-of-a-call": program(CALL + b")R"),
    "53-in-metadata": program(HOOKS + b"}" + text("_metadata") + CALL + b"sb"),
    "53-in-a-set": program(b"\x8f(" + CALL + b"\x90", 4),
    "53-as-an-argument": program(name("collections", "deque") + b"]" + CALL + b"a\x85R"),
    "54-dotted": state_pickle({"x": program(b"\x8c\x0eckptool_marker\x8c\x0crun.__call__\x93)R", 4)[2:-1]}),
    "54-dotted-torch": state_pickle({"x": name("torch", "_utils.os.system") + text("trace") + b"\x85R"}),
    "54-dotted-known": state_pickle({"x": name("collections", "OrderedDict.fromkeys") + b"]\x85R"}),
    "58-hooks": state_pickle({"x": name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage()
        + b"K\x00K\x04\x85K\x01\x85\x89}K\x01"
                       + MARKER + b"stR"}),
    "58-hooks-called": state_pickle({"x": name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage()
        + b"K\x00K\x04\x85K\x01\x85\x89"
                              + CALL + b"tR"}),
    "59-from-type": state_pickle({"x": name("torch._tensor", "_rebuild_from_type_v2") + b"(" + MARKER
        + name("torch", "Tensor")
                           + text("trace") + b"\x85}tR"}),
    "59-from-type-of-a-foreign-class": state_pickle({"x": name("torch._tensor", "_rebuild_from_type_v2") + b"("
                                              + name("torch._utils", "_rebuild_tensor_v2") + MARKER + b"(" + storage()
                                              + b"K\x00K\x04\x85K\x01\x85\x89" + HOOKS + b"t}tR"}),
    "60-pop": pops(CALL),
    "60-pop-mark": program(b"(" + CALL + b"1}" + text("w") + tensor((4,), (1,)) + b"s"),
    "60-memo": pops(CALL + b"q\x07"),
    "60-overwritten-memo": program(CALL + b"q\x000Nq\x000h\x00"),
    "60-swallowed-by-a-known-call": state_pickle({"x": name("collections", "OrderedDict") + b"((" + text("k") + CALL
        + b"lNl\x85R"}),
    "60-swallowed-by-a-set": state_pickle({"x": name("builtins", "frozenset") + b"](" + CALL + b"e\x85R"}),
    "85-codec": state_pickle({"x": name("_codecs", "encode") + text("trace") + text("rot13") + b"\x86R"}),
    "85-codec-computed": state_pickle({"x": name("_codecs", "encode") + text("trace") + CALL + b"\x86R"}),
    "85-decode": state_pickle({"x": name("_codecs", "decode") + b"C\x05trace" + text("unicode_escape") + b"\x86R"}),
    "getattr": state_pickle({"x": name("builtins", "getattr") + MARKER + text("__call__") + b"\x86R"}),
    "eval": state_pickle({"x": name("builtins", "eval") + text("__import__('ckptool_marker').run()") + b"\x85R"}),
    "map": state_pickle({"x": name("builtins", "list") + name("builtins", "map") + MARKER + b"](K\x01e\x86R\x85R"}),
    "apply": state_pickle({"x": name("functools", "partial") + MARKER + b"\x85R"}),
    "load-from-bytes-elsewhere": state_pickle({"x": name("torch.storage", "_load_from_file") + b"C\x05trace\x85R"}),
    "bit-generator": state_pickle({"x": name("numpy.random._pickle", "__generator_ctor") + MARKER + b"\x85R"}),
}  # fmt: skip


# Shown and kept, though they are not calls: nothing happens until somebody makes the class's object.
INERT: dict[str, bytes] = {
    "59-wrapper-of-a-foreign-class": state_pickle(
        {
            "x": name("torch._utils", "_rebuild_wrapper_subclass")
            + b"("
            + MARKER
            + name("torch", "float32")
            + b"K\x04\x85K\x01\x85K\x00"
            + name("torch", "strided")
            + text("cpu")
            + b"\x89tR"
        }
    ),
    "53-newobj": state_pickle({"x": MARKER + text("trace") + b"\x85\x81"}),
    "53-newobj-ex": state_pickle({"x": MARKER + text("trace") + b"\x85}\x92"}),
    "53-name-alone": state_pickle({"x": MARKER}),
    "57-build-of-a-device": state_pickle(
        {"x": name("torch", "device") + text("cpu") + b"\x85R}" + text("__class__") + MARKER + b"sb"}
    ),
    "57-build-of-a-list-subclass": state_pickle({"x": MARKER + b")\x81](K\x01K\x02eb"}),
    "57-slots-state": state_pickle({"x": MARKER + b")\x81N}" + text("__reduce__") + MARKER + b"s\x86b"}),
}


INPUTS: dict[str, bytes | Callable[[], bytes]] = {
    f"row {title}": pickle_zip(pickle) for title, pickle in (CALLS | INERT).items()
}
