"""Which run this peer takes part in, and what it needs to know to do so: asked of the server, of the DHT, or founded here."""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer.config import PeerConfig
from peer.launch.begun import as_it_began
from peer.launch.lengths import of_founder, of_joiner
from swarm.errors import ExitCode, Unanswered, UserError
from swarm.founding import check_founding
from swarm.options import build
from swarm.records import HostWord
from swarm.run_config import RunConfig
from swarm.runs import FoundRun

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Joined:
    """A run, the addresses that lead into it, and the newest state known of it: {digest, round, samples, peers}."""

    run: RunConfig
    server_url: str = ""
    initial_peers: tuple[str, ...] = ()
    last_known: Mapping[str, Any] | None = None
    host_key: str = ""
    """The host's, as far as it is known: whose orders about the run's end count."""
    extension: Mapping[str, Any] | None = None
    bans: tuple[HostWord, ...] = ()
    known: bool = False
    """Whether this is what was known when this peer started last: nobody has confirmed it."""

    def about(self) -> dict[str, Any]:
        """What an output folder keeps of it, for the programs that find the folder later."""
        return {"run": self.run.to_mapping(), "server_url": self.server_url, "peers": list(self.initial_peers)}


def from_before(folder: Path, key_of: Callable[[str], str]) -> Joined:
    """The run that an output folder is of, as it was known when this peer started last. Raises OSError, ValueError and more where none is."""
    saved = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    run = RunConfig.from_mapping(saved["run"], where=str(folder))
    return Joined(run, saved["server_url"], tuple(saved["peers"]), host_key=key_of(run.run_id), known=True)


def join(
    peer: PeerConfig,
    given: Mapping[str, Any],
    ask_server: Callable[..., Any],
    found_at_server: Callable[[str, RunConfig], Any],
    complete: Callable[[RunConfig], RunConfig],
    known_key: Callable[[str], str] = lambda run_id: "",
) -> Joined:
    """The run of the server or of the DHT, or one founded from `given`, this peer's own words about the run.

    ask_server(url, run_id=...) answers what a server serves, None when nothing was founded there yet. found_at_server(url, run) founds a
    run there and answers what it serves then, which is another founder's run if that one was faster. complete(run) is a run
    that is founded here with all that its founder works out for the others. known_key(run_id): the host's key as far as it is known.

    Raises UserError when nobody answers, when `given` disagrees with the run, or when there is no run and this peer may not found one.
    """
    if peer.datasetserver:
        try:
            joined = _from_server(peer, given, ask_server) or _founded_at_server(peer, given, found_at_server, complete)
        except Unanswered as error:
            joined = _without_server(peer, given, known_key, error)
    elif peer.peers:
        joined = _from_dht(peer, given, ask_server, known_key) or _founded(peer, given, complete)
    else:
        joined = _founded(peer, given, complete)
    if not joined.server_url and not peer.own_data and not peer.assist:
        raise UserError(
            "This run has no dataset server, and this peer no data.",
            fix="Give --train_data_dir a folder of pictures with captions, or --dataset_name.",
        )
    return joined


def _from_server(peer: PeerConfig, given: Mapping[str, Any], ask_server: Callable[..., Any]) -> Joined | None:
    """None when there is no run at the server, and this peer may found it."""
    answer = ask_server(peer.datasetserver, run_id=peer.run_id)
    if answer:
        return joined(peer, given, answer)
    if peer.found and not peer.run_id:
        return None
    found_it = "Found it without --run_id, which names a run that exists." if peer.found else "Wait for its host, or found it: add --found --model MODEL."
    raise UserError(f"The dataset server {peer.datasetserver} has no run yet.", fix=found_it, code=ExitCode.NETWORK)


