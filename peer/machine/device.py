"""The machine: which device, which number format and why, how many threads, and the ranks of one launch as a group."""

import datetime
import importlib
import importlib.util
import io
import logging
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from peer.config import PeerConfig
from peer.launch.launcher import (
    Daemon,
    Rank,
    address_towards,
    bind_to_nodes,
    interface_between,
    numa_nodes,
    rendezvous,
    said_threads,
    share_of_cores,
    shared_cpus,
    unbind,
)
from swarm.errors import ExitCode, UserError, of_machine
from swarm.records import MAX_HARDWARE, words
from swarm.run.family import family_named
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)

_BUCKET_BYTES = 64 << 20
_MEET_SECONDS = 300
"""Nodes read PyTorch from a shared disk at their own speed."""
_PATIENT_SECONDS = 24 * 3600
"""What rank 0 may take alone while it fetches a model (34 GB of FLUX.1 at 4 Mbit/s: 19 h), decodes a folder or writes a result. A rank that
dies is noticed at once all the same, since its connections close."""
# Autocast casts weights and activations at every operation. On two cores of a Xeon with AMX a step in bf16 was 0.55, 0.73 and 1.42 times as
# fast as one in float32, for UNets of 1, 29 and 446 M parameters (benchmarks/cpu.py).
_BF16_PAYS_FROM_PARAMETERS = 100_000_000


@dataclass(frozen=True)
class Precision:
    """How the forward pass computes; parameters, gradients and optimizer stay float32."""

    device: torch.device
    dtype: torch.dtype | None
    """Autocast's; None: float32 throughout."""
    scaled: bool
    """Whether the loss must be scaled, because fp16 gradients underflow."""
    reason: str

    @property
    def rng_device(self) -> torch.device:
        """Where random numbers are drawn: XLA has no generator that can be handed around, and so draws the numbers of a CPU."""
        return torch.device("cpu") if self.device.type == "xla" else self.device

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, dtype=self.dtype) if self.dtype else nullcontext()


def choose_device(wanted: str, rank: Rank) -> torch.device:
    """The device for `--device auto|cpu|cuda|cuda:N|xla`; each local rank takes its own GPU, and one rank all XLA devices of its host.

    Raises UserError when a GPU was asked for that is not there, or one for several ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "xla" or (wanted == "auto" and not gpus and xla_is_meant()):
        return importlib.import_module("peer.machine.xla").open_devices(rank)
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return torch.device("cpu")
    if not re.fullmatch(r"auto|cuda(:\d+)?", wanted):
        raise UserError(f"--device '{wanted}' is unknown.", fix="Use auto, cpu, cuda, cuda:N or xla.")
    if not gpus:
        raise UserError(
            f"--device {wanted} needs a GPU, and PyTorch {torch.__version__} sees none.",
            fix="Check nvidia-smi, CUDA_VISIBLE_DEVICES, and that this PyTorch is a build for your GPU; or use --device cpu.",
        )
    number = wanted.partition(":")[2]
    if number and rank.local_world > 1:
        raise UserError(
            f"--device {wanted} is one GPU, and {rank.local_world} ranks of this launch run on this host.",
            fix="Use --device cuda: each rank takes its own GPU, of those in CUDA_VISIBLE_DEVICES.",
        )
    index = int(number or rank.local)
    if index >= gpus:
        raise UserError(
            f"Local rank {rank.local} asks for GPU {index}, but this machine has {gpus}.", fix="Start fewer ranks, or --device cpu."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def xla_is_meant(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> bool:
    """Whether PyTorch/XLA is installed and something says that it is to be used: its own variable, or a TPU."""
    said = bool(environ.get("PJRT_DEVICE")) or (devices / "accel0").exists() or (devices / "vfio" / "0").exists()
    return said and importlib.util.find_spec("torch_xla") is not None


def precision_of(peer: PeerConfig, run: RunConfig, device: torch.device, num_parameters: int) -> Precision:
    """What this peer computes the run in; where its weights are bf16, that. For the rest see `choose_precision`."""
    family = family_named(run.family)
    wanted = "bf16" if peer.weights == "bf16" else peer.mixed_precision
    return choose_precision(wanted, device, num_parameters, family.half if family else "float16")


def choose_precision(wanted: str, device: torch.device, num_parameters: int, half: str = "float16") -> Precision:
    """Autocast's number format for `--mixed_precision`, with the reason; num_parameters: of what computes, trained or not.

    half: torch's half precision in which the model's family computes (`Family.half`).
    """
    name, reason = (wanted, "asked for by --mixed_precision") if wanted != "auto" else _best_format(device, num_parameters, half)
    if device.type != "cuda" and name == "fp16":
        what = "on a CPU is slow and overflows" if device.type == "cpu" else "is not what XLA's devices compute in"
        raise UserError(f"fp16 {what}.", fix="Use --mixed_precision bf16, or no.")
    dtype = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
    return Precision(device, dtype, scaled=name == "fp16", reason=f"{name}: {reason}")


def _best_format(device: torch.device, num_parameters: int, half: str) -> tuple[str, str]:
    if device.type == "xla":
        return importlib.import_module("peer.machine.xla").best_format()
    if device.type == "cuda":
        gpu = "{} (compute capability {}.{})".format(torch.cuda.get_device_name(device), *torch.cuda.get_device_capability(device))
        if not emulates_bf16(device):
            return "bf16", f"{gpu} computes in it"
        if half == "bfloat16":
            return "no", f"{gpu} has no bf16, and models of this family overflow in fp16"
        return "fp16", f"{gpu} has no bf16; the loss is scaled"
    features = cpu_features()
    if not features:
        return "no", "this processor has neither AMX nor AVX512-BF16"
    if num_parameters < _BF16_PAYS_FROM_PARAMETERS:
        return "no", f"with {num_parameters / 1e6:.1f} M parameters casting would cost more than {features[0]} saves"
    return "bf16", f"this processor has {' and '.join(features)}"


def emulates_bf16(device: torch.device) -> bool:
    """Whether it is a GPU that computes bf16 in float32, and so takes longer for it: one older than NVIDIA's Ampere (compute capability 8.0)."""
    return device.type == "cuda" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)


