import dataclasses
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from peer.contracts import Sample
from peer.machine.device import Rank, RankGroup
from peer.samples.buckets import Buckets, Pool, bucket_sizes
from peer.samples.decoding import Decoder
from peer.samples.feed import Feed
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.peer.samples.test_decoding import png
from tests.peer.samples.test_feed import Shelf
from tests.peer.test_alone import RUN, flat, start  # noqa: F401

RATIOS = [(8, 24), (12, 20), (16, 16), (20, 12), (24, 8)]
BUCKETS = Buckets(bucket_sizes(16, 4, 16))


def blank(ratio):
    return png(Image.new("RGB", (2 * ratio[0], 2 * ratio[1])))


def test_the_buckets_at_512_are_between_the_originals_sides_and_nearly_of_one_area():
    sizes = bucket_sizes(512, 64, 16)
    assert set(sizes) == {size for w, h in [(512, 512), (576, 448), (640, 384), (768, 320), (768, 256)] for size in ((w, h), (h, w))}
    assert all(256 <= side <= 768 and side % 64 == 0 for size in sizes for side in size)
    assert all(0.75 * 512**2 <= w * h <= 512**2 for w, h in sizes)


@pytest.mark.parametrize("count", range(20))
def test_there_are_never_more_buckets_than_asked_for_and_the_square_is_always_one(count):
    for resolution, multiple in ((16, 4), (512, 64), (1024, 32)):
        sizes = bucket_sizes(resolution, multiple, count)
        assert len(set(sizes)) == len(sizes) <= max(1, count) and (resolution, resolution) in sizes
        assert {(h, w) for w, h in sizes} == set(sizes) and all(w * h <= resolution**2 for w, h in sizes)


def test_few_buckets_are_spread_over_all_ratios():
    assert set(bucket_sizes(512, 64, 3)) == {(512, 512), (768, 256), (256, 768)}


def test_sides_that_leave_no_square_are_refused():
    with pytest.raises(UserError, match="bucket_side_max 256, but resolution 512 must lie between"):
        bucket_sizes(512, 64, 16, side_max=256)


def test_a_picture_goes_into_the_bucket_of_the_nearest_ratio():
    sizes = [BUCKETS.sizes[BUCKETS.nearest(picture)] for picture in map(blank, RATIOS)]
    assert sizes == RATIOS == BUCKETS.sizes
    assert BUCKETS.nearest(png(Image.new("RGB", (31, 32)))) == BUCKETS.nearest(b"no picture") == 2
    assert BUCKETS.beside(0) == [1] and BUCKETS.beside(2) in ([1, 3], [3, 1])


def draws(kinds):
    return [Sample(str(i), blank(RATIOS[kind]), "") for i, kind in enumerate(kinds)]


def formed(pool, samples, end=True):
    pool.add(samples)
    if end:
        pool.flush()
    return pool.take(10**6)


def content(batches):
    return [(batch.size, tuple(sample.key for sample in batch.samples)) for batch in batches]


KINDS = st.lists(st.integers(0, 4), max_size=120)


@given(KINDS, st.integers(1, 5))
def test_no_sample_is_lost_or_comes_twice_and_every_batch_is_of_one_size(kinds, size):
    batches = formed(Pool(BUCKETS, size), draws(kinds))
    assert sorted(int(key) for _, keys in content(batches) for key in keys) == list(range(len(kinds)))
    for batch in batches:
        assert 1 <= len(batch.samples) <= size
        own = RATIOS.index(batch.size)
        assert all(abs(kinds[int(sample.key)] - own) <= 1 for sample in batch.samples)


@given(KINDS, st.integers(1, 5), st.integers(0, 40))
def test_none_waits_while_more_are_drawn_than_the_patience(kinds, size, patience):
    pool = Pool(BUCKETS, size)
    pool.patience = patience
    for drawn, sample in enumerate(draws(kinds), start=1):
        pool.add([sample])
        pool.take(10**6)
        assert all(drawn - sample.number <= patience for sample in pool.held()) and len(pool.held()) <= 5 * (size - 1)


