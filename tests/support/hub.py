"""A small hub: the routes of the Hugging Face hub that `huggingface_hub` calls to read a repository, over real HTTP.

Written from what the library sends and expects; it holds repositories with one commit and names for it.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/([^/]+)")
_RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Files of the one commit, and what else it is called."""

    files: dict[str, bytes]
    names: set[str] = field(default_factory=lambda: {"main", COMMIT})
    token: str | None = None
    """Who wants it must have this one."""


class Hub(ThreadingHTTPServer):
    """Serves `repositories`, by kind (`models` or `datasets`) and id, until `close`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.fetched: list[str] = []
        """Files that were asked for with GET."""
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def add(self, kind: str, repo_id: str, folder: Path, *, tag: str | None = None) -> Repository:
        """Serve the files of a folder."""
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        repository = Repository(files)
        repository.names |= {tag} if tag else set()
        self.repositories[kind, repo_id] = repository
        return repository

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


def ask_at(url: str, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let the library, which read its environment when it was imported, ask there in this process."""
    constants = "huggingface_hub.constants."
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for name, value in {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(f"{constants}{name}", value)


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := _API.fullmatch(path):
            kind, repo_id, what, revision = match.groups()
            found = self._find(kind, repo_id, revision)
            if found is not None:
                self._answer(
                    json.dumps(_info(repo_id, found) if what == "revision" else _tree(found))
                )
            return
        match = _RESOLVE.fullmatch(path)
        if match is None:
            self._refuse(404, "RepoNotFound")
            return
        dataset, repo_id, revision, name = match.groups()
        found = self._find("datasets" if dataset else "models", repo_id, revision)
        if found is None:
            return
        if name not in found.files:
            self._refuse(404, "EntryNotFound")
            return
        if self.command == "GET":
            self.server.fetched.append(name)
        content = found.files[name]
        self._answer(content, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET  # noqa: N815  http.server's names

    def _find(self, kind: str, repo_id: str, revision: str) -> Repository | None:
        found = self.server.repositories.get((kind, repo_id))
        if found is None:
            self._refuse(404, "RepoNotFound")
        elif found.token and self.headers["Authorization"] != f"Bearer {found.token}":
            self._refuse(401, "GatedRepo")
        elif revision not in found.names:
            self._refuse(404, "RevisionNotFound")
        else:
            return found
        return None

    def _refuse(self, status: int, code: str) -> None:
        self._answer(json.dumps({"error": code}), {"X-Error-Code": code}, status=status)

    def _answer(
        self, content: bytes | str, headers: dict[str, str] | None = None, *, status: int = 200
    ) -> None:
        payload = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        for name, value in {"Content-Length": str(len(payload)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        pass


def _info(repo_id: str, repository: Repository) -> dict[str, object]:
    return {
        "id": repo_id,
        "sha": COMMIT,
        "private": False,
        "siblings": [{"rfilename": name} for name in sorted(repository.files)],
    }


def _tree(repository: Repository) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
        for name, content in sorted(repository.files.items())
    ]


def _oid(content: bytes) -> str:
    """Return git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
