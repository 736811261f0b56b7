"""The HTTP server around one engine."""

from tevatron.scorer.server.app import ServerOptions, create_app

__all__ = ["ServerOptions", "create_app"]
