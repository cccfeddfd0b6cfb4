"""The machine: which device, which number format and why, how many threads, and the ranks of one launch as a group."""

import datetime
import importlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from peer.launched import Daemon, Rank, address_towards, interface_between, numa_nodes, rendezvous, said_threads, share_of_cores, unbind
from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)

_BUCKET_BYTES = 64 << 20
_MEET_SECONDS = 300
"""Nodes read PyTorch from a shared disk at their own speed."""
# Autocast casts weights and activations at every operation. One thread of a Xeon with AMX: a UNet of 1 M parameters made 326 samples/s
# without and 200 with it; a UNet of 29 M parameters was 1.3-1.5 times as fast with it (AVX512-BF16).
_BF16_PAYS_FROM_PARAMETERS = 10_000_000


@dataclass(frozen=True)
class Precision:
    """How the forward pass computes; parameters, gradients and optimizer stay float32."""

    device: torch.device
    dtype: torch.dtype | None
    """Autocast's; None: float32 throughout."""
    scaled: bool
    """Whether the loss must be scaled, because fp16 gradients underflow."""
    reason: str

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, dtype=self.dtype) if self.dtype else nullcontext()


def choose_device(wanted: str, rank: Rank) -> torch.device:
    """The device for `--device auto|cpu|cuda|cuda:N`; each local rank takes its own GPU.

    Raises UserError when a GPU was asked for and there is none.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return torch.device("cpu")
    if wanted != "auto" and not wanted.startswith("cuda"):
        raise UserError(f"--device '{wanted}' is unknown.", fix="Use auto, cpu, cuda or cuda:N.")
    number = wanted.partition(":")[2]
    index = int(number) if number.isdigit() else rank.local
    if index >= gpus:
        raise UserError(
            f"Local rank {rank.local} asks for GPU {index}, but this machine has {gpus}.", fix="Start fewer ranks, or --device cpu."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def choose_precision(wanted: str, device: torch.device, num_parameters: int) -> Precision:
    """Autocast's number format for `--mixed_precision`, with the reason; num_parameters: those being trained."""
    name, reason = (wanted, "asked for by --mixed_precision") if wanted != "auto" else _best_format(device, num_parameters)
    if device.type == "cpu" and name == "fp16":
        raise UserError("fp16 on a CPU is slow and overflows.", fix="Use --mixed_precision bf16, or no.")
    dtype = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
    return Precision(device, dtype, scaled=name == "fp16", reason=f"{name}: {reason}")


def _best_format(device: torch.device, num_parameters: int) -> tuple[str, str]:
    if device.type == "cuda":
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16", f"{torch.cuda.get_device_name(device)} (compute capability {capability}) computes in it"
        return "fp16", f"{torch.cuda.get_device_name(device)} (compute capability {capability}) has no bf16; the loss is scaled"
    features = cpu_features()
    if not features:
        return "no", "this processor has neither AMX nor AVX512-BF16"
    if num_parameters < _BF16_PAYS_FROM_PARAMETERS:
        return "no", f"with {num_parameters / 1e6:.1f} M trained parameters casting would cost more than {features[0]} saves"
    return "bf16", f"this processor has {' and '.join(features)}"


