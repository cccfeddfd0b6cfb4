"""What the denoisers are to predict: noise, targets and weights against the formulas that diffusers' scripts have."""

import dataclasses
import math

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DiffusionPipeline,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    PNDMScheduler,
)
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from safetensors.torch import save_file

from peer.contracts import LatentBatch
from peer.models.diffusion.distance import distance_of
from peer.models.diffusion.flow import Flow
from peer.models.diffusion.noising import Noising, changed, ddim, multires, sample_losses
from peer.rooms import load_part
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests import tiny

CPU = torch.device("cpu")
RUN = RunConfig()
ALL = torch.arange(1000)


def rng():
    return torch.Generator().manual_seed(5)


def latents(size=3):
    return torch.randn(size, 4, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def load(tiny_family):
    def load(family, **options):
        run = RunConfig(**tiny.MODELS[family].run, **options)
        return load_part("models", tiny.FAMILIES[family]).load(tiny_family(family), CPU, run)

    return load


def batch(model):
    with torch.no_grad():
        return LatentBatch(latents(), model.encode_text(["a toy", "", "a cat"]))


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("family", ["sd", "sdxl"])
@torch.no_grad()
def test_the_target_is_what_the_run_says_and_the_saved_scheduler_says_it_too(load, family, prediction_type, tmp_path):
    model = load(family, prediction_type=prediction_type)
    encoded, draw = batch(model), rng()
    scheduler = DDPMScheduler.from_config(tiny.ddpm(prediction_type).config)
    noise = torch.randn(3, 4, 8, 8, generator=draw)
    timesteps = torch.randint(0, 1000, (3,), generator=draw)
    target = {"epsilon": noise, "v_prediction": scheduler.get_velocity(latents(), noise, timesteps), "sample": latents()}[prediction_type]
    told = {"text_embeds": encoded.text["pooled"], "time_ids": torch.tensor([[16, 16, 0, 0, 16, 16.0]] * 3)} if family == "sdxl" else None
    seen = scheduler.add_noise(latents(), noise, timesteps)
    predicted = model.unet(seen, timesteps, encoded.text["states"], added_cond_kwargs=told).sample
    torch.testing.assert_close(model.loss(encoded, rng()), (predicted - target).square().mean((1, 2, 3)))
    model.save(tmp_path / "out")
    assert DiffusionPipeline.from_pretrained(tmp_path / "out").scheduler.config.prediction_type == prediction_type


@torch.no_grad()
def test_sdxl_is_told_the_geometry_of_each_picture(load):
    model = load("sdxl")
    encoded, seen = batch(model), []
    model.unet.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["added_cond_kwargs"]["time_ids"]), with_kwargs=True)
    geometry = torch.tensor([[64, 48, 3, 5, 16, 16], [20, 30, 0, 0, 16, 16], [16, 16, 0, 0, 16, 16]])
    losses = model.loss(dataclasses.replace(encoded, geometry=geometry), rng()), model.loss(encoded, rng())
    assert torch.equal(seen[0], geometry.float()) and seen[1].tolist() == [[16, 16, 0, 0, 16, 16]] * 3
    assert not torch.isclose(losses[0], losses[1], rtol=1e-6)[:2].any() and torch.isclose(losses[0], losses[1])[2]


def test_with_zero_terminal_snr_nothing_of_the_picture_is_left_at_the_last_step():
    noising = Noising(tiny.ddpm("v_prediction"), RunConfig(rescale_betas_zero_snr=True))
    last = torch.tensor([999])
    assert torch.equal(noising._scheduler.add_noise(latents(1), latents(2)[1:], last), latents(2)[1:])
    kept = Noising(tiny.ddpm("v_prediction", zero_snr=True), RUN)  # the model's own scheduler says so
    assert kept._scheduler.alphas_cumprod[-1] == 0 != Noising(tiny.ddpm("v_prediction"), RUN)._scheduler.alphas_cumprod[-1]
    undone = Noising(tiny.ddpm("v_prediction", zero_snr=True), RunConfig(rescale_betas_zero_snr=False))
    assert undone._scheduler.alphas_cumprod[-1] > 0


