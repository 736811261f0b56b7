"""A small hub: the routes of the Hugging Face hub that `huggingface_hub` calls for a repository, over real HTTP.

Written from what the library sends and expects; it is an imitation. It holds repositories with one commit and names for it.
What is written: the creation of a repository, the question how each file is sent, the protocol of Git LFS (`basic`) and the
commit. It has no Xet storage, which the real hub prefers, no branches, and gives every commit the same name.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pushes = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")
"""Marks a test that pushes: the library's LFS calls httpx in a way that httpx deprecates."""

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/([^/]+)")
_WRITE = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main")
_LFS_BATCH = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
_RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Files of the one commit, and what else it is called."""

    files: dict[str, bytes]
    names: set[str] = field(default_factory=lambda: {"main", COMMIT})
    token: str | None = None
    """Who wants it must have this one."""
    private: bool = False
    ignored: set[str] = field(default_factory=set)
    """What its .gitignore names."""
    num_commits: int = 0
    """Commits that were made over HTTP."""


class Hub(ThreadingHTTPServer):
    """Serves `repositories`, by kind (`models` or `datasets`) and id, until `close`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.fetched: list[str] = []
        """Files that were asked for with GET."""
        self.writer: str | None = None
        """The token that creating a repository needs."""
        self.stored: dict[str, bytes] = {}
        """What was uploaded by LFS, by sha256."""
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
        # Pushes go by LFS then, which this hub has.
        "HF_HUB_DISABLE_XET": True,
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

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        if path == "/api/validate-yaml":
            self._answer(json.dumps({"errors": [], "warnings": []}))
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif match := _LFS_BATCH.fullmatch(path):
            if self._find("models", match[1], "main") is not None:
                self._answer(json.dumps(self._lfs(json.loads(body)["objects"])))
        elif match := _WRITE.fullmatch(path):
            found = self._find("models", match[1], "main")
            if found is not None and match[2] == "preupload":
                self._answer(json.dumps(_upload_modes(found, json.loads(body)["files"])))
            elif found is not None:
                self._commit(match[1], found, [json.loads(line) for line in body.splitlines()])
        else:
            self._refuse(404, "RepoNotFound")

    def do_PUT(self) -> None:
        """Take a file that is sent by LFS; the address has its sha256."""
        content = self._body()
        oid = self.path.rpartition("/")[2]
        if hashlib.sha256(content).hexdigest() != oid:
            self._refuse(400, "WrongSha256")
            return
        self.server.stored[oid] = content
        self._answer("")

    def _body(self) -> bytes:
        if self.headers["Transfer-Encoding"] != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"] or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _create(self, asked: dict[str, object]) -> None:
        repo_id = f"{asked['organization']}/{asked['name']}"
        if self.server.writer and self.headers["Authorization"] != f"Bearer {self.server.writer}":
            self._refuse(401, "Unauthorized")
            return
        there = ("models", repo_id) in self.server.repositories
        if not there:
            private = asked.get("visibility") == "private"
            self.server.repositories["models", repo_id] = Repository(
                {}, token=self.server.writer, private=private
            )
        url = f"{self.server.url}/{repo_id}"
        self._answer(json.dumps({"url": url, "name": repo_id}), status=409 if there else 200)

    def _lfs(self, objects: list[dict[str, object]]) -> dict[str, object]:
        answers = []
        for one in objects:
            upload = {"href": f"{self.server.url}/lfs/{one['oid']}"}
            is_stored = one["oid"] in self.server.stored
            answers.append(one if is_stored else {**one, "actions": {"upload": upload}})
        return {"transfer": "basic", "objects": answers}

    def _commit(
        self, repo_id: str, repository: Repository, lines: list[dict[str, dict[str, str]]]
    ) -> None:
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                repository.files[value["path"]] = self.server.stored[value["oid"]]
            elif key == "deletedFile":
                del repository.files[value["path"]]
            else:
                assert key == "header", line
        repository.num_commits += 1
        self._answer(
            json.dumps(
                {"commitUrl": f"{self.server.url}/{repo_id}/commit/{COMMIT}", "commitOid": COMMIT}
            )
        )

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
        if self.command != "HEAD":
            self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        pass


def _info(repo_id: str, repository: Repository) -> dict[str, object]:
    return {
        "id": repo_id,
        "sha": COMMIT,
        "private": repository.private,
        "siblings": [{"rfilename": name} for name in sorted(repository.files)],
    }


def _upload_modes(repository: Repository, files: list[dict[str, str]]) -> dict[str, object]:
    return {
        "files": [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": file["path"] in repository.ignored,
            }
            for file in files
        ]
    }


def _tree(repository: Repository) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
        for name, content in sorted(repository.files.items())
    ]


def _oid(content: bytes) -> str:
    """Return git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
