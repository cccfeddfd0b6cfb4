import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline

from peer.contracts import PixelBatch
from peer.methods import full
from peer.models import stable_diffusion
from peer.models.diffusion import pipeline
from peer.samples import encoding
from peer.samples.encoding import Encoder
from swarm.digest import digest_model
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests import tiny

CPU = torch.device("cpu")


def batch(captions=("a red square", "", "a red square")):
    rng = torch.Generator().manual_seed(1)
    return PixelBatch(torch.rand(len(captions), 3, 16, 16, generator=rng) * 2 - 1, captions)


def encode(model, captions=("a red square", "", "a red square")):
    return Encoder(model)(batch(captions), torch.Generator().manual_seed(0))


def test_a_batch_becomes_latents_and_text_states(tiny_model):
    model = stable_diffusion.load(tiny_model, CPU, RunConfig())
    full.build(RunConfig()).attach(model)
    encoded = encode(model)
    states = encoded.text["states"]
    assert encoded.latents.shape == (3, 4, 8, 8) and states.shape == (3, 77, 16)
    assert not encoded.latents.requires_grad and not states.requires_grad
    assert torch.equal(states[0], states[2]) and not torch.equal(states[0], states[1])


def test_latents_are_drawn_as_the_vae_draws_them(tiny_model):
    model = stable_diffusion.load(tiny_model, CPU, RunConfig())
    with torch.no_grad():
        posterior = model.vae.encode(batch().pixels).latent_dist
    expected = posterior.sample(torch.Generator().manual_seed(0)) * model.vae.config.scaling_factor
    torch.testing.assert_close(encode(model).latents, expected)


def test_text_states_match_the_pipelines_own(tiny_model):
    model = stable_diffusion.load(tiny_model, CPU, RunConfig())
    pipeline = StableDiffusionPipeline.from_pretrained(tiny_model)
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt(["a red square", ""], CPU, 1, False)
    torch.testing.assert_close(model.encode_text(("a red square", ""))["states"], expected, rtol=1e-5, atol=1e-6)


def test_captions_that_repeat_are_encoded_once_and_few_are_kept(tiny_model, monkeypatch):
    monkeypatch.setattr(encoding, "_TEXT_CACHE_BYTES", 2 * 77 * 16 * 4)
    monkeypatch.setattr(encoding, "_LEAST_CAPTIONS", 1)
    model = stable_diffusion.load(tiny_model, CPU, RunConfig())
    full.build(RunConfig()).attach(model)
    asked, encode_text = [], model.encode_text
    monkeypatch.setattr(model, "encode_text", lambda captions: asked.append(list(captions)) or encode_text(captions))
    encoder = Encoder(model)
    for captions in (("a", "b"), ("a", "c"), ("c", "a", "c"), ("b", "a")):
        assert encoder(batch(captions), torch.Generator()).text["states"].shape == (len(captions), 77, 16)
    assert asked == [["a"], ["b"], ["c"], ["b"]]  # one by one: the others of a batch would change the last bits


def test_however_unlike_texts_are_in_length_only_so_many_bytes_of_them_are_kept(monkeypatch):
    """Of a family whose texts are as long as their captions; the first of each batch is the empty one."""
    monkeypatch.setattr(encoding, "_TEXT_CACHE_BYTES", 10 * 4000)
    monkeypatch.setattr(encoding, "_LEAST_CAPTIONS", 2)

    def encode_text(captions):
        return {"states": torch.zeros(len(captions), 1000 if any(captions) else 1, 1)}

    encoder = Encoder(SimpleNamespace(encode_text=encode_text, encode_pixels=lambda pixels: torch.zeros(len(pixels), 2, 1, 1)))
    for number in range(40):
        encoder(batch(["", f"long {number}"]), torch.Generator())
    assert sum(text["states"].nbytes for text in encoder._known.values()) <= 10 * 4000 and len(encoder._known) == 10


