"""Ranks of a launch. The variables are those that each launcher really set (MPICH 4.0.2, Open MPI 4.1.4, Intel MPI 2021.19, torchrun of
PyTorch 2.13, accelerate 1.15), as captured from two or three ranks of it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from peer.finetune import cli
from peer.launch import launcher
from peer.launch.launcher import Daemon, Rank, interface_between, rendezvous, said_threads, share_of_cores
from swarm.errors import ExitCode, UserError

MPICH = {"MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "127.0.0.3", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0", "PMI_FD": "5", "PMI_RANK": "2", "PMI_SIZE": "3"}  # fmt: skip
INTEL_MPI = {
    "PMI_SIZE": "2",
    "PMI_RANK": "1",
    "PMI_FD": "11",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "HYDRA_BSTRAP_LOCALHOST": "localhost",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_NODE_RANK": "0", "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_num_nodes": "2", "OMPI_UNIVERSE_SIZE": "2", "PMIX_RANK": "1", "PMIX_HOSTNAME": "vm",
}  # fmt: skip
TORCHRUN = {
    "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "39143",
    "OMP_NUM_THREADS": "1", "RANK": "1", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "066c1928", "WORLD_SIZE": "2",
}  # fmt: skip
ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "False", "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parents[3]
CORES = frozenset(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, Rank(0, 1, 0, 1)),
        (ACCELERATE, Rank(0, 1, 0, 1)),
        (TORCHRUN, Rank(1, 2, 1, 2)),
        (MPICH, Rank(2, 3, 0, 1)),
        (MPICH | ACCELERATE, Rank(2, 3, 0, 1)),
        (INTEL_MPI, Rank(1, 2, 1, 2)),
        (OPEN_MPI | ACCELERATE, Rank(1, 2, 0, 1)),
        ({"RANK": "", "WORLD_SIZE": ""}, Rank(0, 1, 0, 1)),
        (OPEN_MPI | {"RANK": "", "WORLD_SIZE": "2"}, Rank(1, 2, 0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, Rank(1, 2, 0, 2)),
    ],
)
def test_every_launcher_says_the_rank_in_its_own_way(environ, rank):
    assert Rank.from_environment(environ) == rank


@pytest.mark.parametrize("environ", [{"RANK": "first", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x"}])
def test_a_rank_that_no_launcher_gives_is_an_error_that_says_what_to_unset(environ, monkeypatch, capsys):
    with pytest.raises(UserError, match=f"RANK='{environ['RANK']}', WORLD_SIZE=.* is not a rank of a launch"):
        Rank.from_environment(environ)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["finetune.py", "--model", "m"])
    assert cli() == ExitCode.CONFIG and "Unset RANK and WORLD_SIZE" in capsys.readouterr().err


def test_what_was_exported_is_where_the_ranks_meet():
    assert rendezvous(Rank(2, 3, 0, 1), {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}, find=lambda: None) == ("node0", 1234)
    assert rendezvous(Rank.from_environment(TORCHRUN), TORCHRUN, find=lambda: None) == ("localhost", 39143)
    with pytest.raises(UserError, match="MASTER_PORT is 'x'"):
        rendezvous(Rank(), {"MASTER_PORT": "x"}, find=lambda: None)


def test_without_an_export_the_ranks_meet_where_mpirun_was_started():
    assert rendezvous(Rank(2, 3, 0, 1), MPICH, find=lambda: Daemon(CORES, "10.0.0.1")) == ("10.0.0.1", 29500)
    assert rendezvous(Rank(0, 3, 0, 1), {}, find=lambda: Daemon(CORES, "")) == ("127.0.0.1", 29500)
    assert rendezvous(Rank(1, 2, 1, 2), INTEL_MPI, find=lambda: None) == ("127.0.0.1", 29500)


def test_the_loopback_that_accelerate_says_is_no_meeting_place_for_several_hosts():
    said = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert rendezvous(Rank(2, 3, 0, 1), said, find=lambda: Daemon(CORES, "10.0.0.1")) == ("10.0.0.1", 29500)
    assert rendezvous(Rank(2, 3, 0, 1), said, find=lambda: None) == ("127.0.0.1", 29500)


def test_an_unknown_meeting_place_is_an_error_that_says_what_to_export():
    with pytest.raises(UserError, match=r"Rank 2 of 3 cannot tell where rank 0 is.*export MASTER_ADDR"):
        rendezvous(Rank(2, 3, 0, 1), MPICH, find=lambda: None)
    with pytest.raises(UserError, match=r"Rank 0 runs on .*, but mpirun was started on 127\.0\.0\.9.*export MASTER_ADDR="):
        rendezvous(Rank(0, 3, 0, 1), MPICH, find=lambda: Daemon(CORES, "127.0.0.9"))


def test_the_interface_is_the_one_that_leads_to_other_hosts():
    assert interface_between("127.0.0.1", ["127.0.0.1", "127.0.0.1"]) == "lo"
    names = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries if entry.family == socket.AF_INET}
    for address, name in names.items():
        assert interface_between(address, [address, address]) == name
    with pytest.raises(UserError, match=r"nowhere\.invalid cannot be reached"):
        launcher.address_towards("nowhere.invalid")


def test_one_thread_counts_only_if_the_user_said_it():
    assert said_threads({}) == 0 and said_threads({"OMP_NUM_THREADS": "many"}) == 0
    assert said_threads({"OMP_NUM_THREADS": "1"}) == 1 and said_threads({"OMP_NUM_THREADS": "8,2"}) == 8
    for whose in (TORCHRUN, MPICH | ACCELERATE):
        assert said_threads(whose, of_launcher=dict) == 0
        assert said_threads(whose, of_launcher=lambda: {"OMP_NUM_THREADS": "1"}) == 1
        assert said_threads({**whose, "OMP_NUM_THREADS": "6"}, of_launcher=dict) == 6


def test_ranks_share_a_nodes_cores_and_stay_on_those_they_are_bound_to(monkeypatch):
    monkeypatch.setattr(launcher, "physical_cores", len)
    bound_to = {Rank(0, 4, 0, 4): range(16), Rank(0, 2, 0, 1): range(8), Rank(0, 4, 1, 4): range(8), Rank(0, 2, 1, 2): range(1)}
    threads = []
    for rank, cores in bound_to.items():
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(cores))
        threads.append(share_of_cores(rank, range(16)))
    assert threads == [4, 8, 4, 1]
    assert share_of_cores(Rank(0, 32, 0, 32), range(16)) == 1, "never less than one"


def test_two_hyperthreads_are_one_core_and_nodes_are_found(tmp_path):
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
        (tmp_path / f"node{cpu % 2}" / f"cpu{cpu}").mkdir(parents=True)
    assert launcher.physical_cores({0, 1, 2, 3}, tmp_path) == 2 and launcher.physical_cores({0, 2}, tmp_path) == 1
    assert launcher.physical_cores({0, 1, 2}, tmp_path / "missing") == 3
    assert launcher.numa_nodes({0, 1}, tmp_path) == [0, 1] and launcher.numa_nodes({1, 3}, tmp_path) == [1]


@pytest.fixture
def host(tmp_path, monkeypatch):
    """`host(8)`: a host with two NUMA nodes of four logical CPUs each, on all of which we may run; what a rank is bound to is in `.bound`."""
    for cpu in range(8):
        (tmp_path / f"node{cpu // 4}" / f"cpu{cpu}").mkdir(parents=True)
    bound = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(sorted(cpus)))

    def bind(rank, shared=range(8), environ=None):
        return launcher.bind_to_nodes(rank, shared, environ or {}, tmp_path)

    bind.bound = bound
    return bind


def test_each_of_several_ranks_is_bound_to_its_node(host):
    said = [host(Rank(index, 4, index, 4)) for index in range(4)]
    assert host.bound == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    assert said[0] == "bound to NUMA node 0 of 2, 4 of 8 logical CPUs" and said[3] == "bound to NUMA node 1 of 2, 4 of 8 logical CPUs"


def test_a_rank_alone_on_its_host_has_all_of_it(host):
    assert host(Rank()) == host(Rank(2, 3, 0, 1)) == "" and not host.bound


@pytest.mark.parametrize(
    ("ranks", "nodes"), [(2, [[0, 1], [2, 3]]), (3, [[0], [1], [2, 3]]), (4, [[0], [1], [2], [3]]), (6, [[0], [0], [1], [2], [2], [3]])]
)
def test_ranks_go_to_the_nodes_in_order(ranks, nodes):
    assert [list(launcher.nodes_of(Rank(index, ranks, index, ranks), range(4))) for index in range(ranks)] == nodes


def test_who_was_bound_already_stays_as_he_is_and_it_is_said(host, monkeypatch):
    two = Rank(1, 2, 1, 2)
    preloaded = {"KMP_AFFINITY": "granularity=fine,compact", "LD_PRELOAD": "/usr/lib/libtcmalloc.so.4:/opt/lib/libiomp5.so"}
    assert host(two, environ=preloaded) == "bound already, by KMP_AFFINITY"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5})
    assert host(two) == "bound already, to 2 of 8 logical CPUs"
    assert not host.bound
    assert host(two, shared={4, 5}) == "", "all ranks together were bound to one node"


def test_a_process_that_was_bound_shares_what_its_parent_has():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from peer.launch.launcher import shared_cpus; print(len(shared_cpus(None)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert int(done.stdout) == len(CORES)
    assert launcher.shared_cpus(Daemon(frozenset({3}), "")) == {3}


def test_open_mpis_own_binding_is_undone_and_the_users_is_not(monkeypatch):
    set_to = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: set_to.append(len(cores)))
    launcher.unbind({})
    launcher.unbind({"OMPI_MCA_orte_bound_at_launch": "1", "OMPI_MCA_hwloc_base_binding_policy": "core"})
    assert not set_to
    launcher.unbind({"OMPI_MCA_orte_bound_at_launch": "1"})
    assert set_to == [os.cpu_count()]
