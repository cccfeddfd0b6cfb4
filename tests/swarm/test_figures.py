import json
import time
from dataclasses import asdict

import pytest

from datasetserver.rendezvous import _peer_info
from swarm.figures import A100_SAMPLES_PER_SECOND, figures, mean_loss
from swarm.records import Finding
from swarm.status import summarize
from tests.swarm.test_status import a_peer, a_run, shown


def seen(*peers, **run):
    values = {"run_name": "cats", "total_samples": 1000, "target_batch_size": 200, "resolution": 512}
    return summarize(a_run(run=values | run), peers, now=time.time())


def test_what_is_left_takes_as_long_as_the_peers_train_beside_their_rounds():
    one = a_peer(samples=400, waiting_samples=100, samples_per_second=10.0, share_lost=0.2)
    shown = figures(seen(one))
    assert (shown.share, shown.round_share, shown.utilisation) == (0.4, 0.5, 0.8)
    assert shown.eta_seconds == pytest.approx(500 / 8)


def test_a_speed_of_next_to_nothing_ends_never_and_is_json():
    """One record could end every browser's stream: Infinity is no JSON."""
    shown = figures(seen(a_peer(samples=400, samples_per_second=5e-324, share_lost=0.0)))
    assert shown.eta_seconds is None
    json.dumps(asdict(shown), allow_nan=False)


def test_who_assists_trains_nothing_and_lowers_no_utilisation():
    trains, helps = a_peer(share_lost=0.5), a_peer(peer_id="QmHelper", phase="assist")
    assert (figures(seen(trains, helps)).utilisation, figures(seen(trains, helps)).trainers) == (0.5, 1)
    assert figures(seen(helps)).utilisation is None and figures(seen(helps)).eta_seconds is None


def test_speed_in_a100s_is_measured_in_pixels():
    two = [a_peer(peer_id=f"QmPeer{n}", samples_per_second=A100_SAMPLES_PER_SECOND) for n in (1, 2)]
    assert figures(seen(*two)).a100s == pytest.approx(2)
    assert figures(seen(*two, resolution=256)).a100s == pytest.approx(0.5)


def test_a_run_without_end_promises_none():
    shown = figures(seen(a_peer(samples_per_second=5.0), total_samples=0))
    assert shown.share is None and shown.eta_seconds is None


def test_the_last_round_is_what_is_left_smaller_or_a_little_larger_than_the_others():
    targets = [figures(seen(a_peer(samples=samples))).round_target for samples in (0, 749, 750, 900, 1000, 1001)]
    assert targets == [200, 200, 250, 100, 0, 0]
    assert figures(seen(a_peer(samples=900, waiting_samples=50))).round_share == 0.5
    assert figures(seen(a_peer(samples=1000))).round_share == 1.0


def test_the_held_out_loss_is_the_median_of_the_last_rounds_that_there_are_and_is_on_the_screen():
    told = [(None, 0), (0.5, 2), (0.3, 3), (0.2, 3), (9.0, 3), (7.0, 99)]
    peers = [a_peer(peer_id=f"QmPeer{n}", validation_loss=loss, validation_round=round) for n, (loss, round) in enumerate(told)]
    known = figures(seen(*peers))
    assert (known.validation_round, known.validation_loss) == (3, 0.4)
    assert "validation  0.4000 after round 3" in shown(seen(*peers))
    honest = [a_peer(peer_id=f"QmPeer{n}", round=40, validation_loss=0.2, validation_round=30 + n) for n in range(5)]
    old, liar = (a_peer(peer_id=f"QmOther{round}", round=40, validation_loss=1e9, validation_round=round) for round in (19, 40))
    assert figures(seen(*honest, liar, old)).validation_loss == 0.2, "one that measured last, or long ago, does not say it all"
    assert figures(seen(a_peer())).validation_loss is None and "validation" not in shown(seen(a_peer()))


def test_the_loss_is_that_of_the_fast_ones_most_of_all():
    assert mean_loss([(0.2, 30.0), (0.4, 10.0), (None, 99.0)]) == pytest.approx(0.25)
    assert mean_loss([(0.2, 0.0), (0.4, 0.0)]) == pytest.approx(0.3), "before anybody has a speed"
    assert mean_loss([(None, 1.0)]) is None


def test_bytes_are_those_of_all_peers_and_the_transfer_that_of_the_slowest():
    one, two = a_peer(sent_bytes=3, received_bytes=5, transfer_seconds=2.0), a_peer(peer_id="QmPeer2", sent_bytes=4, transfer_seconds=7.0)
    shown = figures(seen(one, two))
    assert (shown.sent_bytes, shown.received_bytes, shown.transfer_seconds) == (7, 5, 7.0)


def test_what_audits_found_is_on_the_screen_and_those_reported_come_first():
    found = [Finding(peer=f"QmPeer{n}", change=n / 100, error=0.001, rounds=7 + n, own=-0.5 if n else None, reported=n == 1) for n in range(3)]
    peers = [a_peer(peer_id="QmPeer0", name="Ada"), a_peer(peer_id="QmHelper", name="the helper", phase="assist", findings=tuple(found))]
    assert [(each["peer"], each["by"]) for each in figures(seen(*peers)).findings] == [(f"QmPeer{n}", "QmHelper") for n in (1, 2, 0)]
    screen = shown(seen(*peers))
    assert "audits report 1: ...QmPeer1" in screen and "makes it worse" in screen and screen.count("the helper") >= 3
    (line,) = [line.split() for line in screen.splitlines() if line.startswith("...QmPeer1") and "+0.01000" in line]
    assert line[1:5] == ["+0.01000", "0.00100", "-0.50000", "8"]
    assert figures(seen(a_peer())).findings == [] and "audit" not in shown(seen(a_peer()))


def test_a_dataset_server_reads_what_audits_found_from_its_nodes_report():
    found = Finding(peer="QmPeer1", change=0.25, error=0.125, rounds=7, own=-0.5, reported=True)
    told = json.loads(json.dumps(a_peer(peer_id="QmHelper", findings=(found,)).asdict()))
    assert _peer_info(told).model_dump()["findings"] == [vars(found)]
    assert _peer_info(json.loads(json.dumps(a_peer().asdict()))).findings == []
    assert _peer_info({**told, "findings": [{**vars(found), "rounds": -1}]}) is None
