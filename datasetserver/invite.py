"""`dd-datasetserver invite NAME`: one line that a volunteer pastes into a terminal, a token made for it on the spot where the server has tokens.

Where the server is and whom it lets in is what it wrote down when it was last started; whether it runs now does not matter.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from datasetserver import tokens, work_folder
from datasetserver.work_folder import HOST_KEY, LEDGER, SERVING, unwritable
from swarm import files
from swarm.arguments import ArgumentParser
from swarm.errors import UserError
from swarm.listening import is_loopback
from swarm.run_config import RunConfig
from swarm.signing import HostKey
from swarm.urls import check_url

_PEERS = 4
"""A check and a machine or two, of which one was set up anew. A friend who votes with 64 identities is none."""


@dataclass(frozen=True)
class Serving:
    """url: under which peers reach the server. tokens: path of their file; '' where it lets everybody in."""

    url: str
    tokens: str = ""

    def write(self, work_dir: Path) -> None:
        """Raises UserError (disk)."""
        try:
            files.replace(work_dir / SERVING, json.dumps(asdict(self), indent=2).encode())
        except OSError as error:
            raise unwritable(work_dir, error, "Free some space.") from None

    @classmethod
    def read(cls, work_dir: Path) -> "Serving":
        """Raises UserError where no server was ever started."""
        try:
            values = json.loads((work_dir / SERVING).read_text(encoding="utf-8"))
            return cls(str(values["url"]), str(values["tokens"]))
        except FileNotFoundError:
            raise UserError(
                f"No server was ever started on {work_dir}.", fix="Start it first, and give its --dataset or --work_dir."
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{work_dir / SERVING} cannot be read: {error}.", fix="Start the server again: it rewrites the file.") from None


def line(url: str, host_key: str, token: str = "", model: str = "") -> str:
    """What a volunteer pastes. The token comes before the command: others on that machine see a command's flags, not its environment."""
    words = ["dd-peer", "--datasetserver", url, "--host_key", host_key, *(["--model", model] if model else []), "--output_dir", "out"]
    return (f"DD_TOKEN={shlex.quote(token)} " if token else "") + shlex.join(words)


def main(argv: Sequence[str]) -> None:
    """`dd-datasetserver invite NAME`. Raises UserError."""
    parser = ArgumentParser(
        "dd-datasetserver invite",
        description="Print the line that a volunteer pastes to join the run.",
        examples=["dd-datasetserver invite alice --dataset pictures"],
    )
    parser.add_argument("name", help="whom it is for: the token's name, for 'token remove'")
    parser.add_argument("--peers", type=tokens.of_peers, default=_PEERS, metavar="N", help=f"in a run for members, how many peers with this line may be members at once [{_PEERS}]")
    parser.add_argument("--public_url", default="", metavar="URL", help="the server's URL for the volunteer, if the server was not given one")
    work_folder.add_arguments(parser)
    args = parser.parse_args(argv)
    work_dir = work_folder.given(args)
    serving = Serving.read(work_dir)
    url = args.public_url or serving.url
    check_url(url, "--public_url")
    _refuse_nowhere(url)
    key = HostKey(work_dir / HOST_KEY, missing="refuse")
    token = tokens.add(Path(serving.tokens), args.name, args.peers) if serving.tokens else ""
    print(line(url, key.public, token))
    for remark in _remarks(args.name, args.peers, url, serving.tokens, _run(work_dir)):
        print(remark, file=sys.stderr)


def _run(work_dir: Path) -> RunConfig | None:
    from datasetserver.ledger import stored_run

    return stored_run(work_dir / LEDGER)


def _refuse_nowhere(url: str) -> None:
    """Raises UserError for 'any address of this machine', which is nobody's address."""
    host = urlsplit(url).hostname or ""
    if host in ("0.0.0.0", "::"):
        raise UserError(
            f"The server listens on {host}, which is not an address that a volunteer could dial.",
            fix="Give --public_url http://YOUR-PUBLIC-ADDRESS:9090, here or (better) to the server.",
        )


def _remarks(name: str, peers: int, url: str, token_file: str, run: RunConfig | None) -> list[str]:
    remarks, is_local = [], is_loopback(urlsplit(url).hostname or "")
    if token_file:
        remarks.append(
            f"This line is a secret: it holds the token of '{name}', shown once. Send it to {name} alone, by a way nobody else reads."
        )
        if peers and run and run.members_of:
            remarks.append(f"Up to {peers} peers with it are members at once (--peers); each new --output_dir and each --check is one, for two days.")
        remarks.append(f"To take it back: dd-datasetserver token remove {name} --tokens {shlex.quote(token_file)}")
        if url.startswith("http:") and not is_local:
            remarks.append("The token will travel unencrypted: with --tls_cert and --tls_key the server speaks https.")
    else:
        remarks.append("This server asks nobody for a token: anyone who has this line, or its URL, can take part.")
    if is_local:
        remarks.append(f"{url} is this machine alone: for peers elsewhere start the server with --host 0.0.0.0 and --public_url.")
    if run and Path(run.model).exists():
        remarks.append(f"The model {run.model} is on this machine: volunteers need its weights, too, and add --model FOLDER.")
    remarks.append("It works where this project is installed and .venv activated: docs/join.md begins with the two lines for that.")
    remarks.append("With --check in place of --datasetserver the line only says what works between that machine and the run.")
    return remarks
