"""Where the loss counts: masks from a picture's transparency or from a file beside it, from a folder or a host's shard to the loss."""

import dataclasses
import logging
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from datasetserver.__main__ import cli
from datasetserver.ingest import Policy, ingest
from datasetserver.pictures import normalise
from datasetserver.prepared import shard_path
from datasetserver.report import report
from datasetserver.sources import Folder
from peer.contracts import LatentBatch, Sample
from peer.data.directory import Directory, Rules
from peer.data.shards import read_shard
from peer.rooms import load_part
from peer.samples.caches import TensorCache, latents_name
from peer.samples.decoding import Decoder
from peer.samples.pictures import Frame, decode, size_of, try_decode
from swarm.errors import ExitCode
from swarm.picture_file import BadSample, with_mask
from swarm.run_config import RunConfig
from tests import tiny
from tests.datasetserver.hosting import write_model
from tests.datasetserver.test_program import complaint
from tests.peer.samples.test_buckets import mixed_pictures  # noqa: F401
from tests.peer.samples.test_decoding import png, ramp, turned
from tests.peer.test_alone import RUN, flat, start  # noqa: F401

CPU = torch.device("cpu")


def see_through(picture, alpha):
    picture = picture.copy()
    picture.putalpha(alpha)
    return picture


def own(width=40, height=16):
    """A picture whose mask is its red channel."""
    picture = ramp(width, height)
    return see_through(picture, picture.getchannel("R"))


@pytest.mark.parametrize(
    "frame",
    [
        {"center_crop": False, "seed": "5", "mirrored": True},
        {"mirrored": True, "interpolation": "box"},
        {"center_crop": False, "seed": "7", "width": 12, "height": 10},
        {"width": 24, "height": 24, "interpolation": "lanczos"},
    ],
)
@pytest.mark.parametrize("kind", ["upright", "turned"])
def test_a_mask_is_cropped_resized_mirrored_and_turned_with_its_picture(frame, kind):
    data = png(own()) if kind == "upright" else turned(own(), 6)
    found = decode(data, Frame(**{"width": 16, "height": 16, "masked": True, **frame}))
    assert np.array_equal(found.mask, found.pixels[..., 0]) and found.mask.std() > 0
    plain = decode(png(ramp(40, 16)) if kind == "upright" else turned(ramp(40, 16), 6), Frame(**{"width": 16, "height": 16, **frame}))
    assert np.array_equal(found.pixels, plain.pixels) and found.geometry == plain.geometry, "what a mask hides keeps its colours"


def test_without_a_masked_loss_what_is_transparent_is_white_and_nothing_is_a_mask():
    data = png(see_through(ramp(16, 16), Image.new("L", (16, 16), 0)))
    assert decode(data, Frame(16, 16)).mask is None and (decode(data, Frame(16, 16)).pixels == 255).all()
    assert decode(png(ramp(16, 16)), Frame(16, 16, masked=True)).mask is None
    deep = png(Image.fromarray(np.full((16, 16), 300, np.uint16)), transparency=300)
    assert decode(deep, Frame(16, 16, masked=True)).mask is None


def test_a_host_keeps_transparency_only_where_it_is_a_mask():
    data = png(own())
    assert normalise(data, masked=True) == (data, 40, 16, "", True) and normalise(data).change == "RGBA made RGB, put on white"
    palette = own().quantize(8)
    for picture, change in ((palette, "P made RGBA"), (see_through(Image.new("L", (4, 4)), Image.new("L", (4, 4), 9)), "LA made RGBA")):
        found = normalise(png(picture), masked=True)
        assert found.change == change
        assert decode(found.data, Frame(4, 4, masked=True)).mask.tolist() == decode(png(picture), Frame(4, 4, masked=True)).mask.tolist()
    assert normalise(png(ramp(16, 16)), masked=True) == normalise(png(ramp(16, 16)))


