"""Where a program of ours listens for HTTP, and whether that is this machine alone."""

import ipaddress
import socket

from swarm.errors import ExitCode, UserError


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound before anything slow is done. Raises UserError when the port is in use, or none at all."""
    if not 0 <= port <= 65535:
        raise UserError(f"There is no port {port}.", fix="Use 0 (any free one) to 65535.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise UserError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}.",
            fix="Choose another --port (0: any free one), or stop the program that uses it.",
            code=ExitCode.NETWORK,
        ) from None
    return sock


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    """Of what `sock` is bound to, with the port that it got."""
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a name or an address without brackets is this machine, for nobody but itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