def test_zero_terminal_snr_is_refused_where_the_noise_is_predicted():
    with pytest.raises(UserError, match=r"rescale_betas_zero_snr needs .* Add --prediction_type v_prediction"):
        Noising(tiny.ddpm(), RunConfig(rescale_betas_zero_snr=True))


@pytest.mark.parametrize("scheduler", [EDMEulerScheduler, EDMDPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler])
def test_a_model_whose_noise_has_no_betas_is_refused(scheduler, tmp_path):
    pipeline = tiny.build("sdxl")
    pipeline.scheduler = scheduler()
    pipeline.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"scheduler is {scheduler.__name__}, whose noise has no beta_schedule"):
        load_part("models", "sdxl").load(tmp_path, CPU, RunConfig())


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_a_unet_whose_latents_have_a_mean_is_refused(family, tmp_path):
    pipeline = tiny.build(family)
    pipeline.vae.register_to_config(latents_mean=[0.1] * 4, latents_std=[1.2] * 4)
    pipeline.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="VAE has latents_mean and latents_std"):
        load_part("models", tiny.FAMILIES[family]).load(tmp_path, CPU, RunConfig())


@pytest.mark.parametrize("name", ["edm_mean", "edm_vpred.sigma_max"])
def test_a_single_file_of_a_model_with_edms_noise_is_refused(name, tmp_path):
    save_file({name: torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"has EDM's noise .{name}"):
        load_part("models", "sdxl").load(tmp_path / "model.safetensors", CPU, RunConfig())


@pytest.mark.parametrize("kind", [EulerDiscreteScheduler, PNDMScheduler])
def test_ddim_in_place_of_another_kind_clips_nothing(kind):
    made = kind(beta_schedule="scaled_linear")
    drawn = ddim(made.config)
    drawn.set_timesteps(4)
    noise = torch.full((1, 4, 2, 2), 0.5)
    noisy = drawn.add_noise(torch.full_like(noise, 3.0), noise, drawn.timesteps[-2:-1])
    assert torch.allclose(drawn.step(noise, drawn.timesteps[-2], noisy).pred_original_sample, torch.tensor(3.0), atol=1e-4)
    assert changed(made, {"rescale_betas_zero_snr": True}).config.get("clip_sample", False) is False
    assert ddim(DDIMScheduler(clip_sample=True).config).config.clip_sample, "what says so is taken at its word"


def test_a_run_that_changes_the_noise_is_saved_with_a_scheduler_that_begins_where_it_ends(load, tmp_path):
    from diffusers import PNDMScheduler

    for number, scheduler in enumerate((tiny.ddpm(), PNDMScheduler.from_config(tiny.ddpm().config))):
        pipeline = tiny.build("sd")
        pipeline.scheduler = scheduler
        pipeline.save_pretrained(tmp_path / f"base{number}")
        run = RunConfig(prediction_type="v_prediction", rescale_betas_zero_snr=True)
        model = load_part("models", "stable_diffusion").load(tmp_path / f"base{number}", CPU, run)
        model.save(tmp_path / f"out{number}")
        saved = DiffusionPipeline.from_pretrained(tmp_path / f"out{number}").scheduler
        saved.set_timesteps(5)
        assert saved.timesteps[0] == 999 and saved.alphas_cumprod[-1] < 1e-6 and saved.config.prediction_type == "v_prediction"
        assert type(saved) is (DDPMScheduler, DDIMScheduler)[number]


@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_min_snr_weights_are_the_papers_and_finite(prediction_type, zero_snr):
    noising = Noising(tiny.ddpm(prediction_type, zero_snr), RunConfig(snr_gamma=5.0))
    weights = noising.weights(ALL)
    alphas = noising._scheduler.alphas_cumprod.double()
    snr = alphas / (1 - alphas)
    least = snr.clamp(max=5.0)
    expected = {"epsilon": least / snr, "v_prediction": least / (snr + 1), "sample": least}[prediction_type].nan_to_num(1.0)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-4, atol=1e-6)
    assert weights.isfinite().all() and weights.std() > 0
    assert Noising(tiny.ddpm(prediction_type, zero_snr), RUN).weights(ALL).eq(1).all()


