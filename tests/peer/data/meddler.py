"""A proxy between a peer and a real dataset server that does damage on the way, for tests."""

import http.server
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

from swarm.signed_request import KEY_HEADER, TIME_HEADER
from swarm.signed_request import SIGNATURE_HEADER as SIGNED_HEADER
from swarm.signing import SIGNATURE_HEADER

Change = Callable[[str, dict[str, str], bytes], bytes]


class Meddler(http.server.ThreadingHTTPServer):
    """Does to the first blob transfers what `faults` says: cuts them in the middle ("cut"), or flips a bit ("flip").

    change(path, headers, body): what becomes of any answer; it may change the headers too. ranges, sent: what was asked of blobs, and how
    many of their bytes went through.
    """

    daemon_threads = True

    def __init__(self, target: str, *faults: str, change: Change = lambda path, headers, body: body):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.faults, self.change, self.ranges, self.sent = target, list(faults), change, [], 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self._forward(None)

    def do_POST(self):
        self._forward(self.rfile.read(int(self.headers["Content-Length"])))

    def _forward(self, body):
        passed = ("Range", "Content-Type", KEY_HEADER, TIME_HEADER, SIGNED_HEADER)
        headers = {name: self.headers[name] for name in passed if name in self.headers}
        request = urllib.request.Request(self.server.target + self.path, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                status, data, signature = response.status, response.read(), response.headers.get(SIGNATURE_HEADER)
        except urllib.error.HTTPError as error:
            with error:
                status, data, signature = error.code, error.read(), None
        headers = {SIGNATURE_HEADER: signature} if signature else {}
        data = self.server.change(self.path, headers, data)
        size = len(data)
        if "/blobs/" in self.path:
            data = self._damage(data)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(size)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True

    def _damage(self, data):
        self.server.ranges.append(self.headers.get("Range"))
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "cut":
            data = data[: len(data) // 2]
        elif fault == "flip":
            data = data[:600] + bytes([data[600] ^ 1]) + data[601:]
        self.server.sent += len(data)
        return data

    def log_message(self, *_):
        pass
