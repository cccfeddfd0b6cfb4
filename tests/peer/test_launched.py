"""Ranks of a launch. The variables are those that each launcher really set (MPICH 4.0.2, Open MPI 4.1.4, Intel MPI 2021.19, torchrun of
PyTorch 2.13, accelerate 1.15), as captured from two or three ranks of it."""

import os
import socket

import psutil
import pytest

from peer import launched
from peer.launched import Daemon, Rank, interface_between, rendezvous, said_threads, share_of_cores
from swarm.errors import UserError

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
    ],
)
def test_every_launcher_says_the_rank_in_its_own_way(environ, rank):
    assert Rank.from_environment(environ) == rank


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
        launched.address_towards("nowhere.invalid")


def test_one_thread_counts_only_if_the_user_said_it():
    assert said_threads({}) == 0 and said_threads({"OMP_NUM_THREADS": "many"}) == 0
    assert said_threads({"OMP_NUM_THREADS": "1"}) == 1
    for launcher in (TORCHRUN, MPICH | ACCELERATE):
        assert said_threads(launcher, of_launcher=dict) == 0
        assert said_threads(launcher, of_launcher=lambda: {"OMP_NUM_THREADS": "1"}) == 1
        assert said_threads({**launcher, "OMP_NUM_THREADS": "6"}, of_launcher=dict) == 6


def test_ranks_share_a_nodes_cores_and_stay_on_those_they_are_bound_to(monkeypatch):
    monkeypatch.setattr(launched, "physical_cores", len)
    bound_to = {Rank(0, 4, 0, 4): range(16), Rank(0, 2, 0, 1): range(8), Rank(0, 4, 1, 4): range(8), Rank(0, 2, 1, 2): range(1)}
    threads = []
    for rank, cores in bound_to.items():
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(cores))
        threads.append(share_of_cores(rank, Daemon(frozenset(range(16)), "")))
    assert threads == [4, 8, 4, 1]
    assert share_of_cores(Rank(0, 3, 0, 3), None) == 1, "never less than one"


def test_two_hyperthreads_are_one_core_and_nodes_are_found(tmp_path):
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
        (tmp_path / f"node{cpu % 2}" / f"cpu{cpu}").mkdir(parents=True)
    assert launched.physical_cores({0, 1, 2, 3}, tmp_path) == 2 and launched.physical_cores({0, 2}, tmp_path) == 1
    assert launched.physical_cores({0, 1, 2}, tmp_path / "missing") == 3
    assert launched.numa_nodes({0, 1}, tmp_path) == [0, 1] and launched.numa_nodes({1, 3}, tmp_path) == [1]


def test_open_mpis_own_binding_is_undone_and_the_users_is_not(monkeypatch):
    set_to = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: set_to.append(len(cores)))
    launched.unbind({})
    launched.unbind({"OMPI_MCA_orte_bound_at_launch": "1", "OMPI_MCA_hwloc_base_binding_policy": "core"})
    assert not set_to
    launched.unbind({"OMPI_MCA_orte_bound_at_launch": "1"})
    assert set_to == [os.cpu_count()]
