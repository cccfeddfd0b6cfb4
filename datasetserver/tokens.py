"""Who may use a server: a file of names, each with the digest of a token that was shown once, and how many peers it lets in.
`dd-datasetserver token add NAME`.

A token is 256 random bits, so that one fast hash keeps it as safe as a slow one would: nobody can try them all, and every request
pays for the hash. It does not say which peer may do what: whoever holds one may do all that a peer does, in the name of peers whose keys
he has, and that came with no other token before (`owners.py`).
"""

import contextlib
import logging
import re
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from datasetserver.newcomers import MOST_OF_AN_OWNER
from datasetserver.refused import Refused
from swarm import files
from swarm.arguments import ArgumentParser
from swarm.digest import digest_bytes
from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
"""A running server looks this often whether the file has changed: a token that is removed opens nothing after that."""
_FILE = "tokens.txt"
_NOBODY = "# nobody"
"""All that a file says whose last token was removed, so that it is not taken for one that was emptied by mistake."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LINE = re.compile(rf"({_NAME.pattern}) ([0-9a-f]{{64}})(?: ([1-9][0-9]?))?")


@dataclass(frozen=True)
class Holder:
    """Whom a token was given to. peers: how many of his may be members of a run at once; 0: as many as any owner's (newcomers.py)."""

    name: str
    peers: int = 0


