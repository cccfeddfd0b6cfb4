"""`dd-peer --assist`: a peer that trains nothing, for volunteers whom nobody can dial. What it does is in peer/sync/engine/assistant.py."""

import asyncio
import collections
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peer.audit.auditor import Auditor
from peer.config import PeerConfig
from peer.contracts import CommittedRound
from peer.data.client.runs import fetch_run, report_round
from peer.drawing.artist import Artist
from peer.figures.audience import show
from peer.launch.joining import Joined, from_before
from peer.launch.membership import kept
from peer.launch.resolving import known_hosts, token_for
from peer.launch.stopping import Stop, wishes
from peer.machine.device import describe_hardware
from peer.results.output_folder import Owner, claim, lock, made
from peer.sync.engine.assistant import Known
from peer.sync.engine.assistant import assist as take_part
from peer.sync.engine.net.bucket import Bucket
from peer.sync.engine.state import Head
from peer.sync.engine.transfer.discarded import discard
from swarm.bans import Bans
from swarm.dht import SwarmNode
from swarm.end import EXTENSION_FILE, End
from swarm.errors import ExitCode, UserError
from swarm.identity import Identity
from swarm.life import TRAINING, Life
from swarm.logs import setup_logging
from swarm.members import Members
from swarm.peer_key import PeerKey
from swarm.records import ASSIST
from swarm.run.strategy import swarms
from swarm.signed_request import Signer
from swarm.tasks import end_tasks

log = logging.getLogger(__name__)

HELP = """usage: dd-peer --assist (--datasetserver URL | --peers MULTIADDR ...) --output_dir FOLDER

A peer that trains nothing. Run one where the volunteers are all behind routers that let nobody in, or may all be away at once:
it averages for them, hands the newest state to newcomers, and keeps every final state, so that they find the run where they left it.
It needs a port that others can reach, a fast link, memory for two states and a round's mean, and disk for four and those it keeps;
but neither GPU nor model nor data. Only a peer that trains can give it the first state; it waits until one comes.
With --validation_prompts it also draws them, for the page of the run's host, and with --audit it looks for members whose work makes the model
worse: for these it needs the model, and memory for it.

  --datasetserver URL          the run's dataset server; alone enough to find the run
  --token TOKEN                the token that its host gave you, if it asks for one; or DD_TOKEN in the environment
  --peers MULTIADDR ...        peers of the run, in its place
  --output_dir FOLDER          states (state/, settled/), rounds.jsonl and identity.key; start with the same folder to go on
  --host_maddrs MULTIADDR      a fixed port to listen on: /ip4/0.0.0.0/tcp/31337
  --announce_maddrs MULTIADDR  where others reach that port, if a router or a cloud translates it: /ip4/203.0.113.7/tcp/31337
  --peer_name NAME             its name on the page and in dd-status
  --states_total_limit N       keep the N newest final states; 0: all of them
  --validation_prompts "A" ... draw these from the newest final state, on the CPU in a process of its own, into validation/ and the page
  --validation_steps N         every N rounds; 0: every round, but not before the one before is drawn
  --audit N                    measure what N members' contributions of each round do to the loss of the server's pictures, in a process of its own:
                               see docs/security.md
  --model MODEL                where the run's base model lies here, if not where the run says
  --metrics_port N             figures for Prometheus at http://127.0.0.1:N/metrics

Ctrl-C, SIGTERM or closing its terminal ends it in order. With one in the swarm the volunteers need no open port: each peer finds out whether others can dial it.
A model's folder from the newest state, also when everybody is gone:

  dd-export --state FOLDER --out model
  dd-generate --model model --prompt "a red square"

All options of a peer: dd-peer --help all
"""
_JOIN_SECONDS, _REJOIN_SECONDS = 60.0, 10.0
_LAST_REPORTS_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
_OF_TRAINING = (
    "min_peers", "train_batch_size", "gradient_accumulation_steps", "weights", "base_precision", "fused_step", "swap_to", "fit",
    "overlap", "gradient_checkpointing", "max_train_steps", "num_train_epochs", "lr_warmup_steps", "scale_lr", "use_ema", "ema_decay",
    "lease_samples", "compile", "channels_last", "ipex", "dataloader_num_workers", "loader_prefetch_size", "device_prefetch_size", "cache_dir",
    "cache_gib", "cache_latents", "cache_text", "hours", "train_data_dir", "dataset_name", "dataset_config_name", "dataset_split", "dataset_part",
    "image_column", "caption_column", "instance_prompt", "max_train_samples", "repeats", "with_prior_preservation", "class_data_dir",
    "class_prompt", "prior_loss_weight", "num_class_images", "output_bucket_info", "checkpointing_steps", "checkpoints_total_limit",
    "resume_from_checkpoint", "save_steps", "save_as_full_pipeline", "safe_serialization", "push_to_hub", "hub_model_id", "report_to",
    "logging_dir", "tracker_project_name", "print_loss", "profile_duration", "nproc_per_node",
)  # fmt: skip
"""Options that do nothing here."""


