"""Whether others can dial this peer. No peer can see that by itself, so it asks others to try ("dial me").

Whoever is asked dials with a fresh p2pd of its own, since an open connection would answer for a new one, and only at the IP address
from which it was asked: nobody can be made to knock at a third party's door. libp2p checks that the one who answers is who asked.
A p2pd costs half a second of a core to start, so questions are answered one at a time and a few a minute. A peer that is refused
asks others. If none of them can tell, it asks again for 75 s, and goes on in client mode if all stay busy: a peer that wrongly thinks
it can be dialled fails every round that it leads, and five strangers who ask all the time keep everybody's budget used up.
libp2p's own AutoNAT does much the same, but p2pd does not tell what it found.
"""

import asyncio
import ipaddress
import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

from swarm.daemon import Daemon
from swarm.listening import is_loopback
from swarm.places import ip_of, place_of
from swarm.quota import Quota

log = logging.getLogger(__name__)

DIAL_ME = "distributed-diffusion.dial-me.1"
ASK_SECONDS = 30.0
"""For one question, with the time that p2pd needs to start and to give up on addresses that swallow what is sent to them."""
DIAL_SECONDS = 6.0
_ASKED = 5
_MAX_ADDRESSES = 8
_PER_MINUTE, _PER_MINUTE_AND_ASKER = 6, 3
"""Questions answered: in all, and of one peer or one address. An asker that a router gave another port meanwhile asks twice."""
_QUEUE = 2
"""Questions at once, the one being answered among them: an asker waits ASK_SECONDS, and one dial takes up to 2 x DIAL_SECONDS."""
_PATIENCE_SECONDS, _AGAIN_SECONDS = 75.0, 5.0
"""How long a peer goes on asking busy ones, and how often: a budget is full for a minute, and two dials may come before ours."""
_MAX_REQUEST_BYTES = 4096
_ADDRESS = re.compile(r"/ip[46]/[0-9a-f.:]{2,39}/tcp/[0-9]{1,5}")


@dataclass(frozen=True)
class Finding:
    """What those who could tell found: how many they were, how many of them got through, and where; addresses without the peer id."""

    answers: int = 0
    reached: int = 0
    unannounced: str = ""
    """An address at which this peer answers although it does not announce it: a port is forwarded, and nobody was told."""
    busy: bool = False
    """Nobody could tell, and some had no budget or no time to try."""

    @property
    def unreachable(self) -> bool:
        """More of those who could tell did not get through than did, or nobody could tell because they were busy.

        Not so where nobody was there who knows the question: somebody must be the first whom others dial.
        """
        return 2 * self.reached <= self.answers if self.answers else self.busy

    def __str__(self) -> str:
        text = f"{self.answers - self.reached} of {self.answers} peers asked could not dial it"
        return f"{text}; it answers at {self.unannounced} and does not announce that, see --announce_maddrs" if self.unannounced else text


def explain(finding: Finding, maddrs: Sequence[str]) -> str:
    """In plain words what `finding` means for a peer that listens at `maddrs`, and what its owner can do about it."""
    places = [(ip, port) for ip, port in map(_ip_and_port, maddrs) if ip and port]
    said = "it dials the others, and its traffic goes by way of those that can be dialled (client mode): training works all the same."
    if finding.busy:
        return (
            f"whether others can dial this peer is not known: all who were asked were busy for {_PATIENCE_SECONDS:.0f} s, so {said} "
            "If you know that others can dial it, start it with --client_mode False"
        )
    if not finding.answers:
        return "whether others can dial this peer is not known: nobody was there to try"
    if not finding.unreachable:
        return f"others can dial this peer: {finding.reached} of {finding.answers} who tried got through ({', '.join(maddrs[:3])})"
    if finding.unannounced:
        return (
            f"others can dial this peer only at {finding.unannounced}; {said} Better: start it with --announce_maddrs {finding.unannounced}"
        )
    port = min((port for _, port in places), default=31338)
    ours = sorted({ip for ip, _ in places if ipaddress.ip_address(ip).version == 4 and not ipaddress.ip_address(ip).is_loopback})
    to = f"this machine ({', '.join(ours[:2])})" if ours else "this machine"
    return (
        f"others cannot dial this peer ({finding.answers - finding.reached} of {finding.answers} who tried did not get through), so {said} "
        f"To be dialled, open TCP port {port} in this machine's firewall and forward TCP port {port} on the router to {to}. Then start it with "
        f"--host_maddrs /ip4/0.0.0.0/tcp/{port} --announce_maddrs /ip4/YOUR-PUBLIC-IP/tcp/{port}"
    )