def cpu_features(path: str = "/proc/cpuinfo") -> list[str]:
    """Which of AMX and AVX512-BF16 this processor has."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            flags = next((set(line.split()) for line in file if line.startswith("flags")), set())
    except OSError:
        return []
    return [name for name, flag in (("AMX", "amx_bf16"), ("AVX512-BF16", "avx512_bf16")) if flag in flags]


def set_threads(wanted: int, rank: Rank) -> int:
    """Give torch its threads; returns how many. OMP_NUM_THREADS counts where nothing was asked for, else this rank's share of the cores.

    Ranks of one machine share its cores: two peers of two threads each on two cores trained 8 times slower than of one each (seen).
    """
    unbind()
    threads = wanted or said_threads() or share_of_cores(rank, Daemon.find() if rank.world > 1 else None)
    torch.set_num_threads(threads)
    nodes = numa_nodes(os.sched_getaffinity(0))
    if rank.world > 1 and len(nodes) > rank.local_world:
        log.info(
            "%d ranks on %d NUMA nodes of this host: one on each (mpirun -ppn %d -bind-to numa) keeps memory near its cores",
            rank.local_world,
            len(nodes),
            len(nodes),
        )
    return threads


class RankGroup:
    """The ranks of one launch as a group; with a world of 1 nothing is started and nothing listens.

    A lost rank ends the others: every method then raises UserError, within `timeout_seconds` when it hangs.
    """

    def __init__(self, rank: Rank, device: torch.device, timeout_seconds: float = 600):
        self.rank, self.world, self.is_main = rank.index, rank.world, rank.index == 0
        if self.world == 1:
            return
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = _meet(rank, min(timeout_seconds, _MEET_SECONDS))
        # Its functions have the group of that moment as a default; the first optimizer imports it. Imported with the group there, it keeps
        # gloo's threads alive until the interpreter ends, where they may abort the process (3 of 20 launches on a busy machine).
        importlib.import_module("torch.distributed.nn.functional")
        with _lost_rank():
            _choose_interface(rank, store)
            timeout = datetime.timedelta(seconds=timeout_seconds)
            dist.init_process_group(backend, store=store, rank=rank.index, world_size=rank.world, timeout=timeout)

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, at every rank."""
        if self.world == 1:
            return value
        box = [value]
        with _lost_rank():
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def scatter(self, parts: Sequence[Any] | None) -> Any:
        """Part i of rank 0's `parts` (one for each rank) at rank i; the other ranks give None."""
        if self.world == 1:
            assert parts is not None and len(parts) == 1
            return parts[0]
        box = [None]
        with _lost_rank():
            dist.scatter_object_list(box, list(parts) if parts is not None else None, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, at every rank."""
        if self.world == 1:
            return [value]
        box = [None] * self.world
        with _lost_rank():
            dist.all_gather_object(box, value)
        return box

    @torch.no_grad()
    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite `tensors` in place with rank 0's."""
        if self.world == 1:
            return
        with _lost_rank():
            for tensor in tensors:
                dist.broadcast(tensor.data, src=0)

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite `tensors` (of one device) in place with their sums over the ranks, added in float32, the same bits everywhere."""
        if self.world == 1:
            return
        with _lost_rank():
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.reshape(-1).float() for tensor in bucket])
                dist.all_reduce(flat)
                for tensor, summed in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                    tensor.copy_(summed.view_as(tensor))

    def barrier(self) -> None:
        self.broadcast_object(None)

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _meet(rank: Rank, seconds: float) -> dist.Store:
    """The store of this launch, which rank 0 (or torchrun) holds. Raises UserError when the ranks do not find each other."""
    host, port = rendezvous(rank)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    try:
        return next(iter(dist.rendezvous("env://", rank.index, rank.world, timeout=datetime.timedelta(seconds=seconds))))[0]
    except RuntimeError as error:  # DistNetworkError, DistStoreError
        reason = str(error).strip().splitlines()[0][:200]
        where = f"listen on port {port}" if rank.index == 0 else f"find rank 0 at {host}:{port} within {seconds:.0f} s"
        raise UserError(
            f"Rank {rank.index} of {rank.world} could not {where} ({reason}).",
            fix="Open all TCP ports between the nodes; export MASTER_ADDR (an address of rank 0 that all reach) or a free MASTER_PORT.",
            code=ExitCode.NETWORK,
        ) from error


def _choose_interface(rank: Rank, store: dist.Store) -> None:
    """Name the interface between the hosts to gloo, unless GLOO_SOCKET_IFNAME is set."""
    own = address_towards(os.environ["MASTER_ADDR"])
    store.set(f"address/{rank.index}", own)
    addresses = [store.get(f"address/{index}").decode() for index in range(rank.world)]
    if interface := interface_between(own, addresses):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


@contextmanager
def _lost_rank() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:  # gloo raises plain RuntimeError, the store DistStoreError, a subclass
        log.debug("collective failed", exc_info=True)
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(
            f"Another rank of this launch ended or hangs ({reason}).",
            fix="Its own last message says why; start again with --resume_from_checkpoint latest.",
            code=ExitCode.FAILED,
        ) from error


def describe(rank: Rank, precision: Precision, threads: int, params: Mapping[str, Tensor]) -> str:
    """One line for the log: what is trained, where, and in which number format and why."""
    device = precision.device
    count = sum(parameter.numel() for parameter in params.values())
    where = f"cpu threads={threads}" if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"
    return f"parameters={count} ranks={rank.world} device={where} autocast={precision.reason}"
