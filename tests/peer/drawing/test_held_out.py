"""Pictures that are held out of training: nobody learns them, and their loss is measured at the same noise each time."""

import dataclasses
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from peer.config import PeerConfig
from peer.data import directory
from peer.drawing.held_out import HeldOut
from peer.machine.device import Rank, RankGroup
from peer.wiring import check_held_out
from swarm.errors import UserError
from swarm.held_out import MOST_HELD_OUT, held_out
from tests.identities import identity_file
from tests.peer.test_alone import CPU, RUN, start  # noqa: F401

SPLIT = dataclasses.replace(RUN, validation_split=0.3, total_samples=40)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_is_held_out_stays_so_when_the_dataset_grows_and_is_about_the_share():
    names = [f"{number:06d}.png" for number in range(1000)]
    chosen = held_out(dict.fromkeys(names), 0.1)
    assert 70 < len(chosen) < 130 and held_out(dict.fromkeys(names[:500]), 0.1) == [name for name in chosen if name < "000500"]
    assert len(held_out(dict.fromkeys(names), 0.9)) == MOST_HELD_OUT and not held_out(dict.fromkeys(names), 0.0)
    for share in (0.001, 0.999):
        with pytest.raises(UserError, match="validation_split") as raised:
            held_out(dict.fromkeys(names[:3]), share)
        assert ("Raise" if share < 0.5 else "Lower") in raised.value.fix


def test_a_folders_own_share_takes_the_place_of_the_runs():
    names = [f"{number:06d}.png" for number in range(200)]
    plain, none, whole = names[:100], names[100:180], names[180:]
    own = {**dict.fromkeys(plain), **dict.fromkeys(none, 0.0), **dict.fromkeys(whole, 1.0)}
    chosen = held_out(own, 0.1)
    assert set(whole) <= set(chosen) and not set(none) & set(chosen)
    assert set(chosen) - set(whole) == set(held_out(dict.fromkeys(plain), 0.1))
    with pytest.raises(UserError, match="of a folder is 1, and the run's is 0") as raised:
        held_out(own, 0.0)
    assert "Remove it" in raised.value.fix
    many = [f"{number:06d}.png" for number in range(MOST_HELD_OUT + 1)]
    with pytest.raises(UserError, match="holds out 256 of 257"):  # the last one is not trained either
        held_out(dict.fromkeys(many, 1.0), 0.1)


@pytest.fixture
def few_draws(monkeypatch):
    """For what does not depend on their number."""
    monkeypatch.setattr("peer.drawing.held_out._LEAST_DRAWS", 8)


def test_a_run_that_measures_is_the_same_run_to_the_bit_and_equal_weights_give_equal_figures(start, tmp_path, few_draws):  # noqa: F811
    plain = start("plain", run=SPLIT, validation_steps=10).run()
    measuring = start("measuring", run=SPLIT, validation_steps=5)
    modes = [module.training for part in measuring.trainer.model.parts.values() for module in part.modules()]
    measuring.run()
    assert measuring.losses == plain.losses
    assert [module.training for part in measuring.trainer.model.parts.values() for module in part.modules()] == modes and any(modes)
    told = [line for line in lines(tmp_path / "measuring") if "validation_loss" in line]
    measured = dict((line["step"], line["validation_loss"]) for line in told)
    assert list(measured) == [5, 10] and measured[5] != measured[10], "other weights have other losses"
    assert [line.get("validation_loss") for line in lines(tmp_path / "plain")] == [None, measured[10]]


def test_the_figure_is_the_loss_of_the_held_out_pictures_and_a_swarm_is_told(start, tmp_path):  # noqa: F811
    told: list[float] = []
    done = start(run=dataclasses.replace(SPLIT, ucg=0.0, total_samples=4), validation_steps=1)
    done.trainer.sync.measured = told.append
    drawn = []
    loss = done.trainer.model.loss
    done.trainer.model.loss = lambda batch, rng: drawn.append((batch, loss(batch, rng))) or drawn[-1][1]
    done.run()
    measured = [each for batch, each in drawn if len(batch.latents) == 1 and not each.requires_grad]
    (figure,) = told
    assert figure == pytest.approx(torch.stack(measured).mean().item())
    assert len(measured) >= 64 and len({each.item() for each in measured}) > 60


