"""The rows of `scripts/strangers` in which a member lies: what is counted, what the liars send, and one of them for some seconds."""

import asyncio
import json
import math
import random
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from peer.audit.tally import LEAST_ROUNDS, Tally
from peer.config import PeerConfig
from peer.contracts import SyncReport
from peer.sync.engine.codec import LEAST_ELEMENTS, Wire, add_up, rough_square
from peer.sync.engine.round.share_seals import part_hash
from peer.sync.engine.state import first_state
from peer.sync.engine.vectors import Schema, flatten
from scripts.attacks import siege, toy_audit
from scripts.attacks.lies import Noise, Stretched
from scripts.attacks.progress import RATE, lost, place, progress
from scripts.attacks.rounds import Outlet, as_bytes
from scripts.attacks.rows import ROWS
from scripts.attacks.swarm import Kind, Swarm
from scripts.attacks.toy import Registered, Toy, build, new_params, read_run
from scripts.attacks.wire import Key
from swarm.peer_key import PeerKey, has_signed
from swarm.receipts import Receipts
from swarm.signing import HostKey
from swarm.slices import tree_digest
from swarm.statements import input_statement
from tests.conftest import ROOT
from tests.warm import Warm

WIRE = Wire("fp16", 100)


# ------------------------------------------------------------------ what is counted


def test_a_place_is_one_on_the_target_and_zero_as_far_off_as_who_never_moves_or_further():
    assert [place(loss) for loss in (0.0, 0.25, 1.0, 1e300, math.nan)] == [1.0, 0.5, 0.0, 0.0, 0.0]


def test_progress_is_the_mean_place_of_peers_however_much_each_told():
    assert progress([[0.0, 0.0, 0.0], [1.0]]) == 0.5 and progress([[0.25], []]) == 0.25


def test_what_is_lost_is_a_share_of_what_the_undisturbed_made():
    assert lost(0.6, 0.8) == pytest.approx(0.25) and lost(0.0, 0.8) == 1.0 and lost(0.8, 0.8) == 0.0 and lost(0.9, 0.8) < 0
    assert lost(0.0, 0.0) == 1.0


def test_a_step_of_a_member_goes_its_share_of_the_way():
    params, now = new_params(), time.time()
    toy, before = Toy(params, RATE), None
    before = toy.gradients(now)
    toy.move()
    assert toy.gradients(now) == pytest.approx(before * (1 - RATE) ** 2, rel=1e-4)


def verdict(row, rounds=(10, 10), reasons=(), least_median=0.0, **figures):
    tried = siege.Siege(None, seconds=1, seed=0, say=print, kind=Kind(members=True), least_median=least_median)
    tried.pairs[row], tried.reasons[row], tried.figures[row] = [rounds], list(reasons), figures
    return tried.verdict()


def test_a_member_may_cost_a_tenth_of_the_progress_and_a_fifth_of_the_rounds():
    held = verdict("member-nan", (8, 10), progress_lost=0.1)
    assert held["holds"] and held["progress_lost"] == {"member-nan": 0.1} and held["rounds_median"] is None
    slow = verdict("member-nan", (7, 10), progress_lost=0.1)
    assert not slow["holds"] and not slow["beyond"]
    harmed = verdict("member-nan", progress_lost=0.11)
    assert not harmed["holds"] and harmed["beyond"] == {"member-nan": 0.11}
    assert not verdict("member-sign-flip", reasons=["loss 3"])["holds"], "nothing excuses a member"


def test_proofs_and_reports_have_their_bounds():
    late = verdict("two-faced", banned_after_rounds=21, progress_lost=0.0)
    assert late["beyond"] == late["banned_after_rounds"] == {"two-faced": 21}
    assert verdict("two-faced", banned_after_rounds=20, progress_lost=0.0)["holds"]
    unseen = verdict("audited-sign-flip", reported_after_rounds=51)
    assert unseen["beyond"] == unseen["reported_after_rounds"] == {"audited-sign-flip": 51}


