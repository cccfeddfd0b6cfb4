"""What the launcher of this process says: its rank, where rank 0 is, the network interface between them, and its share of the cores.

torchrun, mpirun (MPICH, Intel MPI, Open MPI), `accelerate launch` under each of them, and scripts/launch_cluster. Needs no torch.
"""

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from swarm.errors import ExitCode, UserError
from swarm.listening import is_loopback

log = logging.getLogger(__name__)

_DAEMONS = ("hydra_", "orted", "prted")
"""What mpirun starts on every node, by the beginnings of its name: MPICH and Intel MPI, Open MPI 4, Open MPI 5."""
_LAUNCHERS = ("mpirun", "mpiexec", "prterun")
_BINDS_THREADS = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Whoever set one of these has a plan for the cores, which a narrower choice of ours would cross."""


@dataclass(frozen=True)
class Rank:
    """This process among those of its launch; all of them together are one peer."""

    index: int = 0
    world: int = 1
    local: int = 0
    local_world: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Rank":
        """The rank that torchrun or mpirun (Open MPI, MPICH, Intel MPI) gave this process; alone without one. Raises UserError for one that none gives."""
        for names in (
            ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
            ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ):
            index, world, local, local_world = (environ.get(name, "") for name in names)
            if not (index and world):  # an empty one is how some job scripts unset it
                continue
            said = index, world, local or "0", local_world or world
            if all(map(str.isdecimal, said)) and int(index) < int(world):
                return cls(*map(int, said))
            given = [name for name in names if environ.get(name)]
            raise UserError(
                f"The environment has {', '.join(f'{name}={environ[name]!r}' for name in given)}, which is not a rank of a launch.",
                fix=f"Unset {' and '.join(given)}, or start with torchrun or mpirun, which set them.",
            )
        return cls()

    @property
    def several_hosts(self) -> bool:
        return self.world > self.local_world


@dataclass(frozen=True)
class Daemon:
    """mpirun, or what it started on this node: an ancestor of ours, also with `accelerate launch` between."""

    cores: frozenset[int]
    """Those that all ranks of this node share."""
    upstream: str
    """The address of the host where mpirun was started, as this node reaches it; '' on that host itself."""

    @classmethod
    def find(cls) -> "Daemon | None":
        try:
            for process in psutil.Process().parents():
                if process.name().startswith((*_DAEMONS, *_LAUNCHERS)):
                    return cls(frozenset(process.cpu_affinity()), _upstream(process))
        except psutil.Error:
            log.debug("cannot look at the launcher", exc_info=True)
        return None


def _upstream(process: psutil.Process) -> str:
    """The other end of a daemon's connection to mpirun. Neither MPICH nor Intel MPI says it in a variable."""
    if not process.name().startswith(_DAEMONS):
        return ""
    own = own_addresses()
    ends = [connection.raddr.ip.removeprefix("::ffff:") for connection in process.net_connections("tcp") if connection.raddr]
    return next((end for end in ends if end not in own and not is_loopback(end)), "")


def rendezvous(rank: Rank, environ: Mapping[str, str] = os.environ, find: Callable[[], Daemon | None] = Daemon.find) -> tuple[str, int]:
    """Host and port where rank 0 listens: MASTER_ADDR and MASTER_PORT, or the host where mpirun was started.

    Raises UserError when nobody says it, or when rank 0 is elsewhere than mpirun.
    """
    said, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "29500")
    if not port.isdigit():
        raise UserError(f"MASTER_PORT is '{port}'.", fix="Give a number, 29500 is usual, or unset it.")
    if said and not (rank.several_hosts and is_loopback(said)):  # accelerate says 127.0.0.1 where its config knows no better
        return said, int(port)
    daemon = find()
    if daemon is None and rank.several_hosts and not said:
        raise UserError(
            f"Rank {rank.index} of {rank.world} cannot tell where rank 0 is.",
            fix="Give all ranks its address: export MASTER_ADDR=..., or mpirun -genv MASTER_ADDR ... (Open MPI: -x MASTER_ADDR=...).",
        )
    if rank.index == 0 and daemon and daemon.upstream:
        here = address_towards(daemon.upstream)
        raise UserError(
            f"Rank 0 runs on {here}, but mpirun was started on {daemon.upstream}, where the others look for it.",
            fix=f"Name the host of mpirun first in the host file, or export MASTER_ADDR={here} before mpirun.",
        )
    return (daemon.upstream if daemon else said) or "127.0.0.1", int(port)


def interface_between(own: str, addresses: Sequence[str]) -> str:
    """This host's network interface to the other hosts; own: the address it is known by, addresses: those of all ranks, ours among them.

    Gloo would take the one that the host's name resolves to, which on Debian and Ubuntu is the loopback.
    """
    here = own_addresses()
    others = [address for address in addresses if address not in here and not is_loopback(address)]
    towards = address_towards(others[0] if others else own)
    names = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    return names.get(towards, "lo" if is_loopback(towards) else "")


