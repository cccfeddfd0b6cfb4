"""Which run this peer is in: its swarm's, or alone what it was given."""

import dataclasses
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from peer.config import PeerConfig
from peer.launch.joining import Joined, join
from peer.launch.launcher import Rank
from peer.launch.lengths import of_founder
from peer.launch.starting_model import complete
from swarm.clock import check_clock, clock_error
from swarm.errors import ExitCode, UserError
from swarm.founding import check_idle, check_optimizer
from swarm.options import build
from swarm.run.strategy import swarms
from swarm.run_config import RunConfig
from swarm.signing import KnownHosts

_KNOWN_HOSTS = "known_hosts.json"


def resolve_run(peer: PeerConfig, given: Mapping[str, Any]) -> Joined:
    """The run: the swarm's, or alone what was given, and no sync."""
    if peer.swarming:
        _check_addresses(peer)
        ask, found = partial(_ask_server, peer), partial(_found_at_server, peer)
        joined = join(peer, given, ask, found, partial(complete, given=given, digest=True), known_hosts(peer).key_of)
        known, named = known_hosts(peer).key_of(joined.run.run_id), joined.run.members_of
        if known and named not in ("", known):
            raise UserError(
                f"The run '{joined.run.run_name}' is for members of the key {named[:16]}, and its host's is {known[:16]}.",
                fix="Ask the host for its key, and give it as --host_key.", code=ExitCode.AUTH,
            )  # fmt: skip
        return dataclasses.replace(joined, host_key=joined.host_key or named or known)
    if given.get("sync", "none") != "none":
        raise UserError(
            f"--sync {given['sync']} needs a swarm, and none was named.", fix="Add --datasetserver, --peers or --found, or remove --sync."
        )
    run = build(RunConfig, of_founder(given, peer, Rank.from_environment().world), {"sync": "none"})
    if not run.model:
        raise no_model()
    if not peer.own_data:
        raise UserError(
            "No data was given.",
            fix="Give --train_data_dir a folder of pictures with a .txt beside each, --dataset_name one of the Hub, or --datasetserver.",
        )
    if peer.resume_from_checkpoint in ("auto", "none"):  # else it goes on as it began
        check_idle(run)
    check_optimizer(run)
    return Joined(complete(run, given=given))


def _check_addresses(peer: PeerConfig) -> None:
    """Raises UserError: a mistyped address is told before anything is asked, fetched or loaded."""
    from swarm.maddrs import parse_maddrs

    parse_maddrs(peer.peers, need_peer_id=True)
    parse_maddrs([*peer.host_maddrs, *peer.announce_maddrs], need_peer_id=False)


def no_model() -> UserError:
    fix = "Give --datasetserver URL to join a run, or --model a diffusers folder or a Hub id to train alone."
    return UserError("No run and no model was given.", fix=fix)


def _ask_server(peer: PeerConfig, url: str, run_id: str) -> Any:
    from peer.data.client.runs import fetch_run

    asked = time.time()
    answer = fetch_run(url, run_id=run_id, token=token_for(url, peer), known_hosts=known_hosts(peer))
    if answer:
        swarm = swarms(RunConfig.from_mapping(answer.run, where=url).sync)
        check_clock(clock_error(answer.server_time, asked, time.time()), "the dataset server", refuse=swarm and not peer.dry_run)
    return answer


def _found_at_server(peer: PeerConfig, url: str, run: RunConfig) -> Any:
    from peer.data.client.runs import found_run

    return found_run(url, run, token=token_for(url, peer), known_hosts=known_hosts(peer))


def known_hosts(peer: PeerConfig) -> KnownHosts:
    """The hosts' keys that this peer was given or has seen, kept beside its own."""
    return KnownHosts(peer.identity_file.with_name(_KNOWN_HOSTS), peer.host_key, remember=not peer.dry_run)


def token_for(url: str, peer: PeerConfig) -> str:
    """The token goes to the server that this peer's owner named, never to one that the swarm names."""
    return peer.token if url == peer.datasetserver else ""
