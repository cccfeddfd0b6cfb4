"""What sending shards costs the dataset server: CPU seconds per GB and throughput, against nginx in the same run.

    .venv/bin/python benchmarks/blobs.py [--megabytes 40] [--gigabytes 4] [--rounds 5]

Both serve the same file to the same client over loopback, one process each (nginx with one worker and sendfile), plain and with TLS 1.3;
the client takes the file again and again on one connection. The two take turns, round by round, so that a busy machine is busy for
both; the table has medians, the ratios are medians over the rounds of ours divided by nginx's. CPU: user and system, of the process that sends.
nginx is the Debian package's; it needs to be installed, not running.
"""

import argparse
import contextlib
import os
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.common import argument_parser, cpu_seconds, heed_sigterm, print_result, print_table, start
from benchmarks.hosting import serving, write_noise
from swarm.errors import UserError
from swarm.protocol import Manifest

START_SECONDS, STALL_SECONDS = 60.0, 60.0
NGINX_CONF = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log stderr error; {user}
events {{ worker_connections 64; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000; default_type application/x-tar;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3; uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{ listen 127.0.0.1:{plain}; root {root}; }}
  server {{ listen 127.0.0.1:{tls} ssl; root {root}; ssl_protocols TLSv1.3; ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem; }}
}}
"""


@dataclass(frozen=True)
class Target:
    """A server under test: where the file is, and the process whose CPU time counts."""

    name: str
    url: str
    process: psutil.Process


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=40, help="size of the file; a shard has 48 MiB at most [40]")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="how much each server sends in a round [4]")
    parser.add_argument("--rounds", type=int, default=5)
    return start(parser, measure)


def measure(options: argparse.Namespace) -> None:
    if not 1 <= options.megabytes <= 44 or options.rounds < 1 or options.gigabytes <= 0:
        raise UserError("A shard has 1 to 44 MB here, a round sends something.", fix="See --help.")
    heed_sigterm()
    rows, result = [], {}
    with tempfile.TemporaryDirectory(prefix="blobs-") as name:
        folder = Path(name)
        write_noise(folder / "data", options.megabytes)  # all of it in one shard
        certificate(folder)
        for tls in (False, True):
            with ours(folder, tls) as server, nginx(folder, server, tls) as reference:
                figures = take_turns((server, reference), folder / "cert.pem", options.gigabytes * 1e9, options.rounds)
            kind = "TLS" if tls else "plain"
            for target, runs in figures.items():
                cpu, speed = (statistics.median(run[key] for run in runs) for key in ("cpu", "speed"))
                rows.append({"server": target, "link": kind, "CPU s/GB": cpu, "GB/s": speed})
            pairs = list(zip(figures["ours"], figures["nginx"], strict=True))
            prefix = "tls_" if tls else ""
            result[f"{prefix}ratio_cpu_per_gb"] = statistics.median(one["cpu"] / other["cpu"] for one, other in pairs)
            result[f"{prefix}ratio_throughput"] = statistics.median(one["speed"] / other["speed"] for one, other in pairs)
    print_table(rows)
    print_result(result)


def certificate(folder: Path) -> None:
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost"
    )
    subprocess.run([*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"], cwd=folder, check=True, capture_output=True)


@contextlib.contextmanager
def ours(folder: Path, tls: bool) -> Iterator[Target]:
    flags = ["--tls_cert", str(folder / "cert.pem"), "--tls_key", str(folder / "key.pem")] if tls else []
    with serving("--dataset", folder / "data", "--work_dir", folder / "work", "--ingest_workers", "0", *flags) as server:
        (shard,) = Manifest.model_validate_json((folder / "work" / "manifest.json").read_bytes()).shards
        yield Target("ours", f"{server.url}/v1/blobs/{shard.digest}.tar", server.process)


@contextlib.contextmanager
def nginx(folder: Path, server: Target, tls: bool) -> Iterator[Target]:
    """Serves the shard that `server` serves."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if not program:
        raise UserError("There is no nginx to compare with.", fix="apt-get install nginx-light.")
    plain, secure = free_ports(2)
    config = folder / "nginx.conf"
    user = "user root;" if os.geteuid() == 0 else ""
    config.write_text(NGINX_CONF.format(folder=folder, root=folder / "work" / "shards", plain=plain, tls=secure, user=user))
    process = subprocess.Popen([program, "-c", str(config), "-p", str(folder), "-e", "stderr"])
    name = server.url.rpartition("/")[2]
    url = f"https://127.0.0.1:{secure}/{name}" if tls else f"http://127.0.0.1:{plain}/{name}"
    try:
        until = time.monotonic() + START_SECONDS
        while not (workers := psutil.Process(process.pid).children()) or not listens(plain):
            if process.poll() is not None or time.monotonic() > until:
                raise UserError("nginx did not start.", fix="See its messages above.")
            time.sleep(0.05)
        yield Target("nginx", url, workers[0])
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as closing:
        return [closing.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def take_turns(targets: tuple[Target, ...], trusted: Path, count: float, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Per server and round: CPU seconds per GB and GB per second. The first round, which warms caches up, is not among them."""
    figures: dict[str, list[dict[str, float]]] = {target.name: [] for target in targets}
    for number in range(rounds + 1):
        for target in targets if number % 2 else targets[::-1]:
            begun, used = time.perf_counter(), cpu_seconds(target.process)
            taken = take(target.url, trusted, count if number else count / 10)
            seconds, used = time.perf_counter() - begun, cpu_seconds(target.process) - used
            if number:
                figures[target.name].append({"cpu": max(used, 0.01) / taken * 1e9, "speed": taken / seconds / 1e9})
                print(f"{target.name}: {used / taken * 1e9:.3f} CPU s/GB, {taken / seconds / 1e9:.2f} GB/s", file=sys.stderr, flush=True)
    return figures


def take(url: str, trusted: Path, count: float) -> int:
    """Fetch the file until at least `count` bytes have come, on one connection; returns how many came."""
    parts = urlsplit(url)
    request = f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
    buffer, taken = bytearray(1 << 20), 0
    with contextlib.ExitStack() as closing:
        link = closing.enter_context(socket.create_connection((parts.hostname, parts.port), STALL_SECONDS))
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=trusted)
            link = closing.enter_context(context.wrap_socket(link, server_hostname=parts.hostname))
        while taken < count:
            link.sendall(request)
            taken += _answer(link, buffer)
    return taken


def _answer(link: socket.socket, buffer: bytearray) -> int:
    """Read one answer; returns its bytes. Raises UserError when it is no 200 with a length."""
    head = b""
    while b"\r\n\r\n" not in head:
        if not (piece := link.recv(65536)):
            raise UserError("A server closed the connection.", fix="See its messages above.")
        head += piece
    head, _, rest = head.partition(b"\r\n\r\n")
    length = next((int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length:")), None)
    if b" 200 " not in head.splitlines()[0] or length is None:
        raise UserError(f"A server answered {head[:200]!r}.", fix="See its messages above.")
    left = length - len(rest)
    while left > 0:
        count = link.recv_into(buffer, min(left, len(buffer)))
        if not count:
            raise UserError("A server closed the connection.", fix="See its messages above.")
        left -= count
    return len(head) + 4 + length


if __name__ == "__main__":
    sys.exit(main())
