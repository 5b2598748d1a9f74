"""A hub of one dataset on this machine, whose network can fail: it sends so many bytes of shards, and then hangs up."""

import hashlib
import http.server
import json
import threading
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

COMMIT = "0" * 40


class HubServer:
    """Serves a folder as a dataset repository; a context manager.

    Attributes:
        url: for HF_ENDPOINT.
        bytes_left: of shards that it still sends; what is beyond is a connection that breaks.
        status: of every answer, where it is not None.
        requests: method and path of each.
    """

    def __init__(self, folder: Path, repository: str):
        self.folder, self.repository = folder, repository
        self.bytes_left, self.status, self.requests = 10**12, None, []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # headers and content are two packets, of which the second would wait

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                length = int(self.headers.get("Content-Length", 0))
                hub.answer(self, self.rfile.read(length))

            do_HEAD = do_POST = do_GET

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request, posted: bytes) -> None:
        self.requests.append((request.command, request.path))
        path = unquote(urlparse(request.path).path)
        api, files = f"/api/datasets/{self.repository}", f"/datasets/{self.repository}/resolve/"
        if self.status is not None:
            self.send(request, b"", self.status)
        elif path == api or path.startswith(f"{api}/revision/"):
            names = [str(file.relative_to(self.folder)) for file in sorted(self.folder.rglob("*")) if file.is_file()]
            self.send_json(
                request, {"id": self.repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            )
        elif path.startswith(f"{api}/tree/"):
            folder = self.folder.joinpath(*path.removeprefix(f"{api}/tree/").split("/")[1:])
            if folder.is_dir():
                self.send_json(request, [self.entry(file) for file in sorted(folder.iterdir())])
            else:
                self.send_missing(request)
        elif path.startswith(f"{api}/paths-info/"):
            names = parse_qs(posted.decode()).get("paths", [])
            self.send_json(request, [self.entry(self.folder / name) for name in names if (self.folder / name).exists()])
        elif path.startswith(files) and self.folder.joinpath(*path.removeprefix(files).split("/")[1:]).is_file():
            self.send_file(request, self.folder.joinpath(*path.removeprefix(files).split("/")[1:]))
        else:
            self.send_missing(request)

    def entry(self, file: Path) -> dict:
        kind = "directory" if file.is_dir() else "file"
        name = str(file.relative_to(self.folder))
        oid = hashlib.sha1(name.encode()).hexdigest()
        return {"type": kind, "path": name, "size": file.stat().st_size if kind == "file" else 0, "oid": oid}

    def send_file(self, request, file: Path) -> None:
        content = file.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        status, total = 200, len(content)
        if asked := request.headers.get("Range"):
            first, last = asked.removeprefix("bytes=").split("-")
            start, end = int(first), min(int(last) + 1, total) if last else total
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{total}"
            status, content = 206, content[start:end]
        headers["Content-Length"] = str(len(content))
        sent = content
        if request.command == "GET" and file.suffix == ".gz":
            sent = content[: self.bytes_left]
            self.bytes_left -= len(sent)
        self.send(request, sent, status, **headers)
        request.close_connection = len(sent) < len(content)

    def send_json(self, request, value) -> None:
        self.send(request, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def send_missing(self, request) -> None:
        self.send(request, b"{}", 404, **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

    @staticmethod
    def send(request, content: bytes, status: int = 200, **headers: str) -> None:
        request.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)
