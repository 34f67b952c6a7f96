"""An object store over HTTP, in a process of its own: GET, and PUT under the conditions If-Match and If-None-Match.

It stands for S3, of which it has what a conditional write needs: the ETag is a digest of the content only, and a
condition is checked in the same step in which the object is written. It has no buckets, signatures or metadata.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.programs import REPO

_objects: dict[str, bytes] = {}
_writing = threading.Lock()


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        content = _objects.get(self.path)
        self._answer(404 if content is None else 200, content or b"", content)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        with _writing:
            there = _objects.get(self.path)
            if self.headers["If-None-Match"] == "*" and there is not None:
                return self._answer(412)
            if (wanted := self.headers["If-Match"]) and (there is None or _etag(there) != wanted):
                return self._answer(404 if there is None else 412)
            _objects[self.path] = content
        return self._answer(200, etag_of=content)

    def _answer(self, status: int, body: bytes = b"", etag_of: bytes | None = None) -> None:
        self.send_response(status)
        if etag_of is not None:
            self.send_header("ETag", _etag(etag_of))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@contextmanager
def object_store() -> Iterator[str]:
    """The url of an empty one."""
    command = [sys.executable, "-m", "tests.support.object_store"]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), _Requests) as server:
        print(server.server_port, flush=True)
        server.serve_forever()
