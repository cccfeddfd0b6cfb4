"""What the page is served from, without a browser: one snapshot for all, a bounded history, who is gone, and headers."""

import asyncio
import contextlib
import json
import re
import sqlite3

import aiohttp
import pytest

from swarm.page import assets
from swarm.page.history import History
from swarm.page.roster import GONE_SECONDS, MOST_GONE, Roster
from swarm.page.watch import Watch
from tests.page.scenes import Scene, a_peer, a_run, served


def look(scenario, scene, **kwargs):
    async def run():
        async with served(scene, **kwargs) as (url, watch), aiohttp.ClientSession() as session:
            return await scenario(url, watch, session)

    return asyncio.run(run())


async def news(response) -> dict:
    """The next event that says something."""
    while True:
        line = await asyncio.wait_for(response.content.readline(), 60)
        assert line, "the stream ended"
        if line.startswith(b"data: "):
            return json.loads(line[6:])


def test_all_who_watch_get_the_same_and_only_what_is_new():
    scene = Scene(a_run([a_peer(1, maddrs=["/ip4/203.0.113.7/tcp/1"])]))

    async def scenario(url, watch, session):
        async with session.get(f"{url}/v1/events") as one, session.get(f"{url}/v1/events") as two:
            first, same = await news(one), await news(two)
            assert first["progress"]["peers"] == same["progress"]["peers"] and first["figures"]["trainers"] == 1
            assert first["progress"]["peers"][0]["maddrs"] == []  # who only watches dials nobody
            event = watch._event
            await watch.look()
            assert watch._event is event  # only the time has changed: nothing is sent
            scene.now = a_run([a_peer(1, round=8)], round=8)
            assert (await news(one))["progress"]["round"] == (await news(two))["progress"]["round"] == 8
            assert one.headers["Content-Type"] == "text/event-stream" and one.headers["Cache-Control"] == "no-store"

    look(scenario, scene)


def test_a_run_that_cannot_be_seen_leaves_the_last_view_with_the_reason():
    scene = Scene(a_run([a_peer(1)]))

    async def scenario(url, watch, session):
        async with session.get(f"{url}/v1/events") as stream:
            assert (await news(stream))["trouble"] == ""
            scene.now = OSError("the disk\nis full")
            told = await news(stream)
            assert told["trouble"] == "the disk is full" and told["progress"]["round"] == 7
            scene.now = a_run([a_peer(1)])
            assert (await news(stream))["trouble"] == ""

    look(scenario, scene)


def test_closing_ends_every_stream():
    async def scenario(url, watch, session):
        async with session.get(f"{url}/v1/events") as stream:
            await news(stream)
            watch.close()
            await asyncio.wait_for(stream.content.read(), 60)

    look(scenario, Scene(a_run([])))


def test_more_than_the_most_who_may_watch_are_told_so(monkeypatch):
    monkeypatch.setattr("swarm.page.watch.MOST_WATCHERS", 1)

    async def scenario(url, watch, session):
        async with session.get(f"{url}/v1/events") as stream:
            await news(stream)
            async with session.get(f"{url}/v1/events") as refused:
                assert refused.status == 503 and "watch already" in await refused.text()

    look(scenario, Scene(None))


def test_who_holds_most_places_makes_room_for_others_and_for_nobody_who_has_as_many(monkeypatch):
    monkeypatch.setattr("swarm.page.watch.MOST_WATCHERS", 3)
    monkeypatch.setattr("swarm.page.watch.ALIVE_SECONDS", 0.05)
    watch = Watch(lambda: None, None)
    for stream, who in enumerate(["greedy", "greedy", "greedy"]):
        assert watch.has_room(who)
        watch._watching[stream] = who
    assert not watch.has_room("greedy") and watch.has_room("ann")
    watch._watching[3] = "ann"
    assert watch._watching == {1: "greedy", 2: "greedy", 3: "ann"} and not watch.has_room("ann") and watch.has_room("bob")
    watch._watching[4] = "bob"
    assert watch._watching == {2: "greedy", 3: "ann", 4: "bob"} and not watch.has_room("cy")

    async def scenario(url, watch, session):
        async with contextlib.AsyncExitStack() as all_streams:
            streams = [await all_streams.enter_async_context(session.get(f"{url}/v1/events")) for _ in range(3)]
            await news(streams[0])
            assert watch.has_room("elsewhere")
            await asyncio.wait_for(streams[0].content.read(), 60)
            assert len(watch._watching) == 2

    look(scenario, Scene(None))


def test_a_silent_run_is_still_told_to_be_there(monkeypatch):
    monkeypatch.setattr("swarm.page.watch.ALIVE_SECONDS", 0.05)

    async def scenario(url, watch, session):
        async with session.get(f"{url}/v1/events") as stream:
            await news(stream)
            while await asyncio.wait_for(stream.content.readline(), 60) != b":\n":
                pass

    look(scenario, Scene(None))


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in assets.NAMES)])
def test_the_pages_files_come_whole_compressed_and_never_as_what_they_are_not(path):
    async def scenario(url, watch, session):
        async with session.get(url + path) as response:
            body = await response.read()
            headers = response.headers
            assert response.status == 200 and headers["Content-Encoding"] == "gzip"
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and headers["X-Content-Type-Options"] == "nosniff"
        async with session.get(url + path, headers={"Accept-Encoding": "identity"}) as response:
            assert await response.read() == body and "Content-Encoding" not in response.headers
        async with session.get(url + path, headers={"If-None-Match": headers["ETag"]}) as response:
            assert response.status == 304 and await response.read() == b""

    look(scenario, Scene(None))


