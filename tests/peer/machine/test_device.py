import socket
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest
import torch

from peer.config import PeerConfig
from peer.launch.joining import Joined
from peer.launch.launch import Launch
from peer.learner import build_learner
from peer.machine import device
from peer.machine.device import Precision, Rank, RankGroup, choose_device, choose_precision, precision_of
from peer.machine.trial_of_speed import relative_difference
from swarm.errors import UserError
from swarm.run.family import families
from swarm.run_config import RunConfig
from tests import tiny

CPU = torch.device("cpu")


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
    for wanted in ("cuda", "cuda:0"):
        with pytest.raises(UserError, match=rf"--device {wanted} needs a GPU, and PyTorch \S+ sees none\. .*--device cpu"):
            choose_device(wanted, Rank())


@pytest.mark.parametrize("wanted", ["gpu", "cuda1", "cuda:", "cudaX:y", "cuda:-1"])
def test_a_device_that_is_none_is_refused_and_not_taken_for_the_first_gpu(wanted):
    with pytest.raises(UserError, match=f"'{wanted}' is unknown"):
        choose_device(wanted, Rank())


def test_each_local_rank_takes_its_own_gpu_and_several_cannot_share_one(monkeypatch):
    for name, value in (("is_available", True), ("device_count", 2), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert [choose_device(wanted, Rank()).index for wanted in ("auto", "cuda", "cuda:1")] == [0, 0, 1]
    assert choose_device("cuda", Rank(1, 2, 1, 2)).index == 1
    with pytest.raises(UserError, match=r"--device cuda:1 is one GPU, and 2 ranks"):
        choose_device("cuda:1", Rank(1, 2, 1, 2))
    with pytest.raises(UserError, match=r"asks for GPU 2, but this machine has 2"):
        choose_device("cuda:2", Rank())


@pytest.mark.parametrize(
    ("features", "parameters", "dtype", "reason"),
    [
        (["AMX", "AVX512-BF16"], 860_000_000, torch.bfloat16, "this processor has AMX and AVX512-BF16"),
        (["AMX"], 1_000_000, None, "with 1.0 M parameters casting would cost more than AMX saves"),
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


@pytest.fixture
def an_old_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda which: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda which: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("family", "dtype", "reason"),
    [
        ("sdxl", torch.float16, "fp16: Tesla T4 (compute capability 7.5) has no bf16; the loss is scaled"),
        ("auto", torch.float16, "fp16: "),
        ("flux", None, "no: Tesla T4 (compute capability 7.5) has no bf16, and models of this family overflow in fp16"),
    ],
)
def test_a_gpu_without_bf16_computes_in_fp16_only_families_that_stay_finite_in_it(an_old_gpu, family, dtype, reason):
    run = RunConfig(family=family)
    chosen = precision_of(PeerConfig(), run, an_old_gpu, 10**9)
    assert (chosen.dtype, chosen.scaled) == (dtype, dtype is not None) and chosen.reason.startswith(reason)
    asked = precision_of(PeerConfig(mixed_precision="fp16"), run, an_old_gpu, 10**9)
    assert asked.dtype is torch.float16 and asked.reason == "fp16: asked for by --mixed_precision"
    assert precision_of(PeerConfig(weights="bf16"), run, an_old_gpu, 10**9).dtype is torch.bfloat16


@pytest.mark.parametrize(("family", "warned"), [("sd", False), ("z_image", True)])
def test_who_asks_for_fp16_of_a_family_that_overflows_in_it_is_warned(tiny_family, tmp_path, monkeypatch, caplog, family, warned):
    monkeypatch.setattr("peer.learner.precision_of", lambda *_: Precision(CPU, torch.float16, True, "asked for"))
    run = RunConfig(model=str(tiny_family(family)), family=tiny.FAMILIES[family], resolution=16, sync="none", method="lora")
    with ExitStack() as closing:
        launch = Launch(
            joined=Joined(run), peer=PeerConfig(output_dir=str(tmp_path)), group=RankGroup(Rank(), CPU), device=CPU, stopping=lambda: False,
            closing=closing,
        )  # fmt: skip
        build_learner(launch, "x")
    assert ("overflow in fp16" in caplog.text) == warned


def test_a_peer_tells_others_what_it_computes_on(monkeypatch):
    monkeypatch.setattr(device, "cpu_features", lambda: ["AMX"])
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert device.describe_hardware(CPU) == "16 CPU cores, AMX"
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda which: "NVIDIA H100 80GB HBM3 with a name far longer than any record has room for"
    )
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    said = device.describe_hardware(torch.device("cuda", 0))
    assert said.startswith("8 x NVIDIA H100") and len(said) == 64


@pytest.mark.parametrize(
    ("multiprocessors", "weights", "refused"), [((72, 84), "bf16", True), ((84, 84), "bf16", False), ((72, 84), "fp32", False)]
)
def test_bf16_weights_are_refused_where_the_gpus_of_a_launch_would_round_otherwise(monkeypatch, multiprocessors, weights, refused):
    def properties(which):
        return SimpleNamespace(name="NVIDIA A10", multi_processor_count=multiprocessors[which.index])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    group = RankGroup(Rank(), CPU)
    monkeypatch.setattr(group, "gather", lambda own: [own, device._kind(torch.device("cuda", 1))])
    said = r"unlike devices.*A10 \(72 multiprocessors\), NVIDIA A10 \(84 multiprocessors\)\. Remove --weights bf16"
    with pytest.raises(UserError, match=said) if refused else nullcontext():
        device.check_alike(group, torch.device("cuda", 0), weights)


def test_cpu_features_are_read_from_the_kernels_list(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu amx_bf16 avx512_bf16\n")
    assert device.cpu_features(tmp_path / "cpuinfo") == ["AMX", "AVX512-BF16"]
    assert device.cpu_features(tmp_path / "missing") == []


def test_ranks_that_do_not_meet_say_where_they_looked(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(UserError, match=rf"Rank 1 of 2 could not find rank 0 at 127\.0\.0\.1:{taken.getsockname()[1]} within 1 s"):
            RankGroup(Rank(1, 2), CPU, timeout_seconds=1)
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(UserError, match=r"Rank 0 of 2 could not listen on port .* a free MASTER_PORT"):
            RankGroup(Rank(0, 2), CPU, timeout_seconds=1)


def test_tensors_are_summed_in_buckets_that_hold_them_all_in_order(monkeypatch):
    monkeypatch.setattr(device, "_BUCKET_BYTES", 40)
    tensors = [torch.zeros(count) for count in (3, 20, 1, 5, 5, 2)]
    assert [[tensor.numel() for tensor in bucket] for bucket in device._buckets(tensors)] == [[3, 20], [1, 5, 5], [2]]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")])
def test_a_rank_that_runs_out_of_memory_says_so_and_not_that_another_is_lost(monkeypatch, error):
    raised = iter([error, RuntimeError("Connection closed by peer")])

    def all_reduce(flat):
        raise next(raised)

    monkeypatch.setattr(device.dist, "all_reduce", all_reduce)
    group = RankGroup(Rank(), CPU)
    group.world = 2
    with pytest.raises(type(error), match="CUDA"):
        group.sum_([torch.zeros(2)])
    with pytest.raises(UserError, match="Another rank of this launch ended or hangs"):
        group.sum_([torch.zeros(2)])


@pytest.mark.parametrize("family", tiny.ONE_OF_EACH)
def test_attention_is_pytorchs_own_in_every_family(family):
    pipeline = tiny.build(family)
    name = families()[tiny.FAMILIES[family]].denoiser
    parts = {name: getattr(pipeline, name), "vae": pipeline.vae}
    assert device.attention(parts) == "sdpa"


def test_another_way_to_compute_attention_is_named():
    from diffusers.models.attention_processor import AttnProcessor

    unet = tiny.build("sd").unet
    unet.set_attn_processor(AttnProcessor())
    assert device.attention({"unet": unet}) == "AttnProcessor"
    assert "device=cpu threads=3 attention=AttnProcessor autocast=no: asked for" in device.describe(
        Rank(), choose_precision("no", CPU, 0), 3, {}, {"unet": unet}
    )


def test_channels_last_is_for_gpus(caplog):
    assert device.gains_by_channels_last(True, torch.device("cuda"))
    assert not device.gains_by_channels_last(False, torch.device("cuda")) and not caplog.text
    assert not device.gains_by_channels_last(True, CPU)
    assert "channels_last=no: it is for GPUs" in caplog.text


def test_channels_last_changes_what_flows_and_not_the_weights():
    pipeline = tiny.build("sd")
    parts = {"unet": pipeline.unet, "vae": pipeline.vae, "text_encoder": pipeline.text_encoder}
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(2, 4, 8, 8, generator=generator), torch.tensor([3, 700]), torch.randn(2, 77, 16, generator=generator)
    weights = {name: (parameter, parameter.data_ptr(), parameter.stride()) for name, parameter in pipeline.unet.named_parameters()}
    plain = gradients(pipeline.unet, given)
    seen = []
    pipeline.unet.conv_out.register_forward_pre_hook(lambda _, args: seen.append(args[0].is_contiguous(memory_format=torch.channels_last)))
    assert device.use_channels_last(parts) == ["unet", "vae"]
    pipeline.unet.conv_out.register_forward_pre_hook(lambda _, args: seen.append(args[0].is_contiguous(memory_format=torch.channels_last)))
    laid_out = gradients(pipeline.unet, given)
    assert seen[-1] and list(weights) == [name for name, _ in pipeline.unet.named_parameters()]
    for name, parameter in pipeline.unet.named_parameters():
        assert weights[name] == (parameter, parameter.data_ptr(), parameter.stride()) and parameter.grad.stride() == parameter.stride()
    assert relative_difference(plain, laid_out) < 1e-4


def gradients(unet, given):
    unet.zero_grad()
    unet(*given, return_dict=False)[0].square().sum().backward()
    return [parameter.grad.clone() for parameter in unet.parameters()]