def test_a_mask_that_does_not_fit_its_picture_or_is_none_is_told():
    with pytest.raises(BadSample, match=r"^its mask has 8x8 pixels, and the picture 16x16$"):
        with_mask(png(ramp(16, 16)), png(Image.new("L", (8, 8))))
    with pytest.raises(BadSample, match=r"^its mask is none of PNG"):
        with_mask(png(ramp(16, 16)), b"nothing")
    with pytest.raises(BadSample, match=r"^is none of PNG"):
        with_mask(b"nothing", png(Image.new("L", (8, 8))))
    both = with_mask(png(own()), png(Image.new("RGB", (40, 16), "white")))
    assert (decode(both, Frame(40, 16, masked=True)).mask == 255).all()
    assert "its mask has 8x8" in str(try_decode(png(ramp(16, 16)), Frame(16, 16, masked=True), png(Image.new("L", (8, 8)))))


@pytest.mark.parametrize("kind", ["upright", "turned"])
def test_a_mask_beside_a_picture_is_read_like_one_within(kind):
    """And a large JPEG is decoded at a part of its size: its mask follows."""
    data = png(own()) if kind == "upright" else turned(own(), 6)
    upright = decode(data, Frame(*size_of(data), masked=True)).mask
    frame, mask = Frame(12, 10, False, "7", True, masked=True), png(Image.fromarray(upright))
    within, beside = decode(data, frame), decode(data, frame, mask)
    assert np.array_equal(within.mask, beside.mask) and within.geometry == beside.geometry
    photo, half = png(ramp(640, 320), "JPEG"), Image.new("L", (640, 320), 255)
    half.paste(0, (0, 0, 320, 320))
    found = decode(photo, Frame(32, 16, masked=True), png(half)).mask
    assert found.shape == (16, 32) and (found[:, :12] == 0).all() and (found[:, 20:] == 255).all()


def test_latents_are_kept_by_the_mask_beside_the_picture():
    image, frame = png(ramp(16, 16)), Frame(16, 16, masked=True)
    assert len({latents_name(image, frame), latents_name(image, frame, b"a"), latents_name(image, frame, b"b")}) == 3


