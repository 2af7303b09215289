"""Checkpoints behind URLs: what is asked for, how often, and what servers do wrong. The judge is the local file."""

from __future__ import annotations

import gc
import itertools
import os
import re
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save_file

import ckptool
from ckptool.checkpoint import remote
from ckptool.checkpoint.tree import tensors
from ckptool.errors import CkptoolError, FileChanged, FileMissing, FileProblem, NoPermission, UsageError
from fixtures.sparse import make_sparse
from tests.support.cli import Run
from tests.support.elsewhere import FILES, FOLDERS, SHARDS, TENSORS, layered, make_elsewhere, plain
from tests.support.engine_cases import committed_cases
from tests.support.errors import refused
from tests.support.files import contents
from tests.support.looped import looped
from tests.support.range_server import RangeHandler, RangeServer
from tests.support.same import assert_same_objects, assert_same_tree

VERBS = ("inspect {}", "show {}", "doctor {}", "scan {}", "spec {}", "diff {} {}", "warm-start {} --against {}")
# The most requests for a file, and for all of it.
MOST = {"model.pt": 4, "script.pt": 4, "m.safetensors": 3, "hub": 3 + 3 * SHARDS, "dcp": 2, "zero": 10}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_elsewhere(tmp_path_factory.mktemp("elsewhere"))


def ranges(server: RangeServer) -> list[int]:
    found = (re.fullmatch(r"bytes=(\d+)-(\d+)", asked or "") for *_, asked in server.log)
    return [int(each[2]) - int(each[1]) + 1 for each in found if each]


@pytest.mark.parametrize("name", FILES + FOLDERS)
def test_tables_are_read_in_few_requests_and_say_what_the_local_file_says(files: Path, name: str, run: Run) -> None:
    for verb in VERBS:
        with RangeServer(files) as server:
            place = server.url + name + "/" * (files / name).is_dir()
            ran = run(*verb.replace("{}", place).split(), "--json")
        local = run(*verb.replace("{}", str(files / name)).split(), "--json")
        found, expected = plain(ran.out.replace(f'{name}/"', f'{name}"'), server.url), plain(local.out, f"{files}/")
        for each in (found, expected):
            different(each, name)
        assert (ran.code, found) == (local.code, expected), verb
        top = name.partition("/")[0]
        most = MOST.get(top, TENSORS + 4) + verb.startswith("warm-start")  # which looks for a configuration
        assert sum(server.requests.values()) <= most, (verb, server.requests)
        assert all(number <= 3 for file, number in server.requests.items() if top == "hub"), server.requests
        assert max(ranges(server)) <= (128 << 10) + 300 * TENSORS, verb
        if top not in ("hub", "zero"):
            assert sum(server.sent.values()) < 0.6 * (files / name).stat().st_size or top == "dcp", verb


def different(answer: Any, name: str) -> None:
    """Takes out what may differ: where fixed files go, when folders were changed, what of a DCP folder is opened."""
    for each in answer if isinstance(answer, list) else answer.values() if isinstance(answer, dict) else ():
        different(each, name)
    for key in ("fix", "fixes", *(("modified",) if "." not in name else ()), *(("bytes",) if name == "dcp" else ())):
        if isinstance(answer, dict):
            answer.pop(key, None)


FOLDERS_OF_ENGINES = [case for case in committed_cases() if case.name != "stable-baselines3"]  # a folder of archives


@looped("case", FOLDERS_OF_ENGINES, lambda case: case.name)
def test_the_folders_of_engines_have_the_values_that_they_have_here(case: Path) -> None:
    """Also where names share a place in a file, with values of their own."""

    def values(place: str) -> dict[Any, Any]:
        found = tensors(ckptool.open(place).tree)
        return {path: (entry.dtype, entry.shape, entry.row_major().read(0, entry.nbytes)) for path, entry in found}

    with RangeServer(case) as server:
        assert values(f"{server.url}checkpoint/") == values(str(case / "checkpoint"))


def test_what_is_written_into_a_folder_has_the_name_that_it_has_here(files: Path, tmp_path: Path, run: Run) -> None:
    with RangeServer(files) as server:
        for place, out in ((server.url, tmp_path / "far"), (f"{files}/", tmp_path / "near")):
            inputs = [f"{place}{name}{'/' * (files / name).is_dir()}" for name in ("m.safetensors", "hub", "dcp")]
            assert run("convert", *inputs, "--to", "npz", "-d", out).code == 0
    assert contents(tmp_path / "far") == contents(tmp_path / "near")


