"""A local server in place of the hub on 127.0.0.1: the requests of huggingface_hub, and the ways to fail.

As the real one does for large files, `resolve` answers with hash, size and commit and redirects to another host
("localhost" here), which serves the bytes and understands Range.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
_BLOCK = 65_536
_REPO = "(?:datasets/)?[^/]+/[^/]+"


@dataclass(frozen=True)
class HubRequest:
    method: str
    path: str
    range: str | None = None
    token: str | None = None


@dataclass
class Hub:
    """A running server: its address, its files, its requests, and how it fails."""

    endpoint: str
    files: dict[tuple[str, str], bytes]  # (repository, file) -> content; datasets: (datasets/repository, file)
    requests: list[HubRequest] = field(default_factory=list)
    commit: str = COMMIT
    revision: str = "main"  # the name of that commit
    status: int = 200  # any other is the answer to every request
    gated: bool = False  # without a token
    cut_after: int | None = None  # bytes after which a download's connection breaks
    cuts: int = 1  # how often
    status_after_cut: int = 200  # the answer to every later request
    block_pause_s: float = 0.0  # between blocks of 64 KiB
    stall: bool = False  # downloads start but send no bytes
    ignore_range: bool = False
    claimed_bytes: int | None = None  # instead of the true size
    claimed_sha256: str | None = None  # instead of the true hash

    def ranges(self) -> list[str | None]:
        """The Range of every download."""
        return [
            request.range for request in self.requests if request.method == "GET" and request.path.startswith("/cdn/")
        ]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(self.path.split("?")[0])
        token = self.headers.get("Authorization")
        self.hub.requests.append(HubRequest(self.command, path, self.headers.get("Range"), token))
        if self.hub.status != 200:
            self._fail(self.hub.status, "")
        elif path.startswith("/cdn/"):
            self._send_bytes(path.removeprefix("/cdn/"))
        elif path.startswith("/api/models/"):
            self._describe(path.removeprefix("/api/models/"))
        elif match := re.fullmatch(f"/({_REPO})/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        else:
            self._fail(404, "RepoNotFound")

    def _describe(self, path: str) -> None:
        repo = path.partition("/revision/")[0]
        files = {file: body for (name, file), body in self.hub.files.items() if name == repo}
        if not files:
            self._fail(404, "RepoNotFound")
            return
        siblings = [
            {
                "rfilename": file,
                "size": len(body),
                "lfs": {"sha256": self.hub.claimed_sha256 or self._sha256(body), "size": len(body), "pointerSize": 9},
            }
            for file, body in files.items()
        ]
        body = json.dumps({"id": repo, "sha": self.hub.commit, "siblings": siblings, "tags": []}).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        self._write(body)

    def _resolve(self, repo: str, revision: str, file: str) -> None:
        if not any(name == repo for name, _ in self.hub.files):
            self._fail(401, "RepoNotFound")  # the hub's answer without a token
        elif self.hub.gated and self.headers.get("Authorization") is None:
            self._fail(403, "GatedRepo")
        elif revision not in (self.hub.revision, self.hub.commit):
            self._fail(404, "RevisionNotFound")
        elif (repo, file) not in self.hub.files:
            self._fail(404, "EntryNotFound")
        else:
            body = self.hub.files[repo, file]
            size = len(body) if self.hub.claimed_bytes is None else self.hub.claimed_bytes
            port = self.hub.endpoint.rpartition(":")[2]
            self._head(
                302,
                {
                    "Location": f"http://localhost:{port}/cdn/{repo}/{file}",
                    "X-Repo-Commit": self.hub.commit,
                    "X-Linked-Etag": f'"{self.hub.claimed_sha256 or self._sha256(body)}"',
                    "X-Linked-Size": str(size),
                    "Content-Length": "0",
                },
            )

    def _send_bytes(self, path: str) -> None:
        place = re.fullmatch(f"({_REPO})/(.+)", path)
        assert place is not None
        body = self.hub.files[place[1], place[2]]
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(wanted[1]) if wanted and not self.hub.ignore_range else 0
        headers = {"Content-Length": str(len(body) - start), "ETag": '"cdn"', "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self._head(206 if start else 200, headers)
        if self.command == "HEAD":
            return
        if self.hub.stall:
            time.sleep(30)
        end = len(body)
        if self.hub.cut_after is not None and self.hub.cuts > 0:
            self.hub.cuts -= 1
            end = min(end, start + self.hub.cut_after)
            self.close_connection = True
        for at in range(start, end, _BLOCK):
            if not self._write(body[at : min(at + _BLOCK, end)]):
                return
            time.sleep(self.hub.block_pause_s)
        if end < len(body):
            self.hub.status = self.hub.status_after_cut

    def _fail(self, status: int, code: str) -> None:
        self._head(status, {"X-Error-Code": code, "Content-Length": "0"})

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _write(self, block: bytes) -> bool:
        with suppress(OSError):  # the client left
            self.wfile.write(block)
            return True
        self.close_connection = True
        return False

    @staticmethod
    def _sha256(body: bytes) -> str:
        return hashlib.sha256(body).hexdigest()

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: standard error belongs to the test."""


@contextmanager
def local_hub(files: dict[tuple[str, str], bytes]) -> Iterator[Hub]:
    """Serves `files` until the block ends."""
    hub = Hub("", dict(files))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    server.block_on_close = False
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
