"""A hub on loopback, of which `HfFileSystem` finds repositories, lists, reads and commits: `HF_ENDPOINT=server.url`.

`folder/ORGANIZATION/NAME/…` is the branch main of a model. What it answers are the calls that huggingface_hub 2.4 makes
without xet (`HF_HUB_DISABLE_XET=1`): large files go by LFS.
"""

import base64
import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from tests.support.range_server import RangeHandler, RangeServer

REGULAR = 1 << 16  # bytes: what is larger goes by LFS


class HubServer(RangeServer):
    """Its `commits` are lists of the paths that each added; `uploads` is what LFS has, by sha256."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, handler=HubHandler, **options)
        self.commits: list[list[str]] = []
        self.uploads: dict[str, bytes] = {}


class HubHandler(RangeHandler):
    server: HubServer

    def answer(self, name: str, fault: str) -> None:
        self.body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        found = re.match(r"(api/models/)?([^/]+/[^/.]+)(?:\.git)?/?([^/]*)/?([^/]*)/?(.*)", name)
        if fault in ("busy", "deny", "wait") or found is None:
            return super().answer(name, fault)
        api, repository, verb, revision, path = found.groups()
        model = self.server.folder / repository
        if not model.is_dir():
            return self.send(404, {"X-Error-Code": "RepoNotFound"})
        if verb in ("tree", "resolve", "revision", "paths-info") and revision not in ("main", self.revision()):
            return self.send(404, {"X-Error-Code": "RevisionNotFound"})
        if verb == "resolve" and not api:
            self.more = {"X-Repo-Commit": self.revision()}
            return super().answer(f"{repository}/{path}", fault)
        value = self.value(model, repository, verb, path)
        if value is None:
            return self.send(404, {"X-Error-Code": "EntryNotFound"})
        return self.send_bytes(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def value(self, model: Path, repository: str, verb: str, path: str) -> Any:
        """What is answered as JSON; None for nothing."""
        if verb in ("", "revision"):
            return {"id": repository, "sha": self.revision(), "siblings": [], "tags": []}
        if verb == "tree":
            pattern = "**/*" if "recursive=true" in self.path else "*"
            return [described(each, model) for each in sorted((model / path).glob(pattern))] or None
        if verb == "paths-info":
            paths = (model / each for each in parse_qs(self.body.decode()).get("paths", []))
            return [described(each, model) for each in paths if each.exists()]
        if verb == "preupload":
            files = json.loads(self.body)["files"]
            modes = ({"uploadMode": "lfs" if each["size"] > REGULAR else "regular", **each} for each in files)
            return {"files": [{"shouldIgnore": False, **each} for each in modes]}
        if verb == "info":  # /lfs/objects/batch
            upload = {"actions": {"upload": {"href": f"{self.server.url}{repository}/upload"}}}
            return {"transfer": "basic", "objects": [upload | each for each in json.loads(self.body)["objects"]]}
        if verb == "upload":
            self.server.uploads[sha256(self.body).hexdigest()] = self.body
            return {}
        assert verb == "commit", self.path
        self.server.commits.append([])
        for line in map(json.loads, self.body.splitlines()):
            if line["key"] in ("file", "lfsFile"):
                self.add(model, **line["value"])
            elif line["key"] == "deletedFile":
                (model / line["value"]["path"]).unlink()
        url = f"{self.server.url}{repository}/commit/{self.revision()}"
        return {"commitUrl": url, "commitOid": self.revision()}

    def add(self, model: Path, path: str, content: str = "", oid: str = "", **_: Any) -> None:
        (model / path).parent.mkdir(parents=True, exist_ok=True)
        (model / path).write_bytes(self.server.uploads[oid] if oid else base64.b64decode(content))
        self.server.commits[-1].append(path)

    do_POST = do_PUT = RangeHandler.do_GET  # noqa: N815

    def revision(self) -> str:
        return f"{len(self.server.commits):040x}"


def described(path: Path, model: Path) -> dict[str, Any]:
    """What a listing has of a file or folder."""
    kind, size = ("file", path.stat().st_size) if path.is_file() else ("directory", 0)
    oid = sha256(str(path).encode()).hexdigest()[:40]
    return {"type": kind, "size": size, "oid": oid, "path": str(path.relative_to(model))}
