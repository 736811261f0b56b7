"""Hashes by content of what results depend on."""

from __future__ import annotations

import hashlib
import json

from tevatron.evaluator.metrics import Qrels


def qrels_sha256(qrels: Qrels) -> str:
    """Hash judgments by content, whatever form and order their file has."""
    return hashlib.sha256(json.dumps(qrels, sort_keys=True).encode()).hexdigest()