def test_strangers_cost_a_twentieth_of_the_rounds_in_the_median():
    assert verdict("nan", (9, 10))["holds"] and verdict("nan", (19, 20), least_median=siege.MEDIAN)["holds"]
    few = verdict("nan", (9, 10), least_median=siege.MEDIAN)
    assert not few["holds"] and few["rounds_median"] == 0.9


def test_a_wave_whose_undisturbed_swarm_fails_says_nothing_and_the_next_one_is_played():
    said = []
    tried = siege.Siege(None, seconds=1, seed=0, say=said.append)
    fine, broken = SimpleNamespace(row=ROWS["member-nan"], broken=""), SimpleNamespace(broken="not within 240 s: averages together")
    tried._judge(fine, broken)
    assert tried.verdict()["broken"] == {"member-nan": "the undisturbed swarm: not within 240 s: averages together; try --at_once with fewer"}
    assert not tried.verdict()["holds"] and "COULD NOT BE TRIED" in said[0]


def test_members_that_lie_come_only_when_asked_for():
    usual, everything = siege.chosen(""), siege.chosen("", everything=True)
    assert not any(row.let_in for row in usual) and everything == list(ROWS.values())
    assert siege.chosen("member-nan") == [ROWS["member-nan"]]


def test_a_liar_is_one_of_five_members_and_a_stranger_comes_to_two_peers():
    kind = Kind(averaging="centered", clip_members=0.0)
    member, stranger = kind.of(ROWS["member-nan"]), kind.of(ROWS["nan"])
    assert (member.peers, member.members, member.rate, member.averaging) == (4, True, RATE, "centered")
    assert (stranger.peers, stranger.members, stranger.rate) == (2, False, 0.0)
    assert Kind(peers=3).of(ROWS["member-nan"]).peers == Kind(peers=3).of(ROWS["nan"]).peers == 3


def test_a_swarm_is_told_its_kind_and_a_new_run_has_its_own_clip(tmp_path):
    key = HostKey(tmp_path / "host.key")
    words = Kind(members=True, averaging="centered", clip_members=0.0, rate=0.1).words(tmp_path)
    options = dict(word[2:].split("=") for word in words)
    run = read_run("parameters", key, options)
    assert (run.members_of, run.averaging, run.clip_members, options["rate"]) == (key.public, "centered", 0.0, "0.1")
    usual = read_run("parameters", None, dict(word[2:].split("=") for word in Kind().words(tmp_path)))
    assert (usual.members_of, usual.averaging, usual.clip_members) == ("", "mean", type(usual)(model="x").clip_members)


# ------------------------------------------------------------------ what honest members have


def test_each_contribution_has_a_receipt_for_what_was_trained_for_it():
    class Sync:
        def __init__(self):
            self.reports, self.given = [], []

        def step(self, samples, loss):
            return self.reports.pop(0)

        def registered(self, number, receipt):
            self.given.append((number, receipt))

    sync = Sync()
    sync.reports = [SyncReport(), SyncReport(frozen=7), SyncReport(), SyncReport(dropped=(0,)), SyncReport(frozen=8)]
    registered = Registered(sync, lambda number, samples: f"{samples} of {number}")
    for samples in (8, 8, 8, 0, 16):
        registered.step(samples)
    assert sync.given == [(7, "16 of 7"), (8, "16 of 8")]


def test_the_toys_host_signs_receipts_that_hold(tmp_path):
    key = HostKey(tmp_path / "host.key")
    run = read_run("none", key, {})
    _, _, receipt = build(tmp_path / "peer-1", run, [], key)
    receipts, peer = Receipts.of(run), PeerKey.read(PeerConfig(output_dir=str(tmp_path / "peer-1")).identity_file).peer_id
    assert receipts.hold(peer, 3, 16, receipt(3, 16)) and not receipts.hold(peer, 3, 17, receipt(3, 16))


