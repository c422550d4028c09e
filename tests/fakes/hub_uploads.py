"""A Hub on this machine: the part of its HTTP API that takes uploads of models."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

LARGE = ".safetensors"
"""Files with this ending are sent by themselves, others as a part of the commit."""
TOKEN = "hf_valid"


class UploadingHub(ThreadingHTTPServer):
    """Keeps what is uploaded. Accepts one token; `status` refuses everybody."""

    def __init__(self, status: int | None = None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.repositories: dict[str, bool] = {}
        """Name → whether it is private."""
        self.files: dict[str, bytes] = {}
        self.messages: list[str] = []
        self._large: dict[str, bytes] = {}
        """Digest → content."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def create(self, asked: dict) -> dict:
        name = f"{asked.get('organization', 'me')}/{asked['name']}"
        self.repositories.setdefault(name, asked.get("visibility") == "private")
        return {"url": f"{self.endpoint}/{name}", "id": name}

    def modes(self, asked: dict) -> dict:
        paths = [file["path"] for file in asked["files"]]
        modes = {path: "lfs" if path.endswith(LARGE) else "regular" for path in paths}
        return {
            "files": [
                {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}
                for path, mode in modes.items()
            ]
        }

    def places(self, asked: dict) -> dict:
        """Where large files go."""
        return {
            "transfer": "basic",
            "objects": [
                entry | {"actions": {"upload": {"href": f"{self.endpoint}/large/{entry['oid']}"}}}
                for entry in asked["objects"]
            ],
        }

    def commit(self, name: str, lines: list[dict]) -> dict:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self._large[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.files[value["path"]]
        oid = f"{len(self.messages):040}"
        return {
            "success": True,
            "commitOid": oid,
            "commitUrl": f"{self.endpoint}/{name}/commit/{oid}",
            "hookOutput": "",
        }


class _Handler(BaseHTTPRequestHandler):
    server: UploadingHub

    def do_POST(self) -> None:
        body = self._body()
        hub, path = self.server, self.path.partition("?")[0]
        if hub.status or self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(hub.status or 401, {"error": "refused"})
        if path.endswith("/commit/main"):
            name = path.removeprefix("/api/models/").removesuffix("/commit/main")
            return self._send(
                200, hub.commit(name, [json.loads(line) for line in body.splitlines()])
            )
        asked = json.loads(body or b"{}")
        if path == "/api/repos/create":
            return self._send(200, hub.create(asked))
        if path.endswith("/preupload/main"):
            return self._send(200, hub.modes(asked))
        if path.endswith("/info/lfs/objects/batch"):
            return self._send(200, hub.places(asked))
        return self._send(200, {})

    def do_PUT(self) -> None:
        self.server._large[self.path.rpartition("/")[2]] = self._body()
        self._send(200, {})

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in self.server.files.items()
            ]
            return self._send(200, entries)
        self._send(200, {"id": "me/model", "sha": "0" * 40, "siblings": [], "tags": []})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _send(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def uploading_hub(status: int | None = None) -> Iterator[UploadingHub]:
    hub = UploadingHub(status)
    Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
