"""`scripts/strangers`: a few of its rows for some seconds, with real processes; and that it knows an attack that works from one that does not."""

import asyncio
import contextlib
import inspect
import json
import random
import re
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from peer.contracts import Member
from peer.sync.engine.net.messages import read_header
from peer.sync.engine.state import Header
from scripts.attacks import siege, states, wire
from scripts.attacks.band import Band
from scripts.attacks.rows import ROWS
from scripts.attacks.swarm import Swarm
from swarm.errors import UserError
from swarm.peer_key import check_statement
from tests.conftest import ROOT
from tests.swarm import p2pds
from tests.swarm.conftest import scenes
from tests.warm import Warm

SHORT = ("nan", "browser-post")
"""One beside a swarm, one at a server. The simulator plays the other rows of a swarm: tests/simulation/test_world.py."""
SECONDS = 15
"""Long enough for each of them to stop the swarm as it was before there was a defence."""


def siege_of(folder, *flags: str) -> dict:
    path, log = folder / "record.json", folder / "log"
    words = ["-m", "scripts.attacks.siege", *flags, "--seconds", SECONDS, "--pairs", 1, "--seed", 1, "--record", path]
    siege = Warm(words, ROOT, log, forks=True)
    try:
        siege.wait(540)
    finally:
        siege.send_signal(signal.SIGTERM)  # it ends all that it has started
    assert path.exists(), log.read_text()[-6000:]
    return json.loads(path.read_text())


@pytest.mark.swarm
@pytest.mark.slow
def test_a_stranger_ends_stops_and_corrupts_nothing_and_the_honest_peers_go_on_with_their_rounds(tmp_path):
    record = siege_of(tmp_path, "--rows", ",".join(SHORT))
    assert record["why"] == {} and record["broken"] == {}, record
    # One deadline of a fresh identity is a third of a window as short as this.
    assert set(record["rounds_ratio"]) == {"nan"} and record["rounds_ratio"]["nan"] >= 0.5, record


@pytest.mark.swarm
@pytest.mark.slow
def test_what_only_a_member_could_do_costs_a_run_for_members_nothing(tmp_path):
    """A stranger that contributes is not stopped otherwise."""
    record = siege_of(tmp_path, "--members", "--rows", "sign-flip,split-means,browser-post")
    assert record["holds"] and set(record["rounds_ratio"]) == {"sign-flip", "split-means"}, record
    assert min(record["rounds_ratio"].values()) >= 0.5, record


