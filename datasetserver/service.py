"""What the handlers of a server's requests share: its run, ledger, keys and files, and how the run is doing now."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from datasetserver import answers
from datasetserver.bans import say
from datasetserver.book import Book
from datasetserver.founding import check_host_key
from datasetserver.gallery import Gallery
from datasetserver.ledger import Ledger
from datasetserver.limits import Limits
from datasetserver.metrics import Metrics
from datasetserver.newcomers import Newcomers
from datasetserver.origins import Names
from datasetserver.prepared import Ingested, in_order, manifest_path
from datasetserver.proven import PROOFS_FILE, Proven
from datasetserver.refused import Refused
from datasetserver.rendezvous import Rendezvous
from datasetserver.signed import Signatures
from datasetserver.states import States
from datasetserver.tokens import Tokens
from datasetserver.tree import State
from swarm import proofs, protocol
from swarm.bans import Bans
from swarm.base_model import shown_model
from swarm.end import End, sign_extension
from swarm.figures import mean_loss
from swarm.page.history import History
from swarm.page.watch import Watch
from swarm.protocol import BANNED
from swarm.records import HostWord
from swarm.run_config import RunConfig
from swarm.signing import HostKey

Request = TypeVar("Request", bound=protocol.Message)


@dataclass
class Service:
    """All that the handlers need. `url`: how peers reach this server; `key`: what its host signs with; `rendezvous`: None without a DHT.

    `run` and `ledger` are None until there is a run: the host's, or that of the first peer that founds one. `tokens`: None where
    whoever reaches the server may use it.
    """

    data: Ingested
    work_dir: Path
    url: str
    key: HostKey
    open_ledger: Callable[[RunConfig], Ledger]
    rendezvous: Rendezvous | None = None
    run: RunConfig | None = None
    ledger: Ledger | None = None
    tokens: Tokens | None = None
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)
    pictures_from: Sequence[str] = ()
    states: States = field(default_factory=lambda: States(None))
    names: Names = field(default_factory=Names)
    signatures: Signatures = field(default_factory=Signatures)
    newcomers: Newcomers = field(default_factory=Newcomers)
    for_members: bool = False
    """Whether a run that a peer founds here is for members."""
    wall: Callable[[], float] = time.time
    """UNIX seconds."""
    extended: Callable[[], int] = lambda: 0
    """To how many samples the host lets the run go on; 0: to its own total."""
    banned: Callable[[], Sequence[HostWord]] = lambda: ()
    """The host's words about peers, as of the last second."""
    countersign_at: float = field(default=0.0, init=False)
    """When a state is to be countersigned again, by `wall`."""
    _end: End | None = field(default=None, init=False)
    _bans: Bans | None = field(default=None, init=False)
    _words: Sequence[HostWord] = field(default=(), init=False)
    proven: Proven = field(init=False)
    """Whom a proof keeps out; there is a run."""

    def __post_init__(self) -> None:
        self.shards = {shard.digest: shard for shard in in_order(self.data.manifest)}
        self.manifest_bytes = manifest_path(self.work_dir).stat().st_size
        self.gallery = Gallery(self.work_dir / "gallery")
        self.watch = Watch(partial(_look, self), History(self.work_dir / HISTORY), pictures=lambda: self.gallery.version)

    def begin(self, run: RunConfig) -> None:
        """Serve `run` from now on; it is on the disk when this returns. Raises UserError when the ledger is another run's, or the key is lost
        with which its members were let in."""
        check_host_key(run, self.key, self.work_dir)
        self.key.keep()  # before the ledger names it
        self.ledger, self.run, self._end = self.open_ledger(run), run, End(run, self.key.public)
        self._bans, self._words = Bans(run, self.key.public), ()
        self.proven = Proven(run, self.work_dir / PROOFS_FILE)
        if self.rendezvous:
            self.rendezvous.tell(run_id=run.run_id, run=run.to_mapping())

    def extension(self) -> dict[str, Any] | None:
        """The host's signed order that the run goes on, which peers pass on to each other; None without one."""
        if self._end is None:
            return None
        total = self.extended()
        if total > self._end.total and self._end.extend(sign_extension(self.key, self.run, total)) and self.rendezvous:
            self.rendezvous.tell(extension=self._end.extension)
        return self._end.extension

    @property
    def bans(self) -> Bans:
        """Whom the host keeps out, as of the last second; there is a run."""
        if (words := self.banned()) is not self._words:
            self._words = words
            self._bans.hear(words)
        return self._bans

    def discard(self, digest: str, reason: str) -> None:
        """Forget a state and all that descends from it, as the host does by `dd-datasetserver discard`; there is a run. Raises UserError."""
        self._bans.hear([say(self.work_dir, self.run, digest, banned=True, reason=reason, clock=self.wall)])

    @property
    def total_samples(self) -> int:
        """Where the run ends, extensions included; 0: nowhere."""
        self.extension()
        return self._end.total

    def live_peers(self) -> list[protocol.PeerInfo]:
        """Without those that the host or a proof bans."""
        peers = self.rendezvous.peers() if self.rendezvous else []
        banned = {*self.bans.peers(), *self.proven.peers()} if self.run else ()
        return [peer for peer in peers if peer.peer_id not in banned]


