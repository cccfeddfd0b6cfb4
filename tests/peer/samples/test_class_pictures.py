"""Prior preservation: what is drawn, what accompanies which picture, and what it weighs."""

import dataclasses
import errno
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image

from peer.config import PeerConfig
from peer.contracts import Sample
from peer.machine.device import Rank, RankGroup, choose_precision
from peer.samples import class_pictures
from peer.samples.class_pictures import ClassPictures, Drawing, draw_class_pictures, pictures_in
from peer.samples.decoding import Decoder
from swarm import files
from swarm.digest import digest_model
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.samples.test_decoding import png, ramp
from tests.peer.test_alone import CPU, RUN, flat, start  # noqa: F401


@pytest.fixture
def dogs(tmp_path):
    """A folder of three pictures of a class, each of one colour."""
    folder = tmp_path / "dogs"
    folder.mkdir()
    for number in range(3):
        Image.new("RGB", (20, 16), (100 + number, 0, 0)).save(folder / f"{number}.png")
    return folder


def companions(folder, count=3):
    return ClassPictures(folder, "a dog", count=count, seed=7)


def decoded(prior, keys, workers=0):
    decoder = Decoder(RunConfig(resolution=16, ucg=1.0), workers, class_weight=0.5)
    samples = [Sample(key, png(ramp(16, 16)), "sks") for key in keys]
    result = decoder.finish(decoder.start(samples, beside=prior.beside(samples)))
    decoder.close()
    return result


@pytest.mark.parametrize("workers", [0, 1])
def test_every_sample_is_accompanied_by_a_picture_of_the_class(dogs, workers):
    keys = [f"0:{i}" for i in range(30)]
    batch = decoded(companions(dogs), keys, workers)
    assert batch.keys == tuple(keys) and batch.pixels.shape == (60, 3, 16, 16) and batch.geometry.shape == (60, 6)
    assert batch.captions == [""] * 30 + ["a dog"] * 30 and batch.weights.tolist() == [1.0] * 30 + [0.5] * 30
    reds = {round((float(red) + 1) * 127.5) for red in batch.pixels[30:, 0, 0, 0]}
    assert reds == {100, 101, 102}
    assert torch.equal(decoded(companions(dogs), keys).pixels, batch.pixels)


def test_no_more_pictures_of_the_class_are_used_than_asked_for(dogs):
    batch = decoded(companions(dogs, count=1), [f"0:{i}" for i in range(9)])
    assert {round((float(red) + 1) * 127.5) for red in batch.pixels[9:, 0, 0, 0]} == {100}


def test_a_broken_picture_of_the_class_is_left_out_and_no_sample_with_it(dogs, caplog):
    for path in pictures_in(dogs):
        path.write_bytes(b"broken")
    result = decoded(companions(dogs), ["0:a", "0:b"])
    assert result.keys == ("0:a", "0:b") and result.bad == () and result.weights.tolist() == [1.0, 1.0]
    assert "png with 0:a" in caplog.text


def test_a_folder_without_pictures_cannot_stand_for_a_class(tmp_path):
    with pytest.raises(UserError, match="holds no pictures of the class"):
        companions(tmp_path / "missing")


def options(dogs, **more):
    return {"with_prior_preservation": True, "class_data_dir": str(dogs), "class_prompt": "a dog", "num_class_images": 3} | more


def test_the_loss_is_the_pictures_mean_and_the_weighted_mean_of_the_class(start, dogs):  # noqa: F811
    """As in diffusers' train_dreambooth.py: loss + prior_loss_weight * prior_loss, each a mean over its half of the batch."""
    trainer = start(**options(dogs, prior_loss_weight=0.25)).trainer
    work = next(iter(trainer.feed))
    (batch,) = work.batches
    assert len(work.keys) == 4 and len(batch.captions) == 8
    each = trainer._losses(dataclasses.replace(batch, weights=None), 0).detach()
    trainer.optimizer.zero_grad()
    assert trainer._accumulate(work)[0] == pytest.approx(float(each[:4].mean() + 0.25 * each[4:].mean()), rel=1e-6)


