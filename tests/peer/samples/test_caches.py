"""Latents and texts on disk: found when everything they depend on is the same, and never otherwise."""

import dataclasses
import fcntl
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from blake3 import blake3

import peer.samples.decoding
from peer.contracts import Sample
from peer.samples.caches import TensorCache, content_seed, latents_name, open_caches
from peer.samples.decoding import Decoder
from peer.samples.pictures import Frame
from swarm.digest import digest_json
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.samples.test_buckets import mixed_pictures  # noqa: F401
from tests.peer.samples.test_decoding import png, ramp, turned
from tests.peer.test_alone import RUN, flat, start  # noqa: F401

NAME = "ab" * 32
RUN = dataclasses.replace(RUN, center_crop=True, random_flip=True, num_buckets=5, total_samples=36, lr_scheduler="constant")


@pytest.fixture
def kept(tmp_path):
    return TensorCache(tmp_path / "kept", "f" * 64, 1 << 20)


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_is_kept_comes_back_as_it_was(kept):
    tensors = {"latents": torch.randn(8, 4, 4), "geometry": torch.tensor([1, 2, 3]), "scalar": torch.tensor(0.5)}
    assert kept.get(NAME) is None
    kept.put(NAME, tensors)
    found = kept.get(NAME)
    assert found.keys() == tensors.keys() and all(torch.equal(found[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize(
    "spoil", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data[:-3] + b"abc", lambda data: b"x" * 99]
)
def test_a_damaged_entry_is_noticed_and_may_be_made_again(kept, tmp_path, caplog, spoil):
    kept.put(NAME, {"latents": torch.ones(4)})
    (path,) = files(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    assert kept.get(NAME) is None and "damaged" in caplog.text and not path.exists()
    kept.put(NAME, {"latents": torch.ones(4)})
    assert torch.equal(kept.get(NAME)["latents"], torch.ones(4))


def test_an_entry_under_anothers_name_is_not_taken_for_it(kept, tmp_path):
    kept.put(NAME, {"latents": torch.ones(4)})
    (path,) = files(tmp_path)
    path.rename(path.with_name(f"{'ab' + 'cd' * 31}.safetensors"))
    assert kept.get("ab" + "cd" * 31) is None


def test_a_full_cache_keeps_what_it_has_and_says_so_once(tmp_path, caplog):
    cache = TensorCache(tmp_path, "f" * 64, 1500)
    for i in range(5):
        cache.put(f"{i:064}", {"latents": torch.zeros(100)})
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 1500 and cache.get(f"{0:064}") is not None
    assert cache.get(f"{4:064}") is None and caplog.text.count("is full") == 1


def test_what_another_model_left_makes_room(tmp_path):
    old = TensorCache(tmp_path, "e" * 64, 1500)
    old.put(NAME, {"latents": torch.zeros(200)})
    del old
    new = TensorCache(tmp_path, "f" * 64, 1500)
    new.put(NAME, {"latents": torch.ones(200)})
    assert not (tmp_path / ("e" * 32)).exists() and new.get(NAME)["latents"][0] == 1


def test_what_another_run_uses_stays_when_the_folder_is_full(tmp_path, caplog):
    rank, first = (TensorCache(tmp_path, "e" * 64, 1500) for _ in range(2))
    first.put(NAME, {"latents": torch.zeros(200)})
    del rank
    second = TensorCache(tmp_path, "f" * 64, 1500)
    for run in (second, first):
        run.put("cd" * 32, {"latents": torch.ones(200)})
    assert first.get(NAME) is not None and caplog.text.count("is full") == 2 and len(files(tmp_path)) == 1
    assert (tmp_path / ("f" * 32)).is_dir()


def test_a_run_whose_cache_is_dropped_by_another_machine_goes_on_caching(kept, tmp_path):
    shutil.rmtree(tmp_path / "kept")
    kept.put(NAME, {"latents": torch.ones(4)})
    assert kept.get(NAME) is not None


def test_a_cache_that_is_dropped_while_a_run_opens_it_is_made_again(tmp_path, monkeypatch):
    folder, lock = tmp_path / ("f" * 32), fcntl.flock

    def dropped_before(descriptor, kind):
        monkeypatch.undo()
        shutil.rmtree(folder)
        lock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", dropped_before)
    cache = TensorCache(tmp_path, "f" * 64, 1500)
    cache.put(NAME, {"latents": torch.ones(200)})
    TensorCache(tmp_path, "e" * 64, 1500).put(NAME, {"latents": torch.ones(200)})
    assert cache.get(NAME) is not None


def test_a_disk_that_takes_no_more_ends_the_keeping_and_not_the_training(kept, tmp_path, caplog):
    (tmp_path / "kept" / ("f" * 32) / NAME[:2]).write_text("a file where a folder should be")
    kept.put(NAME, {"latents": torch.ones(4)})
    assert "stopped caching" in caplog.text


def test_a_cache_that_cannot_be_made_is_an_error_that_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another --cache_dir"):
        TensorCache(tmp_path / "file", "f" * 64, 1)


def test_several_may_write_the_same_entries_at_once(tmp_path):
    caches = [TensorCache(tmp_path, "f" * 64, 1 << 20) for _ in range(4)]
    tensors = {"latents": torch.randn(1000)}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda cache: [cache.put(f"{i:064}", tensors) for i in range(30)], caches))
    assert all(torch.equal(caches[0].get(f"{i:064}")["latents"], tensors["latents"]) for i in range(30))
    assert len(files(tmp_path)) == 30


def test_a_name_says_all_that_a_pictures_latents_depend_on():
    frame, image = Frame(16, 16, center_crop=False, seed="1"), png(ramp(20, 16))
    others = [
        dataclasses.replace(frame, **change)
        for change in ({"width": 20}, {"height": 20}, {"center_crop": True}, {"seed": "2"}, {"mirrored": True}, {"interpolation": "box"}, {"masked": True})
    ]
    names = {latents_name(image, other) for other in [frame, *others]} | {latents_name(png(ramp(21, 16)), frame)}
    assert len(names) == 9 and latents_name(image, frame) == latents_name(image, dataclasses.replace(frame))
    centered = dataclasses.replace(frame, center_crop=True)
    assert latents_name(image, centered) == latents_name(image, dataclasses.replace(centered, seed="2"))


def test_the_latents_of_a_picture_that_is_not_turned_are_found_under_the_name_they_always_had():
    """Those of one that EXIF turns were made of it as it lay, and are not taken for it."""
    image, frame = png(ramp(20, 16)), Frame(16, 16)

    def before(image):
        return digest_json([blake3(image).hexdigest(), 16, 16, "center", False, "lanczos"])

    assert latents_name(image, frame) == before(image) and latents_name(b"broken", frame) == before(b"broken")
    assert latents_name(turned(ramp(20, 16), 1), frame) == before(turned(ramp(20, 16), 1))
    assert latents_name(turned(ramp(20, 16), 6), frame) != before(turned(ramp(20, 16), 6))


def test_with_a_cache_a_random_crop_is_the_pictures_own_in_every_epoch(kept):
    image = png(ramp(60, 16))
    keys = [f"{epoch}:a" for epoch in range(5)]
    run = RunConfig(resolution=16)

    def lefts(decoder):
        samples = [Sample(key, image, "") for key in keys]
        return {int(left) for left in decoder.finish(decoder.start(samples)).geometry[:, 3]}

    assert len(lefts(Decoder(run, latents=kept))) == 1 < len(lefts(Decoder(run)))
    assert content_seed(1, image) != content_seed(2, image) != content_seed(2, b"another")


def fingerprints(trainer, tmp_path, run=RUN, dtype=None, **change):
    caches = open_caches(trainer.model, run, dtype, tmp_path / "kept", 1 << 20, latents=True, texts=True)
    return caches.latents._folder.name, caches.texts._folder.name


def test_another_model_or_precision_finds_nothing_of_what_this_one_left(start, tmp_path):  # noqa: F811
    trainer = start().trainer
    latents, texts = fingerprints(trainer, tmp_path)
    assert (latents, texts) == fingerprints(trainer, tmp_path)
    half = fingerprints(trainer, tmp_path, dtype=torch.bfloat16)
    assert latents != half[0] and texts != half[1]
    read = [
        fingerprints(trainer, tmp_path, run=dataclasses.replace(RUN, **change)) for change in ({"clip_skip": 1}, {"max_token_chunks": 2})
    ]
    assert len({texts, *(other for _, other in read)}) == 3 and {other for other, _ in read} == {latents}
    with torch.no_grad():
        next(trainer.model.parts["vae"].parameters())[0] += 1
    changed = fingerprints(trainer, tmp_path)
    assert changed[0] != latents and changed[1] == texts
    with torch.no_grad():
        next(trainer.model.parts["text_encoder"].parameters())[0] += 1
    other = fingerprints(trainer, tmp_path)[1]
    trainer.model.pipeline.tokenizer.chat_template = "a language model is told captions in this form: {{ messages[0].content }}"
    assert len({texts, other, fingerprints(trainer, tmp_path)[1]}) == 3


def watched(trained, monkeypatch):
    """How often a picture was decoded or encoded, and a caption encoded, while `trained` ran to its end."""
    counts = {"decoded": 0, "pixels": 0, "texts": 0}
    model, decode = trained.trainer.model, peer.samples.decoding.try_decode

    def counted(name, function, size):
        def call(*arguments):
            counts[name] += size(*arguments)
            return function(*arguments)

        return call

    model.encode_pixels = counted("pixels", model.encode_pixels, len)
    model.encode_text = counted("texts", model.encode_text, len)
    with monkeypatch.context() as patched:
        patched.setattr(peer.samples.decoding, "try_decode", counted("decoded", decode, lambda *_: 1))
        trained.run()
    return counts


@pytest.mark.parametrize("size", [1, 4])
def test_training_with_caches_equals_training_without_and_computes_nothing_twice(start, mixed_pictures, tmp_path, monkeypatch, size):  # noqa: F811
    """To the bit with batches of one; larger ones are otherwise encoded together, which changes the last bits."""
    run = dataclasses.replace(RUN, total_samples=16)
    plain = start("plain", run=run, train_batch_size=size).run()
    options = {"cache_latents": True, "cache_text": True, "cache_dir": str(tmp_path / "kept"), "train_batch_size": size}
    first = start("first", run=run, **options)
    counts = watched(first, monkeypatch)
    assert first.losses == plain.losses if size == 1 else first.losses == pytest.approx(plain.losses, rel=1e-5)
    assert 12 < counts["decoded"] == counts["pixels"] < run.total_samples and counts["texts"] == 5  # four colours and no caption
    second = start("second", run=run, **options)
    assert watched(second, monkeypatch) == {"decoded": 0, "pixels": 0, "texts": 0}
    assert second.losses == first.losses and torch.equal(flat(second.trainer.params), flat(first.trainer.params))
    for path in files(tmp_path / "kept"):
        path.write_bytes(path.read_bytes()[:-1])
    third = start("third", run=run, **options)
    assert watched(third, monkeypatch) == counts and third.losses == first.losses


def test_a_run_with_caches_buckets_and_decoding_processes_resumes_to_the_bit(start, mixed_pictures, tmp_path):  # noqa: F811
    run = dataclasses.replace(RUN, center_crop=False, total_samples=16)
    options = {"cache_latents": True, "cache_text": True, "train_batch_size": 2, "gradient_accumulation_steps": 2}
    whole = start("whole", run=run, **options).run()
    first = start("parts", run=run, stop_after=2, dataloader_num_workers=1, **options).run()
    second = start("parts", run=run, resume_from_checkpoint="latest", dataloader_num_workers=1, **options).run()
    assert first.losses + second.losses == whole.losses and len(first.losses) == 2
    assert torch.equal(flat(second.trainer.params), flat(whole.trainer.params))


def test_a_broken_picture_is_left_out_and_not_kept(kept):
    decoder = Decoder(RunConfig(resolution=16, ucg=0.0), latents=kept)
    batch = [Sample("0:a", png(ramp(16, 16)), "a"), Sample("0:b", b"broken", "b"), Sample("0:c", png(ramp(20, 16)), "c")]
    names = [latents_name(sample.image, decoder._frame(sample, (16, 16))) for sample in batch]
    kept.put(names[2], {"latents": torch.ones(8, 8, 8), "geometry": torch.tensor([1, 2, 3, 4, 5, 6])})
    pixels = decoder.finish(decoder.start(batch))
    assert pixels.keys == ("0:a", "0:c") and pixels.bad == ("0:b",) and pixels.captions == ["a", "c"]
    assert pixels.pixels.shape == (1, 3, 16, 16) and list(pixels.latents) == [1] and pixels.names == (names[0], names[2])
    assert pixels.geometry.tolist() == [[16, 16, 0, 0, 16, 16], [1, 2, 3, 4, 5, 6]]


TRAINED = [{"train_text_encoder": True}, {"method": "textual_inversion", "placeholder_token": "<dog>", "initializer_token": "a"}]


@pytest.mark.parametrize("change", TRAINED)
def test_a_text_encoder_that_is_trained_is_not_cached(start, change):  # noqa: F811
    run = dataclasses.replace(RUN, **change)
    with pytest.raises(UserError, match="--cache_text keeps the text encoder's output, but this run trains"):
        start(run=run, cache_text=True)


def test_the_log_says_that_random_crops_are_fixed(start, caplog):  # noqa: F811
    caplog.set_level(logging.INFO)
    start(run=dataclasses.replace(RUN, center_crop=False), cache_latents=True)
    assert "always has the same crop" in caplog.text


@pytest.mark.parametrize("family", [family for family in tiny.ONE_OF_EACH if family != "sd"])
def test_other_families_train_in_buckets_and_from_caches(start, shallow_family, mixed_pictures, tmp_path, monkeypatch, family):  # noqa: F811
    """Their texts are several tensors, and their latents have other shapes."""
    run = dataclasses.replace(RUN, total_samples=6, resolution=32, model=str(shallow_family(family)))
    options = {"cache_latents": True, "cache_text": True, "cache_dir": str(tmp_path / "kept"), "train_batch_size": 2}
    first = start("first", run=run, **options).run()
    second = start("second", run=run, **options)
    assert watched(second, monkeypatch) == {"decoded": 0, "pixels": 0, "texts": 0}
    assert second.losses == first.losses and torch.equal(flat(second.trainer.params), flat(first.trainer.params))
