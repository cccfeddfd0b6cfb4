"""A peer's membership of a run for members: asked of the run's server, kept beside the peer's key, and renewed while it runs."""

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from peer.config import PeerConfig
from peer.launch.joining import Joined
from peer.launch.resolving import token_for
from swarm import files
from swarm.bans import Bans
from swarm.errors import ExitCode, UserError
from swarm.members import LIFE_SECONDS, Members, is_signed, read_membership, said
from swarm.peer_key import PeerKey
from swarm.records import Membership
from swarm.run_config import RunConfig
from swarm.signed_request import Signer

log = logging.getLogger(__name__)
_FILE = "memberships.json"
_RENEW_SECONDS, _LOOK_SECONDS = 86_400.0, 600.0
_SKEW_SECONDS = 3_600.0
_FEWEST_SECONDS = 3_600.0
"""A peer does not start with a membership that ends sooner."""


def kept(joined: Joined, peer: PeerConfig, bans: Bans, closing: ExitStack) -> Members:
    """The run's members, with this peer's own membership, which a thread renews until `closing`. Raises UserError when the server refuses one."""
    members = Members(joined.run, bans)
    if members.needed:
        key = PeerKey.read(peer.identity_file)
        token = token_for(joined.server_url, peer)
        keeper = Keeper(members, key.peer_id, partial(_ask, joined, key, token), peer.identity_file.with_name(_FILE))
        try:
            keeper.begin()
        except UserError as error:
            if error.code == ExitCode.AUTH and peer.token and not token:
                fix = "Add --datasetserver URL: a token is shown to the server that you name, and to no other."
                raise UserError(error.message, fix=fix, code=error.code) from None
            raise
        closing.callback(keeper.renew_meanwhile().set)
    return members


def visitor(joined: Joined, identity: Path, token: str) -> Members:
    """As `kept`, for a program that ends soon: nothing is kept or renewed."""
    members = Members(joined.run, Bans(joined.run, joined.host_key, joined.bans))
    if members.needed:
        members.own = _ask(joined, PeerKey.read(identity), token)
    return members


def _ask(joined: Joined, key: PeerKey, token: str) -> Membership:
    from peer.data.client.runs import ask_membership  # aiohttp: not needed in a run for everybody

    if not joined.server_url:
        raise UserError(
            f"The run '{joined.run.run_name}' is for members, and no dataset server is known that could let this peer in.",
            fix="Give --datasetserver URL, and the --token that its host gave you if it asks for one.",
            code=ExitCode.AUTH,
        )
    return ask_membership(joined.server_url, joined.run, Signer(key), token=token)


class Keeper:
    """Keeps `members.own`, the membership of `peer`, valid. ask: gets a new one from the server, or raises UserError. wall: UNIX seconds."""

    def __init__(self, members: Members, peer: str, ask: Callable[[], Membership], path: Path, wall: Callable[[], float] = time.time):
        self._members, self._peer, self._ask, self._path, self._wall = members, peer, ask, path, wall

    def begin(self) -> None:
        """Take the membership on disk if it is less than a day old, else ask for one; if the server is away, the old one will do. Raises UserError."""
        self._members.own = _read(self._path, self._members.run, self._peer)
        if self._left() > LIFE_SECONDS - _RENEW_SECONDS:
            return
        try:
            self.renew()
        except UserError as error:
            if self._left() < _FEWEST_SECONDS or error.code == ExitCode.AUTH:
                raise
            log.warning("going on with the membership from before, for %.1f days: %s", self._left() / 86_400, error)

    def renew(self) -> None:
        """Raises UserError, also for one that the server's wrong clock has made: it would end too soon, or never."""
        new, now = self._ask(), self._wall()
        if not max(now, now + self._left()) <= new.until <= now + LIFE_SECONDS + _SKEW_SECONDS:
            raise UserError(
                f"The dataset server's clock is wrong: its membership ends {(new.until - now) / 86_400:+.1f} days from now.", fix="Tell the host.",
                code=ExitCode.NETWORK,
            )  # fmt: skip
        self._members.own = new
        _write(self._path, self._members.run, self._members.own)

    def renew_meanwhile(self) -> threading.Event:
        """Start a thread that renews it daily until the returned event is set."""
        stop = threading.Event()
        threading.Thread(target=self._renew_until, args=[stop], name="membership", daemon=True).start()
        return stop

    def _renew_until(self, stop: threading.Event) -> None:
        while not stop.wait(_LOOK_SECONDS):
            if self._left() > LIFE_SECONDS - _RENEW_SECONDS:
                continue
            try:
                self.renew()
            except (UserError, OSError) as error:
                log.warning("cannot renew the membership yet, it lasts for %.1f days: %s", self._left() / 86_400, error)

    def _left(self) -> float:
        return self._members.own.until - self._wall() if self._members.own else 0.0


def _read(path: Path, run: RunConfig, peer: str) -> Membership | None:
    """That of this peer and run; None where there is none."""
    found = read_membership(_all(path).get(run.digest))
    return found if found and is_signed(run, peer, found) else None


def _write(path: Path, run: RunConfig, membership: Membership) -> None:
    try:
        files.replace(path, (json.dumps({**_all(path), run.digest: said(membership)}, indent=1) + "\n").encode())
    except OSError as error:
        log.warning("cannot keep the membership in %s: %s", path, error.strerror)


def _all(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
