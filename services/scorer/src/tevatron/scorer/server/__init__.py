"""The HTTP server around one engine."""

from tevatron.scorer.server.app import create_app
from tevatron.scorer.server.service import ServerOptions

__all__ = ["ServerOptions", "create_app"]
