import io

import numpy as np
import pytest
import torch
from PIL import Image

from peer.batches import Decoder, dropped, to_pixels
from peer.contracts import Sample
from peer.pictures import BadPicture, decode_square
from swarm.run_config import RunConfig


def png(picture: Image.Image, kind="PNG") -> bytes:
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


def ramp(width, height):
    """Red grows to the right, green downwards."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([x, y, np.zeros_like(x)], axis=-1).astype(np.uint8))


def square(data, side=16, center_crop=True, random_flip=False, seed="s"):
    return decode_square(data, side, center_crop=center_crop, random_flip=random_flip, seed=seed)


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
    data = png(ramp(16, 16))
    mirrored = sum(square(data, random_flip=True, seed=str(i))[0, 0, 0] == 15 for i in range(400))
    assert 150 < mirrored < 250


def test_transparent_pixels_are_white_and_grey_pictures_become_rgb():
    assert square(png(Image.new("RGBA", (16, 16), (9, 9, 9, 0)))).min() == 255
    assert square(png(Image.new("L", (16, 16), 7))).tolist() == [[[7] * 3] * 16] * 16


@pytest.mark.parametrize("data", [b"", b"no picture", png(Image.new("RGB", (16, 16)))[:40], png(Image.new("RGB", (16, 16)), "GIF")])
def test_what_is_no_picture_of_ours_is_refused_with_a_reason(data):
    with pytest.raises(BadPicture) as error:
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
    decoded = decoder.finish(batch, decoder.start(batch))
    assert decoded.keys == ("0:0", "0:2") and decoded.bad == ("0:1", "0:3") and decoder.num_bad == 2
    assert decoded.pixels.pixels.shape == (2, 3, 16, 16) and decoded.pixels.captions == ["caption 0", "caption 2"]
    assert "0:1" in caplog.text
    decoded = decoder.finish(batch[1:2], decoder.start(batch[1:2]))
    assert decoded.pixels is None and decoder.num_bad == 3


def test_captions_are_dropped_at_the_rate_asked_for_and_always_for_the_same_samples():
    keys = [f"0:{i}" for i in range(2000)]
    share = sum(dropped(key, run(ucg=0.1)) for key in keys) / len(keys)
    assert 0.08 < share < 0.12
    assert [dropped(key, run(ucg=0.1)) for key in keys] == [dropped(key, run(ucg=0.1)) for key in keys]
    assert all(dropped(key, run(ucg=1.0)) for key in keys) and not any(dropped(key, run(ucg=0.0)) for key in keys)


def test_decoding_processes_give_the_same_batch_and_are_gone_when_closed():
    batch = samples(6, bad=(2,))
    inline, pooled = Decoder(run(random_flip=True)), Decoder(run(random_flip=True), num_workers=2)
    ours = inline.finish(batch, inline.start(batch))
    theirs = pooled.finish(batch, pooled.start(batch))
    workers = list(pooled._pool._processes.values())
    pooled.close()
    assert torch.equal(ours.pixels.pixels, theirs.pixels.pixels) and ours.pixels.captions == theirs.pixels.captions
    assert theirs.bad == ("0:2",) and workers and not any(worker.is_alive() for worker in workers)