# ------------------------------------------------------------------ what liars send


def guest(mean=None):
    band = SimpleNamespace(target=48, rng=random.Random(3))
    memory = {} if mean is None else {part.start: part.of(mean) for part in WIRE.parts}
    return SimpleNamespace(band=band, wire=WIRE, memory=memory)


class Frames:
    """A reducer that answers each part with `mean`."""

    def __init__(self, mean):
        self.came, self._mean, self._asked = [], mean, 0

    async def send(self, payload):
        self.came.append(payload)

    async def receive(self, seconds):
        part = WIRE.parts[self._asked]
        self._asked += 1
        return {}, bytes(part.encode(part.of(self._mean)).numpy())


def test_with_its_last_part_a_contribution_is_signed_as_members_sign():
    """A run for members takes none without that, so no member's lie would come to a mean."""
    key, wire, came = Key(), Wire("fp16", 2 * LEAST_ELEMENTS), []

    async def send(header, data):
        came.append((header, data))

    frames = SimpleNamespace(peer="QmReducer", send=send, receive=None)
    guest = SimpleNamespace(stranger=SimpleNamespace(key=key), band=SimpleNamespace(config=SimpleNamespace(digest="run")))
    outlet = Outlet(guest, frames, "group", wire.parts)
    encoded = [part.encode(torch.ones(part.end - part.start)) for part in wire.parts]
    for data in encoded:
        asyncio.run(outlet.send(as_bytes(data)))
    (first, _), (last, _) = came
    digest = tree_digest([part_hash(part, data) for part, data in zip(wire.parts, encoded, strict=True)])
    assert first == {} and has_signed(key.peer_id, input_statement("run", "group", "QmReducer", digest), last["key"], last["signature"])


def sent_by(lie, who, mean):
    """What arrives, (100,), and the norm that was stated for it."""
    frames, said = Frames(mean), lie.states(who)
    asyncio.run(lie.sends(who, frames, WIRE.parts))
    values = [part.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8)) for part, data in zip(WIRE.parts, frames.came, strict=True)]
    assert said["samples"] == 96
    assert math.sqrt(add_up(rough_square(some) for some in values)) == pytest.approx(said["norm"], rel=1e-6), "it states its norm truly"
    return torch.cat(values)


MEAN = torch.linspace(-0.25, 0.5, 100).half().float()


@pytest.mark.parametrize("times", [-20, -1, 1, 10, 1e6])
def test_a_liar_brings_nothing_first_and_then_a_multiple_of_the_last_mean(times):
    who, lie = guest(), Stretched(times)
    assert not sent_by(lie, who, MEAN).any()
    torch.testing.assert_close(sent_by(lie, who, MEAN), (MEAN * times).clamp(-65504, 65504), rtol=1e-3, atol=0)


def test_noise_is_as_long_as_it_says_and_other_noise_in_each_round():
    who, lie = guest(MEAN), Noise(10)
    first, second = (sent_by(lie, who, MEAN) for _ in range(2))
    assert float(first.norm()) == pytest.approx(10 * float(MEAN.norm()), rel=1e-2) and not torch.equal(first, second)
    assert abs(float(first @ MEAN / first.norm() / MEAN.norm())) < 0.4


# ------------------------------------------------------------------ a helper that audits


