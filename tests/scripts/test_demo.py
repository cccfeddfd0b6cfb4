"""The parts of the quickstart that need no swarm: data, judge, model, pictures, display."""

import io
import math

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from scripts.demo import digits, report, tiny_model
from scripts.demo.display import Display, line

PROGRESS = {
    "round": 3,
    "samples": 6144,
    "total_samples": 65536,
    "target_batch_size": 2048,
    "waiting_samples": 512,
    "samples_per_second": 403.2,
    "loss": 0.1234,
    "peers": [{}, {}],
}


@pytest.fixture(scope="module")
def judge():
    return digits.Judge.from_real_digits()


def test_the_judge_reads_real_digits_that_it_never_saw(judge):
    ink, labels = digits.load()
    unseen = digits.pictures(ink[digits.TRAIN_COUNT :])
    assert judge.accuracy >= 0.9
    assert float((judge.read(unseen) == labels[digits.TRAIN_COUNT :]).mean()) == pytest.approx(judge.accuracy)


def test_the_judge_does_not_read_noise_as_what_was_asked(judge):
    random = np.random.default_rng(0)
    noise = [Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)) for _ in range(100)]
    assert (judge.read(noise) == report.asked_digits()).mean() < 0.3


def test_the_dataset_is_captioned_pictures_of_real_digits(tmp_path):
    digits.write_folder(tmp_path / "data", count=20)
    ink, labels = digits.load()
    assert len(list((tmp_path / "data").iterdir())) == 40
    with Image.open(tmp_path / "data" / "0007.png") as picture:
        assert picture.size == (16, 16) and picture.mode == "RGB"
        assert np.array_equal(np.asarray(picture), np.asarray(digits.picture(ink[7])))
    assert (tmp_path / "data" / "0007.txt").read_text() == f"a handwritten {digits.WORDS[labels[7]]}"


def test_the_tiny_model_is_a_real_pipeline_and_the_same_each_time(tmp_path):
    from diffusers import StableDiffusionPipeline

    from swarm.digest import digest_model

    ink, _ = digits.load()
    captions = [digits.caption(digit) for digit in range(10)]
    shown = []
    for name in ("first", "second"):
        tiny_model.build(tmp_path / name, digits.pictures(ink[:64]), captions, vae_steps=2, show=lambda *step: shown.append(step))
    assert shown == 2 * [(1, 2), (2, 2)]
    assert digest_model(tmp_path / "first") == digest_model(tmp_path / "second")
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "first", safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    picture = pipeline("a handwritten seven", height=16, width=16, num_inference_steps=2).images[0]
    assert picture.size == (16, 16)


def test_the_tokenizer_gives_each_caption_its_own_tokens_and_takes_any_text():
    captions = [digits.caption(digit) for digit in range(10)]
    tokenizer = tiny_model.make_tokenizer(captions)
    ids = [tuple(tokenizer(text).input_ids) for text in captions]
    assert len(set(ids)) == 10 and all(len(one) == 5 for one in ids)  # begin, a, handwritten, the digit, end
    assert len(tokenizer("something else!").input_ids) > 5
    assert max(tokenizer([*captions, "zebra ~ 9"]).input_ids[-1]) < len(tokenizer)


def test_the_text_encoder_tells_all_digits_apart():
    import torch

    captions = [digits.caption(digit) for digit in range(10)]
    tokenizer = tiny_model.make_tokenizer(captions)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        encoder = tiny_model.make_text_encoder(tokenizer)
        states = encoder(tokenizer(captions, padding="max_length", return_tensors="pt").input_ids)[0]
    spread = torch.cdist(states[:, 3], states[:, 3]) + 1e9 * torch.eye(10)  # at the digit's own token
    assert spread.min() > 0.5 * states.norm(dim=-1).mean()


def test_the_grid_shows_every_picture_and_marks_those_read_wrongly():
    drawn = [Image.new("RGB", (16, 16), (200, 200, 200))] * 100
    asked = report.asked_digits()
    read = asked.copy()
    plain = report.grid(drawn, read, asked, title="t", subtitle="s")
    read[0] = 5
    marked = report.grid(drawn, read, asked, title="t", subtitle="s")
    changed = np.argwhere((np.asarray(plain) != np.asarray(marked)).any(axis=-1))
    (top, left), (bottom, right) = changed.min(axis=0), changed.max(axis=0)
    assert (left, top) == (report.MARGIN - 2, report.HEAD - 2)
    assert right - left <= report.TILE + 4 and bottom - top <= report.TILE + 4


def test_accuracy_is_also_told_digit_by_digit():
    asked = report.asked_digits()
    read = asked.copy()
    read[70:75] = 1
    by_digit = report.accuracy_by_digit(read, asked)
    assert by_digit["seven"] == 0.5 and by_digit["one"] == 1.0


def test_the_loss_is_plotted_even_where_a_peer_wrote_nothing(tmp_path):
    metrics = {"peer-1": [{"time": 1.0, "loss": 0.5}, {"time": 2.0, "loss": None}, {"time": 3.0, "loss": 0.4}], "peer-2": []}
    report.plot_loss(metrics, [{"time": 2.5}], tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.width > 500
    assert report.smooth([1.0, 0.0], keep=0.5) == [1.0, 0.5]


def test_away_from_a_terminal_each_round_is_one_plain_line():
    words = io.StringIO()
    with Display(Console(file=words, width=200)) as display:
        for progress in (PROGRESS, PROGRESS | {"waiting_samples": 900}, PROGRESS | {"round": 4, "samples": 8192, "loss": None}):
            display.show(progress)
    assert words.getvalue().splitlines() == [line(PROGRESS), line(PROGRESS | {"round": 4, "samples": 8192, "loss": None})]
    assert "6,144 of 65,536 samples" in line(PROGRESS) and "2 peers" in line(PROGRESS)


def test_the_speed_does_not_drop_to_nothing_while_peers_average():
    words = io.StringIO()
    display = Display(Console(file=words, width=200))
    display.show(PROGRESS)
    display.show(PROGRESS | {"round": 4, "samples_per_second": 0.0})
    assert words.getvalue().count("403 samples/s") == 2


def test_on_a_terminal_there_is_one_live_display():
    words = io.StringIO()
    with Display(Console(file=words, force_terminal=True, width=120)) as display:
        display.show(PROGRESS)
        display.say("peer-3 has come")
    assert "whole run" in words.getvalue() and "round 4" in words.getvalue() and "peer-3 has come" in words.getvalue()


def test_versions_name_what_the_result_depends_on():
    found = report.versions(digits.Path(__file__).parent)
    assert set(report.PACKAGES) < set(found) and math.isfinite(float(found["python"].split(".")[0]))