def test_the_captions_of_a_small_dataset_are_kept_however_long_what_t5_says_of_them():
    asked, mib = [], 1 << 18

    def encode_text(captions):
        asked.extend(captions)
        return {"states": torch.zeros(len(captions), 2 * mib)}  # a quarter of FLUX's 8 MiB: 32 would fill the 64 MiB

    encoder = Encoder(SimpleNamespace(encode_text=encode_text, encode_pixels=lambda pixels: torch.zeros(len(pixels), 2, 1, 1)))
    captions = [str(number) for number in range(64)]
    for caption in [*captions, *captions, "another", "0"]:
        encoder(batch([caption]), torch.Generator())
    assert asked == [*captions, "another", "0"]


@pytest.mark.parametrize(("device", "groups"), [("cpu", [["a"], ["b"], ["c"]]), ("cuda", [["a", "b"], ["c"]])])
def test_a_window_is_encoded_in_the_groups_in_which_its_steps_would_be(device, groups):
    """On a GPU the last bits of a caption's text depend on what else is in its batch."""
    asked = []

    def encode_text(captions):
        asked.append([*captions])
        return {"states": torch.zeros(len(captions), 1)}

    encoder = Encoder(SimpleNamespace(encode_text=encode_text, encode_pixels=lambda pixels: torch.zeros(len(pixels), 2, 1, 1)))
    first, second = encoder.ahead([batch(["a", "b"]), batch(["b", "c"])], torch.device(device), texts=True)
    assert asked == groups and {states.device for ahead in (first, second) for states in (*ahead.text.values(), *ahead.latents.values())} == {CPU}


def test_a_window_that_takes_long_says_every_ten_seconds_how_far_it_is(monkeypatch, caplog):
    caplog.set_level("INFO")
    now = [0.0]

    def encode_pixels(pixels):
        now[0] += 4.0
        return torch.zeros(len(pixels), 2, 1, 1)

    monkeypatch.setattr(encoding, "time", SimpleNamespace(monotonic=lambda: now[0]))
    Encoder(SimpleNamespace(encode_pixels=encode_pixels)).ahead([batch(["a", "b"])] * 8, CPU, texts=False)
    assert [record.getMessage() for record in caplog.records] == ["encoded 6 of the next 16 pictures", "encoded 12 of the next 16 pictures"]


def test_text_that_is_trained_is_encoded_every_time_and_has_a_gradient(tiny_model):
    model = stable_diffusion.load(tiny_model, CPU, RunConfig())
    full.build(RunConfig()).attach(model)
    weight = model.text_encoder.get_input_embeddings().weight.requires_grad_(True)
    encoder, states = Encoder(model), []
    for _ in range(2):
        states.append(encoder(batch(("b", "a", "b")), torch.Generator()).text["states"])
        with torch.no_grad():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(states[0][0], states[0][2]) and not torch.allclose(states[0], states[1])
    states[0].square().sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_the_loss_is_the_schedulers_target_for_each_sample(tmp_path, prediction_type):
    folder = tiny.write_model(tmp_path / "model", prediction_type=prediction_type)
    model = stable_diffusion.load(folder, CPU, RunConfig())
    encoded = encode(model)
    losses = model.loss(encoded, torch.Generator().manual_seed(5))

    rng, scheduler = torch.Generator().manual_seed(5), DDPMScheduler.from_pretrained(folder, subfolder="scheduler")
    noise = torch.randn(encoded.latents.shape, generator=rng)
    timesteps = torch.randint(0, 1000, (3,), generator=rng)
    target = noise if prediction_type == "epsilon" else scheduler.get_velocity(encoded.latents, noise, timesteps)
    predicted = model.unet(scheduler.add_noise(encoded.latents, noise, timesteps), timesteps, encoded.text["states"]).sample
    expected = torch.nn.functional.mse_loss(predicted, target, reduction="none").mean((1, 2, 3))
    assert losses.shape == (3,) and losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected)


