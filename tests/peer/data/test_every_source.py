"""What every source promises: a file that appears in peer/data, or a class in datasetserver/sources.py, is tested here the same day.

A peer's source (`peer.contracts.Source`)
* yields every good picture once an epoch with its captions, each of one line, whatever its name and format;
* leaves out what cannot be trained on, or yields it as `Sample.bad`, which the decoder counts; nothing outside of the dataset is ever shown;
* names each sample by a key that begins with its epoch, is text, and means the same picture whenever the data are read again;
* yields what was given back again, also behind its end; after a resume, what was given back and not yet drawn, and nothing of what is in work;
* ends at `close`, which may be called twice; rests and goes on, with no sample lost;
* raises a UserError that says what to do where there is nothing to train on.
Pixels are as people see them: upright, 16-bit greys by their upper byte, white behind what is clear.

A host's source lists the same pictures, in an order that follows from the dataset alone, under names that differ. Its identity is JSON that
stays while the dataset does; a folder's changes with its files, that of a dataset of the Hub with its revision.
"""

import inspect
import json
import re
from itertools import islice
from operator import attrgetter

import numpy as np
import pytest

import datasetserver.sources
from datasetserver.ingest import ingest
from datasetserver.prepared import shard_path
from peer.contracts import Source
from peer.data.shards import read_shard
from peer.rooms import load_part
from peer.samples.decoding import Decoder
from peer.samples.pictures import Frame, decode, size_of
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.peer.data import sources
from tests.peer.data.sources import HOSTS, bad_rows, encoded, good_rows, plain
from tests.sources import parts

every_source = pytest.mark.parametrize("name", parts("data"))
LISTINGS = sorted(name for name, each in vars(datasetserver.sources).items() if inspect.isclass(each) and "list" in vars(each) and name != "Source")
every_listing = pytest.mark.parametrize("name", LISTINGS)
METHODS = [name for name, each in vars(Source).items() if inspect.isfunction(each) and (not name.startswith("_") or name == "__iter__")]


@pytest.fixture
def opened(tmp_path, serve):
    """`opened(name, rows)` makes sources of that name over these rows, for one peer; all are closed in the end."""
    made = []

    def over(name, rows):
        build = getattr(sources, name)(rows, tmp_path, serve)
        return lambda: made.append(build()) or made[-1]

    yield over
    for source in made:
        source.close()


@pytest.fixture
def private(tmp_path):
    path = tmp_path / "private.png"
    path.write_bytes(encoded(plain(99)))
    return path


def upright(image):
    return decode(image, Frame(*size_of(image))).pixels


def captions(caption):
    return frozenset([caption] if isinstance(caption, str) else caption)


def one_line(caption):
    return caption.replace("e\u0301", "\u00e9").replace("\n", " ")


def told(rows):
    return sorted((row.upright.tobytes(), sorted(map(one_line, row.captions))) for row in rows)


def seen(samples):
    return sorted((upright(image).tobytes(), sorted(captions(caption))) for image, caption in samples)


def epoch(source, number=0, *, of=14):
    """The samples of an epoch of at most so many; those of a server may come after some of the next."""
    return [sample for sample in islice(source, 3 * of) if re.match(r"\d+", sample.key)[0] == str(number)]


# -- a peer's sources


@every_source
def test_a_source_offers_what_the_loop_asks_for(name):
    made = inspect.signature(load_part("data", name).build).return_annotation
    kind = getattr(load_part("data", name), made) if isinstance(made, str) else made
    for method in METHODS:
        wanted, there = (list(inspect.signature(getattr(cls, method)).parameters) for cls in (Source, kind))
        assert there == wanted, method


@every_source
def test_every_good_picture_comes_once_an_epoch_and_what_is_bad_is_left_out_or_counted(opened, private, name):
    good, bad = good_rows(), bad_rows(private)
    samples = epoch(opened(name, good + bad)())
    decoder = Decoder(RunConfig(resolution=16, ucg=0.0))
    decoded = decoder.finish(decoder.start(samples))
    assert sorted(decoded.keys + decoded.bad) == sorted(sample.key for sample in samples) and len(decoded.bad) <= len(bad)
    assert seen((sample.image, sample.caption) for sample in samples if sample.key in decoded.keys) == told(good)
    assert all(private.read_bytes() != sample.image for sample in samples)


@every_source
def test_a_key_is_text_begins_with_its_epoch_and_means_the_same_picture_when_the_data_are_read_again(opened, name):
    build = opened(name, good_rows())
    first, again = build(), build()
    samples = [sample for source in (first, again) for number in (0, 1) for sample in epoch(source, number)]
    assert {sample.key for sample in samples} == {sample.key.encode().decode() for sample in samples}
    assert json.loads(json.dumps([sample.key for sample in samples])) == [sample.key for sample in samples]
    meant = {}
    for sample in samples:
        assert meant.setdefault(sample.key, sample) == sample
    assert len(meant) >= 8