def test_a_run_with_a_class_counts_its_own_pictures_only_and_resumes_to_the_bit(start, dogs):  # noqa: F811
    run = dataclasses.replace(RUN, num_buckets=5, total_samples=16)
    given = options(dogs, cache_latents=True, cache_text=True)
    whole = start("whole", run=run, **given).run()
    assert whole.trainer.trained == 16
    first = start("parts", run=run, stop_after=2, dataloader_num_workers=1, **given).run()
    second = start("parts", run=run, resume_from_checkpoint="latest", **given).run()
    assert first.losses + second.losses == whole.losses
    assert torch.equal(flat(second.trainer.params), flat(whole.trainer.params))


def draw(trainer, folder, count, batch=2, stopping=lambda: False):
    group = RankGroup(Rank(), CPU)
    precision = choose_precision("no", CPU, 0)
    sizes = {"count": count, "batch": batch, "denoising_steps": 2, "seed": 7}
    draw_class_pictures(trainer.model, folder, Drawing("a dog", "", 16), precision=precision, group=group, stopping=stopping, **sizes)
    return {path.name: np.asarray(Image.open(path)).astype(int) for path in pictures_in(folder)}


def test_missing_pictures_are_drawn_each_from_a_seed_of_its_own(start, tmp_path):  # noqa: F811
    trainer = start().trainer
    before, state = flat(trainer.params).clone(), torch.get_rng_state()
    drawn = draw(trainer, tmp_path / "class", 3)
    assert list(drawn) == ["class-00000.png", "class-00001.png", "class-00002.png"]
    assert {picture.shape for picture in drawn.values()} == {(16, 16, 3)} and not np.array_equal(*list(drawn.values())[:2])
    assert torch.equal(flat(trainer.params), before) and torch.equal(torch.get_rng_state(), state)
    assert trainer.model.parts["unet"].training
    (tmp_path / "class" / "class-00001.png").unlink()
    draw(start("late", run=dataclasses.replace(RUN, seed=20250101123045)).trainer, tmp_path / "late", 1)  # of a date as a seed times 1,000,003 torch has no number
    again = draw(trainer, tmp_path / "class", 3)
    assert again.keys() == drawn.keys() and all(abs(again[name] - drawn[name]).max() <= 1 for name in drawn)


def test_with_a_packed_base_missing_pictures_are_not_drawn(dogs):
    def prepared(count):
        peer = PeerConfig(base_precision="nf4", class_data_dir=str(dogs), class_prompt="a dog", num_class_images=count, with_prior_preservation=True, train_data_dir=str(dogs.parent / "own"))
        return class_pictures.prepare(None, RUN, peer, None, RankGroup(Rank(), CPU), lambda: False, dogs)

    assert prepared(3) is not None
    with pytest.raises(UserError, match=r"lacks pictures of the class.*start once without --base_precision"):
        prepared(4)


def test_the_class_is_read_as_captions_are_in_training(start, tmp_path):  # noqa: F811
    plain = draw(start().trainer, tmp_path / "plain", 1)
    reading = start("reading", run=dataclasses.replace(RUN, max_token_chunks=2)).trainer
    pipeline, told = reading.model.pipeline, reading.model.prompt_arguments(["a dog"])
    drawn = draw(reading, tmp_path / "reading", 1)["class-00000.png"]
    assert not np.array_equal(drawn, plain["class-00000.png"])
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
    reading.model.parts["unet"].eval()
    generator = torch.Generator().manual_seed(7 * 1_000_003)
    with torch.no_grad():
        expected = pipeline(**told, num_inference_steps=2, height=16, width=16, generator=[generator]).images[0]
    assert abs(drawn - np.asarray(expected).astype(int)).max() <= 1


def test_who_asks_to_stop_while_the_class_is_drawn_does_not_wait_for_all_of_it(start, tmp_path, caplog):  # noqa: F811
    trainer, asked = start().trainer, iter([False, True])
    with caplog.at_level("INFO"), pytest.raises(SystemExit) as ended:
        draw(trainer, tmp_path / "class", 5, stopping=lambda: next(asked))
    assert ended.value.code == ExitCode.OK and "the next start draws the rest" in caplog.text
    assert [path.name for path in pictures_in(tmp_path / "class")] == ["class-00000.png", "class-00001.png"]
    assert len(draw(trainer, tmp_path / "class", 5)) == 5