def test_the_toys_audit_tells_a_contribution_towards_the_target_from_one_away_from_it():
    params, now = new_params(), 1000.0
    run = read_run("parameters", None, {})
    wire, anchor = Wire.of(run.wire, Schema.of(params)), None
    anchor = flatten(params, torch.empty(wire.size))
    state = first_state(run.digest, Schema.of(params).digest, anchor.clone(), 0)
    Toy(params, RATE).gradients(now)
    step = -RATE * torch.cat([parameter.grad.flatten() for parameter in params.values()])
    measuring = toy_audit.measuring_of(params, run)
    measuring.now = now
    found = measuring.losses(state, wire.parts, {"honest": wire.encode(step), "liar": wire.encode(-step)})
    assert found["honest"].after < found["honest"].before == found["liar"].before < found["liar"].after
    assert torch.equal(flatten(params, torch.empty(wire.size)), anchor), "the parameters are the anchor's afterwards"
    tally = Tally()
    for _ in range(LEAST_ROUNDS):
        for peer in ("a", "b", "c"):
            tally.add(peer, found["honest"].after - found["honest"].before)
        tally.add("liar", found["liar"].after - found["liar"].before)
    assert [finding.peer for finding in tally.findings() if finding.reported] == ["liar"]


def audited(tmp_path, *reports, address=""):
    """A swarm of the row, whose helper and stranger have said that."""
    swarm = Swarm.__new__(Swarm)
    swarm.row, swarm.began, swarm._memory, swarm.newcomer = ROWS["audited-sign-flip"], 100.0, 0.0, None
    rounds = [{"time": at, "digest": f"d{at}"} for at in range(101, 301, 2)]
    folder = tmp_path / "peer-1"
    swarm._toys = [SimpleNamespace(name="peer-1", folder=folder, memory_mib=lambda: 0.0, rounds=lambda: rounds)]
    came = '{"event": "came", "peers": ["QmLiar"]}\n'
    log = tmp_path / "log"
    log.write_text("nothing was measured\n")
    swarm.stranger = SimpleNamespace(text=lambda: came, address=lambda: address)
    said = "".join(json.dumps({"event": "reported", "time": at, "peer": peer}) + "\n" for at, peer in reports)
    swarm.helper = SimpleNamespace(text=lambda: said, log=log)
    return swarm


def test_the_rounds_until_the_helper_names_the_liar_are_counted(tmp_path):
    swarm = audited(tmp_path, (121.0, "QmLiar"), (150.0, "QmLiar"))
    assert swarm.figures(300.0, 0.0)["reported_after_rounds"] == 10.0 and swarm._unreported() == []


def test_a_liar_that_trains_is_known_by_its_address(tmp_path):
    swarm = audited(tmp_path, (121.0, "QmTrainer"), address="/ip4/127.0.0.1/tcp/1/p2p/QmTrainer")
    assert swarm.figures(300.0, 0.0)["reported_after_rounds"] == 10.0 and swarm._unreported() == []


def test_a_helper_that_names_nobody_or_an_honest_member_is_said(tmp_path):
    silent = audited(tmp_path)
    assert silent.figures(300.0, 0.0)["reported_after_rounds"] == 100.0
    assert silent._unreported() == ["the helper did not report the liar: nothing was measured"]
    wrong = audited(tmp_path, (121.0, "QmLiar"), (130.0, "QmHonest"))
    assert wrong._unreported() == ["the helper reported the honest Honest"]


# ------------------------------------------------------------------ a row, for some seconds


@pytest.mark.swarm
@pytest.mark.slow
def test_without_the_clip_one_member_takes_the_progress_of_the_others(tmp_path):
    """With two honest ones and for ten seconds, to keep it short; in thirty it takes 0.84 of it from four. It shows that the figure can fail,
    and that members with receipts average with a liar."""
    path, log = tmp_path / "record.json", tmp_path / "log"
    words = ["-m", "scripts.attacks.siege", "--rows", "member-x1e6", "--peers", 2, "--clip_members", 0]
    program = Warm([*words, "--seconds", 10, "--pairs", 1, "--seed", 1, "--record", path], ROOT, log, forks=True)
    try:
        program.wait(540)
    finally:
        program.send_signal(signal.SIGTERM)  # it ends all that it has started
    assert path.exists(), log.read_text()[-6000:]
    record = json.loads(path.read_text())
    assert record["broken"] == {} and record["progress_lost"]["member-x1e6"] > 0.3, record
    assert record["beyond"] == record["progress_lost"] and not record["holds"]
