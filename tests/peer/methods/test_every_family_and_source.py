"""Every family from every source of pictures: one batch has the same losses and gradients to the bit, whichever way its pictures came.

So what is shown of a family and a method with one source holds with each. Keys differ between sources, and with them what chance decides:
the run here leaves nothing to it.
"""

import dataclasses
from contextlib import ExitStack
from itertools import islice

import pytest
import torch

from peer.launch.starting_model import load_model
from peer.rooms import load_part
from peer.samples.decoding import Decoder
from peer.samples.encoding import Encoder
from swarm.run_config import RunConfig
from tests import tiny
from tests.datasetserver.hosting import Host
from tests.peer.data import sources
from tests.peer.data.sources import Row, encoded, plain
from tests.peer.machine.shallow import shallow_family  # noqa: F401

CPU = torch.device("cpu")
RUN = RunConfig(method="full", resolution=16, ucg=0.0, center_crop=True)
FAMILIES = [*tiny.ONE_OF_EACH]
ROWS = [Row(f"{colour}.png", encoded(plain(number)), (f"a {colour} square",)) for number, colour in enumerate(tiny.COLOURS)]


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """By source, the batch of all rows in the order of their captions."""
    place = tmp_path_factory.mktemp("sources")
    with ExitStack() as closing:

        def serve(**options):
            host = Host(place / "server" / "host0", **options)
            closing.callback(host.stop)
            return host.start()

        builds = {
            "a folder": sources.directory(ROWS, place / "folder", serve),
            "a TOML file": sources.toml(ROWS, place / "toml", "a"),
            "a tar": sources.tar(ROWS, place / "tar"),
            "parquet files": sources.huggingface(ROWS, place / "parquet", serve),
            "a dataset server": sources.dataset_server(ROWS, place / "server", serve),
        }
        decoder, made = Decoder(RUN), {}
        for name, build in builds.items():
            source = build()
            closing.callback(source.close)
            samples = sorted(islice(source, len(ROWS)), key=lambda sample: sample.caption)
            made[name] = decoder.finish(decoder.start(samples))
        yield made


@pytest.mark.parametrize("family", FAMILIES)
def test_one_batch_has_the_same_losses_and_gradients_from_every_source(batches, shallow_family, family):  # noqa: F811
    model = load_model(dataclasses.replace(RUN, model=str(shallow_family(family))), {}, CPU)
    params = load_part("methods", "full").build(RUN).attach(model)

    def learned(batch):
        rng = torch.Generator().manual_seed(5)
        losses = model.loss(Encoder(model)(batch, rng), rng)
        slopes = torch.autograd.grad(losses.sum(), [*params.values()], materialize_grads=True)
        return losses.tolist(), torch.cat([slope.flatten() for slope in slopes])

    losses, gradients = learned(batches["a folder"])
    assert len(set(losses)) == len(ROWS) and gradients.abs().sum() > 0
    for name, batch in batches.items():
        assert batch.captions == batches["a folder"].captions
        others, slopes = learned(batch)
        assert others == losses and torch.equal(slopes, gradients), name
