"""The signature of a delivery, as the Standard Webhooks specification has it (standardwebhooks.com)."""

from __future__ import annotations

import base64
import hashlib
import hmac

from tevatron.core.store.webhooks import SECRET_PREFIX


def signed_headers(body: bytes, *, secret: str, delivery_id: str, timestamp: int) -> dict[str, str]:
    """Return the three headers by which a receiver knows who sent the body, when, and which event it is."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = b".".join((delivery_id.encode(), str(timestamp).encode(), body))
    signature = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{signature}",
    }
