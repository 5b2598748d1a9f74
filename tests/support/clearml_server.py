"""A ClearML server on this machine, as far as one reporting task needs one; it remembers what it was told."""

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def _token() -> str:
    """A JSON web token, whose signature is not checked."""
    claims = {"exp": int(time.time()) + 86400, "api_version": "2.31", "server_version": "2.0.0", "env": ""}
    parts = ({"alg": "HS256", "typ": "JWT"}, claims, "signature")
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts)


class ClearMLServer(ThreadingHTTPServer):
    """Serves API and files on one port from construction to `stop`.

    Attributes:
        calls: (endpoint, body) of every API call, in order.
        scalars: (title, series) -> iteration -> value.
        arrived: set whenever something came.
        task: the task that was made last; it is the only one that there is.
        uploads: how many files were posted.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.calls: list[tuple[str, dict]] = []
        self.scalars: dict[tuple[str, str], dict[int, float]] = {}
        self.uploads = 0
        self.arrived = threading.Condition()
        self.task: dict = {}
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self.server_address[1]

    def stop(self) -> None:
        """Disappear."""
        self.shutdown()
        self.server_close()

    def names(self) -> list[str]:
        """The endpoints that were called."""
        return [name for name, _ in self.calls]

    def wait_for(self, condition) -> None:
        """Until a condition holds that something which comes may fulfil."""
        with self.arrived:
            self.arrived.wait_for(condition)

    def answer(self, name: str, content: bytes) -> dict | None:
        """The data of an API call's answer; None: there is no such task."""
        if name == "events.add_batch":
            for event in map(json.loads, content.splitlines()):
                if event["type"] == "training_stats_scalar":
                    series = self.scalars.setdefault((event["metric"], event["variant"]), {})
                    series[event["iter"]] = event["value"]
            return {"added": 1, "errors": 0}
        body = json.loads(content) if content else {}
        self.calls.append((name, body))
        if name == "auth.login":
            return {"token": _token()}
        if name == "tasks.create":
            parts = {"execution": {"artifacts": []}, "output": {}, "models": {"input": [], "output": []}}
            # ClearML locks a file of the machine by the id, so that tests at the same time must not share one.
            number = f"{self.port}_{self.names().count('tasks.create')}"
            self.task = body | {"id": f"task_{number}", "status": "created", "project": "p"} | parts
        if name.startswith("tasks.") and body.get("task", self.task.get("id")) != self.task.get("id"):
            return None
        states = {"tasks.started": "in_progress", "tasks.completed": "completed", "tasks.stopped": "stopped"}
        if name in states:
            self.task["status"] = states[name]
        answers = {
            "tasks.create": {"id": self.task.get("id")},
            "tasks.get_by_id": {"task": self.task},
            "tasks.get_all": {"tasks": [self.task]},
            "projects.get_all": {"projects": [{"id": "p", "name": "AdLoCo"}]},
            "models.create": {"id": "model", "created": True},
            "models.get_by_id": {"model": {"id": "model", "uri": ""}},
        }
        return answers.get(name, {"updated": 1, "started": 1, "stopped": 1, "fields": {}})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and content are two packets, of which the second would wait

    def log_message(self, *arguments) -> None:
        pass

    def _respond(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        name = self.path.split("?")[0].rstrip("/").split("/")[-1]
        with self.server.arrived:
            if name:
                data = self.server.answer(name, content)
            else:
                self.server.uploads += 1
                data = {}
            self.server.arrived.notify_all()
        endpoint = {"name": name, "requested_version": "2.31", "actual_version": "2.31"}
        meta = {
            "id": "x",
            "trx": "x",
            "endpoint": endpoint,
            "result_code": 400 if data is None else 200,
            "result_subcode": 0,
            "result_msg": "Invalid task id" if data is None else "OK",
        }
        answer = json.dumps({"meta": meta, "data": data or {}}).encode()
        self.send_response(meta["result_code"])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_PUT = do_HEAD = _respond
