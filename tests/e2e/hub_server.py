"""A Hub on this machine: the part of its HTTP API with which `datasets` finds and downloads a
dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from threading import Thread
from urllib.parse import urlsplit

COMMIT = "0" * 39 + "1"


def _entries(files: Mapping[str, bytes]) -> dict[str, dict[str, object]]:
    """Path → its description, of all files and the folders that they are in."""
    entries: dict[str, dict[str, object]] = {}
    for path, content in files.items():
        for parent in PurePosixPath(path).parents:
            entries[str(parent)] = {
                "type": "directory",
                "path": str(parent),
                "size": 0,
                "oid": COMMIT,
            }
        digest = hashlib.sha1(content).hexdigest()
        entries[path] = {"type": "file", "path": path, "size": len(content), "oid": digest}
    entries.pop(".", None)
    return entries


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        asked = json.loads(self.rfile.read(length) or b"{}").get("paths", [])
        entries = _entries(self.server.files)
        self._send_json(
            [
                entries[path]
                for path in ([asked] if isinstance(asked, str) else asked)
                if path in entries
            ]
        )

    def _answer(self, with_body: bool) -> None:
        path, name = urlsplit(self.path).path, self.server.dataset
        self.server.requests.append(path)
        files = self.server.files
        if path.startswith(f"/datasets/{name}/resolve/"):
            file = path.split("/resolve/", 1)[1].partition("/")[2]
            self._send_file(files.get(file), with_body)
        elif path.startswith(f"/api/datasets/{name}/tree/"):
            folder = path.split("/tree/", 1)[1].partition("/")[2] or "."
            entries = _entries(files)
            self._send_json(
                [
                    entry
                    for file, entry in entries.items()
                    if str(PurePosixPath(file).parent) == folder
                ]
            )
        elif path in (
            f"/api/datasets/{name}",
            f"/api/datasets/{name}/revision/{COMMIT}",
            f"/api/datasets/{name}/revision/main",
        ):
            siblings = [{"rfilename": file} for file in files]
            self._send_json(
                {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            )
        else:
            self._send_file(None, with_body)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), "application/json")

    def _send_file(self, content: bytes | None, with_body: bool) -> None:
        if content is None:
            self._send(404, b"{}", "application/json", with_body)
        else:
            self._send(200, content, "application/octet-stream", with_body)

    def _send(self, status: int, body: bytes, kind: str, with_body: bool = True) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    def __init__(self, dataset: str, files: Mapping[str, bytes]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.dataset = dataset
        self.files = files
        self.requests: list[str] = []


@contextmanager
def hub_with(dataset: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """The endpoint of a Hub that has one dataset, made of these files."""
    server = _Server(dataset, files)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
