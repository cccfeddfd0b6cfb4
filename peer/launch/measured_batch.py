"""`--train_batch_size auto`: measured once for a machine and its options, remembered in the cache, and from then on the same.

The measuring is done by a process of its own: what it took is free afterwards, and where the kernel ends it for memory, what it told before counts.
"""

import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from peer.config import PeerConfig
from peer.contracts import Params
from peer.launch.joining import Joined
from peer.launch.launcher import Rank
from peer.machine import largest_batch
from peer.machine.device import RankGroup, choose_device, set_threads
from peer.machine.making_room import useless
from peer.machine.turns import in_turns, to_try
from peer.rooms import load_part
from swarm import files
from swarm.digest import digest_json
from swarm.errors import ExitCode, UserError, circumstances
from swarm.life import FOLDER
from swarm.lifeline import die_with_parent
from swarm.memory_advice import memory_advice
from swarm.run.strategy import swarms
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)

_FILE = "train_batch_size.json"
_LOOK_SECONDS = 0.2
_TAKES_MEMORY = (
    "device", "mixed_precision", "weights", "base_precision", "fused_step", "offload", "blocks_to_swap", "swap_to", "gradient_checkpointing",
    "gradient_accumulation_steps", "with_prior_preservation", "channels_last", "compile", "use_ema",
)  # fmt: skip
"""Options of a machine by which it remembers what it measured."""


def with_largest(
    peer: PeerConfig, joined: Joined, given: Mapping[str, Any], device: torch.device, rank: Rank, stopping: Callable[[], bool]
) -> PeerConfig:
    """The peer with the largest micro-batch that fits, remembered or measured now; with 1 where it is asked to stop meanwhile. Raises UserError."""
    if rank.world > 1 or device.type == "xla":
        where = f"{rank.world} ranks are" if rank.world > 1 else "XLA's devices are"
        raise UserError(f"--train_batch_size auto measures one GPU or CPU, and {where} to train.", fix="Give a number.")
    peer, run = peer.unmeasured, joined.run
    path, key = peer.cache_folder / _FILE, _key(peer, joined, device)
    known = _read(path)
    if key in known:
        log.info("train_batch_size=%d, as measured before (%s)", known[key], path)
        return dataclasses.replace(peer, train_batch_size=known[key])
    most = largest_batch.MOST
    if peer.swarming:  # a step is no more than a round
        most = max(1, min(most, run.target_batch_size // peer.gradient_accumulation_steps))
    log.info("measuring the largest micro-batch up to %d whose step fits ...", most)
    found = _measure(peer, joined, given, most, stopping)
    if found is None:
        return peer
    if not found:
        fix = memory_advice(useless=useless(run, peer, device))
        raise UserError("A step of 1 picture does not fit into the memory.", fix=fix, code=ExitCode.MEMORY)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, json.dumps({**known, key: found}).encode())
        log.info("train_batch_size=%d is the largest that fits. It is remembered in %s", found, path)
    except OSError as error:
        log.warning("train_batch_size=%d is the largest that fits, and is measured again at each start: %s: %s", found, path, error.strerror)
    return dataclasses.replace(peer, train_batch_size=found)


def _measure(
    peer: PeerConfig, joined: Joined, given: Mapping[str, Any], most: int, stopping: Callable[[], bool], work: Callable[..., None] | None = None
) -> int | None:
    """The largest size that a process of its own told of, 0 where none fits; None when stopped. Raises the UserError that ended it."""
    context = multiprocessing.get_context("spawn")  # a fork has no CUDA
    told, tell = context.Pipe(duplex=False)
    process = context.Process(target=work or _work, args=(tell, peer, joined, dict(given), most), daemon=True)
    process.start()
    tell.close()
    best = 0
    try:
        while not stopping():
            if not told.poll(_LOOK_SECONDS):
                continue
            try:
                answer = told.recv()
            except EOFError:  # it has ended, by itself, by the kernel, or by the Ctrl-C that we heard as well
                return None if stopping() else best
            if isinstance(answer, dict):
                raise UserError(**answer)
            best = max(best, answer)
        return None
    finally:
        process.kill()
        process.join()


def _work(tell: Any, peer: PeerConfig, joined: Joined, given: Mapping[str, Any], most: int) -> None:
    """In the process: tell of each size that fits, or of the error that ends it."""
    die_with_parent()  # else it would keep the GPU of a trainer that was killed
    os.environ.pop(FOLDER, None)  # who supervises the trainer has nothing to hear of this
    try:
        with circumstances():
            device = choose_device(peer.device, Rank())
            learner = trial_learner(peer, joined, given, device)
            memory = largest_batch.CardMemory(device) if device.type == "cuda" else largest_batch.HostMemory(free_bytes(peer, joined.run, learner.params))
            largest_batch.try_sizes(learner, joined.run, peer, memory, most, tell.send)
    except UserError as error:
        tell.send({"message": error.message, "fix": error.fix, "code": error.code})
    except Exception as error:  # else it would be taken for a want of memory
        tell.send({"message": f"Measuring the micro-batch failed: {error!r}.", "fix": "Give a number for --train_batch_size.", "code": ExitCode.FAILED})
        raise


def trial_learner(peer: PeerConfig, joined: Joined, given: Mapping[str, Any], device: torch.device) -> Any:
    """A learner whose steps are only tried. Raises UserError as `build_learner` does."""
    from peer.launch.launch import Launch
    from peer.learner import build_learner

    rank = Rank()
    set_threads(peer.num_threads, rank)
    with ExitStack() as closing:
        launch = Launch(
            joined=joined, peer=to_try(peer, device), given=given, group=RankGroup(rank, device), device=device,
            stopping=lambda: False, closing=closing,
        )  # fmt: skip
        return build_learner(launch, "trial")[0]


def free_bytes(peer: PeerConfig, run: RunConfig, params: Params) -> float:
    """Of the host's memory, without what averaging will take of it."""
    from peer.sync.engine.codec import Wire
    from peer.sync.engine.memory import SIDECAR_BYTES, available_bytes, host_bytes
    from peer.sync.engine.vectors import Schema

    if not swarms(run.sync):
        return available_bytes()
    wire = Wire.of(run.wire, Schema.of(params))
    needs = host_bytes(load_part("sync", run.sync).strategy(run), wire, state_on=peer.state_on)
    return available_bytes() - sum(needs.values()) - SIDECAR_BYTES


def _key(peer: PeerConfig, joined: Joined, device: torch.device) -> str:
    """Of this device, and of all options that say what a step takes."""
    card = str(torch.cuda.get_device_properties(device)) if device.type == "cuda" else "host"
    options = {name: getattr(peer, name) for name in _TAKES_MEMORY} | {"offload": in_turns(peer, device)}
    return digest_json([card, torch.__version__, joined.run.digest, options])[:16]


def _read(path: Path) -> dict[str, int]:
    """What was measured before; nothing when the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        return {str(key): int(size) for key, size in json.loads(path.read_bytes()).items() if int(size) >= 1}
    return {}
