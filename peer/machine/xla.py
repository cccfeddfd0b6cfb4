"""`--device xla`: TPUs, and CPUs that stand in for them, by PyTorch/XLA. Imported only when asked for.

XLA notes down what it is asked for, and at a boundary compiles that into a program, which it keeps; another shape, or another order of
questions, is another program (half a minute of a tiny UNet). So every batch is made to look alike here: short ones are filled up
with rows that weigh nothing. All devices of the host are one: the rows of a batch are spread over them, the weights are on each.
"""

import dataclasses
import importlib
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peer.config import PeerConfig
from peer.contracts import LatentBatch, PixelBatch
from peer.launch.launcher import Rank
from peer.machine.placing import Encode, Placing
from swarm.errors import UserError

log = logging.getLogger(__name__)


def open_devices(rank: Rank, environ: Any = os.environ) -> torch.device:
    """The one device that all XLA devices of this host are; CACHE_DIR keeps compiled programs. Raises UserError without torch_xla."""
    torch_xla, runtime = _torch_xla(), _torch_xla("runtime")
    if rank.local_world > 1 and runtime.device_type() == "TPU":
        raise UserError(
            f"{rank.local_world} ranks of this host would each want all of its TPU chips.",
            fix="Start one rank on each host: it uses them all.",
        )
    if (hosts := runtime.process_count()) > 1:
        raise UserError(
            f"This process was given the chips of {hosts} hosts, and can feed those of one.",
            fix="Set TPU_PROCESS_BOUNDS and the two others as docs/hardware.md has them, under 'Several machines with TPUs'.",
        )
    if folder := environ.get("CACHE_DIR"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        runtime.initialize_cache(folder, readonly=False)
    if runtime.device_type() == "CPU" and "device_count" in environ.get("XLA_FLAGS", "") and num_devices() == 1:
        log.warning("XLA_FLAGS makes no devices here, so this peer uses one; CPU_NUM_DEVICES=4 makes four")
    if num_devices() > 1:
        runtime.use_spmd()
    return torch_xla.device()


def check_options(peer: PeerConfig) -> None:
    """Raise UserError at the first option that XLA has nothing to do with."""
    for name, given, why, fix in (
        ("weights bf16", peer.weights == "bf16", "rounds by chance, for which XLA has no program", "Use --mixed_precision bf16."),
        ("compile", peer.compile, "is for devices that do not compile by themselves", "Remove it."),
        ("channels_last", peer.channels_last, "is for devices that do not choose the order in memory themselves", "Remove it."),
        ("ipex", peer.ipex, "is for CPUs", "Remove it, or --device xla."),
    ):
        if given:
            raise UserError(f"--{name} {why}; this peer computes by XLA.", fix=fix)


def num_devices() -> int:
    return _torch_xla("runtime").global_runtime_device_count()


def compute() -> None:
    """Have all computed that was asked for so far. Returns before it is: only a question to the device waits for it."""
    _torch_xla().sync()


def best_format() -> tuple[str, str]:
    """The number format for `--mixed_precision auto`, and why."""
    if _torch_xla("runtime").device_type() == "TPU":
        return "bf16", "TPUs multiply in it"
    return "no", "only TPUs gain from bf16 by XLA"


def describe() -> str:
    return f"xla devices={num_devices()} ({_torch_xla('runtime').device_type()})"


def hardware() -> str:
    """What other peers are told: '4 x TPU by XLA'."""
    return f"{num_devices()} x {_torch_xla('runtime').device_type()} by XLA"


class Spread(Placing):
    """Fills batches up to `rows`, or the next number that all devices share evenly, and spreads them."""

    def __init__(self, device: torch.device, rows: int):
        count, self.lazy = num_devices(), device
        self.rows = -(-rows // count) * count
        self._mesh = _mesh(count) if count > 1 else None
        if self.rows > rows:
            log.warning("batches of %d do not divide among %d devices: %d rows of each are idle", rows, count, self.rows - rows)

    def whole(self, batch: PixelBatch) -> PixelBatch:
        """The batch with `rows` rows and weights."""
        return filled(batch, self.rows)

    def pixels(self, batch: PixelBatch) -> PixelBatch:
        """The whole batch, its pixels on the device. Those of a cache stay here until the others are encoded."""
        batch = self.whole(batch)
        if batch.names:
            return batch
        return dataclasses.replace(batch, pixels=self._put(batch.pixels))

    def latents(self, encode: Encode) -> Encode:
        def spread(batch: PixelBatch, rng: torch.Generator) -> LatentBatch:
            found = encode(batch, rng)
            geometry = None if found.geometry is None else self._put(found.geometry)
            mask = None if found.mask is None else self._put(found.mask)
            return LatentBatch(self._put(found.latents), {name: self._put(states) for name, states in found.text.items()}, geometry, mask)

        return spread

    def boundary(self) -> None:
        compute()

    def _put(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.lazy)
        if self._mesh is not None:
            _torch_xla("distributed.spmd").mark_sharding(tensor, self._mesh, ("data", *[None] * (tensor.dim() - 1)))
        return tensor


class Recording:
    """What the devices do until `stop`, in files for TensorBoard with its profile plugin."""

    def __init__(self, folder: Path):
        self._profiler = _torch_xla("debug.profiler")
        self._profiler.start_trace(str(folder))

    def stop(self) -> None:
        self._profiler.stop_trace()


def filled(batch: PixelBatch, rows: int) -> PixelBatch:
    """The batch with `rows` rows, the added ones being its first again with a weight of 0; always with weights."""
    own = len(batch.captions)
    more = rows - own
    assert own and more >= 0
    weights = torch.ones(own) if batch.weights is None else batch.weights
    filled = {
        "captions": [*batch.captions, *[batch.captions[0]] * more],
        "weights": torch.cat([weights, torch.zeros(more)]),
        "geometry": None if batch.geometry is None else _repeated(batch.geometry, more),
        "names": [*batch.names, *batch.names[:1] * more],
        "masks": [*batch.masks, *batch.masks[:1] * more],
    }
    if 0 in batch.latents:
        filled["latents"] = {**batch.latents, **{own + i: batch.latents[0] for i in range(more)}}
    else:
        filled["pixels"] = _repeated(batch.pixels, more)
    return dataclasses.replace(batch, **filled)


def _repeated(rows: Tensor, more: int) -> Tensor:
    return torch.cat([rows, rows[:1].expand(more, *rows.shape[1:])])


def _mesh(count: int) -> Any:
    import numpy

    return _torch_xla("distributed.spmd").Mesh(numpy.arange(count), (count,), ("data",))


def _torch_xla(name: str = "") -> Any:
    """torch_xla, or a module of it. Raises UserError when it is not there, or not for this torch."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(f"torch_xla.{name}" if name else "torch_xla")
    except ImportError as error:  # also what its library says that finds no symbols in another release of torch
        raise UserError(
            f"--device xla needs PyTorch/XLA, which does not load here ({str(error).splitlines()[0][:120]}).",
            fix="Install the extra [xla] into an environment of its own (docs/hardware.md); its torch is 2.9.",
        ) from None