async def find_out(p2p: P2P, maddrs: Sequence[str]) -> Finding:
    """Ask peers that we are connected to whether they can dial us at `maddrs`, our own addresses without the peer id.

    Five at a time, those first that were asked least. While none can tell and one of them is busy, they are asked again,
    unless all who are busy are on this machine.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + _PATIENCE_SECONDS
    asked: Counter[PeerID] = Counter()
    busy: dict[PeerID, bool] = {}
    while True:
        connected = await asyncio.wait_for(p2p.list_peers(), ASK_SECONDS)
        peers = sorted(connected, key=lambda peer: asked[peer.peer_id])[:_ASKED]
        asked.update(peer.peer_id for peer in peers)
        said = await asyncio.gather(*(_ask(p2p, peer.peer_id, maddrs) for peer in peers))
        answers = [reached for reached, _ in said if reached is not None]
        for peer, (_, is_busy) in zip(peers, said, strict=True):
            busy[peer.peer_id] = is_busy and not _all_loopback(peer.addrs)
        if answers or not any(busy.values()) or loop.time() >= until:
            break
        log.info("the peers asked to dial this one are busy: asking again in %.0f s", _AGAIN_SECONDS)
        await asyncio.sleep(_AGAIN_SECONDS)
    announced = [answer for answer in answers if answer in maddrs]
    unannounced = next((answer for answer in answers if answer and answer not in maddrs), "")
    return Finding(len(answers), len(announced), unannounced, busy=not answers and any(busy.values()))


async def _ask(p2p: P2P, peer: PeerID, maddrs: Sequence[str]) -> tuple[str | None, bool]:
    """The address at which `peer` got through to us, '' when at none; None when it could not tell, and whether for want of time."""
    try:
        request = json.dumps(list(maddrs[:_MAX_ADDRESSES])).encode()
        answer = json.loads(await asyncio.wait_for(p2p._client.call_unary_handler(peer, DIAL_ME, request), ASK_SECONDS))
        reached = answer["reached"]
        if isinstance(reached, str) and reached and reached not in maddrs and not _ADDRESS.fullmatch(reached):
            raise ValueError("no address")  # it would stand in a command that the owner is told to run
        return (reached, False) if isinstance(reached, str) else (None, answer.get("busy") is True)
    except asyncio.TimeoutError:
        return None, True
    except Exception as error:  # one that knows no such question or is gone: hivemind raises its own kinds
        log.debug("%s did not say whether it can dial us: %r", peer.to_base58()[-6:], error)
        return None, False


def _all_loopback(maddrs: Iterable[Multiaddr]) -> bool:
    return all(is_loopback(ip) for ip in map(ip_of, maddrs) if ip)


class _Busy(Exception):
    """There is no budget, or no room to wait in."""


class Prober:
    """Answers those who ask on `p2p`, within a budget, one after the other. It cannot tell what it is not free to try."""

    def __init__(self, p2p: P2P):
        self._p2p, self._dialling, self._waiting = p2p, asyncio.Lock(), 0
        self._budget = Quota(_PER_MINUTE, _PER_MINUTE_AND_ASKER, 60.0)

    async def start(self) -> None:
        await self._p2p._client.add_unary_handler(DIAL_ME, self._answer)

    async def _answer(self, request: bytes, caller: PeerID) -> bytes:
        try:
            return json.dumps({"reached": await self._try(caller, _parse(request))}).encode()
        except _Busy:
            return json.dumps({"reached": None, "busy": True}).encode()

    async def _try(self, caller: PeerID, maddrs: Sequence[Multiaddr]) -> str | None:
        """As `_dial`; None for a caller whose addresses are not for us to dial. Raises _Busy."""
        peer = caller.to_base58()
        if self._waiting >= _QUEUE or not self._budget.allows(peer):  # before p2pd is asked: this is what a flood of questions costs
            raise _Busy
        self._waiting += 1
        try:
            async with self._dialling:
                addrs = [maddr for info in await self._p2p.list_peers() if info.peer_id == caller for maddr in info.addrs]
                if not self._budget.allows(peer, *(places := {place_of(maddr) for maddr in addrs})):
                    raise _Busy
                groups = [group for group in at_its_own_address(maddrs, {ip for ip in map(ip_of, addrs) if ip}) if group]
                if not groups:
                    return None
                self._budget.take(peer, *places)
                return await _dial(caller, groups)
        finally:
            self._waiting -= 1


def _parse(request: bytes) -> list[Multiaddr]:
    """The addresses of a question. Raises ValueError."""
    if len(request) > _MAX_REQUEST_BYTES:
        raise ValueError("too long a question")
    try:
        maddrs = json.loads(request)
        if not isinstance(maddrs, list) or not all(isinstance(maddr, str) for maddr in maddrs):
            raise ValueError("no list of addresses")
        return [Multiaddr(maddr) for maddr in maddrs[:_MAX_ADDRESSES]]
    except Exception as error:  # the library of addresses raises its own kinds, and JSON that is nested 1,000 deep a RecursionError
        raise ValueError(f"no question: {type(error).__name__}") from None


async def _dial(caller: PeerID, groups: Iterable[Sequence[Multiaddr]]) -> str:
    """The address at which `caller` answers, of the first group of which one does; '' when at none. One p2pd for all."""
    daemon = await Daemon.start(host_maddrs=None, no_listen=True, dht_mode="client", use_relay=False, auto_nat=False, nat_port_map=False)
    try:
        for group in groups:
            if answered := await _answers(daemon.p2p, caller, group):
                return answered
        return ""
    finally:
        await daemon.close()


def at_its_own_address(maddrs: Iterable[Multiaddr], seen_at: Collection[str]) -> tuple[list[Multiaddr], list[Multiaddr]]:
    """Which addresses to dial for a caller that is seen at the IP addresses `seen_at`: those it announces there, and guesses.

    Behind a router that forwards a port, a private address answers at the router's, often at the same port: the guesses. A caller
    that announces other public addresses may be reachable there, but those are not for us to dial: both lists are empty then.
    """
    announced, guessed = [], []
    for maddr in maddrs:
        ip = ip_of(maddr)
        if not ip:
            return [], []  # a name, or a relay: we cannot tell whose it is
        if ip in seen_at:
            announced.append(maddr)
        elif ipaddress.ip_address(ip).is_global:
            return [], []
        else:
            ours = (seen for seen in sorted(seen_at) if ipaddress.ip_address(seen).version == ipaddress.ip_address(ip).version)
            guessed += [Multiaddr(str(maddr).replace(ip, seen, 1)) for seen in ours]
    return announced, [maddr for maddr in dict.fromkeys(guessed) if maddr not in announced]


async def _answers(p2p: P2P, peer: PeerID, maddrs: Sequence[Multiaddr]) -> str:
    """Which of `maddrs` the first connection of `p2p` to `peer` came about at, or ''."""
    try:
        await asyncio.wait_for(p2p._client.connect(peer, maddrs), DIAL_SECONDS)
        connected = {str(maddr) for info in await p2p.list_peers() if info.peer_id == peer for maddr in info.addrs}
        return next((str(maddr) for maddr in maddrs if str(maddr) in connected), "")
    except (ControlFailure, asyncio.TimeoutError) as error:
        log.debug("%s does not answer at %s: %r", peer.to_base58()[-6:], ", ".join(map(str, maddrs)), error)
        return ""


def _ip_and_port(maddr: str) -> tuple[str, int]:
    parsed = Multiaddr(maddr)
    return ip_of(parsed), int(parsed["tcp"]) if "tcp" in parsed else 0
