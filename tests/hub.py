"""The Hugging Face hub as far as its client asks: a server on loopback with repositories of small files.

Downloads, and uploads as git does them: files below a size within the commit, others by the protocol of LFS before it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

TOKEN = "hf_of_the_test"
LARGE = (".safetensors", ".parquet", ".mp4")  # what goes by LFS
LICENSES = ("apache-2.0", "mit", "gemma")
Files = Mapping[str, bytes]


@dataclass
class Hub:
    """``repositories``: {owner/name: {branch or tag: {file: bytes}}}, datasets as ``datasets/owner/name``.

    Those in ``private`` want :data:`TOKEN`, which may write into repositories of ``owner``; those in ``gated`` an
    agreement.  ``asked`` are the paths of all requests; a download of ``cut`` bytes in all ends the connection, and
    ``interrupt`` is called when a file of so many bytes arrives.
    """

    repositories: dict[str, dict[str, Files]]
    private: set[str] = field(default_factory=set)
    gated: tuple[str, ...] = ()
    owner: str = "somebody"
    asked: list[str] = field(default_factory=list)
    cut: int = 0
    interrupt: Callable[[int], None] = lambda size: None
    url: str = ""
    commits: dict[str, Files] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)  # by SHA-256

    def commit(self, repository: str, revision: str) -> str:
        """The hash of the commit that a revision names; "" for none."""
        for name, files in self.repositories[repository].items():
            made = hashlib.sha1(repository.encode())
            for file in sorted(files):
                made.update(f"{file} {_sha(files[file])}".encode())
            self.commits[made.hexdigest()] = files
            if revision == name:
                return made.hexdigest()
        return revision if revision in self.commits else ""

    def head(self, repository: str, revision: str = "main") -> Files:
        named = self.repositories[repository]
        return named[revision] if revision in named else self.commits[revision]

    def taken(self, kind: str) -> list[str]:
        """The files that were asked for, the last parts of their paths."""
        return sorted({path.partition(f"/{kind}/")[2].partition("/")[2] for path in self.asked if f"/{kind}/" in path})


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve ``hub`` at its ``url`` meanwhile."""
    handler = type("OfHub", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def at(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """The client asks at ``address``, as HF_ENDPOINT would say before it is imported."""
    constants = "huggingface_hub.constants."
    monkeypatch.setattr(constants + "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants + "HUGGINGFACE_CO_URL_TEMPLATE", template)


def alone(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The client knows no token, and its cache is in ``folder``; transfers are HTTP's own."""
    constants = "huggingface_hub.constants."
    monkeypatch.setattr(constants + "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants + "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(constants + "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        repository, (kind, revision, *rest) = self.addressed()
        if not self.refused(repository):
            self.read(repository, kind, revision, "/".join(rest).rstrip("/"))

    def read(self, repository: str, kind: str, revision: str, file: str) -> None:
        commit = self.hub.commit(repository, revision or "main")
        if not commit:
            return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        files = self.hub.commits[commit]
        if kind in ("", "revision"):
            private = repository in self.hub.private
            return self.json({"id": _name(repository), "sha": commit, "private": private, "siblings": []})
        if kind == "tree":
            return self.json([_entry(name, data) for name, data in files.items()])
        self.file(files[file], commit)

    def file(self, data: bytes, commit: str) -> None:
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{_sha(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.answer(206 if start else 200, headers, data[start:])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        repository, (kind, revision, *_) = self.addressed()
        if repository == "repos/create":
            return self.create(json.loads(body))
        if repository == "validate-yaml":
            return self.validate(json.loads(body)["content"])
        if repository.endswith(".git"):
            return self.batch(json.loads(body))
        if self.refused(repository, writes=True):
            return
        if kind == "preupload":
            return self.preupload(self.hub.head(repository, revision), json.loads(body)["files"])
        if kind == "commit":
            return self.commit(repository, revision, [json.loads(line) for line in body.splitlines()])
        new = revision if kind == "branch" else json.loads(body)["tag"]
        if new in self.hub.repositories[repository]:
            return self.json({}, 409)
        self.hub.repositories[repository][new] = self.hub.head(repository, "main" if kind == "branch" else revision)
        self.json({})

    def do_DELETE(self) -> None:
        repository, (_, tag, *_) = self.addressed()
        if not self.refused(repository, writes=True):
            found = self.hub.repositories[repository].pop(tag, None)
            self.answer(200 if found is not None else 404, {"X-Error-Code": "RevisionNotFound"})

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.asked.append(self.path.strip("/"))
        self.hub.interrupt(len(data))
        self.hub.large[hashlib.sha256(data).hexdigest()] = data
        self.answer(200, {})

    def addressed(self) -> tuple[str, list[str]]:
        """The repository of a request, and at least two more parts of its path."""
        path = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        self.hub.asked.append("/".join(path))
        if path[:1] == ["api"]:
            path = path[1:] if path[1] in ("datasets", "repos", "validate-yaml") else path[2:]
        parts = {"datasets": 3, "validate-yaml": 1}.get(path[0], 2)
        return "/".join(path[:parts]), [*path[parts:], "", ""]

    def knows(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def refused(self, repository: str, writes: bool = False) -> bool:
        """Whether the answer was that this user may not; the hub shows nobody what he may not see."""
        hidden = repository in self.hub.private and not self.knows()
        if repository not in self.hub.repositories or hidden:
            self.answer(401 if hidden else 404, {"X-Error-Code": "RepoNotFound"})
        elif repository in self.hub.gated:
            self.answer(403, {"X-Error-Code": "GatedRepo"})
        elif writes and not self.knows():
            self.answer(401, {})
        elif writes and _name(repository).partition("/")[0] != self.hub.owner:
            self.answer(403, {})
        else:
            return False
        return True

    def create(self, wanted: Mapping[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        repository = f"datasets/{name}" if wanted.get("type") == "dataset" else name
        if not self.knows():
            return self.json({"error": "Invalid username or password."}, 401)
        if wanted["organization"] != self.hub.owner:
            return self.json({"error": "You don't have the rights to create here."}, 403)
        known = repository in self.hub.repositories
        if not known:
            self.hub.repositories[repository] = {"main": {".gitattributes": b""}}
            self.hub.private |= {repository} if wanted.get("visibility") == "private" else set()
        self.json({"url": f"{self.hub.url}/{repository}"}, 409 if known else 200)

    def validate(self, text: str) -> None:
        front = yaml.safe_load(text.split("---")[1])
        wrong = front.get("license", LICENSES[0]) not in LICENSES
        self.json({"errors": [{"message": '"license" must be one of ...'}] if wrong else []}, 400 if wrong else 200)

    def preupload(self, there: Files, files: list[Mapping[str, Any]]) -> None:
        found = []
        for file in files:
            large, data = file["path"].endswith(LARGE), there.get(file["path"])
            oid = None if data is None else hashlib.sha256(data).hexdigest() if large else _sha(data)
            mode = "lfs" if large else "regular"
            found.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.json({"files": found})

    def batch(self, wanted: Mapping[str, Any]) -> None:
        found = []
        for item in wanted["objects"]:
            actions = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}
            found.append({**item, **({} if item["oid"] in self.hub.large else {"actions": actions})})
        self.json({"transfer": "basic", "objects": found})

    def commit(self, repository: str, revision: str, lines: list[Mapping[str, Any]]) -> None:
        self.hub.commit(repository, revision)  # the one before stays a commit
        files = dict(self.hub.head(repository, revision))
        for line in lines:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
        self.hub.repositories[repository][revision] = files
        made = self.hub.commit(repository, revision)
        self.json({"commitUrl": f"{self.hub.url}/{repository}/commit/{made}", "commitOid": made})

    def json(self, value: object, status: int = 200) -> None:
        self.answer(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def answer(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.cut and len(body) > self.hub.cut:
            self.wfile.write(body[: self.hub.cut])
            self.close_connection = True
            self.hub.cut = 0
            return
        self.wfile.write(body)

    def log_message(self, format: str, *given: object) -> None:
        """Nothing."""


def _name(repository: str) -> str:
    return repository.removeprefix("datasets/")


def _sha(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": _sha(data)}
