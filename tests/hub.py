"""The Hugging Face hub as far as its client asks: a server on loopback with repositories of small files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

TOKEN = "hf_of_the_test"


@dataclass
class Hub:
    """``repositories``: {owner/name: {revision: {file: bytes}}}; those in ``private`` want :data:`TOKEN`,
    those in ``gated`` an agreement.

    ``asked`` are the paths of all requests; a download of ``cut`` bytes in all ends the connection.
    """

    repositories: Mapping[str, Mapping[str, Mapping[str, bytes]]]
    private: tuple[str, ...] = ()
    gated: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list)
    cut: int = 0
    url: str = ""

    def commit(self, repository: str, revision: str) -> str:
        """The hash of the commit that a revision names."""
        for name in self.repositories[repository]:
            made = hashlib.sha1(f"{repository} {name}".encode()).hexdigest()
            if revision in (name, made):
                return made
        return ""

    def files(self, repository: str, commit: str) -> Mapping[str, bytes]:
        named = self.repositories[repository]
        return next(files for name, files in named.items() if self.commit(repository, name) == commit)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve ``hub`` at its ``url`` meanwhile."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urlsplit(self.path).path.strip("/").split("/")
            hub.asked.append("/".join(path))
            api = path[:2] == ["api", "models"]
            repository = "/".join(path[2:4] if api else path[:2])
            kind, revision, *rest = (path[4:] if api else path[2:]) or ["", ""]
            if repository not in hub.repositories:
                return self.answer(404, {"X-Error-Code": "RepoNotFound"})
            if repository in hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer(401, {"X-Error-Code": "RepoNotFound"})
            if repository in hub.gated:
                return self.answer(403, {"X-Error-Code": "GatedRepo"})
            commit = hub.commit(repository, revision)
            if not commit:
                return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            files = hub.files(repository, commit)
            if kind == "revision":
                return self.json({"id": repository, "sha": commit, "siblings": []})
            if kind == "tree":
                return self.json([_entry(name, data) for name, data in files.items()])
            return self.file(files["/".join(rest)], commit)

        def file(self, data: bytes, commit: str) -> None:
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
            headers = {"ETag": f'"{_sha(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.answer(206 if start else 200, headers, data[start:])

        def json(self, value: object) -> None:
            self.answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

        def answer(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.cut and len(body) > hub.cut:
                self.wfile.write(body[: hub.cut])
                self.close_connection = True
                hub.cut = 0
                return
            self.wfile.write(body)

        def log_message(self, format: str, *given: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _sha(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": _sha(data)}