def describe_hardware(device: torch.device) -> str:
    """What other peers are told of this one: 'NVIDIA H100 80GB HBM3', '2 x NVIDIA A40' on all ranks together, '16 CPU cores, AMX'."""
    if device.type == "cpu":
        return words(", ".join([f"{len(os.sched_getaffinity(0))} CPU cores", *cpu_features()]), MAX_HARDWARE)
    if device.type == "xla":
        return words(importlib.import_module("peer.machine.xla").hardware(), MAX_HARDWARE)
    ranks = Rank.from_environment().world
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return words(f"{ranks} x {name}" if ranks > 1 else name, MAX_HARDWARE)


def check_alike(group: "RankGroup", device: torch.device, weights: str) -> None:
    """Raises UserError where --weights bf16 would round otherwise at each rank; all ranks call it, before a model is loaded.

    From one seed, GPUs of different kinds draw different random numbers (they depend on the number of multiprocessors), as do a GPU and a CPU.
    """
    kinds = group.gather(_kind(device))
    if weights == "bf16" and len({*kinds}) > 1:
        raise UserError(
            f"--weights bf16 rounds by chance, and the ranks of this launch compute on unlike devices, whose weights would drift apart: "
            f"{', '.join(sorted({*kinds}))}.",
            fix="Remove --weights bf16, start the ranks on GPUs of one kind (CUDA_VISIBLE_DEVICES), or start a peer for each kind.",
        )


def _kind(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    its = torch.cuda.get_device_properties(device)
    return f"{its.name} ({its.multi_processor_count} multiprocessors)"


def cpu_features(path: str = "/proc/cpuinfo") -> list[str]:
    """Which of AMX and AVX512-BF16 this processor has."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            flags = next((set(line.split()) for line in file if line.startswith("flags")), set())
    except OSError:
        return []
    return [name for name, flag in (("AMX", "amx_bf16"), ("AVX512-BF16", "avx512_bf16")) if flag in flags]


def set_threads(wanted: int, rank: Rank, *, bind: bool = True) -> int:
    """Give torch its threads; returns how many. OMP_NUM_THREADS counts where nothing was asked for, else this rank's share of the cores.

    Ranks of one machine share its cores: two peers of two threads each on two cores trained 8 times slower than of one each (seen).
    bind: keep each of several ranks to its NUMA nodes, unless somebody has bound it already.
    """
    unbind()
    shared = shared_cpus(Daemon.find() if rank.world > 1 else None)
    if bind and (done := bind_to_nodes(rank, shared)):
        log.info("the %d ranks of this host: rank %d is %s", rank.local_world, rank.index, done)
    threads = wanted or said_threads() or share_of_cores(rank, shared)
    torch.set_num_threads(threads)
    nodes = numa_nodes(os.sched_getaffinity(0))
    if bind and rank.world > 1 and len(nodes) > 1:
        log.info(
            "a rank computes on %d NUMA nodes of this host: one rank for each (mpirun -ppn %d) keeps memory near its cores",
            len(nodes),
            len(numa_nodes(shared)),
        )
    return threads


def gains_by_channels_last(asked: bool, device: torch.device) -> bool:
    """Whether to compute with channels last on `device`, where --channels_last asks for it. A CPU's steps took 1.03 (bf16) to 1.45 (float32) times as long."""
    if asked and device.type == "cpu":
        log.warning("channels_last=no: it is for GPUs, and this peer computes on a CPU, where steps would take longer")
        return False
    return asked


def use_channels_last(parts: Mapping[str, nn.Module]) -> list[str]:
    """Have the convolutions compute with channels last in memory; returns the parts that have any.

    What flows through them is laid out anew, not the weights: these stay the tensors that they are, byte by byte, for the optimizer and the swarm.
    """
    convolutions = {name: [module for module in part.modules() if isinstance(module, nn.Conv2d)] for name, part in parts.items()}
    for module in (module for some in convolutions.values() for module in some):
        module.register_forward_pre_hook(_channels_last)
    return [name for name, some in convolutions.items() if some]


def _channels_last(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].contiguous(memory_format=torch.channels_last), *args[1:])


