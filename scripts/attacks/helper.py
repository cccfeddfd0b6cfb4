"""An assisting peer that audits a swarm of toys: `python -m scripts.attacks.helper OUT ADDRESS --host_key=FILE [--averaging=NAME ...]`.

It draws, keeps, counts and reports with what `dd-peer --assist --audit 1` has. Only the loss is the toy's own (`toy_audit.py`): a toy has no
pictures, and no server. Prints a line of JSON for each member that it reports.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import torch

from peer.audit.auditor import Auditor
from peer.config import PeerConfig
from peer.launch.joining import Joined
from peer.sync.engine.assistant import assist
from scripts.attacks.toy import read_run
from swarm.dht import SwarmNode
from swarm.errors import run_program
from swarm.lifeline import die_with_parent
from swarm.logs import setup_logging
from swarm.members import Members, sign_membership
from swarm.signing import HostKey
from swarm.tasks import end_tasks

_LOOK_SECONDS = 1.0
_AUDIT = ("-m", "scripts.attacks.toy_audit")


async def live(out: Path, address: str, options: dict[str, str]) -> None:
    key = HostKey(Path(options["host_key"]), missing="refuse")
    run = read_run("parameters", key, options)
    peer = PeerConfig(output_dir=str(out), host_maddrs=("/ip4/127.0.0.1/tcp/0",), assist=True, audit=1, peers=(address,))
    out.mkdir(parents=True, exist_ok=True)
    node = await SwarmNode.join(initial_peers=[address], host_maddrs=peer.host_maddrs, identity_path=peer.identity_file)
    members = Members(run, own=sign_membership(key, run, node.peer_id))
    auditor = Auditor(peer, {}, Joined(run), command=_AUDIT)
    beside = [asyncio.create_task(auditor.measure_forever()), asyncio.create_task(_tell_forever(auditor))]
    try:
        for maddr in await node.maddrs():
            print(f"others can join with --peers {maddr}", flush=True)
        await assist(
            run=run, node=node, folder=out, stop=asyncio.Event(), final=lambda rounds: None, states_limit=4, members=members, auditor=auditor
        )
    finally:
        await end_tasks(*beside)
        await node.close()


async def _tell_forever(auditor: Auditor) -> None:
    """Once of each member that is reported."""
    told: set[str] = set()
    while True:
        for found in auditor.findings():
            if found.reported and found.peer not in told:
                told.add(found.peer)
                print(json.dumps({"event": "reported", "time": time.time(), "peer": found.peer, "measured": found.rounds}), flush=True)
        await asyncio.sleep(_LOOK_SECONDS)


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    options = dict(argument[2:].split("=") for argument in sys.argv[1:] if argument.startswith("--"))
    out, address = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    setup_logging(name=Path(out).name)
    asyncio.run(live(Path(out), address, options))


if __name__ == "__main__":
    sys.exit(run_program(main))