def test_the_page_asks_nobody_else_for_anything_and_has_no_code_in_its_text():
    for name in ("index.html", "page.css", "page.js"):
        text = assets.asset(name).body.decode()
        assert "http://" not in text and "https://" not in text and "innerHTML" not in text and "@import" not in text
    index = assets.asset("index.html").body.decode()
    assert not re.search(r"\s(style|on\w+)=|<style|<script>", index)


# ---------------------------------------------------------------- history


def point(number: int, loss: float | None = 0.5):
    return (1000.0 + 10 * number, number, 64 * number, loss, 7.0, 2, 0.9)


def test_a_history_survives_a_restart_and_another_run_begins_its_own(tmp_path):
    path = tmp_path / "history.sqlite"
    history = History(path)
    assert [history.note("run", point(number)) for number in range(5)] == [True] * 5
    history.close()
    again = History(path)
    assert again.note("run", point(5)) and again.columns()["round"] == [0, 1, 2, 3, 4, 5]
    again.close()
    other = History(path)
    assert other.note("other", point(6)) and other.columns()["round"] == [6]
    other.close()


def test_a_history_that_another_program_has_stays_where_it_is(tmp_path, caplog):
    path = tmp_path / "history.sqlite"
    history = History(path)
    assert history.note("run", point(1))
    history.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        there = History(path)
        assert there.note("run", point(2)) and "in memory only" in caplog.text
        there.close()
    again = History(path)
    again.note("run", point(3))
    assert again.columns()["round"] == [1, 3] and not path.with_suffix(".broken").exists()
    again.close()


def test_a_history_merges_what_comes_fast_and_what_has_become_too_much(tmp_path):
    history = History(tmp_path / "history.sqlite", most=8)
    assert history.note("run", point(0)) and not history.note("run", (1004.0, 0, 0, 0.1, 1.0, 2, None))
    assert history.note("run", (1010.0, 1, 64, 0.3, 3.0, 4, 0.5))
    assert history.columns()["loss"][1] == pytest.approx(0.2) and history.columns()["peers"][1] == 3
    for number in range(2, 200):
        history.note("run", point(number))
        assert len(history.columns()["time"]) <= 8
    rounds = history.columns()["round"]
    assert rounds == sorted(rounds) and rounds[0] < 100 and rounds[-1] > 160  # all of the run, evenly
    history.close()
    again = History(tmp_path / "history.sqlite", most=8)
    again.note("run", point(200))
    assert again.columns()["round"][: len(rounds)] == rounds
    assert not again.note("run", point(201))  # as seldom as before the restart
    again.close()


def test_a_clock_that_is_set_back_stops_no_chart(tmp_path):
    """It was a day ahead: for a day no point was added, and what was looked at meanwhile was kept in memory."""
    history = History(tmp_path / "history.sqlite")
    for number in (0, 1, 8640, 8641, 2, 3):
        history.note("run", point(number))
    assert history.columns()["round"] == [0, 1, 2, 3]
    history.close()
    again = History(tmp_path / "history.sqlite")
    assert again.note("run", point(4)) and again.columns()["round"] == [0, 1, 2, 3, 4]
    again.close()


def test_points_without_a_loss_are_points(tmp_path):
    history = History(None)
    history.note("run", point(0, loss=None))
    assert history.columns()["loss"] == [None]


@pytest.mark.parametrize("content", [b"no database at all, but some bytes" * 40, b""])
def test_a_file_that_is_no_history_is_put_aside(tmp_path, content):
    path = tmp_path / "history.sqlite"
    path.write_bytes(content)
    history = History(path)
    assert history.note("run", point(0)) and history.columns()["round"] == [0]
    history.close()
    assert path.with_suffix(".broken").exists() == bool(content)


def test_a_history_of_another_form_is_put_aside(tmp_path):
    path = tmp_path / "history.sqlite"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE point (something TEXT)")
    db.commit()
    db.close()
    history = History(path)
    assert history.note("run", point(0))
    history.close()
    assert path.with_suffix(".broken").exists()


def test_a_history_that_cannot_be_written_goes_on_in_memory(tmp_path, caplog):
    history = History(tmp_path / "history.sqlite")
    history.note("run", point(0))
    history._db.execute("DROP TABLE point")
    assert history.note("run", point(1)) and history.columns()["round"] == [0, 1] and "in memory only" in caplog.text
    assert history.note("run", point(2))
    nowhere = History(tmp_path / "missing" / "history.sqlite")
    assert nowhere.note("run", point(0))


# ---------------------------------------------------------------- who is gone


def test_who_is_gone_is_remembered_for_a_while_with_the_last_that_it_said():
    roster = Roster()
    one, two = a_peer(1).model_dump(), a_peer(2, note="CUDA is out of memory", phase="leaving").model_dump()
    roster.look([one, two], 100.0)
    roster.look([one], 110.0)
    assert roster.seen() == {"QmPeer1": 100} and [peer["note"] for peer in roster.gone()] == ["CUDA is out of memory"]
    roster.look([{**one, "time": 2.0}], 120.0)
    assert roster.seen() == {"QmPeer1": 120} and roster.gone()[0]["seen"] == 100
    roster.look([one, two], 130.0)
    assert roster.gone() == []
    roster.look([], 130.0 + GONE_SECONDS)
    assert roster.gone() == []


def test_a_thousand_that_came_and_went_are_not_all_remembered():
    roster = Roster()
    for number in range(1000):
        roster.look([a_peer(number).model_dump()], float(number))
    assert len(roster.gone()) == MOST_GONE and roster.gone()[0]["peer_id"] == "QmPeer998" and len(roster._heard) == MOST_GONE + 1