def test_full_trains_the_unet_alone_and_under_stable_names(tiny_model):
    model = stable_diffusion.load(tiny_model, CPU, RunConfig())
    params = full.build(RunConfig()).attach(model)
    assert list(params) == [f"unet.{name}" for name, _ in model.unet.named_parameters()]
    assert all(p.requires_grad and p.dtype == torch.float32 for p in params.values())
    assert not any(p.requires_grad for part in ("vae", "text_encoder") for p in model.parts[part].parameters())
    model.loss(encode(model), torch.Generator()).mean().backward()
    assert all(p.grad is not None for p in params.values())


def test_gradient_checkpointing_gives_the_same_gradients(tiny_model):
    gradients = []
    for checkpointing in (False, True):
        model = stable_diffusion.load(tiny_model, CPU, RunConfig())
        params = full.build(RunConfig()).attach(model)
        if checkpointing:
            model.enable_gradient_checkpointing()
        model.loss(encode(model), torch.Generator().manual_seed(0)).mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in params.values()]))
    torch.testing.assert_close(*gradients)


def test_the_export_loads_as_a_plain_pipeline_with_the_trained_weights_and_the_frozen_ones(tiny_model, tmp_path):
    model = stable_diffusion.load(tiny_model, CPU, RunConfig())
    method = full.build(RunConfig())
    params = method.attach(model)
    with torch.no_grad():
        for p in params.values():
            p.add_(0.01)
    method.export(model, params, tmp_path / "out")
    before, after = (StableDiffusionPipeline.from_pretrained(folder) for folder in (tiny_model, tmp_path / "out"))
    assert all(torch.equal(after.unet.get_parameter(name.removeprefix("unet.")), p) for name, p in params.items())
    for part in ("vae", "text_encoder"):
        ours, theirs = getattr(after, part).state_dict(), getattr(before, part).state_dict()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert digest_model(tmp_path / "out") != digest_model(tiny_model)


def test_the_export_keeps_the_text_encoders_old_key_names(tiny_model, tmp_path):
    from safetensors import safe_open

    stable_diffusion.load(tiny_model, CPU, RunConfig()).save(tmp_path / "out")
    with safe_open(tmp_path / "out/text_encoder/model.safetensors", "pt") as file:
        assert all(name.startswith("text_model.") for name in file.keys())  # noqa: SIM118


def test_a_folder_that_is_no_pipeline_is_a_one_line_error(tmp_path, tiny_model):
    with pytest.raises(UserError, match=r"no model_index\.json"):
        stable_diffusion.load(tmp_path, CPU, RunConfig())
    with pytest.raises(UserError, match="There is no model"):
        stable_diffusion.load(tmp_path / "missing", CPU, RunConfig())
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(UserError, match="does not load") as error:
        stable_diffusion.load(tmp_path, CPU, RunConfig())
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_brings_code_is_refused_without_a_question(tmp_path, monkeypatch):
    """transformers asks on the terminal whether to run it: `yes | dd-peer` would. Of other parts diffusers takes its own classes only."""
    ran, tokenizer = tmp_path / "ran", tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({"tokenizer": ["transformers", "OwnProcessor"]}))
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    (tokenizer / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    monkeypatch.setattr("builtins.input", lambda question: "y")
    family = SimpleNamespace(text_encoders={"text_encoder": SimpleNamespace(tokenizer="tokenizer")})
    with pytest.raises(ValueError, match="contains custom code"):
        pipeline._tokenizers(tmp_path, family)
    assert not ran.exists()


def test_a_part_of_another_library_is_not_imported(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"unet": ["antigravity", "UNet"]}))
    with pytest.raises(UserError, match="a unet of 'antigravity'"):
        pipeline._class_in(tmp_path, "unet")


@pytest.mark.parametrize(
    "changed", [{"scheduler": ["own.module", "Own"]}, {"unet": [7, "Own"]}, {"another": ["os", "system"]}, {"_class_name": ["own", "Own"]}], ids=str
)
def test_a_folder_that_names_code_of_its_author_is_refused_before_diffusers_reads_it(tmp_path, tiny_model, changed):
    """diffusers 0.38 to 0.40 imported the module that model_index.json named: a host's model ran its code at a volunteer."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | changed))
    with pytest.raises(UserError, match=r"wants a|which is code"):
        stable_diffusion.load(folder, CPU, RunConfig())
