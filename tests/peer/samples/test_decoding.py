import io
import os
import signal
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from PIL import Image

import peer.samples.decoding
from datasetserver.pictures import normalise
from peer.contracts import Sample
from peer.samples.buckets import Buckets
from peer.samples.decoding import Decoder, to_pixels
from peer.samples.pictures import Frame, decode, read_otherwise, size_of, try_decode
from swarm.picture_file import BadSample
from swarm.run_config import RunConfig
from tests.peer.samples.dying import slow


def png(picture: Image.Image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def turned(picture, orientation, kind="PNG", **options):
    """The file of a picture that EXIF says is to be turned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return png(picture, kind, exif=exif, **options)


def ramp(width, height):
    """Red grows to the right, green downwards."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([x, y, np.zeros_like(x)], axis=-1).astype(np.uint8))


def square(data, side=16, **options):
    return decode(data, Frame(side, side, **options)).pixels


def test_a_picture_of_the_right_size_passes_unchanged():
    picture = ramp(16, 16)
    assert np.array_equal(square(png(picture)), np.asarray(picture))


def test_the_middle_is_cropped_and_a_random_crop_stays_inside():
    data = png(ramp(40, 16))
    assert np.array_equal(square(data)[0, :, 0], np.arange(12, 28))
    lefts = {int(square(data, center_crop=False, seed=str(i))[0, 0, 0]) for i in range(200)}
    assert lefts == set(range(25))


def test_the_short_side_is_resized_to_the_resolution():
    assert square(png(Image.new("RGB", (100, 37)))).shape == (16, 16, 3)
    assert square(png(Image.new("RGB", (7, 9)))).shape == (16, 16, 3)


def test_half_of_the_pictures_are_mirrored():
    batch = [Sample(f"0:{i}", png(ramp(16, 16)), "") for i in range(400)]
    decoder = Decoder(run(random_flip=True))
    pixels = decoder.finish(decoder.start(batch)).pixels
    assert 150 < int((pixels[:, 0, 0, 0] > pixels[:, 0, 0, 15]).sum()) < 250


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_trained_on_as_people_and_the_host_see_it(orientation, kind):
    data = turned(ramp(40, 16), orientation, kind, lossless=True)
    upright = Image.open(io.BytesIO(normalise(data).data))
    framed = decode(data, Frame(*upright.size))
    assert np.array_equal(framed.pixels, np.asarray(upright)) and size_of(data) == upright.size
    assert framed.geometry == (*upright.size[::-1], 0, 0, *upright.size[::-1]) and read_otherwise(data) == [orientation] * (orientation != 1)
    assert Buckets([(8, 16), (12, 12), (16, 8)]).nearest(data) == (2 if orientation < 5 else 0)


def test_exif_behind_a_pngs_pixels_is_seen_and_damaged_exif_turns_nothing():
    data = turned(ramp(40, 16), 6)
    start = data.index(b"eXIf") - 4
    chunk = data[start : start + 12 + int.from_bytes(data[start : start + 4], "big")]
    behind = data.replace(chunk, b"").replace(b"\0\0\0\0IEND", chunk + b"\0\0\0\0IEND")
    assert read_otherwise(behind) == [6] and size_of(behind) == (16, 40) and decode(behind, Frame(16, 40)).geometry[:2] == (40, 16)
    for exif in (b"Exif\0\0nonsense", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0"):
        damaged = png(ramp(40, 16), "JPEG", exif=exif)
        assert read_otherwise(damaged) == [] and decode(damaged, Frame(40, 16)).geometry[:2] == (16, 40)


def test_a_large_jpeg_on_its_side_is_read_no_smaller_than_its_frame():
    """Read at a half it would be 200 pixels wide, and the stripes, each of two pixels, grey."""
    stripes = np.zeros((400, 800, 3), np.uint8)
    stripes[np.arange(400) % 4 < 2] = 255
    pixels = decode(turned(Image.fromarray(stripes), 6, "JPEG", quality=95), Frame(400, 200)).pixels
    assert pixels.shape == (200, 400, 3) and pixels.astype(float).std() > 100


def test_a_picture_is_cropped_to_a_frame_that_is_no_square():
    framed = decode(png(ramp(40, 16)), Frame(32, 16))
    assert framed.pixels.shape == (16, 32, 3) and np.array_equal(framed.pixels[0, :, 0], np.arange(4, 36))
    assert decode(png(Image.new("RGB", (30, 100))), Frame(24, 8)).pixels.shape == (8, 24, 3)


def test_a_picture_that_would_be_huge_when_resized_is_left_out_with_a_reason():
    assert isinstance(found := try_decode(png(Image.new("1", (1, 30_000))), Frame(512, 512)), BadSample)
    assert str(found) == "1x30000 is too narrow: one side is more than 50 times the other"
    narrow = png(Image.new("1", (20, 1000)))
    assert try_decode(narrow, Frame(64, 64)).pixels.shape == (64, 64, 3)
    found = try_decode(narrow, Frame(2048, 2048))
    assert str(found) == "20x1000 is too narrow for 2048x2048: resized it would have 2048x102400 pixels"


def test_a_picture_for_which_memory_does_not_suffice_is_left_out(monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(Image.Image, "resize", full)
    assert str(try_decode(png(ramp(40, 32)), Frame(16, 16))) == "there is not enough memory to resize it"


def test_the_geometry_says_how_large_the_file_was_and_what_was_cropped_of_it():
    """As diffusers' script for SDXL has it: (height, width) of the file, (top, left) of the crop, (height, width) of the result."""
    assert decode(png(ramp(40, 16)), Frame(16, 16)).geometry == (16, 40, 0, 12, 16, 16)
    assert decode(png(ramp(40, 80)), Frame(8, 8)).geometry == (80, 40, 4, 0, 8, 8)
    framed = decode(png(ramp(40, 16)), Frame(16, 16, center_crop=False, seed="3", mirrored=True))
    assert framed.geometry[3] == 39 - framed.pixels[0, 0, 0]  # counted in the mirrored picture
    large = png(Image.new("RGB", (400, 800)), "JPEG")
    assert decode(large, Frame(16, 16)).geometry == (800, 400, 8, 0, 16, 16)  # though decoded at an eighth


def test_a_pictures_size_is_read_from_its_header():
    assert size_of(png(ramp(40, 16))) == (40, 16) and size_of(png(ramp(40, 16))[:60]) == (40, 16)
    assert size_of(b"no picture") is None and size_of(png(ramp(4, 4), "GIF")) is None


def test_pictures_are_resized_as_asked():
    data = png(Image.effect_noise((40, 40), 80))
    assert not np.array_equal(square(data, interpolation="nearest"), square(data, interpolation="lanczos"))


def test_transparent_pixels_are_white_and_grey_pictures_become_rgb():
    assert square(png(Image.new("RGBA", (16, 16), (9, 9, 9, 0)))).min() == 255
    assert square(png(Image.new("L", (16, 16), 7))).tolist() == [[[7] * 3] * 16] * 16


def test_a_grey_picture_of_16_bits_is_its_upper_bytes_as_at_the_host():
    """Pillow's own conversion makes white of all that is 256 or more."""
    grey = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    data = png(Image.fromarray(grey))
    assert np.array_equal(square(data), np.repeat((grey >> 8)[..., None], 3, axis=-1))
    assert np.array_equal(square(data), np.asarray(Image.open(io.BytesIO(normalise(data).data))))
    assert read_otherwise(data) == [16], "what a cache kept of the white one is not found"


@pytest.mark.parametrize("orientation", [0, 9])
def test_an_orientation_that_exif_does_not_have_turns_nothing_here_and_at_the_host(orientation):
    data = turned(ramp(40, 16), orientation, "JPEG")
    plain = normalise(data)
    assert plain.change == "metadata removed" and (plain.width, plain.height) == (40, 16), "the JPEG is kept"
    assert size_of(data) == (40, 16) and decode(data, Frame(40, 16)).geometry[:2] == (16, 40) and read_otherwise(data) == []


def test_a_peer_decodes_a_picture_as_large_as_a_host_admits():
    """70 million pixels: a peer's limit was 67, the host's 100."""
    assert decode(png(Image.new("1", (10_000, 7_000))), Frame(10, 7, interpolation="nearest")).pixels.shape == (7, 10, 3)


@pytest.mark.parametrize("data", [b"", b"no picture", png(Image.new("RGB", (16, 16)))[:40], png(Image.new("RGB", (16, 16)), "GIF")])
def test_what_is_no_picture_of_ours_is_refused_with_a_reason(data):
    with pytest.raises(BadSample) as error:
        square(data)
    assert str(error.value)


def test_pixels_span_minus_one_to_one():
    pixels = to_pixels([np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 255, np.uint8)])
    assert pixels.shape == (2, 3, 4, 4) and pixels.dtype == torch.float32
    assert (pixels[0] == -1).all() and (pixels[1] == 1).all()


def samples(count, bad=()):
    return [Sample(f"0:{i}", b"broken" if i in bad else png(ramp(24, 16)), f"caption {i}") for i in range(count)]


def run(**options):
    return RunConfig(resolution=16, **options)


def test_samples_that_cannot_be_decoded_are_left_out_counted_and_warned_of(caplog):
    decoder, batch = Decoder(run(ucg=0)), samples(4, bad=(1, 3))
    decoded = decoder.finish(decoder.start(batch))
    assert decoded.keys == ("0:0", "0:2") and decoded.bad == ("0:1", "0:3") and decoder.num_bad == 2
    assert decoded.pixels.shape == (2, 3, 16, 16) and decoded.captions == ["caption 0", "caption 2"]
    assert "0:1" in caplog.text
    decoded = decoder.finish(decoder.start(batch[1:2]))
    assert not decoded.captions and decoded.pixels is None and decoder.num_bad == 3


def test_decoding_processes_give_the_same_batch_and_are_gone_when_closed():
    batch = samples(6, bad=(2,))
    inline, pooled = Decoder(run(random_flip=True)), Decoder(run(random_flip=True), num_workers=2)
    ours = inline.finish(inline.start(batch))
    theirs = pooled.finish(pooled.start(batch))
    workers = active_children()
    pooled.close()
    assert torch.equal(ours.pixels, theirs.pixels) and ours.captions == theirs.captions
    assert theirs.bad == ("0:2",) and workers and not any(worker.is_alive() for worker in workers)


def test_a_decoding_process_that_is_killed_costs_no_picture_and_one_that_a_picture_kills_costs_that_picture(monkeypatch):
    monkeypatch.setattr(peer.samples.decoding, "try_decode", slow)
    before, decoder = set(active_children()), Decoder(run(ucg=0), num_workers=2)
    decoder.finish(decoder.start(samples(1)))
    (worker,) = set(active_children()) - before
    steps = [decoder.start(batch) for batch in (samples(10), samples(10, bad=(4,)), samples(10))]
    os.kill(worker.pid, signal.SIGKILL)
    decoded = [decoder.finish(step) for step in steps]
    assert [len(batch.keys) for batch in decoded] == [10, 9, 10]
    assert [batch.skipped for batch in decoded] == [(), (("0:4", decoded[1].skipped[0][1]),), ()]
    assert "crashed" in str(decoded[1].skipped[0][1])
    os.kill((set(active_children()) - before).pop().pid, signal.SIGKILL)
    decoder.close()
    assert set(active_children()) <= before