def test_help_and_the_list_of_rows_need_no_swarm():
    done = subprocess.run([ROOT / "scripts" / "strangers", "--list"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(ROWS)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_every_row_has_its_attack(row):
    """Or is a toy that trains for nobody's good."""
    assert row.trains.startswith("--labels=") if row.trains else inspect.iscoroutinefunction(row.find())


PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NO_ROWS = {"no-store"}
"""Names on the page of a row's form that are none: what an answer says of caches. Programs begin with dd-."""


def in_the_table() -> set[str]:
    """The row ids of the table's last column."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| a stranger ...", "| ---"))]
    return {name for line in lines for name in re.findall("`([^`]*)`", line.rstrip("| ").rpartition("|")[2])}


def in_the_text() -> set[str]:
    """Names of several words on the page, which a row's id is where it is no option, file or program."""
    return {name for name in re.findall("`([a-z]+(?:-[a-z]+)+)`", PAGE) if not name.startswith("dd-")} - NO_ROWS


def test_the_page_on_security_names_every_row():
    assert len(in_the_table()) > 20 and in_the_table() < set(ROWS)
    assert [row for row in ROWS if f"`{row}`" not in PAGE] == []


def test_the_page_on_security_names_no_row_that_there_is_not():
    assert sorted((in_the_table() | in_the_text()) - set(ROWS)) == []


def test_the_table_of_what_is_stopped_has_no_row_that_only_memberships_end():
    below = PAGE.partition("**What the table does not stop.**")[2]
    only_members = {row.id for row in ROWS.values() if row.members}
    assert not only_members & in_the_table() and all(f"`{row}`" in below for row in only_members)


def test_a_row_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(UserError, match="no row sideways") as caught:
        siege.chosen("nan,sideways")
    assert "slot-hog" in caught.value.fix


def test_every_row_is_in_one_wave_and_the_heavy_ones_are_by_themselves():
    waves = siege.waves_of(list(ROWS.values()), at_once=8)
    assert all(len(wave) < (2 if wave[0].let_in else 4 if wave[0].heavy else 8) for wave in waves)
    assert all(len({(row.let_in, row.heavy) for row in wave}) == 1 for wave in waves)
    rated = [row.id for row in ROWS.values() if row.kind not in ("ledger", "open server", "shard")]
    assert sorted(row.id for wave in waves for row in wave) == sorted(rated)


@pytest.mark.parametrize(("minutes", "pairs"), [(1, 1), (20, 1), (38, 2), (90, 3)])
def test_as_many_pairs_are_run_as_fit_into_the_time(minutes, pairs):
    assert siege.how_many_pairs(3, minutes, waves=4, seconds=180, hosted=True) == pairs


def test_the_verdict_forgives_only_what_is_left_to_memberships(tmp_path):
    def verdict(row, rounds, reasons=(), figures=None):
        tried = siege.Siege(tmp_path, seconds=1, seed=0, say=print)
        tried.pairs[row], tried.reasons[row], tried.figures[row] = [rounds, (9, 10), rounds], list(reasons), figures or {}
        return tried.verdict()

    assert verdict("nan", (9, 10))["holds"]
    slow = verdict("nan", (5, 10))
    assert not slow["holds"] and slow["rounds_ratio"] == {"nan": 0.5}
    ended = verdict("nan", (9, 10), ["replicas split"])
    assert not ended["holds"] and ended["ended"] == ["nan"]
    assert verdict("sign-flip", (1, 10), ["loss 3"])["holds"]
    assert verdict("wrong-means", (9, 10), ["loss 3"])["ended"] == ["wrong-means"]
    grown = verdict("junk-keys", (9, 10), figures={"grown_mib": 3000})
    assert not grown["holds"] and grown["beyond"] == {"junk-keys": 3000}


def test_a_forged_child_adds_up_like_an_honest_one():
    parent = Header("run", "schema").child("d0", [Member("a", 3, 8), Member("b", 1, 40)]).child("d1", [Member("a", 4, 8)])
    forged = states.child_of(json.loads(json.dumps(parent.to_json())), "d2", {"peer": "a", "number": 5, "samples": 2**53 - 56})
    assert read_header(forged) == parent.child("d2", [Member("a", 5, 2**53 - 56)])
    first = states.child_of(Header("run", "schema").to_json(), "d0", {"peer": "a", "number": 1, "samples": 1})
    assert read_header(first) == Header("run", "schema").child("d0", [Member("a", 1, 1)])


def test_cheap_keys_are_different_peers_whose_signatures_count():
    keys = [wire.Key() for _ in range(40)]
    assert len({key.peer_id for key in keys}) == 40
    statement = f"{time.time()}".encode()
    for key in keys[::10]:
        public, signature = key.private.get_public_key().to_bytes().decode(), key.private.sign(statement).decode()
        check_statement(key.peer_id, statement, public, signature)


STORING = [row for row in ROWS.values() if row.stores and not row.figure.startswith("knocks")]
"""Those of many records at a time; the row with a listener of its own stores one by one."""


class Small(Band):
    """Of one stranger and few keys, and nobody but a node that stores records."""

    told = (0, 0)

    async def come(self, count=1):
        return self.strangers

    async def honest(self):
        return {"QmHonest": {"digest": "d", "samples": 1}}

    def draw_keys(self, count):
        return super().draw_keys(min(count, 12))

    def say(self, **values):
        if values["event"] == "stored":
            self.told = (values["asked"], values["answered"])


def test_every_record_that_a_stranger_stores_is_answered(tmp_path):
    """A node looks at no question with more than one record, and hivemind then forgets that node."""

    async def scenario(start):
        victim = await start("victim")
        address = next(iter(await victim.maddrs()))
        async with wire.Stranger.come(address, tmp_path, random.Random(1)) as stranger:
            for row in STORING:
                band = Small(address, tmp_path, stranger.rng, contextlib.AsyncExitStack(), strangers=[stranger])
                band.run = {"run_id": "r", "run": {"model": "m", "target_batch_size": 64}}
                stranger.asked = stranger.answered = 0
                attacking = asyncio.create_task(row.find()(band))
                while band.told[0] < 24 and not attacking.done():
                    await asyncio.sleep(0.1)
                attacking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await attacking
                asked, answered = band.told
                assert answered > 0.9 * asked, (row.id, band.told)

    scenes(tmp_path, p2pds.keeper())(scenario)


def test_a_row_whose_records_no_node_looked_at_is_broken():
    def judged(*lines, row="junk-keys"):
        swarm = Swarm.__new__(Swarm)
        swarm.row, swarm.broken, swarm.rounds_within = ROWS[row], "", lambda begin, end: 1.0
        swarm.began, swarm.reasons, swarm.figures, swarm.loss = 0.0, lambda *_: [], lambda *_: swarm._stored(), lambda _: 0.0
        swarm.stranger = SimpleNamespace(text=lambda: "".join(json.dumps(line) + "\n" for line in lines))
        siege_ = siege.Siege(None, seconds=1, seed=0, say=print)
        siege_._judge(swarm, SimpleNamespace(broken="", rounds_within=lambda *_: 1.0, loss=lambda _: 0.0, grown_mib=float))
        return siege_.verdict()

    arrived, deaf, heard = {"event": "arrived"}, {"event": "stored", "asked": 200, "answered": 0}, {"event": "stored", "asked": 300, "answered": 1}
    assert judged(arrived, deaf)["broken"] == {"junk-keys": "none of its 200 questions to store a record was answered"}
    assert "none of its 0" in judged(arrived)["broken"]["junk-keys"] and not judged(arrived)["holds"]
    fine = judged(arrived, deaf, heard)
    assert fine["broken"] == {} and fine["figures"]["junk-keys"]["answered"] == 1
    assert judged({"event": "came"})["broken"] == {}, "in a run for members it heard nothing, and never began"
    assert judged(arrived, row="nan")["broken"] == {}