@torch.no_grad()
def test_min_snr_weighs_each_samples_loss(load):
    plain, weighted = load("sd2v"), load("sd2v", snr_gamma=5.0)
    draw = rng()
    torch.randn(3, 4, 8, 8, generator=draw)
    weights = weighted.noising.weights(torch.randint(0, 1000, (3,), generator=draw))
    assert weights.min() < 0.9
    torch.testing.assert_close(weighted.loss(batch(plain), rng()), plain.loss(batch(plain), rng()) * weights)


THRESHOLDS = {  # kohya-ss/sd-scripts at 48d368fa, library/train_util.py: of huber_c 0.2, by timestep and the ratio of noise to picture
    "constant": lambda timestep, ratio: torch.full_like(ratio, 0.2),
    "exponential": lambda timestep, ratio: torch.exp(-(-math.log(0.2) / 1000) * timestep),
    "snr": lambda timestep, ratio: 0.8 / (1 + ratio) ** 2 + 0.2,
}


@pytest.mark.parametrize("schedule", THRESHOLDS)
@pytest.mark.parametrize("kind", ["huber", "smooth_l1"])
@pytest.mark.parametrize("noise", ["ddpm", "flow"])
def test_the_losses_that_forgive_are_kohyas(noise, kind, schedule):
    run = RunConfig(loss_type=kind, huber_c=0.2, huber_schedule=schedule)
    flow = FlowMatchEulerDiscreteScheduler(shift=3.0)
    noised = (Noising(tiny.ddpm(), run) if noise == "ddpm" else Flow(flow, run))(latents(), rng())
    alphas = tiny.ddpm().alphas_cumprod[noised.timesteps.long()].double()
    share = noised.timesteps.double() / 1000
    ratio = ((1 - alphas) / alphas).sqrt() if noise == "ddpm" else share / (1 - share)
    c = THRESHOLDS[schedule](noised.timesteps.double(), ratio).view(-1, 1, 1, 1)
    answer = noised.target + torch.logspace(-4, 1, 256).view(4, 8, 8)
    root = (torch.logspace(-4, 1, 256).view(1, 4, 8, 8).double().square() + c**2).sqrt() - c
    expected = (2 * c * root if kind == "huber" else 2 * root).mean((1, 2, 3))
    torch.testing.assert_close(sample_losses(answer, noised).double(), expected, rtol=1e-4, atol=0)


def test_every_loss_type_is_one_of_its_own():
    (known,) = (field.metadata["choices"] for field in dataclasses.fields(RunConfig) if field.name == "loss_type")
    values = {kind: float(distance_of(RunConfig(loss_type=kind), torch.tensor([0.5]), lambda: torch.ones(1))(torch.full((1, 1, 1, 1), 2.0))) for kind in known}
    assert len(set(values.values())) == len(known), f"{values}: one has no branch in distance_of (peer/models/diffusion/distance.py)"


def test_where_nothing_is_left_of_the_picture_a_huber_loss_has_the_threshold_that_the_run_says():
    last = {"timestep_bias_strategy": "later", "timestep_bias_portion": 0.001, "timestep_bias_multiplier": 1e9}
    noised = Noising(tiny.ddpm("v_prediction", zero_snr=True), RunConfig(loss_type="huber", **last))(latents(), rng())
    off = torch.ones(3, 4, 8, 8, requires_grad=True)
    assert noised.timesteps.tolist() == [999] * 3
    torch.testing.assert_close(noised.distance(off).mean(), torch.tensor(0.2 * (1.01**0.5 - 0.1)))
    noised.distance(0 * off).sum().backward()
    assert off.grad.eq(0).all()  # an answer that is right asks for nothing, and its gradient is a number


@pytest.mark.parametrize("family", tiny.ONE_OF_EACH)
@torch.no_grad()
def test_the_loss_of_every_family_hears_the_loss_type(load, family):
    square, huber = load(family), load(family, loss_type="huber")
    pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
    encoded = LatentBatch(square.encode_pixels(pixels).chunk(2, dim=1)[0], square.encode_text(["a toy", ""]))
    assert (huber.loss(encoded, rng()) < 0.9 * square.loss(encoded, rng())).all()