@every_source
def test_an_epoch_has_an_order_of_its_own(opened, name):
    samples = list(islice(opened(name, good_rows())(), 16))
    first, second = ([sample.caption for sample in samples if sample.key.startswith(str(number))] for number in (0, 1))
    assert len(first) == len(second) == 8 and sorted(map(captions, first), key=sorted) == sorted(map(captions, second), key=sorted)
    assert first != second


@every_source
def test_what_is_given_back_comes_again_and_what_is_acknowledged_does_not(opened, name):
    source = opened(name, good_rows())()
    keys = [sample.key for sample in islice(source, 6)]
    source.register(1, keys[:4])
    source.acknowledge(keys[:2])
    source.give_back(keys[4:])
    rest = [sample.key for sample in epoch(source)]
    assert len(rest) == len(set(rest)) == 4 and set(keys[4:]) < set(rest) and not set(keys[:4]) & set(rest)


@pytest.mark.parametrize("name", ["directory", "huggingface"])
def test_a_source_that_has_ended_yields_what_was_given_back_since_when_it_is_asked_anew(opened, name):
    source = opened(name, good_rows())()
    keys = [sample.key for sample in source]
    source.give_back(keys[-2:])
    assert [sample.key for sample in source] == keys[-2:] and not list(source)


@every_source
def test_a_resumed_source_yields_what_was_ahead_and_not_yet_drawn_and_nothing_that_is_in_work(opened, name):
    build = opened(name, good_rows())
    killed = build()
    keys = [sample.key for sample in islice(killed, 6)]
    killed.register(1, keys[:3])
    state = json.loads(json.dumps(killed.state_dict()))
    resumed = build()
    resumed.load_state_dict(state)
    resumed.give_back(keys[3:])
    rest = [sample.key for sample in epoch(resumed)]
    assert len(rest) == len(set(rest)) == 5 and set(keys[3:]) < set(rest) and not set(keys[:3]) & set(rest)


@every_source
def test_a_source_that_rested_goes_on_and_loses_nothing(opened, name):
    source = opened(name, good_rows())()
    keys = [sample.key for sample in islice(source, 3)]
    source.rest(True)
    source.rest(False)
    assert len({*keys, *(sample.key for sample in epoch(source))}) == 8


@every_source
def test_a_closed_source_ends_and_may_be_closed_again(opened, name):
    source = opened(name, good_rows())()
    samples = iter(source)
    next(samples)
    source.close()
    source.close()
    assert len(list(samples)) < 8


@every_source
@pytest.mark.parametrize("which", ["none", "bad"])
def test_where_there_is_nothing_to_train_on_an_error_says_so_or_every_sample_is_bad(opened, private, name, which):
    rows = bad_rows(private)[:1] if which == "bad" else []
    try:
        samples = list(islice(opened(name, rows)(), 9))
    except UserError as error:
        assert error.message and error.fix
    else:
        assert which == "bad" and samples and all(size_of(sample.image) is None for sample in samples)


# -- a host's sources


def listing(name, folder):
    kind = getattr(datasetserver.sources, name)
    return kind(folder if name == "Folder" else str(folder))


@every_listing
def test_a_host_makes_the_same_samples_of_it(tmp_path, private, name):
    source = listing(name, HOSTS[name](good_rows() + bad_rows(private), tmp_path / "data"))
    result = ingest(source, tmp_path / "work", workers=0)
    rows = [row for shard in result.manifest.shards for row in read_shard(shard_path(tmp_path / "work", shard.digest), shard.samples)]
    assert seen(rows) == told(good_rows()) and len({name for name, _ in result.rejected}) == len(bad_rows(private))


@every_listing
def test_a_listings_order_and_identity_follow_from_the_dataset_alone(tmp_path, name):
    folder = HOSTS[name](good_rows(), tmp_path / "data")
    first, again = listing(name, folder).list(), listing(name, folder).list()
    assert [*first.identity()] == [*again.identity()]
    names, same = (list(map(attrgetter("name"), each.pairs)) for each in (first, again))
    assert names == same != sorted(names) and len(set(names)) == 8 and first.faults == []


@every_listing
def test_an_empty_listing_is_a_users_error(tmp_path, name):
    with pytest.raises(UserError) as raised:
        ingest(listing(name, HOSTS[name]([], tmp_path / "data")), tmp_path / "work", workers=0)
    assert raised.value.fix


def test_upright_is_what_people_see():
    """Of the helper itself: a picture whose EXIF says 6 is shown turned clockwise."""
    assert np.array_equal(upright(encoded(plain(3), exif=sources.turned(6)))[0, -1], plain(3)[0, 0])