def test_verify_says_that_the_steps_of_ranks_are_not_compared() -> None:
    (case,) = (case for case in committed_cases() if case.name == "fsdp2-tp-2x2")
    with RangeServer(case) as server:
        (note,) = ckptool.verify(f"{server.url}checkpoint/").notes
    assert note.code == "not-provable" and "no step was read in __0_0.distcp" in note.message


class Timeless(RangeHandler):
    """Says neither when a file was changed nor which it is."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword not in ("Last-Modified", "ETag"):
            super().send_header(keyword, value)


def test_a_folder_with_members_has_the_size_and_time_of_its_weights(run: Run) -> None:
    (case,) = (case for case in committed_cases() if case.name == "accelerate-plain")
    weights = case / "checkpoint" / "model.safetensors"
    for handler in (RangeHandler, Timeless):
        with RangeServer(case, handler=handler) as server:
            (row,) = ckptool.scan(f"{server.url}checkpoint/").files
            assert row.bytes == weights.stat().st_size and row.members
            assert row.modified == (int(weights.stat().st_mtime) if handler is RangeHandler else 0)
            shown = run("scan", f"{server.url}checkpoint/").out
            assert (re.search(r"\d (s|min|h|d)  4 of 4 members", shown) is not None) == (row.modified != 0)


def test_many_tensors_take_no_more_requests(tmp_path: Path) -> None:
    many = {f"block.{number}.some.longer.name.weight": torch.zeros(64) for number in range(18_000)}
    torch.save(many, tmp_path / "many.pt")
    save_file(many, tmp_path / "many.safetensors")
    make_sparse(tmp_path / "100GB.pt", 100 << 30)
    for name, most in (("many.pt", 4), ("many.safetensors", 3), ("100GB.pt", 4)):
        with RangeServer(tmp_path) as server:
            found = ckptool.inspect(server.url + name)
        assert len(found.tensors) in (18_000, 50)
        assert server.requests[name] <= most and max(ranges(server)) <= (128 << 10) + 300 * len(found.tensors), name


def test_a_listing_is_not_needed_for_an_index(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise FileProblem("no listing")

    monkeypatch.setattr(remote, "_listing", refused)
    with RangeServer(files) as server:
        found = ckptool.inspect(f"{server.url}hub/model.safetensors.index.json")
        assert len(found.tensors) == 10 * SHARDS
        with pytest.raises(FileProblem):
            ckptool.inspect(f"{server.url}hub/")


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 MB in 64 tensors."""
    folder = tmp_path_factory.mktemp("large")
    model = layered(64, 500)
    torch.save(model, folder / "model.pt")
    save_file(model, folder / "m.safetensors")
    return folder


@pytest.mark.parametrize("name", ["model.pt", "m.safetensors"])
def test_values_come_once_in_long_ranges_at_once(large: Path, name: str, tmp_path: Path) -> None:
    local, size = ckptool.open(large / name), (large / name).stat().st_size
    works: list[Callable[[str], Any]] = [
        lambda url: ckptool.inspect(url, stats=True),
        lambda url: ckptool.convert(url, tmp_path / "out.pt", overwrite=True),
        lambda url: assert_same_objects(ckptool.load(url, map_location="cpu"), ckptool.load(large / name)),
        lambda url: ckptool.diff(url, large / "m.safetensors").same or pytest.fail("differs"),
        lambda url: ckptool.verify(url).fine or pytest.fail("damaged"),
    ]
    for work in works:
        with RangeServer(large) as server:
            work(server.url + name)
        assert max(ranges(server)) <= remote.PART + remote.END and server.most_at_once <= remote.AT_ONCE
        assert sum(server.sent.values()) < 1.1 * size and server.requests[name] < 60 + size // remote.PART
    ckptool.convert(large / name, tmp_path / "local.pt")
    assert (tmp_path / "out.pt").read_bytes() == (tmp_path / "local.pt").read_bytes()
    with RangeServer(large) as server:
        part = ckptool.open(f"{server.url}{name}#layers.7.0")
        assert (part.tree.numpy() == local["layers.7.0"].numpy()).all()
        assert (part.tree[3:5, ::7] == local["layers.7.0"][3:5, ::7]).all()
        assert sum(server.sent.values()) < 3 << 20
        assert ckptool.load(f"{server.url}{name}#layers.7.1", map_location="cpu").shape == (500,)


