"""A child of the scorer host that starts in a moment: the server's interface without a model.

Takes the host's own command line and environment. A model folder named `never-ready` stays so.
"""

import json
import os
import signal
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

INFO = {
    "backend": "hf",
    "model_name_or_path": "stand-in",
    "prompt_template": "tevatron",
    "head": "yes_no",
    "yes_id": 1,
    "no_id": 2,
    "max_length": 160,
    "dtype": "float32",
    "max_probe_difference": None,
    "versions": {},
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/ready":
            self._answer(503 if "never-ready" in sys.argv[4] else 200, {})
        elif self.headers["Authorization"] == f"Bearer {os.environ['TEVATRON_SCORER_TOKEN']}":
            self._answer(200, INFO)
        else:
            self._answer(401, {})

    def _answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
    server.server_activate()
    server.serve_forever()