def attention(parts: Mapping[str, nn.Module]) -> str:
    """How the denoiser computes attention: 'sdpa' for PyTorch's scaled_dot_product_attention, else what its processors are called."""
    processors = {type(one) for part in parts.values() for one in getattr(part, "attn_processors", {}).values()}
    # diffusers: AttnProcessor2_0 and its kin call it themselves; later processors by way of _attention_backend, which is it where nobody set another.
    others = [
        kind.__name__ for kind in processors if not kind.__name__.endswith("2_0") and getattr(kind, "_attention_backend", "") is not None
    ]
    return ", ".join(sorted(others)) or "sdpa"


class RankGroup:
    """The ranks of one launch as a group; with a world of 1 nothing is started and nothing listens.

    A lost rank ends the others: every method then raises UserError. Where it hangs, that takes a day until `begin`, and then `timeout_seconds`.
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
        self._usual_seconds = timeout_seconds
        self._wait_at_most(_PATIENT_SECONDS)

    def begin(self) -> None:
        """Steps begin: from here on the ranks do the same things, and but for `barrier` none is waited for longer than a step takes."""
        if self.world > 1:
            self._wait_at_most(self._usual_seconds)

    def _wait_at_most(self, seconds: float) -> None:
        self._seconds = seconds
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds))

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, at every rank."""
        if self.world == 1:
            return value
        box = [value]
        with _lost_rank():
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def broadcast_state(self, value: Any) -> Any:
        """As `broadcast_object`, of a value with large tensors on the CPU: these go one after the other, and nowhere as bytes beside themselves.

        Pickled whole, a checkpoint of 14 GB takes 41 GB more at each other rank.
        """
        if self.world == 1:
            return value
        tensors: list[Tensor] = []
        bare = _pickled(value, tensors) if self.is_main else b""
        bare, kinds = self.broadcast_object((bare, [(tensor.shape, tensor.dtype) for tensor in tensors]))
        if not self.is_main:
            tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
        with _lost_rank():
            for tensor in tensors:
                # As bytes: gloo knows fewer formats than tensors have. Of what does not lie in one piece, a copy is sent.
                dist.broadcast(tensor.detach().contiguous().view(-1).view(torch.uint8), src=0)
        return value if self.is_main else _unpickled(bare, tensors)

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
                here = _for_gloo(tensor.data)
                dist.broadcast(here, src=0)
                if here is not tensor.data:
                    tensor.data.copy_(here)

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite `tensors` (of one device) in place with their sums over the ranks, added in float32, the same bits everywhere."""
        if self.world == 1:
            return
        with _lost_rank():
            for bucket in _buckets(tensors):
                flat = torch.cat([_for_gloo(tensor).reshape(-1).float() for tensor in bucket])
                dist.all_reduce(flat)
                for tensor, summed in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                    tensor.copy_(summed.view(tensor.shape))

    def barrier(self) -> None:
        """Wait for rank 0, which draws or writes a result alone."""
        if self.world == 1:
            return
        before = self._seconds
        self._wait_at_most(_PATIENT_SECONDS)
        self.broadcast_object(None)
        self._wait_at_most(before)

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


def _pickled(value: Any, tensors: list[Tensor]) -> bytes:
    """`value` with a number in place of each tensor, which goes to `tensors`."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, one: Any) -> int | None:
            if not isinstance(one, Tensor):
                return None
            tensors.append(one)
            return len(tensors) - 1

    data = io.BytesIO()
    Pickler(data).dump(value)
    return data.getvalue()


def _unpickled(data: bytes, tensors: Sequence[Tensor]) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: int) -> Tensor:
            return tensors[number]

    return Unpickler(io.BytesIO(data)).load()


def _for_gloo(tensor: Tensor) -> Tensor:
    """The tensor itself; of an XLA one, which no group of ours can send, a copy on the host."""
    return tensor.cpu() if tensor.device.type == "xla" else tensor


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
        if of_machine(error):  # torch's OutOfMemoryError is a RuntimeError, too, and it is this rank that ends
            raise
        log.debug("collective failed", exc_info=True)
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(
            f"Another rank of this launch ended or hangs ({reason}).",
            fix="Its own last message says why; start again with --resume_from_checkpoint latest.",
            code=ExitCode.FAILED,
        ) from error


def describe(rank: Rank, precision: Precision, threads: int, params: Mapping[str, Tensor], parts: Mapping[str, nn.Module]) -> str:
    """One line for the log: what is trained, where, and in which number format and why."""
    device = precision.device
    count = sum(parameter.numel() for parameter in params.values())
    if device.type == "xla":
        where = importlib.import_module("peer.machine.xla").describe()
    else:
        where = f"cpu threads={threads}" if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"
    return f"parameters={count} ranks={rank.world} device={where} attention={attention(parts)} autocast={precision.reason}"