def test_other_file_systems_are_read_too(files: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(files), "/there", recursive=True)
    for url in ("memory://there/", f"file://{files}/"):
        for name in ("model.pt", "m.safetensors", "hub", "dcp", "zero"):
            assert_same_tree(ckptool.open(f"{url}{name}").tree, ckptool.open(files / name).tree)
    assert_same_tree(ckptool.open("simplecache::memory://there/model.pt").tree, ckptool.open(files / "model.pt").tree)
    opened = ckptool.open("memory://there/model.pt")["state_dict"]
    time.sleep(0.01)
    memory.pipe("/there/model.pt", (files / "model.pt").read_bytes())
    with pytest.raises(FileChanged):
        opened["layers.3.0"].numpy()


class Own(MemoryFileSystem):
    """Tells of a file what its author thought of."""

    protocol = "own"
    store: ClassVar[dict[str, Any]] = {}
    told: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("own://").strip("/")

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        return {**super().info(path, **more), "created": "long ago", **self.told}


@pytest.mark.parametrize("fact", ["ETag", "mtime", "updated", "size"])
def test_a_change_shows_by_any_fact_that_a_file_system_tells(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("own", Own, clobber=True)
    monkeypatch.setattr(Own, "told", {fact: 1_000})
    fsspec.filesystem("own").pipe("/m.bin", bytes(1_000))
    opened = remote.RemoteObject("own://m.bin")
    opened.check_unchanged()
    Own.told[fact] = 2_000
    with pytest.raises(FileChanged):
        opened.check_unchanged()
    Own.told["size"] = None
    with pytest.raises(UsageError, match="how large it is"):
        ckptool.inspect("own://m.bin")


def test_what_only_ckptool_records_in_a_dcp_folder_is_read_too(tmp_path: Path) -> None:
    tied, model = torch.ones(3), torch.nn.Linear(2, 2)
    state = OrderedDict(a=tied, b=tied, c=torch.nn.Parameter(torch.ones(2)))
    state_of = torch.optim.Adam(model.parameters()).state_dict()
    tree = {"sd": state, "numbers": {1: torch.ones(1)}, "optim": state_of, "none": {}, "odd": torch.Size([2])}
    ckptool.save(tree, tmp_path / "own.dcp")
    fsspec.filesystem("memory").put(str(tmp_path / "own.dcp"), "/own.dcp", recursive=True)
    far, near = ckptool.open("memory://own.dcp"), ckptool.open(tmp_path / "own.dcp")
    assert_same_tree(far.tree, near.tree)
    assert far.notes == near.notes and far["sd"]["a"].view == far["sd"]["b"].view and far["numbers"].keys() == {1}


# What servers do wrong ------------------------------------------------------------------------------------------------

ALWAYS = itertools.repeat
FAULTS: dict[str, tuple[Any, type[CkptoolError] | None, str]] = {
    "busy twice": (["busy", "busy"], None, ""), "cut twice": (["", "cut", "cut"], None, ""),
    "busy": (ALWAYS("busy"), FileProblem, "503 Service Unavailable"), "cut": (ALWAYS("cut"), FileProblem, "cut short"),
    "slow": (ALWAYS("wait"), FileProblem, "imeout"),
    "without ranges": (ALWAYS("ignore"), FileProblem, "does not support range requests"),
    "without ranges later": (["", "ignore"], FileProblem, "does not support range requests"),
    "half": (ALWAYS("half"), FileProblem, "model.pt: the server closed the connection\n"),
    "no HTTP": (ALWAYS("garbage"), FileProblem, "Bad status line|Expected HTTP"),
    "changed": (["", "change"], FileChanged, "changed since"), "denied": (["deny"], NoPermission, "403"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_server_does_wrong_is_said_or_tried_again(
    files: Path, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.pt").write_bytes((files / "model.pt").read_bytes())
    monkeypatch.setattr(remote, "WAIT", 0.01)
    monkeypatch.setattr(remote, "PATIENCE", 0.2)
    faults, kind, text = FAULTS[fault]
    with RangeServer(tmp_path, faults, patience=0.5) as server:
        if kind is None:
            assert len(ckptool.inspect(f"{server.url}model.pt").tensors) == TENSORS
        else:
            with pytest.raises(kind, match=text):
                ckptool.inspect(f"{server.url}model.pt")
        assert server.requests["model.pt"] <= (6 if fault == "half" else 4)  # aiohttp asks again, too


@pytest.mark.parametrize(("after", "waits"), [("1", 1.0), ("0", 0), ("soon", 0), ("-1", 0), ("3600", None)])
def test_a_busy_server_is_asked_again_when_it_says(
    files: Path, after: str, waits: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "WAIT", 0.01)
    later = type("Later", (RangeHandler,), {"more": {"Retry-After": after}})
    with RangeServer(files, ["busy"], handler=later) as server:
        began = time.monotonic()
        if waits is None:
            with pytest.raises(FileProblem, match=r"(?s)503.*a wait of 3,600 s"):
                ckptool.inspect(f"{server.url}model.pt")
            assert server.requests["model.pt"] == 1
        else:
            ckptool.inspect(f"{server.url}model.pt")
            assert time.monotonic() - began >= waits


LIES = {"Content-Range": ("bytes 0-131071/²", "bytes 0-131071/" + "9" * 5_000), "Content-Encoding": ("gzip", "br")}


@pytest.mark.parametrize("header", LIES)
def test_headers_that_make_no_sense_are_refused(files: Path, header: str) -> None:
    for value in LIES[header]:
        liar = type("Liar", (RangeHandler,), {"more": {header: value}})
        with (
            RangeServer(files, handler=liar) as server,
            pytest.raises(FileProblem, match="does not support range requests"),
        ):
            ckptool.inspect(f"{server.url}model.pt")


def test_a_download_that_is_advised_replaces_no_file(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    liar = type("Liar", (RangeHandler,), {"more": {"Content-Encoding": "gzip"}})
    with RangeServer(files, handler=liar) as server, pytest.raises(FileProblem) as caught:
        ckptool.inspect(f"{server.url}model.pt")
    assert f"curl -Lo model.pt.new {server.url}model.pt" in str(caught.value.fix)


def test_a_table_that_is_larger_than_all_that_is_kept(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors", {"long": "x" * (remote.KEPT + remote.END)})
    with RangeServer(tmp_path) as server:
        assert ckptool.load(f"{server.url}m.safetensors")["a"].equal(torch.ones(3))


SERVER = """if True:
    import sys
    from pathlib import Path
    from tests.support.range_server import RangeServer

    with RangeServer(Path(sys.argv[1])) as server:
        print(server.url, flush=True)
        sys.stdin.read()
"""


def test_a_fork_leaves_the_connections_of_its_parent_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it closes itself is taken out of the set of both, and its parent would wait for answers that are there."""
    monkeypatch.setattr(remote, "PATIENCE", 3)
    monkeypatch.setattr(remote, "TRIES", 1)
    (tmp_path / "x").write_bytes(data := os.urandom(8 << 20))
    here, pipe = Path(__file__).parents[2], subprocess.PIPE
    words = [sys.executable, "-c", SERVER, str(tmp_path)]
    server = subprocess.Popen(words, cwd=here, stdout=pipe, stdin=pipe, text=True)
    with server:
        assert server.stdout is not None
        found, buffer = remote.RemoteObject(server.stdout.readline().strip() + "x"), bytearray(1 << 20)
        found.expect([(2 << 20, 3 << 20), (4 << 20, 5 << 20)])
        if (child := os.fork()) == 0:
            for at in (6 << 20, 2 << 20):  # also what is on its way to the parent
                found.read_into(at, memoryview(buffer))
                if buffer != data[at : at + (1 << 20)]:
                    os._exit(1)
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for at in range(0, 8 << 20, 1 << 20):
            found.read_into(at, memoryview(buffer))
            assert buffer == data[at : at + (1 << 20)]
        server.communicate("")


LINKS: dict[str, Callable[[str], str]] = {
    "nginx": quote,
    "Apache": lambda name: escape(quote(name, safe="&;'")),
    "Caddy": lambda name: f"./{quote(name)}",
}


@pytest.mark.parametrize("program", LINKS)
def test_a_listed_file_is_asked_for_under_its_own_name(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.range_server.quote", LINKS[program])
    names = ("a#b.pt", "a?b.pt", "a%b.pt", "a\nb.pt", "a b.pt", "ä.pt", "a&b.pt", "a&amp;b.pt", "it's.pt")
    for value, name in enumerate(names):
        torch.save({f"w{value}": torch.ones(1)}, tmp_path / name)
    with RangeServer(tmp_path) as server:
        found = {each.path for each in ckptool.scan(server.url).files if each.is_good}
        assert {key for url in found for key in ckptool.load(url)} == {f"w{value}" for value in range(len(names))}
        assert {f"{server.url}a b.pt", f"{server.url}ä.pt"} < found


class Page(RangeHandler):
    """Answers every name that ends in a slash with the same page of links."""

    links: ClassVar[tuple[str, ...]] = ()

    def answer(self, name: str, fault: str) -> None:
        if name.endswith("/") or not name:
            page = "".join(f'<a href="{link}">x</a>' for link in self.links).encode()
            return self.send_bytes(200, {"Content-Type": "text/html"}, page)
        return super().answer(name, fault)


def test_what_is_found_in_a_folder_can_be_read_by_its_name(files: Path) -> None:
    """By a worker, too, which has not seen the listing; some servers do not say that a folder wants a slash."""
    with RangeServer(files) as server, ThreadPoolExecutor(2) as pool:
        found = ckptool.scan(server.url)
        assert ckptool.scan(server.url, jobs=pool) == found
        good = {row.path.removeprefix(server.url) for row in found.files if row.is_good}
        assert {*FILES, "hub/", "dcp/", "zero/"} <= good
        assert all(ckptool.inspect(server.url + name).tensors for name in good)


def test_links_that_lead_elsewhere_are_not_followed(files: Path, tmp_path: Path) -> None:
    """Neither to files of this machine nor above the folder, whatever they are quoted as."""
    here = quote(str(files / "model.pt"), safe="")
    links = (here, f"x{here}", here.lower(), "%2e%2e/", "%2E%2E", ".%2e/", "%2e/", "..%2fmodel.pt", "..%5cmodel.pt")
    (tmp_path / "below").mkdir()
    for link in links:
        page = type("Linked", (Page,), {"links": (link,)})
        with RangeServer(tmp_path, handler=page) as server:
            assert not any(each.is_good for each in ckptool.scan(f"{server.url}below/").files), link
            assert all(path.startswith("/below/") for _, path, _ in server.log), server.log


@pytest.mark.parametrize("links", [("x/",), ("a/", "b/", "m.pt"), ("x/", "x/?C=N")])
def test_a_server_with_one_page_for_all_names_is_left(links: tuple[str, ...], tmp_path: Path, run: Run) -> None:
    with RangeServer(tmp_path, handler=type("Same", (Page,), {"links": links})) as server:
        for verb in ("scan", "doctor"):
            ran = run(verb, server.url)
            assert ran.code == 2 and "any name with the same page" in ran.err and len(server.log) < 200, ran


def test_a_store_may_have_names_with_a_hash(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "m.pt")
    fsspec.filesystem("memory").pipe("/hash/a#b.pt", (tmp_path / "m.pt").read_bytes())
    (found,) = ckptool.scan("memory://hash/").files
    assert found.is_good and found.path == "memory://hash/a#b.pt"
    with pytest.raises(UsageError, match="begins an address"):
        ckptool.convert(tmp_path / "m.pt", "memory://hash/c#d.pt")


@pytest.mark.parametrize("url", ["https:///x.pt", "http://[::1/x.pt", "http://127.0.0.1:99999/x.pt"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="cannot use http"):
        ckptool.inspect(url)


def test_what_is_not_there_is_not_found(files: Path) -> None:
    with RangeServer(files) as server:
        for name in ("none.pt", "hub/none.safetensors", "none/"):
            with pytest.raises(FileMissing) as caught:
                ckptool.open(server.url + name)
            assert isinstance(caught.value, FileNotFoundError) and name.strip("/") in str(caught.value)
        with pytest.raises(CkptoolError, match="in place"):
            ckptool.strip_module(f"{server.url}model.pt", in_place=True)


def test_a_file_that_changes_between_opening_and_reading(files: Path, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes((files / "model.pt").read_bytes())
    with RangeServer(tmp_path) as server:
        opened = ckptool.open(f"{server.url}model.pt")["state_dict"]
        torch.save(layered(), tmp_path / "model.pt")
        refused(FileChanged, tmp_path, lambda: opened["layers.6.0"].numpy())
        assert "layers.6.0" in ckptool.open(f"{server.url}model.pt").tree  # opened anew, it is what it is now