def test_with_an_average_a_swarm_measures_its_state_and_a_peer_alone_what_it_exports(start, tmp_path, few_draws):  # noqa: F811
    def measured(name, steps, **peer):
        told: list[float] = []
        done = start(name, run=dataclasses.replace(SPLIT, learning_rate=1e-2, total_samples=24), validation_steps=steps, **peer)
        done.trainer.sync.measured = told.append
        done.run()
        assert bool(done.trainer.average) == peer.get("use_ema", False)
        (figure,) = told
        return figure

    average = {"use_ema": True, "ema_decay": 0.9}
    swarm = {"peers": ("/ip4/127.0.0.1/tcp/1/p2p/QmOne",), "identity_path": str(identity_file(tmp_path / "one.key", "one"))}
    assert measured("alone", 6, **average) != measured("alone's state", 6)
    # A swarm's global steps are rounds of 12 samples: the 24 end with the second.
    assert measured("swarm", 2, **swarm, **average) == measured("swarm's state", 2, **swarm)


def test_a_stream_of_rows_is_refused_before_a_model_is_loaded(start, monkeypatch):  # noqa: F811
    monkeypatch.setattr("peer.learner.load_model", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(UserError, match="--dataset_name") as raised:
        start(run=SPLIT, train_data_dir="", dataset_name="rows")
    assert "--train_data_dir" in raised.value.fix


def test_a_peer_never_trains_what_its_folder_holds_out(pictures, tmp_path):
    from peer.contracts import SourceContext

    context = {"peer": PeerConfig(train_data_dir=str(pictures), repeats=2, cache_dir=str(tmp_path)), "peer_id": "alone"}
    source = directory.build(SourceContext(run=SPLIT, epochs=3, **context))
    aside = {sample.key.rpartition(":")[2]: sample for sample in source.held_out()}
    trained = {sample.key.rpartition(":")[2] for sample in source}
    names = {path.name for path in pictures.glob("*.png")}
    assert aside and trained and not aside.keys() & trained and aside.keys() | trained == names
    assert len(source) == 2 * len(trained) and all(sample.image == (pictures / name).read_bytes() for name, sample in aside.items())
    assert source.held_out() == list(aside.values())
    assert not directory.build(SourceContext(run=RUN, epochs=1, **context)).held_out()


def test_a_split_that_fits_no_folder_like_this_one_stops_who_chose_it_and_no_peer_that_joins(pictures, tmp_path, caplog):
    from peer.contracts import SourceContext

    context = {
        "run": dataclasses.replace(RUN, validation_split=1e-9),
        "peer_id": "one",
        "epochs": 1,
    }
    given = {"train_data_dir": str(pictures), "cache_dir": str(tmp_path)}
    for options in (given, {**given, "found": True}):
        with pytest.raises(UserError, match="validation_split"):
            directory.build(SourceContext(peer=PeerConfig(**options), **context))
    source = directory.build(SourceContext(peer=PeerConfig(peers=("/ip4/127.0.0.1/tcp/1/p2p/QmOne",), **given), **context))
    assert not source.held_out() and len(source) == len([*pictures.glob("*.png")])
    assert "This peer measures no held-out loss" in caplog.text


def test_a_loss_that_is_no_number_is_told_nobody(monkeypatch):
    group, told = RankGroup(Rank(), CPU), []
    monkeypatch.setattr("peer.drawing.held_out.encoded", lambda samples, **_: samples)
    monkeypatch.setattr(HeldOut, "_losses", lambda self, sample, encoded, draws: [sample / draws])
    for value in (float("nan"), 64 * 2e9, 64 * 0.5):
        precision, model = SimpleNamespace(device=CPU), SimpleNamespace(parts={})
        rest = {"run": RUN, "samples": lambda value=value: [value], "weights": nullcontext, "show": told.append}
        HeldOut(model=model, group=group, precision=precision, **rest).measure(1)
    assert told == [0.5]


def test_on_a_tpu_it_is_said_that_nothing_is_measured(caplog):
    peer = PeerConfig(train_data_dir="pictures")
    for device in ("cpu", "xla"):
        check_held_out(SimpleNamespace(run=SPLIT, peer=peer, device=SimpleNamespace(type=device)))
        assert ("measures nothing" in caplog.text) == (device == "xla")
