"""A stand-in for the hub on 127.0.0.1: answers what huggingface_hub asks when it downloads one dataset file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class StandIn:
    """A running server: its address, the files that it has, and what it was asked."""

    endpoint: str
    files: dict[tuple[str, str, str], bytes]  # (repository, revision, file) -> content
    requests: list[str] = field(default_factory=list)
    status: int = 200  # another one is given for every request
    cut_at: int | None = None  # bytes after which the connection of a download breaks


@contextmanager
def hub_stand_in(files: dict[tuple[str, str, str], bytes]) -> Iterator[StandIn]:
    """Serve `files` as dataset repositories until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            stand_in.requests.append(f"{self.command} {self.path}")
            body = self._find()
            if stand_in.status != 200 or body is None:
                self.send_response(404 if stand_in.status == 200 else stand_in.status)
                self.send_header("X-Error-Code", "EntryNotFound" if stand_in.status == 200 else "ServerError")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("X-Repo-Commit", _COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body[: stand_in.cut_at])

        def _find(self) -> bytes | None:
            for (repo, revision, name), body in stand_in.files.items():
                if self.path == f"/datasets/{repo}/resolve/{revision}/{name}":
                    return body
            return None

        def log_message(self, format: str, *args: object) -> None:
            """Standard error belongs to the test."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stand_in = StandIn(f"http://127.0.0.1:{server.server_address[1]}", files)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
