"""A small real HTTP server with as much of the model hub's API as its own client library needs to fetch one model."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextmanager
def hub(folder: Path, name: str, commit: str) -> Iterator[tuple[str, list[str]]]:
    """Serves a folder as the model ``name`` at one commit: the hub's URL, and the paths that have been asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            files = {file.name: file for file in folder.iterdir()}
            if path == f"/api/models/{name}/revision/{commit}":
                siblings = [{"rfilename": file} for file in files]
                self._send(json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode(), with_body)
            elif path == f"/api/models/{name}/tree/{commit}":
                tree = [
                    {"type": "file", "path": file, "size": where.stat().st_size, "oid": _etag(where.read_bytes())}
                    for file, where in files.items()
                ]
                self._send(json.dumps(tree).encode(), with_body)
            elif (file := path.removeprefix(f"/{name}/resolve/{commit}/")) in files:
                self._send(files[file].read_bytes(), with_body)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RevisionNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def _send(self, body: bytes, with_body: bool) -> None:
            self.send_response(200)
            self.send_header("ETag", f'"{_etag(body)}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


def _etag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()