def test_a_peer_writes_no_png_and_says_how_many_masks_there_are(folder, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("swarm.picture_folder.with_mask", None)
    caplog.set_level(logging.INFO)
    for _ in range(2):  # at first decoded, then as was kept
        caplog.clear()
        assert decoded(list(Directory(folder, Rules(masks=True), tmp_path / "cache", epochs=1)), masked=True) == EXPECTED
        assert "masks=3 of pictures=4" in caplog.text
    for name in ("alpha.png", "beside.mask.PNG", "x.tar"):
        (folder / name).unlink()
    Directory(folder, Rules(masks=True), tmp_path / "cache", epochs=1)
    assert [record.levelno for record in caplog.records if "masks=0 of pictures=2" in record.getMessage()] == [logging.WARNING]


def test_a_host_says_how_many_masks_there_are(folder, tmp_path):
    result = ingest(Folder(folder, masks=True), tmp_path / "work", workers=0, policy=Policy(masks=True))
    assert "  3 pictures with a mask" in report(folder, result, None, masks=True)
    for name in ("alpha.png", "beside.mask.PNG", "x.tar"):
        (folder / name).unlink()
    bare = ingest(Folder(folder, masks=True), tmp_path / "work", workers=0, policy=Policy(masks=True))
    said = "no picture that was checked has a mask"
    assert said in "\n".join(report(folder, bare, None, masks=True)) and said not in "\n".join(report(folder, bare, None))


def test_white_paint_on_a_transparent_mask_counts_where_it_was_painted():
    mask = Image.new("RGBA", (16, 16), (255, 255, 255, 0))
    mask.paste("white", (0, 0, 8, 16))
    found = decode(with_mask(png(ramp(16, 16)), png(mask)), Frame(16, 16, masked=True)).mask
    assert (found[:, :8] == 255).all() and (found[:, 8:] == 0).all()


def test_a_picture_of_the_class_is_learned_as_a_whole(tmp_path):
    """Also when its latents were kept by a run without masks, whose name for them is the same."""
    data = png(see_through(ramp(16, 16), Image.new("L", (16, 16), 51)))
    sample, beside = Sample("0:a", data, "a"), Sample("b with 0:a", data, "class")
    run = RunConfig(resolution=16, masked_loss=True, ucg=0.0)
    batch = Decoder(run, class_weight=1.0).start([sample], beside=[beside])
    assert [round(255 * mask.mean().item()) for mask in batch.masks] == [51, 255]
    cache = TensorCache(tmp_path, "0" * 64, 2**20)
    decoder = Decoder(run, latents=cache, class_weight=1.0)
    cache.put(latents_name(data, decoder._frame(beside, (16, 16), own=False)), {"latents": torch.zeros(8, 2, 2), "geometry": torch.zeros(6).long()})
    assert decoder.start([sample], beside=[beside]).masks[1].tolist() == [[[1.0, 1.0], [1.0, 1.0]]]


@pytest.fixture
def folder(tmp_path):
    """Four pictures of one colour by their names; the masks of three of them are grey, by transparency, a file, and a file in a tar."""
    folder, packed = tmp_path / "data", tmp_path / "packed"
    for place, names in ((folder, ("alpha", "beside", "bare")), (packed, ("tarred",))):
        place.mkdir()
        for name in names:
            Image.new("RGB", (16, 12), (len(name), 0, 0)).save(place / f"{name}.png")
            (place / f"{name}.txt").write_text(name)
    Image.new("RGBA", (16, 12), (5, 0, 0, 51)).save(folder / "alpha.png")
    Image.new("L", (16, 12), 102).save(folder / "beside.mask.PNG")
    Image.new("L", (16, 12), 153).save(packed / "tarred.mask.png")
    Image.new("L", (16, 12)).save(folder / "lonely.mask.png")
    with tarfile.open(folder / "x.tar", "w") as tar:
        for path in sorted(packed.iterdir()):
            tar.add(path, path.name)
    return folder


def decoded(samples, masked):
    batch = Decoder(RunConfig(resolution=16, ucg=0.0, masked_loss=masked)).start(samples)
    return {caption: (round(255 * batch.masks[i].mean().item()) if masked else None) for i, caption in enumerate(batch.captions)}


EXPECTED = {"alpha": 51, "beside": 102, "tarred": 153, "bare": 255}


def test_a_host_and_a_peer_find_the_same_masks(folder, tmp_path):
    result = ingest(Folder(folder, masks=True), tmp_path / "work", workers=0, policy=Policy(masks=True))
    rows = [row for shard in result.manifest.shards for row in read_shard(shard_path(tmp_path / "work", shard.digest), shard.samples)]
    assert result.rejected == [("lonely.mask.png", "a mask, but no picture of that name")]
    assert decoded([Sample(f"0:{i}", *row) for i, row in enumerate(rows)], masked=True) == EXPECTED
    peers = Directory(folder, Rules(masks=True), tmp_path / "cache", epochs=1)
    assert decoded(list(peers), masked=True) == EXPECTED
    again = ingest(Folder(folder, masks=True), tmp_path / "work", workers=0, policy=Policy(masks=True))
    Image.new("L", (16, 12), 7).save(folder / "beside.mask.PNG")
    changed = ingest(Folder(folder, masks=True), tmp_path / "work", workers=0, policy=Policy(masks=True))
    assert not again.fresh and changed.fresh and changed.digest != again.digest


def test_where_no_loss_is_masked_files_and_policies_are_what_they_were(folder, tmp_path):
    named = [pair.name for pair in Folder(folder).list().pairs]
    assert {"beside.mask.PNG", "lonely.mask.png"} < set(named) and Policy().told() == {"missing_captions": "reject", "duplicates": "keep"}
    assert len(decoded(list(Directory(folder, Rules(), tmp_path / "cache", epochs=1)), masked=False)) == 4


def test_a_mask_that_changed_is_looked_at_again(folder, tmp_path, caplog):
    def names():
        return [sample.caption for sample in Directory(folder, Rules(masks=True), tmp_path / "cache", epochs=1)]

    assert "beside" in names()
    Image.new("L", (4, 4)).save(folder / "beside.mask.PNG")
    assert "beside" not in names() and "beside.png: its mask has 4x4 pixels" in caplog.text
    (folder / "beside.mask.PNG").unlink()
    (folder / "beside.mask.PNG").symlink_to("nowhere.png")
    assert "beside" not in names() and "cannot be read" in caplog.text


def test_a_host_says_masked_loss_beside_its_pictures(folder, tmp_path, capsys):
    flags = ["--model", str(write_model(tmp_path / "model")), "--masked_loss", "--ingest_workers", "0"]
    assert cli(["--dataset", str(folder), "--dry_run", *flags]) == 0
    assert "lonely.mask.png: a mask, but no picture" in capsys.readouterr().out
    ingest(folder, tmp_path / "work", workers=0)
    code, line = complaint(capsys, "--work_dir", str(tmp_path / "work"), "--port", "0", *flags)
    assert code == ExitCode.CONFIG and "masked_loss is True, but the prepared dataset does not say whether it has masks. Add --dataset" in line


@pytest.mark.parametrize("family", tiny.ONE_OF_EACH)
@torch.no_grad()
def test_the_loss_of_every_family_is_the_sum_of_what_is_within_a_mask_and_beyond(shallow_family, family):
    run = RunConfig(**tiny.MODELS[family].run)
    model = load_part("models", tiny.FAMILIES[family]).load(shallow_family(family), CPU, run)
    pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
    latents = model.encode_pixels(pixels).chunk(2, dim=1)[0]
    batch = LatentBatch(latents, model.encode_text(["a toy", ""]))
    left = torch.zeros(2, 1, *latents.shape[2:])
    left[..., : latents.shape[3] // 2] = 1

    def loss(mask):
        return model.loss(dataclasses.replace(batch, mask=mask), torch.Generator().manual_seed(5))

    torch.testing.assert_close(loss(left) + loss(1 - left), loss(None))
    assert (loss(left) > 0).all() and torch.equal(loss(torch.ones_like(left)), loss(None)) and loss(0 * left).eq(0).all()


def half_masked(pictures):
    for path in pictures.glob("*.png"):
        with Image.open(path) as picture:
            mask = Image.new("L", picture.size, 255)
            mask.paste(0, (0, 0, picture.width // 2, picture.height))
            picture = see_through(picture.convert("RGB"), mask)
        picture.save(path)


def test_training_hears_masks_and_from_a_cache_the_same(start, mixed_pictures, tmp_path):  # noqa: F811
    run = dataclasses.replace(RUN, masked_loss=True, center_crop=True, random_flip=True, num_buckets=5, total_samples=4)
    options = {"train_batch_size": 1}
    whole = start("whole", run=run, **options).run()
    plain = start("plain", run=dataclasses.replace(run, masked_loss=False), **options).run()
    half_masked(mixed_pictures)
    half = start("half", run=run, **options).run()
    kept = {"cache_latents": True, "cache_dir": str(tmp_path / "kept"), **options}
    cached = [start(name, run=run, **kept).run() for name in ("first", "second")]
    assert whole.losses == plain.losses, "a picture without a mask counts as a whole"
    assert all(0.1 < part / all < 0.9 for part, all in zip(half.losses, whole.losses, strict=True))
    assert half.losses == cached[0].losses == cached[1].losses
    assert torch.equal(flat(half.trainer.params), flat(cached[1].trainer.params))
