"""`--fit auto` and `--blocks_to_swap auto`: this machine's options, such that the run fits on its device; and advice where memory ran out."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import torch

from peer.config import PeerConfig
from peer.contracts import Params
from peer.launch.joining import Joined
from peer.launch.launcher import Rank
from peer.launch.measured_batch import free_bytes
from peer.launch.starting_model import load_unchecked
from peer.machine.counting import HELD_BYTES
from peer.machine.fitting import ALL, STEP, Fit, fit
from peer.machine.largest_batch import CARD_SHARE, HOST_SHARE
from peer.machine.making_room import by_itself
from peer.machine.needs import Needs
from peer.machine.swap import LEAST, swaps
from peer.watchdog.room import tell_counted
from swarm.errors import ExitCode, UserError, of_machine
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)


def fitted(peer: PeerConfig, joined: Joined, given: Mapping[str, Any], device: torch.device, rank: Rank) -> PeerConfig:
    """The peer with the cheapest options that fit. Raises UserError where none do, or where nobody can count them."""
    if not peer.fits_itself:
        return peer
    said = "--fit auto" if peer.fit == "auto" else "--blocks_to_swap auto"
    if rank.world > 1 or device.type == "xla":
        where = f"{rank.world} ranks are" if rank.world > 1 else "XLA's devices are"
        raise UserError(f"{said} counts the memory of one GPU or CPU, and {where} to train.", fix="Choose the options yourself: docs/hardware.md.")
    if peer.fit != "auto" and not swaps(dataclasses.replace(peer, blocks_to_swap=LEAST), joined.run, device):
        return peer.unfitted
    log.info("counting what this run needs of the memory ...")
    found = counted(peer, joined, given, device)
    found.check()
    log.info("options that fit, by %s: %s%s", said, found, "" if found.changes else ", and no option is changed")
    return dataclasses.replace(peer.unfitted, **found.changes)


def checked(peer: PeerConfig, joined: Joined, given: Mapping[str, Any], device: torch.device) -> tuple[PeerConfig, str]:
    """For --check: the peer as it would train, and what it needs, in words; '' where nobody counts that. Raises UserError where it does not fit.

    On a CPU it is counted where it was asked for: --check has a question of its own for the host's memory.
    """
    if peer.fits_itself:
        return fitted(peer, joined, given, device, Rank()), ""
    if device.type != "cuda":
        return peer, ""
    try:
        found = counted(peer, joined, given, device)
    except UserError as error:
        log.debug("not counted: %s", error)
        return peer, ""
    found.check()
    if found.changes:
        raise UserError(
            f"A step needs {found.before / 1e9:.1f} GB of the GPU's memory, counted, and {found.there / 1e9:.1f} are free.",
            fix=found.advice(), code=ExitCode.MEMORY,
        )  # fmt: skip
    return peer, str(found)


def counted(peer: PeerConfig, joined: Joined, given: Mapping[str, Any], device: torch.device) -> Fit:
    """What fits: of all options, or where --blocks_to_swap auto alone asks, of blocks to swap. Raises UserError where it cannot be counted."""
    ways = ("blocks_to_swap",) if peer.blocks_to_swap is None and peer.fit != "auto" else ALL
    peer, run = peer.unmeasured.unfitted, joined.run
    needs = Needs(run, lambda: load_unchecked(run, given), device)
    there = free_on_gpu(device) if device.type == "cuda" else free_on_host(peer, run, needs.params(peer))
    return fit(run, peer, device, needs, there, ways)


def free_on_gpu(device: torch.device) -> float:
    """Bytes of a GPU that a run can have. What this process holds counts as free; for what nobody counts 5 % is left, and `HELD_BYTES` at least."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - max((1 - CARD_SHARE) * total, HELD_BYTES)


def free_on_host(peer: PeerConfig, run: RunConfig, params: Params) -> float:
    """The same of the host's memory, without what averaging takes of it; a fifth is left."""
    own = psutil.Process().memory_info()
    return HOST_SHARE * (free_bytes(peer, run, params) + own.rss - own.shared)


@contextlib.contextmanager
def advised(peer: PeerConfig, joined: Joined, given: Mapping[str, Any], device: torch.device) -> Iterator[None]:
    """Within the block an error for want of memory says which options would fit here, by count."""
    try:
        yield
    except Exception as error:
        short = error if isinstance(error, UserError) else of_machine(error)
        if short is None or short.code != ExitCode.MEMORY or device.type == "xla":
            raise
        raise UserError(short.message, fix=_fix(short, peer, joined, given, device), code=short.code) from error


def _fix(short: UserError, peer: PeerConfig, joined: Joined, given: Mapping[str, Any], device: torch.device) -> str:
    try:
        found = counted(dataclasses.replace(peer, fit="auto"), joined, given, device)
        found.check()
        # The supervisor halves the micro-batch itself, and first.
        changes = {name: value for name, value in found.changes.items() if name not in STEP}
        if changes and by_itself(changes, peer):
            tell_counted(changes)
    except UserError as error:
        return f"{error.message} {error.fix}" if error.code == ExitCode.MEMORY else short.fix
    except Exception:  # there may be no memory to count in
        log.debug("cannot count what would fit", exc_info=True)
        return short.fix
    return found.advice() if found.changes else short.fix