class Tokens:
    """The tokens of a file, read again whenever it changes. While it cannot be read or is empty, nobody gets in, and nobody is told that
    his token is wrong: peers wait for the host to mend it, and do not end. clock: in seconds.

    Raises UserError when the file is not there, is something else or holds no token.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic):
        self._path, self._clock = path, clock
        self._holders: dict[str, Holder] | None
        self._seen = files.version(path)  # first: what changes while it is read is read again
        self._holders, self._looked = _read(path, may_be_empty=False), clock()

    def holder(self, token: str) -> Holder | None:
        """Whom `token` was given to; None when it is none of ours. Raises Refused (503) while the file cannot be read."""
        self._look()
        if self._holders is None:
            fix = "Try again; the host must mend the file of tokens."
            raise Refused(503, "tokens_unavailable", "The server cannot tell who may use it.", fix)
        digest = _digest(token)
        return next((holder for known, holder in self._holders.items() if secrets.compare_digest(known, digest)), None)

    def names(self) -> Collection[str]:
        """Of all tokens there are, as of the last request."""
        return {holder.name for holder in (self._holders or {}).values()}

    def _look(self) -> None:
        if self._clock() - self._looked < LOOK_SECONDS:
            return
        self._looked, version = self._clock(), files.version(self._path)
        if version == self._seen:
            return
        self._seen = version
        try:
            self._holders = _read(self._path, may_be_empty=False)
            log.info("read tokens=%d file=%s", len(self._holders), self._path)
        except UserError as error:
            self._holders = None
            log.warning("letting nobody in: %s", error)


def add(path: Path, name: str, peers: int = 0) -> str:
    """Make a token for `name`, keep its digest, and return it. peers: as in `Holder`. Raises UserError."""
    if not _NAME.fullmatch(name):
        raise UserError(f"'{name}' is not a name for a token.", fix="Use up to 64 letters, digits, dots, dashes and underscores.")
    token = _draw()
    with _locked(path):
        holders = _read(path) if path.exists() else {}
        if any(holder.name == name for holder in holders.values()):
            raise UserError(
                f"{path} has a token for '{name}' already.",
                fix=f"Choose another name, or remove that one first: dd-datasetserver token remove {name} --tokens {path}.",
            )
        _write(path, {**holders, _digest(token): Holder(name, peers)})
    return token


def _draw(draw: Callable[[int], str] = secrets.token_urlsafe) -> str:
    """A token that no command line takes for a flag."""
    while (token := draw(32)).startswith("-"):
        pass
    return token


def remove(path: Path, name: str) -> None:
    """Forget the token of `name`. Raises UserError."""
    with _locked(path):
        holders = _read(path)
        left = {digest: holder for digest, holder in holders.items() if holder.name != name}
        if len(left) == len(holders):
            raise UserError(f"{path} has no token for '{name}'.", fix="dd-datasetserver token list shows who has one.")
        _write(path, left)


def names(path: Path) -> list[str]:
    """Who has a token, sorted. Raises UserError."""
    return sorted(holder.name for holder in _read(path).values())


def of_peers(text: str) -> int:
    """`--peers`. Raises ValueError."""
    if not text.isdecimal() or int(text) > MOST_OF_AN_OWNER:
        raise ValueError(text)
    return int(text)


def main(argv: Sequence[str]) -> None:
    """`dd-datasetserver token add|remove|list`. Raises UserError."""
    parser = ArgumentParser(
        "dd-datasetserver token",
        description="Say who may use a server that is started with --tokens FILE.",
        examples=["dd-datasetserver token add alice --tokens tokens.txt"],
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    actions = parser.add_subparsers(dest="action", required=True, metavar="add|remove|list")
    for action, about in (("add", "make a token and show it, once"), ("remove", "take a token back"), ("list", "show who has one")):
        whom = "" if action == "list" else " alice"
        sub = actions.add_parser(action, help=about, description=about, examples=[f"dd-datasetserver token {action}{whom} --tokens tokens.txt"])
        if action != "list":
            sub.add_argument("name", help="whom it is for")
        if action == "add":
            sub.add_argument("--peers", type=of_peers, default=0, metavar="N", help="in a run for members, how many peers of it may be members at once; 0: the limit of any owner [0]")
        sub.add_argument("--tokens", type=Path, default=Path(_FILE), metavar="FILE", help=f"the file that the server is given [{_FILE}]")
    args = parser.parse_args(argv)
    if args.action == "add":
        print(add(args.tokens, args.name, args.peers))
        print(f"This is the token of '{args.name}'. It is shown once; a peer takes it as DD_TOKEN or --token.", file=sys.stderr)
        print(f"{args.tokens} keeps its digest: start the server with --tokens {args.tokens}", file=sys.stderr)
    elif args.action == "remove":
        remove(args.tokens, args.name)
        print("its peers remain members for up to 7 days: 'dd-datasetserver members' lists them, and 'ban' ends it at once", file=sys.stderr)
    else:
        print("\n".join(names(args.tokens)))


def _digest(token: str) -> str:
    return digest_bytes(token.encode(errors="surrogatepass"))


def _read(path: Path, *, may_be_empty: bool = True) -> dict[str, Holder]:
    """Holders by the digests of their tokens. Raises UserError.

    may_be_empty: whether a file of no bytes is as good as one whose last token was removed; an editor or a full disk leaves one, too.
    """
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.", fix=f"Make a token: dd-datasetserver token add NAME --tokens {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'no text'}.", fix="Check --tokens.") from None
    if lines == [_NOBODY]:
        return {}
    if not (lines or may_be_empty):
        raise UserError(f"{path} holds no token.", fix=f"dd-datasetserver token add NAME --tokens {path}")
    matches = [_LINE.fullmatch(line) for line in lines]
    if None in matches:
        raise UserError(f"Line {matches.index(None) + 1} of {path} is not a token.", fix="Check --tokens, or remove that line.")
    return {match[2]: Holder(match[1], int(match[3] or 0)) for match in matches if match}


def _write(path: Path, holders: dict[str, Holder]) -> None:
    """Replace the file at once, for its owner's eyes only."""
    lines = (f"{holder.name} {digest}{f' {holder.peers}' if holder.peers else ''}\n" for digest, holder in holders.items())
    files.replace(path, ("".join(lines) or f"{_NOBODY}\n").encode("ascii"), mode=0o600)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One change at a time, told by a lock on the folder. Raises UserError when it cannot be written in."""
    try:
        with files.locked(path.parent):
            yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.", fix="Choose another --tokens.", code=ExitCode.DISK) from None