def _without_server(peer: PeerConfig, given: Mapping[str, Any], known_key: Callable[[str], str], error: Unanswered) -> Joined:
    """What the server said when this peer started last; whoever asked it then goes on while it is away. Raises `error` where it said nothing."""
    try:
        joined = from_before(Path(peer.output_dir), known_key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        raise error from None
    if peer.dry_run or joined.server_url != peer.datasetserver or peer.run_id not in ("", joined.run.run_id):
        raise error
    joined.run.refuse_differences(of_joiner(given, peer, joined.run))
    log.warning("going on with the run known from before: %s", error)
    return dataclasses.replace(joined, initial_peers=tuple(dict.fromkeys([*peer.peers, *joined.initial_peers])))


def _founded_at_server(
    peer: PeerConfig, given: Mapping[str, Any], found_at_server: Callable[[str, RunConfig], Any], complete: Callable[[RunConfig], RunConfig]
) -> Joined:
    run = _run_of(peer, given, complete)
    if peer.dry_run:  # looks, and founds nothing
        return Joined(run, peer.datasetserver, peer.peers)
    found = joined(peer, given, found_at_server(peer.datasetserver, run))
    log.info("the run at %s is '%s' (%s)", peer.datasetserver, found.run.run_name, found.run.run_id)
    return found


def joined(peer: PeerConfig, given: Mapping[str, Any], answer: Any) -> Joined:
    """What a server answered, once it is known that `given` agrees with it."""
    run = RunConfig.from_mapping(answer.run, where=peer.datasetserver)
    run.refuse_differences(of_joiner(given, peer, run))
    head = answer.head and {
        "digest": answer.head.digest,
        "round": answer.head.round,
        "samples": answer.head.samples,
        "peers": list(answer.head.reporters),
    }
    known = tuple(dict.fromkeys([*peer.peers, *answer.initial_peers]))
    return Joined(run, peer.datasetserver, known, head, answer.host_key, answer.extension and answer.extension.model_dump(), tuple(answer.bans))


def _from_dht(peer: PeerConfig, given: Mapping[str, Any], ask_server: Callable[..., Any], known_key: Callable[[str], str]) -> Joined | None:
    from swarm.discovery import find_run

    log.info("looking for the run of %d known peers", len(peer.peers))
    found = find_run(peer.peers, run_id=peer.run_id)
    if found is None:
        if peer.found:
            return None
        raise UserError(
            "The peers given answer, but none of them is in a run.",
            fix="Start the run's first peer, or found one here with --found and its options.",
            code=ExitCode.NETWORK,
        )
    found.run.refuse_differences(of_joiner(given, peer, found.run))
    joined = Joined(found.run, found.server_url, peer.peers, found.head, extension=found.extension)
    if not found.server_url:
        return _from_rumoured_server(peer, given, ask_server, known_key, found) or joined
    try:
        from_server = _from_server(_asking(peer, found.server_url, found.run), given, ask_server)
    except UserError as error:
        log.warning("going on without the dataset server for now: %s", error)
        return joined
    known = [head for head in (from_server.last_known, found.head) if head]
    return dataclasses.replace(from_server, last_known=max(known, key=lambda head: head["samples"], default=None))


def _from_rumoured_server(
    peer: PeerConfig, given: Mapping[str, Any], ask_server: Callable[..., Any], known_key: Callable[[str], str], found: FoundRun
) -> Joined | None:
    """The run at a server of which only strangers tell: if it signs with the key that we know to be the host's, and not otherwise.

    Without a key to compare, the first server that strangers name would be this run's host for good.
    """
    for url in found.rumoured_urls:
        if not known_key(found.run.run_id):
            log.warning("not asking %s: only untrusted records call it the dataset server. If it is, add --datasetserver or --host_key", url)
            continue
        try:
            return _from_server(_asking(peer, url, found.run), given, ask_server)
        except UserError as error:
            log.warning("ignored the dataset server that untrusted records name: %s", error)
    return None


def _asking(peer: PeerConfig, url: str, run: RunConfig) -> PeerConfig:
    """`peer` as one that was told to join `run` at that server: it may serve another one."""
    return dataclasses.replace(peer, datasetserver=url, found=False, run_id=run.run_id)


def _founded(peer: PeerConfig, given: Mapping[str, Any], complete: Callable[[RunConfig], RunConfig]) -> Joined:
    run = _run_of(peer, given, complete)
    log.info("founding the run '%s' (%s)", run.run_name, run.run_id)
    return Joined(run, "", peer.peers, None)


def _run_of(peer: PeerConfig, given: Mapping[str, Any], complete: Callable[[RunConfig], RunConfig]) -> RunConfig:
    """The run that `given` describes, complete."""
    said = of_founder(given, peer)
    run = build(RunConfig, said)
    if not run.model:
        raise UserError("A run needs a base model, and none was given.", fix="Add --model with a diffusers folder or a Hub id.")
    run = complete(run)
    began = as_it_began(Path(peer.output_dir), said, run)
    if began is run:  # else it was checked by the rules of then
        check_founding(run)
    return began
