"""Joining the Hivemind DHT: one p2pd and one DHT node under a lasting identity, all in the caller's asyncio loop.

hivemind's own `DHT` class forks a process; a node in our loop needs no fork, so that whoever owns the loop owns everything
(docs/decisions/0002). Dies with its process: p2pd is told by the kernel, also after SIGKILL.
"""

import asyncio
import contextlib
import functools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from swarm import clock, dht_direct, reachability
from swarm.daemon import Daemon
from swarm.dht_blacklist import Forgiving
from swarm.dht_protocol import DHTProtocol, refusals
from swarm.dht_rules import RUNS_KEY, Rules, Signatures, key_in, peers_key, signer_of
from swarm.dht_storage import MOST_OF_A_KEY
from swarm.errors import ExitCode, UserError
from swarm.identity import Identity
from swarm.maddrs import by_peer, parse_maddrs, peer_at
from swarm.members import Members
from swarm.peer_key import PeerKey, has_signed, is_lot
from swarm.pipe import Pipe
from swarm.places import place_of
from swarm.ports import refuse_busy, with_ports
from swarm.records import MAX_RECORD_BYTES, RECORD_LIFE_SECONDS, RUN_RECORD_LIFE_SECONDS, BadRecord, PeerRecord, RunRecord

log = logging.getLogger(__name__)

JOIN_SECONDS = 60.0
ANSWER_SECONDS = 10.0
"""In which p2pd answers a question about itself, or hangs."""
_MOST_CAME_BY = 2


