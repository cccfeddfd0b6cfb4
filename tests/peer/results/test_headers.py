"""What files say of themselves to other programs: ModelSpec's keys and kohya's, with the run's own values, and nothing of this machine."""

import hashlib
import json
import shutil
from contextlib import ExitStack

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from peer import export
from peer.config import PeerConfig
from peer.launch.joining import Joined
from peer.launch.launch import Launch
from peer.machine.device import Rank, RankGroup
from peer.results.loading import LORA as FILE
from peer.results.result import read_result
from peer.wiring import assemble
from swarm.digest import digest_model
from swarm.run.family import families
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.models import test_flux2, test_sd3
from tests.peer.results.test_results import CPU, LORA, WORD, Trained, plain, real_blocks

RUN = {
    "run_name": "toys é",
    "learning_rate": 3e-4,
    "clip_skip": 1,
    "target_batch_size": 64,
    "train_text_encoder": True,
    "text_encoder_lr": 1e-4,
}
MUST = {f"modelspec.{name}" for name in ("sai_model_spec", "architecture", "implementation", "title", "resolution")}


def said(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def contents(path):
    """SHA-256 of what is behind the header, as ModelSpec and kohya's scripts have it."""
    data = path.read_bytes()
    return hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()


def test_a_loras_header_has_the_runs_own_values_in_every_form(tiny_family, tmp_path):
    """The keys of library/sai_model_spec.py and train_network.py, sd-scripts at 48d368fa557731ad0488c07304dfeba8c07910eb; ModelSpec at fe8dc60."""
    done = Trained(tiny_family("sd"), "sd", tmp_path / "model", **LORA, **RUN).written()
    for form in ("lora_diffusers", "lora_kohya"):
        export.main(["--state", str(tmp_path), "--format", form, "--dtype", "fp16", "--out", str(tmp_path / form)])
    for path in (done.folder / FILE, *tmp_path.glob("*.safetensors")):
        header = said(path)
        assert header.keys() >= MUST and header["modelspec.sai_model_spec"] == "1.0.1"
        assert header["modelspec.hash_sha256"] == f"0x{contents(path)}" and header["sshs_model_hash"] == contents(path)
        assert header["modelspec.description"].endswith("by the method lora: 64 samples in 3 rounds.")
        wanted = {
            "modelspec.architecture": "stable-diffusion-v1/lora",
            "modelspec.implementation": "diffusers",
            "modelspec.title": "toys é",
            "modelspec.resolution": "16x16",
            "modelspec.prediction_type": "epsilon",
            "modelspec.encoder_layer": "2",  # the last is 1 there
            "ss_base_model_version": "sd_v1",
            "ss_v2": "False",
            "ss_network_module": "networks.lora",
            "ss_network_dim": "2",
            "ss_network_alpha": "3.0",
            "ss_learning_rate": "0.0003",
            "ss_text_encoder_lr": "0.0001",
            "ss_steps": "3",
            "ss_total_batch_size": "64",
        }
        assert {name: header[name] for name in wanted} == wanted
        assert "modelspec.date" not in header and not [
            name for name, text in header.items() if "None" in (name, text) or str(tmp_path.parent) in text
        ]


def test_equal_states_give_equal_files_wherever_each_peer_has_the_model(tiny_family, tmp_path):
    """safetensors itself writes a header's entries in another order each time."""
    for name in ("one", "two"):
        base = shutil.copytree(tiny_family("flux"), tmp_path / f"{name}-customers" / name)
        digest = digest_model(base)
        done = Trained(base, "flux", tmp_path / name, model_digest=digest, **LORA).written()
        header = said(done.folder / FILE)
        assert f"from FLUX ({digest[:16]}) with" in header["modelspec.description"] and "customers" not in str(header)
        export.main(["--state", str(tmp_path / name), "--format", "lora_kohya", "--out", str(tmp_path / name / "kohya")])
    for file in (FILE, "kohya.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
        assert len(said(tmp_path / "one" / file)) > 20


def test_a_peers_result_says_where_it_has_the_model_itself_and_not_where_the_host_had_it(tiny_family, tmp_path):
    """A host's relative path looks like an id of the Hub."""
    run = RunConfig(model="customers/toy", family="stable_diffusion", resolution=16, total_samples=4, **LORA)
    pictures = tiny.write_pictures(tmp_path / "pictures", 4)
    peer = PeerConfig(train_data_dir=str(pictures), output_dir=str(tmp_path / "out"), train_batch_size=4)
    with ExitStack() as closing:
        alone = {"group": RankGroup(Rank(), CPU), "device": CPU, "stopping": bool, "closing": closing}
        _, results = assemble(Launch(joined=Joined(run), peer=peer, given={"model": str(tiny_family("sd"))}, **alone))
        results.export(tmp_path / "result")
    assert read_result(tmp_path / "result").run.model == str(tiny_family("sd"))
    written = [path for path in (tmp_path / "result").rglob("*") if path.is_file()]
    assert len(written) == 3 and not [path for path in written if b"customers" in path.read_bytes()]


@pytest.mark.parametrize(
    "options", [{"method": "loha", "rank": 3}, {"method": "lokr", "rank": 3}, WORD], ids=lambda options: options["method"]
)
def test_products_and_words_say_what_they_are(tiny_family, tmp_path, options):
    done = Trained(tiny_family("sdxl"), "sdxl", tmp_path / "model", **options).written()
    if options is WORD:
        export.main(["--state", str(tmp_path), "--format", "embedding", "--out", str(tmp_path / "word")])
        for path in (done.folder / "learned_embeds_2.safetensors", tmp_path / "word.safetensors"):
            header = said(path)
            assert header["modelspec.architecture"] == "stable-diffusion-xl-v1-base/textual-inversion"
            assert "ss_unet_lr" not in header, "no layer of it is trained"
            assert header["modelspec.trigger_phrase"] == "<dicoo>" and header["modelspec.hash_sha256"] == f"0x{contents(path)}"
        return
    header = said(done.folder / "lycoris.safetensors")
    assert header["modelspec.architecture"] == "stable-diffusion-xl-v1-base/lora" and header["ss_base_model_version"] == "sdxl_base_v1-0"
    assert (header["ss_network_module"], header["ss_network_dim"]) == ("lycoris.kohya", "3")
    assert json.loads(header["ss_network_args"]) == {"algo": options["method"]}


def test_a_single_file_says_what_the_whole_model_is(tiny_family, tmp_path):
    Trained(tiny_family("sd"), "sd", tmp_path / "model", **LORA, run_name="toys").written()
    pipeline = real_blocks("sdxl")
    pipeline.scheduler = tiny.ddpm("v_prediction")
    pipeline.save_pretrained(tmp_path / "plain")
    for place, title, architecture, predicts in (
        ("model", "toys", "stable-diffusion-v1", "epsilon"),
        ("plain", "mine", "stable-diffusion-xl-v1-base", "v"),
    ):
        export.main(["--state", str(tmp_path / place), "--format", "single_file", "--out", str(tmp_path / "mine")])
        header = said(tmp_path / "mine.safetensors")
        assert (header["modelspec.title"], header["modelspec.architecture"], header["modelspec.prediction_type"]) == (
            title,
            architecture,
            predicts,
        )
        assert header["modelspec.implementation"] == "https://github.com/Stability-AI/generative-models"
        assert header["modelspec.hash_sha256"] == f"0x{contents(tmp_path / 'mine.safetensors')}"
        assert not [name for name in header if name.startswith("ss")]


SIZES = {
    "stable_diffusion": {"sd_v1": {"cross_attention_dim": 768}, "sd_v2": {"cross_attention_dim": 1024}},
    "sd3": {"medium": test_sd3.SD3_MEDIUM, "5-medium": test_sd3.MEDIUM, "5-large": test_sd3.LARGE},
    "flux": {"flux1": {"guidance_embeds": False}},
    "flux2": {"flux_2_dev": test_flux2.DEV},
    "flux2_klein": {"flux_2_klein_4b": test_flux2.KLEIN_4B, "flux_2_klein_9b": test_flux2.KLEIN_9B},
}


def test_sizes_of_a_family_have_names_of_their_own():
    for family, versions in SIZES.items():
        called = families()[family].called
        assert {version: called(config, False).version for version, config in versions.items()} == {
            version: version for version in versions
        }
        architectures = [called(config, False).architecture for config in versions.values()]
        assert len({*architectures}) == len(architectures)
    second = {"cross_attention_dim": 1024}
    names = families()["stable_diffusion"].called(second, True)
    assert (names.architecture, names.version) == ("stable-diffusion-v2-768-v", "sd_v2_v")
    assert families()["flux"].called({"guidance_embeds": False}, False).architecture == "flux-1-schnell"


def test_a_lora_of_an_earlier_version_has_no_header_and_gets_none(tiny_family, tmp_path):
    from safetensors.torch import save_file

    done = Trained(tiny_family("sd"), "sd", tmp_path / "model", **LORA).written()
    save_file(load_file(done.folder / FILE), done.folder / FILE, {"format": "pt"})
    for form in ("lora_diffusers", "lora_kohya"):
        export.main(["--state", str(tmp_path), "--format", form, "--out", str(tmp_path / form)])
        assert said(tmp_path / f"{form}.safetensors") == {"format": "pt"}
    pipeline = plain(tiny_family("sd"))
    pipeline.load_lora_weights(tmp_path, weight_name="lora_kohya.safetensors")
