"""The dashboard's own style and scripts, and plotly.js out of its Python package; nothing comes from another host."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tevatron.api.security import STATIC_PATH

STATIC = Path(__file__).parent / "static"
PLOTLY_PATH = f"{STATIC_PATH}/plotly-{version('plotly')}.js"


def static_routes() -> list[Route | Mount]:
    """Return the routes of files, which any browser may read."""
    return [
        Route(PLOTLY_PATH, _plotly, methods=["GET", "HEAD"]),
        Mount(STATIC_PATH, StaticFiles(directory=STATIC)),
    ]


def _plotly(request: Request) -> Response:
    # Found and not imported: the package itself is large, and nothing here draws with it.
    spec = find_spec("plotly")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "package_data" / "plotly.min.js"
    # Its name holds the version, so it never changes.
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return FileResponse(path, media_type="text/javascript", headers=headers)