@given(KINDS, st.integers(1, 4), st.integers(0, 30), st.data())
def test_a_pool_that_is_stopped_anywhere_and_resumed_forms_the_same_batches(kinds, size, patience, data):
    """The samples that were ahead are drawn again first, then the others, as a source does it."""
    samples = draws(kinds)
    whole = Pool(BUCKETS, size)
    whole.patience = patience
    expected = content(formed(whole, samples))

    drawn = data.draw(st.integers(0, len(kinds)))
    first = Pool(BUCKETS, size)
    first.patience = patience
    first.add(samples[:drawn])
    taken = content(first.take(data.draw(st.integers(0, first.num_ready))))
    held = sorted(first.held(), key=lambda sample: sample.number)
    state, keys = first.state_dict(held), [sample.key for sample in held]
    second = Pool(BUCKETS, size)
    second.patience = patience
    second.load_state_dict(state, keys)
    rest = content(formed(second, [samples[int(key)] for key in keys] + samples[drawn:]))
    assert taken + rest == expected


def test_a_ratio_too_rare_for_a_batch_is_merged_with_the_next_one():
    pool = Pool(BUCKETS, 4)
    batches = content(formed(pool, draws([0, 1, 1, 3])))
    assert batches == [((8, 24), ("0", "1", "2")), ((20, 12), ("3",))] and pool.merged == 2


class Mixed(Shelf):
    """A source of pictures whose ratio their number decides."""

    def __iter__(self):
        yield from draws([i * i % 5 for i in range(self.count)])
        self.count = 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_holds_micro_batches_of_one_size_each_and_all_samples_come(workers, caplog):
    caplog.set_level(logging.INFO)
    group = RankGroup(Rank(), device="cpu")
    options = {"batch_samples": 3, "accumulation": 2, "buckets": BUCKETS, "bucket_info": True}
    feed = Feed(Mixed(40), Decoder(RunConfig(resolution=16), workers), group, stopping=lambda: False, **options)
    works = list(feed)
    feed.close()
    assert sorted(int(key) for work in works for key in work.keys) == list(range(40))
    shapes = {tuple(batch.pixels.shape[2:]) for work in works for batch in work.batches}
    assert shapes == {(24, 8), (20, 12), (8, 24)} and all(len(work.batches) <= 2 for work in works)
    assert "buckets 8x24 12x20 16x16 20x12 24x8" in caplog.text and "8x24=9 12x20=15 24x8=16, 1 of them merged" in caplog.text


@pytest.fixture
def mixed_pictures(pictures):
    """Twelve pictures of three ratios: their colours and captions stay."""
    for i, path in enumerate(sorted(pictures.glob("*.png"))):
        with Image.open(path) as picture:
            bent = picture.resize(RATIOS[1 + i % 3 % 2 * 2] if i % 4 else (16, 16))
        bent.save(path)
    return pictures


def test_a_run_with_buckets_and_decoding_processes_resumes_to_the_bit(start, mixed_pictures):  # noqa: F811
    """In its first epoch, of whose pictures some wait for a batch, and in its second."""
    run = dataclasses.replace(RUN, num_buckets=16, total_samples=20)
    options = {"gradient_accumulation_steps": 2, "train_batch_size": 2, "dataloader_num_workers": 1}
    whole = start("whole", run=run, **options | {"dataloader_num_workers": 0}).run()
    losses, rest = [], {**options, "resume_from_checkpoint": "latest"}
    for stop_after in (1, 4, None):
        part = start("parts", run=run, stop_after=stop_after, **rest).run()
        losses += part.losses
        assert part.trainer.step == (stop_after or len(whole.losses))
    assert losses == whole.losses
    assert (flat(part.trainer.params) == flat(whole.trainer.params)).all()
