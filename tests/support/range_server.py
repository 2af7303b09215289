"""A web server on loopback for a folder: ranges, ETags and listings, and what servers do wrong.

with RangeServer(folder, ["busy", "busy"]) as server:
    ckptool.open(server.url + "model.pt")
server.requests["model.pt"], server.sent["model.pt"]
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO
from urllib.parse import quote, unquote, urlsplit

# ignore: the whole file, whatever range was asked for. cut: half of what was promised. change: other bytes from now on,
# of the same length. busy: 503. wait: nothing for `patience` seconds. deny: 403. gone: 404.
# half: a part of a status line. garbage: no HTTP.
FAULTS = ("ignore", "cut", "change", "busy", "wait", "deny", "gone", "half", "garbage")


class RangeServer(ThreadingHTTPServer):
    """Serves `folder` under `url`, which ends in a slash. The n-th request meets the n-th of `faults`, "" being none;
    `itertools.repeat("busy")` is for ever. HEAD and listings are requests too."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, folder: Path, faults: Iterable[str] = (), patience: float = 60, handler: type[RangeHandler] | None = None
    ) -> None:
        super().__init__(("127.0.0.1", 0), handler or RangeHandler)
        self.folder, self.patience, self.closing = folder, patience, threading.Event()
        self.faults: Iterator[str] = iter(faults)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.requests, self.sent, self.at_once, self.most_at_once = Counter[str](), Counter[str](), 0, 0
        self.log: list[tuple[str, str, str | None]] = []  # method, path with its query, range
        self.lock = threading.Lock()

    def __enter__(self) -> RangeServer:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        """A client that went away is no news."""


def change(path: Path) -> None:
    """Another last byte, at another time."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


class RangeHandler(BaseHTTPRequestHandler):
    server: RangeServer
    more: Mapping[str, str] = MappingProxyType({})  # headers of every answer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        server, self.name = self.server, unquote(urlsplit(self.path).path).lstrip("/")
        with server.lock:
            fault = next(server.faults, "")
            server.log.append((self.command, self.path, self.headers["Range"]))
            server.requests[self.name] += 1
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        try:
            self.answer(self.name, fault)
        finally:
            with server.lock:
                server.at_once -= 1

    do_HEAD = do_GET  # noqa: N815

    def answer(self, name: str, fault: str) -> None:
        path = self.server.folder / name
        if fault == "wait":
            self.server.closing.wait(self.server.patience)
        if fault in ("half", "garbage"):
            self.wfile.write(b"HTTP/1.1 206 Part" if fault == "half" else b"garbage\r\n\r\n")
            self.close_connection = True
        elif fault in ("busy", "deny"):
            self.send(503 if fault == "busy" else 403, {})
        elif path.is_dir():
            names = sorted(f"{each.name}/" if each.is_dir() else each.name for each in path.iterdir())
            page = "".join(f'<a href="{quote(each)}">{escape(each)}</a>\n' for each in names).encode()
            self.send_bytes(200, {"Content-Type": "text/html"}, page)
        elif not path.is_file() or fault == "gone":
            self.send(404, {})
        else:
            if fault == "change":
                change(path)
            with path.open("rb") as file:
                self.send_file(file, os.fstat(file.fileno()), fault)

    def send_file(self, file: BinaryIO, status: os.stat_result, fault: str) -> None:
        size, seconds = status.st_size, self.date_time_string(int(status.st_mtime))
        headers = {"ETag": f'"{status.st_mtime_ns:x}-{size:x}"', "Last-Modified": seconds, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers["Range"] or "")
        if asked is None or fault == "ignore":
            return self.send(200, headers, file, 0, size, fault)
        start, stop = max(size - int(asked[2] or 0), 0), size
        if asked[1]:
            start, stop = int(asked[1]), min(int(asked[2] or size) + 1, size)
        if start >= stop:
            return self.send(416, {"Content-Range": f"bytes */{size}"})
        return self.send(
            206, headers | {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}, file, start, stop - start, fault
        )

    def send_bytes(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send(status, headers, BytesIO(body), 0, len(body))

    def send(
        self,
        status: int,
        headers: dict[str, str],
        body: BinaryIO | None = None,
        at: int = 0,
        length: int = 0,
        fault: str = "",
    ) -> None:
        self.send_response(status)
        for key, value in ({"Content-Type": "application/octet-stream"} | headers | self.more).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if fault == "cut":
            length, self.close_connection = length // 2, True
        if self.command != "HEAD" and length and body is not None:
            sent = self.connection.sendfile(body, at, length)
            with self.server.lock:
                self.server.sent[self.name] += sent

    def log_message(self, *_: Any) -> None:
        """Silent: `server.log` has it."""