def assist(peer: PeerConfig, resolve: Callable[[], Joined], given: Mapping[str, Any] = {}) -> int:
    """Assist until the run's end, or until told to stop. resolve() asks for the run; given: what is said of it here. Raises UserError."""
    setup_logging(debug=peer.debug, name=Path(peer.output_dir).name, log_format=peer.log_format)
    warn_of_unused(peer)
    stop = Stop(after="").listen()
    torch.set_num_threads(1)
    folder = made(Path(peer.output_dir))
    with lock(folder):
        return _assist_in(folder, peer, resolve, given, stop)


def warn_of_unused(peer: PeerConfig) -> None:
    """One line about the options that were given and do nothing here."""
    plain, used = PeerConfig(), ("cache_dir", "cache_gib") if peer.audit else ()
    if given := [f"--{name}" for name in _OF_TRAINING if name not in used and getattr(peer, name) != getattr(plain, name)]:
        log.warning("--assist trains nothing, and has no use for %s", ", ".join(given))


def _assist_in(folder: Path, peer: PeerConfig, resolve: Callable[[], Joined], given: Mapping[str, Any], stop: Stop) -> int:
    with ExitStack() as closing:
        with stop.before_it_begins():
            joined, known = _run(folder / "run.json", resolve, known_hosts(peer).key_of)
            members = _members(folder, peer, joined, closing)
        discard(folder / "state", peer.discard_state)
        asyncio.run(_until_stopped(peer, given, folder, joined, known, members, stop, Life.of_process()))
    return ExitCode.OK


def _members(folder: Path, peer: PeerConfig, joined: Joined, closing: ExitStack) -> Members:
    """The run's members, this peer among them. Asked before the swarm is joined, which takes up to 60 s.

    Raises UserError when the run averages nothing, and when its server does not let this peer in.
    """
    if not swarms(joined.run.sync):
        raise UserError(
            f"The run '{joined.run.run_name}' has --sync none: its peers average nothing.", fix="There is nothing to assist with."
        )
    if peer.audit and not joined.server_url:
        raise UserError(
            "--audit measures the loss of the dataset server's pictures, and this run has none.", fix="Remove --audit, or name the server with --datasetserver."
        )
    Identity(peer.identity_file).close()  # makes the key that the server is asked to let in
    return kept(joined, peer, Bans(joined.run, joined.host_key, joined.bans, path=folder / "bans.json"), closing)


def _run(path: Path, resolve: Callable[[], Joined], key_of: Callable[[str], str]) -> tuple[Joined, bool]:
    """The run, and whether this peer was in it before: then it goes on alone when all the others are away."""
    try:
        joined = resolve()
    except UserError as error:
        if error.code != ExitCode.NETWORK or not path.exists():
            raise
        log.warning("going on with the run known from before: %s", error)
        return from_before(path.parent, key_of), True
    about = joined.about()
    return joined, claim(path.parent, Owner(id=joined.run.run_id, name=joined.run.run_name, alone=False, about=about))


