"""Write the API's OpenAPI document of this build to a file; `make openapi` writes docs/openapi.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sqlalchemy import create_engine

from tevatron.api.app import create_app
from tevatron.core.settings import Settings

if __name__ == "__main__":
    document = create_app(Settings(), create_engine("postgresql+psycopg://")).openapi()
    Path(sys.argv[1]).write_text(json.dumps(document, indent=2, ensure_ascii=True) + "\n")