def test_offset_noise_is_the_same_in_all_of_a_channel_and_part_of_the_target():
    plain, offset = (Noising(tiny.ddpm(), RunConfig(noise_offset=value))(latents(), rng()) for value in (0.0, 0.1))
    difference = offset.target - plain.target
    assert torch.equal(plain.timesteps, offset.timesteps)
    torch.testing.assert_close(difference, difference[:, :, :1, :1].expand_as(difference), rtol=0, atol=1e-6)
    assert 0.05 < difference.std() < 0.2 and difference[0, 0, 0, 0] != difference[1, 0, 0, 0] != difference[1, 1, 0, 0]
    assert not torch.equal(offset.noisy, plain.noisy)


def test_multires_noise_has_a_deviation_of_1_and_more_of_it_in_what_is_coarse():
    def noise(**options):
        return Noising(tiny.ddpm(), RunConfig(**options))(torch.zeros(64, 4, 16, 16), rng()).target

    plain, coarse = noise(), noise(multires_noise_iterations=6, multires_noise_discount=0.9)
    torch.testing.assert_close(coarse.std(dim=(1, 2, 3)), torch.ones(64))
    means = [each.mean((2, 3)).var().item() for each in (plain, noise(multires_noise_iterations=6), coarse)]
    assert 0.5 / 256 < means[0] < 2 / 256 and 2 * means[0] < means[1] < means[2] / 4  # a mean of 256 numbers
    neighbours = [(each[..., 1:] * each[..., :-1]).mean().item() for each in (plain, noise(multires_noise_iterations=1), coarse)]
    assert abs(neighbours[0]) < 0.02 and abs(neighbours[1]) < 0.02 and neighbours[2] > 0.3  # the first time adds noise as fine as before
    assert torch.equal(coarse, noise(multires_noise_iterations=6, multires_noise_discount=0.9))


def test_multires_noise_of_a_picture_does_not_depend_on_its_batch_and_ends_with_one_pixel():
    noise = torch.randn(2, 1, 8, 8, generator=rng()) * torch.tensor([1.0, 50.0]).view(-1, 1, 1, 1)
    torch.testing.assert_close(multires(noise, rng(), 6, 0.5).std(dim=(1, 2, 3)), torch.ones(2))
    assert torch.equal(multires(noise, rng(), 5, 0.5), multires(noise, rng(), 100, 0.5))  # 8 / 2 ** 4 is less than a pixel, however it is drawn
    assert multires(torch.randn(2, 4, 3, 17, generator=rng()), rng(), 6, 0.5).shape == (2, 4, 3, 17)


@pytest.mark.parametrize(
    ("options", "favoured"),
    [
        ({"timestep_bias_strategy": "earlier", "timestep_bias_portion": 0.1}, range(100)),
        ({"timestep_bias_strategy": "later", "timestep_bias_portion": 0.1}, range(900, 1000)),
        ({"timestep_bias_strategy": "range", "timestep_bias_begin": 300, "timestep_bias_end": 400}, range(300, 400)),
    ],
)
def test_a_bias_draws_some_timesteps_more_often(options, favoured):
    noising = Noising(tiny.ddpm(), RunConfig(timestep_bias_multiplier=9.0, **options))
    drawn = noising(torch.zeros(4000, 1, 1, 1), rng()).timesteps
    share = sum(int(timestep) in favoured for timestep in drawn) / 4000
    assert abs(share - 900 / 1800) < 0.05 and drawn.min() >= 0 and drawn.max() < 1000
    with pytest.raises(UserError, match=r"timestep_bias_multiplier is 0"):
        RunConfig(timestep_bias_multiplier=0.0, **options)


def test_input_perturbation_changes_what_is_seen_and_not_what_is_asked():
    plain, perturbed = (Noising(tiny.ddpm(), RunConfig(input_perturbation=value))(latents(), rng()) for value in (0.0, 0.1))
    assert torch.equal(plain.target, perturbed.target) and torch.equal(plain.timesteps, perturbed.timesteps)
    assert not torch.equal(plain.noisy, perturbed.noisy)