async def _until_stopped(
    peer: PeerConfig,
    given: Mapping[str, Any],
    folder: Path,
    joined: Joined,
    known: bool,
    members: Members,
    asked: Stop,
    alive: Life,
) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    # hivemind leaves tasks behind when p2pd or a stream goes away; what matters of that, the watchdog and PeerLost tell.
    loop.set_exception_handler(lambda _, context: log.debug("%s: %r", context["message"], context.get("exception")))

    def stop(number: int) -> None:
        asked.hear(number)
        stopped.set()

    for number in wishes():
        loop.add_signal_handler(number, stop, number)
    if asked():
        return
    living = asyncio.create_task(_show_life(alive))
    joining, stopping = asyncio.create_task(_node(peer, joined, known)), asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({joining, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if joining.done():
            with ExitStack() as shown:
                await _assist(peer, given, folder, joined, joining.result(), members, stopped, shown)
    finally:
        await end_tasks(joining, stopping, living)


async def _show_life(alive: Life) -> None:
    """The loop that all work is done in still turns."""
    while True:
        alive(TRAINING)
        await asyncio.sleep(1)


async def _assist(
    peer: PeerConfig,
    given: Mapping[str, Any],
    folder: Path,
    joined: Joined,
    node: SwarmNode,
    members: Members,
    stop: asyncio.Event,
    shown: ExitStack,
) -> None:
    reports = Reports(joined, PeerKey.read(peer.identity_file), peer.token if joined.server_url == peer.datasetserver else "")
    beside = [asyncio.create_task(reports.deliver_forever()), asyncio.create_task(Artist(peer, given, joined, node.peer_id).draw_forever())]
    end = End(joined.run, joined.host_key, joined.extension, folder / EXTENSION_FILE)
    seen: collections.deque[dict[str, Any]] = collections.deque([{"phase": ASSIST, "note": "waiting for the first peer that trains"}], maxlen=1)
    try:
        auditor = Auditor(peer, given, joined) if peer.audit else None
        beside += [asyncio.create_task(auditor.measure_forever())] if auditor else []
        show(peer, joined.run, node.peer_id, lambda: seen[-1], lambda: end.total, shown)
        for maddr in await node.maddrs():
            log.info("others can join with --peers %s", maddr)
        await take_part(
            run=joined.run,
            node=node,
            folder=folder,
            stop=stop,
            final=reports.add,
            seen=seen.append,
            states_limit=peer.states_total_limit,
            state_on=peer.state_on,
            server_url=joined.server_url,
            name=peer.peer_name,
            hardware=describe_hardware(torch.device("cpu")),
            known=_known(joined),
            ask=partial(_ask, peer, joined) if joined.server_url else None,
            end=end,
            members=members,
            upload=Bucket(peer.max_upload_mbit) if peer.max_upload_mbit else None,
            auditor=auditor,
        )
        say_goodbye(folder, stopped=stop.is_set())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reports.delivered(), _LAST_REPORTS_SECONDS)
    finally:
        await end_tasks(*beside)
        await node.close()


def say_goodbye(folder: Path, *, stopped: bool) -> None:
    """Why the helper ends, and how to make a model of what it keeps. A log that just ends looks like a crash."""
    why = "stopped as asked (the same command goes on)" if stopped else "the run is over"
    if any((folder / "settled").glob("*.state")):
        log.info("%s; dd-export --state %s --out model makes a model of the newest final state", why, folder)
    else:
        log.info("%s; this helper has no final state", why)


def _known(joined: Joined) -> Known | None:
    last = joined.last_known
    return Known(Head(last["digest"], last["samples"]), last.get("peers", ()), joined.extension) if last else None


async def _ask(peer: PeerConfig, joined: Joined) -> Known | None:
    """What the dataset server knows of the run now; None when it does not answer."""
    url = joined.server_url
    ask = partial(fetch_run, url, _ANSWER_SECONDS, run_id=joined.run.run_id, token=token_for(url, peer), known_hosts=known_hosts(peer))
    try:
        answer = await asyncio.get_running_loop().run_in_executor(None, ask)
    except UserError as error:
        log.info("not known whether the run is over: %s", error)
        return None
    head = answer.head if answer else None
    return head and Known(Head(head.digest, head.samples), head.reporters, answer.extension and answer.extension.model_dump())


async def _node(peer: PeerConfig, joined: Joined, known: bool) -> SwarmNode:
    """Our node, which others can dial. Raises UserError when they cannot."""
    options = {
        "host_maddrs": peer.host_maddrs,
        "announce_maddrs": peer.announce_maddrs,
        "identity_path": peer.identity_file,
        "client_mode": peer.client_mode,
    }
    seconds = _REJOIN_SECONDS if known else _JOIN_SECONDS
    try:
        node = await SwarmNode.join(initial_peers=joined.initial_peers, deadline_seconds=seconds, **options)
    except UserError as error:
        if not known or error.code != ExitCode.NETWORK:
            raise
        log.warning("none of the peers known answers; waiting for others to come")
        node = await SwarmNode.join(initial_peers=[], **options)
    if node.client_mode:
        await node.close()
        raise UserError(
            "An assisting peer must be one that others can dial; they cannot dial this one.",
            fix="Give it a fixed port (--host_maddrs /ip4/0.0.0.0/tcp/31337), open that port, and --announce_maddrs if its address is another. "
            "If the peers that were asked were only busy: --client_mode False.",
            code=ExitCode.NETWORK,
        )
    return node


class Reports:
    """What the dataset server should know, in order, for as long as it takes to tell."""

    def __init__(self, joined: Joined, key: PeerKey, token: str = ""):
        run, url = joined.run, joined.server_url
        self._joined, self._report = joined, partial(report_round, url, run, Signer(key), timeout=_ANSWER_SECONDS, token=token)
        self._waiting: collections.deque[CommittedRound] = collections.deque(maxlen=10_000)
        self._changed = asyncio.Event()

    def add(self, final_rounds: Sequence[CommittedRound]) -> None:
        if self._joined.server_url:
            self._waiting.extend(final_rounds)
            self._changed.set()

    async def delivered(self) -> None:
        while self._waiting:
            await asyncio.sleep(0.1)

    async def deliver_forever(self) -> None:
        loop, pause = asyncio.get_running_loop(), _PAUSE_SECONDS
        while True:
            self._changed.clear()
            while self._waiting:
                told = self._waiting[0]
                try:
                    await loop.run_in_executor(None, self._report, told)
                    self._waiting.popleft()
                    pause = _PAUSE_SECONDS
                except UserError as error:
                    log.warning("cannot report round %d yet: %s", told.round, error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            await self._changed.wait()
