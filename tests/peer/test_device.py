import pytest
import torch

from peer import device
from peer.device import Rank, RankGroup, choose_device, choose_precision
from swarm.errors import UserError

CPU = torch.device("cpu")


def test_the_rank_comes_from_torchrun_or_mpirun_or_is_the_only_one():
    assert Rank.from_environment({}) == Rank(0, 1, 0, 1)
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert Rank.from_environment(torchrun) == Rank(3, 4, 1, 2)
    openmpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert Rank.from_environment(openmpi) == Rank(1, 2, 1, 2)
    assert Rank.from_environment({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}) == Rank(1, 2, 0, 1)


def test_a_rank_alone_starts_no_process_group():
    group = RankGroup(Rank(), CPU)
    tensor = torch.ones(2)
    group.sum_([tensor])
    group.broadcast_([tensor])
    assert not torch.distributed.is_initialized() and tensor.tolist() == [1, 1]
    assert group.broadcast_object("x") == "x" and group.scatter(["part"]) == "part" and group.gather(1) == [1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_gpu_that_is_not_there_is_a_one_line_error():
    assert choose_device("auto", Rank()) == CPU
    with pytest.raises(UserError, match=r"asks for GPU 0, but this machine has 0"):
        choose_device("cuda", Rank())
    with pytest.raises(UserError, match=r"'gpu' is unknown"):
        choose_device("gpu", Rank())


@pytest.mark.parametrize(
    ("features", "parameters", "dtype", "reason"),
    [
        (["AMX", "AVX512-BF16"], 860_000_000, torch.bfloat16, "this processor has AMX and AVX512-BF16"),
        (["AMX"], 1_000_000, None, "with 1.0 M trained parameters casting would cost more than AMX saves"),
        ([], 860_000_000, None, "neither AMX nor AVX512-BF16"),
    ],
)
def test_the_number_format_of_a_cpu_is_chosen_by_what_pays_and_the_reason_is_said(monkeypatch, features, parameters, dtype, reason):
    monkeypatch.setattr(device, "cpu_features", lambda: features)
    chosen = choose_precision("auto", CPU, parameters)
    assert chosen.dtype == dtype and not chosen.scaled and reason in chosen.reason


def test_the_user_may_overrule_it_but_not_with_fp16_on_a_cpu():
    assert choose_precision("bf16", CPU, 1).dtype == torch.bfloat16 and choose_precision("no", CPU, 1).dtype is None
    with pytest.raises(UserError, match="fp16 on a CPU"):
        choose_precision("fp16", CPU, 1)


def test_cpu_features_are_read_from_the_kernels_list(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu amx_bf16 avx512_bf16\n")
    assert device.cpu_features(tmp_path / "cpuinfo") == ["AMX", "AVX512-BF16"]
    assert device.cpu_features(tmp_path / "missing") == []


def test_tensors_are_summed_in_buckets_that_hold_them_all_in_order(monkeypatch):
    monkeypatch.setattr(device, "_BUCKET_BYTES", 40)
    tensors = [torch.zeros(count) for count in (3, 20, 1, 5, 5, 2)]
    assert [[tensor.numel() for tensor in bucket] for bucket in device._buckets(tensors)] == [[3, 20], [1, 5, 5], [2]]