@pytest.mark.parametrize("scheme", ["none", "logit_normal", "mode", "sigma_sqrt", "cosmap"])
@torch.no_grad()
def test_the_loss_of_flux_is_the_weighted_flow_of_diffusers_script(load, scheme):
    options = {"weighting_scheme": scheme, "logit_mean": 0.5, "logit_std": 0.8, "mode_scale": 1.1, "guidance_scale": 2.0}
    model = load("flux", **options)
    encoded, draw = batch(model), rng()
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    noise = torch.randn(3, 4, 8, 8, generator=draw)
    density = compute_density_for_timestep_sampling(scheme, 3, 0.5, 0.8, 1.1, generator=draw)
    timesteps = scheduler.timesteps[(density * 1000).long()]
    sigmas = torch.stack([scheduler.sigmas[scheduler.timesteps == timestep][0] for timestep in timesteps]).view(-1, 1, 1, 1)
    pack, unpack = model.pipeline._pack_latents, model.pipeline._unpack_latents
    predicted = model.denoiser(
        hidden_states=pack((1 - sigmas) * latents() + sigmas * noise, 3, 4, 8, 8),
        timestep=timesteps / 1000,
        guidance=torch.full((3,), 2.0),
        pooled_projections=encoded.text["pooled"],
        encoder_hidden_states=encoded.text["states"],
        txt_ids=torch.zeros(32, 3),
        img_ids=model.pipeline._prepare_latent_image_ids(3, 4, 4, CPU, torch.float32),
    ).sample
    weights = compute_loss_weighting_for_sd3(scheme, sigmas)
    expected = (weights * (unpack(predicted, 16, 16, 2) - (noise - latents())).square()).mean((1, 2, 3))
    torch.testing.assert_close(model.loss(encoded, rng()), expected)
    assert not torch.allclose(load("flux", **options | {"guidance_scale": 7.0}).loss(encoded, rng()), expected, rtol=1e-6)


@pytest.mark.parametrize("scheduler", [{"shift": 3.0}, {"shift": 3.0, "use_dynamic_shifting": True}, {}])
def test_the_points_of_the_way_are_shifted_as_the_run_says_or_else_as_the_models_scheduler(scheduler):
    own = FlowMatchEulerDiscreteScheduler(**scheduler)
    plain, shifted = (Flow(own, RunConfig(timestep_shift=shift)) for shift in (0.0, 1.8))
    share = torch.linspace(1, 0.001, 1000)
    torch.testing.assert_close(shifted._scheduler.sigmas[:1000], 1.8 * share / (1 + 0.8 * share))  # arXiv:2403.03206, equation 23
    assert torch.equal(plain._scheduler.sigmas, own.sigmas)
    drawn = [flow(torch.zeros(2000, 1, 1, 1), rng()) for flow in (Flow(FlowMatchEulerDiscreteScheduler(), RUN), shifted)]
    assert drawn[1].timesteps.mean() > drawn[0].timesteps.mean() + 50
    torch.testing.assert_close(drawn[1].noisy.flatten(), drawn[1].target.flatten() * shifted.sigmas(drawn[1].timesteps))
    assert own.config.get("shift") == scheduler.get("shift", 1.0)  # drawing goes on as before


def test_a_transformer_without_guidance_is_told_none(tmp_path):
    pipeline = tiny.build("flux")
    kind = type(pipeline.transformer)
    pipeline.register_modules(transformer=kind.from_config({**pipeline.transformer.config, "guidance_embeds": False}))
    pipeline.save_pretrained(tmp_path / "schnell")
    model = load_part("models", "flux").load(tmp_path / "schnell", CPU, RunConfig(max_sequence_length=32))
    assert model.loss(batch(model), rng()).isfinite().all()


@pytest.mark.parametrize(
    ("family", "reason", "name"),
    [(family, reason, name) for family, model in tiny.MODELS.items() for reason, options in model.foreign.items() for name in options],
)
def test_an_option_that_a_family_cannot_have_is_refused_by_name(load, family, reason, name):
    with pytest.raises(UserError, match=rf"{name} is .* {reason}.* Remove --{name}"):
        load(family, **{name: tiny.MODELS[family].foreign[reason][name]})