class SwarmNode:
    """This process in the DHT. Create with `await SwarmNode.join(...)`; `p2p` carries further streams of the same identity."""

    def __init__(self, daemon: Daemon, dht: DHTNode, identity: Identity, validator: Signatures, rules: Rules, client_mode: bool):
        self.p2p, self.client_mode = daemon.p2p, client_mode
        self._daemon, self._dht, self._identity, self._validator, self._rules = daemon, dht, identity, validator, rules
        self.reachability = ""
        """In plain words, what those who were asked to dial this node found; '' when nobody was asked."""
        self.peer_id = identity.peer_id
        self.unread: frozenset[str] = frozenset()
        """Peers whose signed records under the run's key were no records as this program knows them, when we last looked."""
        self.came_by: list[list[str]] = []
        """Addresses of those by whom we came into the swarm, above all the dataset server's node: one list per peer."""
        assert isinstance(dht.protocol, DHTProtocol)
        self._stored = dht.protocol.storage
        self._stored.ours = validator.local_public_key
        self._is_known: Callable[[str], bool] = lambda peer: False
        self._keys: dict[str, str] = {}
        """The public keys of those whose records we read last."""

    @classmethod
    async def join(
        cls,
        *,
        initial_peers: Sequence[str] = (),
        host_maddrs: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce_maddrs: Sequence[str] = (),
        identity_path: Path,
        client_mode: bool | None = False,
        deadline_seconds: float = JOIN_SECONDS,
    ) -> "SwarmNode":
        """Start p2pd and a DHT node; tries again until the deadline.

        host_maddrs: tcp/0 is any free port, after a restart the one it had before if that is still free.
        client_mode: None finds out, by asking those of `initial_peers` that answer whether they can dial this peer.

        Raises UserError for bad addresses, an identity in use, a port in use, or when none of `initial_peers` answers in time.
        """
        parse_maddrs(initial_peers, need_peer_id=True)
        parse_maddrs([*host_maddrs, *announce_maddrs], need_peer_id=False)
        if not client_mode:
            refuse_busy(host_maddrs)
        use_hivemind_log_handler("nowhere")
        identity = Identity(identity_path)
        deadline, pause = time.monotonic() + deadline_seconds, 1.0
        try:
            while True:
                try:
                    listening = host_maddrs if client_mode else with_ports(host_maddrs, identity_path.with_suffix(".ports"))
                    return await cls._start(identity, initial_peers, listening, announce_maddrs, client_mode)
                except (ValidationError, P2PDaemonError, RuntimeError, OSError, asyncio.TimeoutError) as error:
                    if isinstance(error, ValidationError) and "local time" in str(error):
                        raise UserError(
                            f"All known peers refuse this machine's clock: {error}.", fix=clock.FIX, code=ExitCode.CLOCK
                        ) from None
                    reason = _readable(error, host_maddrs, initial_peers)
                    if time.monotonic() + pause > deadline:
                        raise UserError(reason, fix=_cure(reason), code=ExitCode.NETWORK) from None
                    log.warning("joining failed, trying again in %.0f s: %s", pause, reason)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, 10)
        except BaseException:
            identity.close()
            raise

    @classmethod
    async def _start(
        cls,
        identity: Identity,
        initial_peers: Sequence[str],
        host_maddrs: Sequence[str],
        announce_maddrs: Sequence[str],
        client_mode: bool | None,
    ) -> "SwarmNode":
        # Who can be dialled relays for those who cannot; these look for relays among the peers that they know. It takes libp2p 3 minutes.
        places = {
            "host_maddrs": list(host_maddrs),
            "announce_maddrs": list(announce_maddrs) or None,
            "dht_mode": "server",
            "force_reachability": "public",
        }
        nowhere = {"host_maddrs": None, "no_listen": True, "dht_mode": "client", "force_reachability": "private", "use_auto_relay": True}
        common = {"initial_peers": list(initial_peers) or None, "identity_path": str(identity.path)}
        daemon = await Daemon.start(**common, **(nowhere if client_mode else places))
        try:
            unreachable, found = await _unreachable(daemon.p2p) if client_mode is None and initial_peers else (False, "")
            if unreachable:
                client_mode = True
                await daemon.close()
                daemon = await Daemon.start(**common, **nowhere)
            validator = Signatures(identity.key)
            with refusals():
                dht = await DHTNode.create(
                    p2p=daemon.p2p,
                    initial_peers=common["initial_peers"],
                    client_mode=bool(client_mode),
                    record_validator=CompositeValidator([rules := Rules(), validator]),
                    cache_locally=False,  # a cache has no bounds, and would be handed on
                    cache_nearest=0,
                    bootstrap_timeout=5,
                )
            dht.blacklist = Forgiving()
            await reachability.Prober(daemon.p2p).start()
        except BaseException:
            await daemon.close()
            raise
        node = cls(daemon, dht, identity, validator, rules, bool(client_mode))
        node.reachability = found
        node.keep_meeting(initial_peers)
        return node

    def keep_meeting(self, maddrs: Sequence[str]) -> None:
        """These peers are dialled again and again, whether they answer now or not."""
        self.came_by = by_peer(maddrs)[:_MOST_CAME_BY]

    def admit(self, members: Members) -> None:
        """From now on, store and read records of that run's peers only if `members` admits them."""
        if members.needed and self._rules.admit(members):
            self._stored.drop(DHTID.generate(source=peers_key(members.run.run_id)))  # what strangers brought before

    def prefer(self, is_known: Callable[[str], bool]) -> None:
        """Where there is no room for all, records of peers that are known have it: in what we store, and in what we read."""
        self._is_known = is_known
        self._stored.is_known = lambda owner: is_known(signer_of(msgpack.packb(owner)))

    async def maddrs(self) -> list[str]:
        """Addresses, each with our peer id, under which others may reach us; none in client mode."""
        return [] if self.client_mode else [str(maddr) for maddr in await self.p2p.get_visible_maddrs(latest=True)]

    async def ended_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for our p2pd to end; whether it has."""
        return await self._daemon.ended_within(seconds)

    def sign(self, statement: bytes) -> str:
        """This peer's signature, in base64."""
        return self._identity.key.sign(statement).decode()

    def key_of(self, peer: str) -> str:
        """The public key of `peer`, in OpenSSH's words: ours, or that of a record that we read last; '' for another's."""
        own = peer == self.peer_id
        return self._identity.key.get_public_key().to_bytes().decode() if own else self._keys.get(peer, "")

    def has_signed(self, peer: str, statement: bytes, key: str, signature: str) -> bool:
        """Whether `key` is that of `peer`, and made `signature` for `statement`."""
        return has_signed(peer, statement, key, signature)

    def lot(self, statement: bytes) -> str:
        """What this peer draws for `statement`: always the same."""
        return self._lots.lot(statement)

    @functools.cached_property
    def _lots(self) -> PeerKey:
        return PeerKey.read(self._identity.path)

    def is_lot(self, peer: str, statement: bytes, key: str, lot: str) -> bool:
        """Whether `key` is that of `peer`, and draws `lot` for `statement`."""
        return is_lot(peer, statement, key, lot)

    async def alive(self) -> bool:
        """Whether p2pd still answers: a real call, since hivemind notices nothing of its death. And whether hivemind still reads what it says."""
        if self._daemon.is_deaf:
            return False
        try:
            await asyncio.wait_for(self.p2p._client.identify(), ANSWER_SECONDS)
            return True
        except Exception:
            return False

    async def meet(self, maddrs: Sequence[str]) -> bool:
        """Dial a peer we knew before, and put it into our routing table again; hivemind forgets those it cannot reach for good."""
        try:
            parsed = [Multiaddr(maddr) for maddr in parse_maddrs(maddrs, need_peer_id=True)]
            peer = PeerID.from_base58(parsed[0]["p2p"])
            bare = [Multiaddr(str(maddr).rsplit("/p2p/", 1)[0]) for maddr in parsed]
            await asyncio.wait_for(self.p2p._client.connect(peer, bare), 5)
            if await asyncio.wait_for(self._dht.protocol.call_ping(peer), 5) is None:
                return False
            self._dht.blacklist.register_success(peer)  # else it is asked for no record until its ban is over
            return True
        except Exception as error:
            log.debug("could not meet %s: %r", ", ".join(maddrs[:2]), error)
            return False

    async def publish(self, run_id: str, record: PeerRecord) -> bool:
        """Sign and store our record for RECORD_LIFE_SECONDS."""
        return await self._store(peers_key(run_id), record.pack(), RECORD_LIFE_SECONDS)

    async def publish_run(self, record: RunRecord) -> bool:
        """Let newcomers who know no more than an address find the run."""
        return await self._store(RUNS_KEY, record.pack(), RUN_RECORD_LIFE_SECONDS)

    async def records(self, run_id: str) -> dict[str, PeerRecord]:
        """Live peers of the run by peer id: signed by the key of that id, within bounds; ours included."""
        found, unread, keys = {}, set(), {}
        for owner, data, key in await self._owned(peers_key(run_id)):
            keys[owner] = key
            try:
                found[owner] = PeerRecord.unpack(data, owner=owner)
            except BadRecord as error:
                unread.add(owner)
                log.debug("ignored a record of %s: %s", owner, error)
        self.unread, self._keys = frozenset(unread), keys
        return found

    async def find_runs(self) -> dict[str, RunRecord]:
        """What peers that can be reached from here say about their runs, by the peer id of who signed it; `discovery.py` chooses."""
        found = {}
        for owner, data, _ in await self._owned(RUNS_KEY):
            try:
                found[owner] = RunRecord.unpack(data)
            except BadRecord as error:
                log.debug("ignored a run record of %s: %s", owner, error)
        return found

    async def dial(self, peer: str, name: str) -> Pipe:
        """A new stream to what `peer` serves under `name`. Raises an error of asyncio's or hivemind's when there is none."""
        # Not `call_binary_stream_handler`: it leaves the connection to p2pd open for good whenever the dial fails (seen).
        reader, writer = await asyncio.open_unix_connection(self.p2p.daemon_listen_maddr["unix"])
        try:
            await _become_stream(reader, writer, peer, name)
            return Pipe(reader, writer)
        except BaseException:
            writer.close()
            raise

    async def listen(self, name: str, handle: Callable[[str, str, Pipe], Awaitable[None]]) -> None:
        """Run `handle` for each stream that is opened to us under `name`: with the other peer, its place, as `places` names it, and the pipe."""

        async def on_stream(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = info.peer_id.to_base58()
            try:
                pipe = Pipe(reader, writer)
            except OSError as error:  # no descriptor is left
                log.warning("%s from %s failed: %s", name, peer[-6:], error)
                return writer.close()
            await handle(peer, place_of(info.addr), pipe)

        await self.p2p.add_binary_stream_handler(name, on_stream)

    async def close(self) -> None:
        """End the node and p2pd."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._dht.shutdown(), 5)
        await self._daemon.close()
        self._identity.close()

    async def _store(self, name: str, data: bytes, seconds: float) -> bool:
        if len(data) > MAX_RECORD_BYTES:  # of a run whose configuration came from others, sparse and long
            raise BadRecord(f"a record of {len(data)} bytes, at most {MAX_RECORD_BYTES} are allowed")
        key, until, owner = DHTID.generate(source=name), time.time() + seconds, self._validator.local_public_key
        self._stored.reserve(key)
        if not self.client_mode:
            # Strangers can take the places nearest to a key, and with them all copies. Who looks asks this node as well.
            record = DHTRecord(key.to_bytes(), msgpack.packb(owner), msgpack.packb(data), until)
            self._stored.store(key, self._validator.sign_value(record), until, subkey=owner)
        # A little newer, so that our own node, if it is one of the nearest, says yes to it as well.
        return bool(await self._dht.store(name, data, expiration_time=until + 1e-3, subkey=owner))

    async def _owned(self, key: str) -> list[tuple[str, bytes, str]]:
        """(peer id, record, public key) of as many peers as one node may keep, however many nodes answered: ours, known ones, and the others."""
        name = DHTID.generate(source=key)
        self._stored.reserve(name)
        with self._dht.protocol.watching(name) as answered:
            answer = await self._dht.get(key, latest=True)
        items = dict(answer.value) if answer is not None else {}
        found_of = {signer_of(msgpack.packb(owner)) for owner in items}
        dht_direct.merge(items, await dht_direct.ask(self._dht, name, self._passed_over(answered, found_of)))
        live = {owner: item for owner, item in items.items() if item.expiration_time > time.time()}
        found = [(signer_of(msgpack.packb(owner)), item.value, key_in(owner)) for owner, item in live.items()]
        found.sort(key=lambda entry: (entry[0] != self.peer_id, not self._is_known(entry[0])))
        return found[:MOST_OF_A_KEY]

    def _passed_over(self, answered: Collection[PeerID], found_of: Collection[str]) -> list[PeerID]:
        """Whom to ask directly after a search, of those who have not answered: by whom we came, and known peers whose record was not found.

        At most MOST_ASKED. Where there are more, each look draws others.
        """
        came_by = filter(None, (peer_at(maddrs[0]) for maddrs in self.came_by))
        names = {peer: peer.to_base58() for peer in self._dht.protocol.routing_table.peer_id_to_uid}
        known = [peer for peer, name in names.items() if self._is_known(name) and name not in found_of]
        told = {*answered, self.p2p.peer_id}
        first = [peer for peer in came_by if peer not in told]
        rest = [peer for peer in known if peer not in told and peer not in first]
        return [*first, *random.sample(rest, min(len(rest), dht_direct.MOST_ASKED - len(first)))]


async def _become_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str, name: str) -> None:
    """Ask p2pd to turn this connection into a stream to `peer`."""
    opening = p2pd_pb2.StreamOpenRequest(peer=PeerID.from_base58(peer).to_bytes(), proto=[name])
    await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening))
    answer = p2pd_pb2.Response()
    await read_pbmsg_safe(reader, answer)
    raise_if_failed(answer)


async def _unreachable(p2p: P2P) -> tuple[bool, str]:
    """Whether to take it that others cannot dial us, and in plain words what they found."""
    maddrs = await _bare_maddrs(p2p)
    finding = await reachability.find_out(p2p, maddrs)
    # A router that maps a port for us (UPnP) may take longer than the question: then there is an address more to ask about.
    if finding.answers and finding.unreachable and maddrs != (mapped := await _bare_maddrs(p2p)):
        finding, maddrs = await reachability.find_out(p2p, mapped), mapped
    if finding.answers and finding.unreachable:
        log.info("client mode, because others cannot dial this peer: %s", finding)
    found = reachability.explain(finding, maddrs)
    log.info("%s", found)
    return finding.unreachable, found


async def _bare_maddrs(p2p: P2P) -> list[str]:
    return [str(maddr).rsplit("/p2p/", 1)[0] for maddr in await p2p.get_visible_maddrs(latest=True)]


def _readable(error: BaseException, host_maddrs: Sequence[str], initial_peers: Sequence[str]) -> str:
    text = str(error)
    if isinstance(error, ValidationError):  # a busy machine misses a first call, and one of two with the same identity gets the other's
        return "The known peers cannot call this one back."
    if "failed to listen" in text:
        return f"Cannot listen on {', '.join(host_maddrs)}."
    if "connect to bootstrap" in text or "initial_peers" in text:
        return f"None of the {len(initial_peers)} known peers answers (tried {', '.join(initial_peers[:3])})."
    return f"The peer-to-peer daemon did not start: {text or type(error).__name__}."


def _cure(reason: str) -> str:
    if "call this one back" in reason:
        return "Open its port, or pass --client_mode; and let no other machine use a copy of its identity."
    if "answers" in reason:
        return "Check that they are running and that their port is open; then start again."
    return "Run again with --debug to see more."