HISTORY = "history.sqlite"
_LONG_BYTES = 256 << 10
"""What is longer is taken apart only for who has signed it: 2.4 MB of keys take 65 ms. Who makes a mistake in a shorter one is told that first."""
SERVICE = web.AppKey("service", Service)


def with_run(request: web.Request, *, status: int) -> Service:
    """The service, which has a run and a ledger; Refused with `status` while it has none."""
    service = request.app[SERVICE]
    if service.run is None:
        message = f"This server has no run yet; its dataset is {service.data.digest}."
        raise Refused(status, "no_run", message, "Found one: start the first peer with --found and --model.")
    return service


async def for_run(request: web.Request, model: type[Request]) -> tuple[Service, Request]:
    """The service and the request's body as `model`, which is about the run that is served, and signed by its peer. Raises Refused."""
    service, body = with_run(request, status=409), await answers.read_body(request, model.most_bytes)
    if len(body) > _LONG_BYTES:
        service.signatures.glance(request.headers)
    asked = answers.parse(body, model)
    if asked.run_id != service.run.run_id:
        message = f"This server serves run {service.run.run_id}, not {asked.run_id}."
        raise Refused(409, "other_run", message, "Check the URL, or join this run.")
    service.signatures.check(asked.peer, request.method, request.path, request.headers, body)
    if reason := service.bans.reason(asked.peer):
        raise Refused(403, BANNED, f"The host has banned this peer: {reason}.", "Ask the host.")
    if reason := service.proven.reason(asked.peer):
        raise Refused(403, BANNED, f"This peer is banned by a proof of its own key: {reason}.", proofs.FIX)
    return service, asked


async def progress_of(service: Service) -> protocol.Progress:
    peers = service.live_peers()
    figures = await service.ledger.call(_figures)
    return protocol.Progress(
        run_id=service.run.run_id,
        run_name=service.run.run_name,
        total_samples=service.total_samples,
        target_batch_size=service.run.target_batch_size,
        resolution=service.run.resolution,
        model=shown_model(service.run.model),
        method=service.run.method,
        waiting_samples=min(sum(peer.waiting_samples for peer in peers), protocol.MAX_COUNT),  # each peer's own word
        samples_per_second=sum(peer.samples_per_second for peer in peers),
        loss=mean_loss((peer.loss, peer.samples_per_second) for peer in peers),
        peers=peers,
        banned={peer: service.bans.reason(peer) for peer in sorted(service.bans.peers())},
        proven=service.proven.reasons(figures.pop("wrong")),
        trusted=sorted(service.bans.trusted),
        dataset_samples=service.data.manifest.total,
        checkpoint=service.states.newest(),
        server_time=service.wall(),
        **figures,
    )


async def _look(service: Service) -> dict | None:
    return (await progress_of(service)).model_dump() if service.run is not None else None


def _figures(book: Book) -> dict:
    book.sweep()
    head, (epoch, epoch_samples) = book.tree.head, book.shard_epochs.epoch_progress()
    return {
        "round": head.round if head else 0,
        "samples": book.counted_samples,
        "repeated_samples": book.repeated_samples,
        "samples_by_peer": book.samples_by_peer(),
        "epoch": epoch,
        "epoch_samples": epoch_samples,
        "ledger": protocol.LedgerTotals(**book.shard_epochs.totals()),
        "finished": book.state == "ended",
        "state": book.state,
        "wrong": book.wrong.all(),
    }


def as_head(state: State | None) -> protocol.Head | None:
    return state and protocol.Head(digest=state.digest, round=state.round, samples=state.samples, reporters=list(state.reporters))