def address_towards(host: str) -> str:
    """This machine's address from which `host` is reached; nothing is sent. Raises UserError when the name is unknown or there is no way."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError as error:
        raise UserError(
            f"{host} cannot be reached from {socket.gethostname()}: {error.strerror or error}.",
            fix="Give an address that all nodes reach: export MASTER_ADDR=...",
            code=ExitCode.NETWORK,
        ) from None


def own_addresses() -> set[str]:
    return {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}


def share_of_cores(rank: Rank, shared: Sequence[int] | frozenset[int] | set[int]) -> int:
    """Physical cores for this rank: an equal share of those that the host's ranks share, and no more than it is bound to."""
    return max(1, min(physical_cores(os.sched_getaffinity(0)), physical_cores(shared) // rank.local_world))


def unbind(environ: Mapping[str, str] = os.environ) -> None:
    """Undo what Open MPI does unasked: it binds each of two ranks to a single core, where all their threads would then run."""
    if "OMPI_MCA_orte_bound_at_launch" in environ and "OMPI_MCA_hwloc_base_binding_policy" not in environ:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def bind_to_nodes(
    rank: Rank,
    shared: Sequence[int] | frozenset[int] | set[int],
    environ: Mapping[str, str] = os.environ,
    system: Path = Path("/sys/devices/system/node"),
) -> str:
    """Keep a rank that shares its host with others on its share of the NUMA nodes, where its memory then is too; returns what was done, for the log.

    shared: the logical CPUs that the launcher has for all ranks of this host. Ranks go to the nodes in order, equally many to each. Nothing is
    done where there is one node or one rank, or where somebody has bound this process or its threads already.
    """
    mine = os.sched_getaffinity(0)
    nodes = numa_nodes(shared, system)
    if rank.local_world == 1 or len(nodes) < 2:
        return ""
    said = next((name for name in _BINDS_THREADS if environ.get(name) and (name != "KMP_AFFINITY" or _has_intel_openmp(environ))), "")
    if said or mine != set(shared):
        return f"bound already, by {said}" if said else f"bound already, to {len(mine)} of {len(shared)} logical CPUs"
    own = nodes_of(rank, nodes)
    cpus = {cpu for cpu in mine for node in own if (system / f"node{node}" / f"cpu{cpu}").exists()}
    os.sched_setaffinity(0, cpus)
    return f"bound to NUMA node {' and '.join(map(str, own))} of {len(nodes)}, {len(cpus)} of {len(shared)} logical CPUs"


def _has_intel_openmp(environ: Mapping[str, str]) -> bool:
    """Whether somebody reads KMP_AFFINITY: `accelerate launch` sets it on CPUs, and libgomp, which torch's wheels bring, does not know it."""
    return "iomp5" in environ.get("LD_PRELOAD", "")


def nodes_of(rank: Rank, nodes: Sequence[int]) -> Sequence[int]:
    """Those of a host's NUMA nodes that are this rank's: one, or several where there are more nodes than ranks."""
    first = rank.local * len(nodes) // rank.local_world
    return nodes[first : max(first + 1, (rank.local + 1) * len(nodes) // rank.local_world)]


def shared_cpus(daemon: Daemon | None) -> frozenset[int]:
    """The logical CPUs that our launcher may use: mpirun's on this node, or our parent's (torchrun, launch_cluster)."""
    if daemon:
        return daemon.cores
    mine = os.sched_getaffinity(0)
    try:
        parents = frozenset(psutil.Process().parent().cpu_affinity())
    except (psutil.Error, AttributeError):
        return frozenset(mine)
    return parents if mine < parents else frozenset(mine)  # narrower than its parent: somebody has bound this process


def said_threads(environ: Mapping[str, str] = os.environ, of_launcher: Callable[[], Mapping[str, str]] | None = None) -> int:
    """OMP_NUM_THREADS as the user set it; 0 when unset, or when torchrun or accelerate set it to 1 for want of anything said.

    of_launcher: the environment that our parent was started with.
    """
    said = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # "8,2": eight, and two in what is nested
    threads = int(said) if said.isdecimal() else 0
    if threads == 1 and ("TORCHELASTIC_RUN_ID" in environ or "ACCELERATE_MIXED_PRECISION" in environ):
        try:
            return int("OMP_NUM_THREADS" in (of_launcher or psutil.Process().parent().environ)())
        except (psutil.Error, AttributeError):
            return threads
    return threads


def physical_cores(cpus: Sequence[int] | frozenset[int] | set[int], system: Path = Path("/sys/devices/system/cpu")) -> int:
    """How many cores these logical CPUs are: two hyperthreads of a core share its multipliers, and PyTorch's default counts them once too."""
    try:
        return len({(system / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text() for cpu in cpus})
    except OSError:
        return len(cpus)


def numa_nodes(cpus: Sequence[int] | frozenset[int] | set[int], system: Path = Path("/sys/devices/system/node")) -> list[int]:
    """The NUMA nodes in which these logical CPUs are; none where the kernel does not say."""
    return sorted(int(node.name[4:]) for node in system.glob("node[0-9]*") if any((node / f"cpu{cpu}").exists() for cpu in cpus))