def test_a_picture_of_the_class_that_cannot_be_written_is_one_line(start, tmp_path, monkeypatch):  # noqa: F811
    def full(path, data):
        if path.name == "class.json":
            return files.replace(path, data)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(class_pictures, "replace", full)
    with pytest.raises(UserError, match=r"class-00000.png cannot be written: No space left on device\. Choose another --class_data_dir") as caught:
        draw(start().trainer, tmp_path / "class", 1)
    assert caught.value.code == ExitCode.DISK


def test_pictures_that_are_there_are_counted_whatever_their_names(start, dogs, tmp_path):  # noqa: F811
    trainer = start().trainer
    assert len(draw(trainer, dogs, 2)) == 3
    assert list(draw(trainer, dogs, 4)) == ["0.png", "1.png", "2.png", "class-00000.png"]


def test_a_run_draws_the_class_with_the_base_model_before_it_begins(start, tmp_path):  # noqa: F811
    start(**options(tmp_path / "new", num_class_images=2, validation_inference_steps=1))
    assert [path.name for path in pictures_in(tmp_path / "new")] == ["class-00000.png", "class-00001.png"]


@pytest.mark.parametrize("change", [{"class_prompt": "a cat"}, {"run": dataclasses.replace(RUN, resolution=2 * RUN.resolution)}])
def test_pictures_that_were_drawn_of_another_class_are_not_trained_under_this_one(start, tmp_path, change):  # noqa: F811
    given = options(tmp_path / "class", num_class_images=1, validation_inference_steps=1)
    start("first", **given)
    start("same", **given)
    with pytest.raises(UserError, match=rf"class holds pictures of 'a dog' of {RUN.resolution} px, by .*Choose another --class_data_dir"):
        start("other", **given | change)
    (tmp_path / "class" / "class-00000.png").unlink()
    start("emptied", **given | change)


def test_pictures_of_another_base_model_are_refused_alone_too_and_its_own_are_taken_in_a_swarm(start, tmp_path):  # noqa: F811
    given = options(tmp_path / "class", num_class_images=1, validation_inference_steps=1)
    model = str(tiny.write_model(tmp_path / "model"))
    run = dataclasses.replace(RUN, model=model)
    start("alone", run=run, **given)
    start("in a swarm", run=dataclasses.replace(run, model_digest=digest_model(Path(model))), **given)
    other = dataclasses.replace(RUN, model=str(tiny.write_model(tmp_path / "other", seed=1)))
    with pytest.raises(UserError, match=r"by model \w+, not of 'a dog' .*Choose another --class_data_dir"):
        start("other", run=other, **given)
    Drawing("a dog", "", RUN.resolution).keep(tmp_path / "class")  # as earlier versions kept it
    start("not known", run=other, **given)


def test_a_folder_for_the_class_that_cannot_be_made_is_an_error(start, tmp_path):  # noqa: F811
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Choose another --class_data_dir"):
        start(**options(tmp_path / "file" / "below"))


def test_textual_inversion_has_nothing_to_preserve(start, dogs):  # noqa: F811
    run = dataclasses.replace(RUN, method="textual_inversion", placeholder_token="<dog>", initializer_token="a")
    with pytest.raises(UserError, match="nothing to preserve"):
        start(run=run, **options(dogs))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"class_prompt": ""}, "needs to know the class"),
        ({"class_data_dir": ""}, "needs to know the class"),
        ({"train_data_dir": "", "datasetserver": "http://a:1"}, "a server's samples go to all peers"),
        ({"num_class_images": 0}, "num_class_images is 0"),
        ({"prior_loss_weight": -1.0}, "prior_loss_weight is -1"),
        ({"prior_loss_weight": float("nan")}, "prior_loss_weight is nan"),
        ({"class_data_dir": "data/class"}, "class_data_dir lies in train_data_dir"),
        ({"with_prior_preservation": False}, "are for --with_prior_preservation"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(given, said):
    with pytest.raises(UserError, match=said):
        PeerConfig(**options("class", train_data_dir="data") | given)
