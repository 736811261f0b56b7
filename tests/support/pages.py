"""A browser without JavaScript: keeps cookies, and sends a page's forms with their token."""

from __future__ import annotations

import re
from collections.abc import Mapping

import httpx

TOKEN = re.compile(r'name="csrf" value="([0-9a-f]{64})"')


class Visitor:
    """One visitor of the dashboard; redirects are not followed, so that a test can look at them."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=30, verify=False)

    def get(self, path: str, **options) -> httpx.Response:
        return self.client.get(path, **options)

    def token(self, path: str = "/ui/new") -> str:
        found = TOKEN.search(self.get(path).text)
        assert found is not None, path
        return found[1]

    def post(self, path: str, fields: Mapping[str, str] | None = None) -> httpx.Response:
        """Send a form as the page that has it would."""
        page = path if path == "/ui/login" else "/ui/new"
        return self.client.post(path, data={"csrf": self.token(page), **(fields or {})})

    def log_in(self, secret: str) -> httpx.Response:
        return self.post("/ui/login", {"key": secret})
