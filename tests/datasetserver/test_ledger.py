"""The ledger's durability, with real files."""

import asyncio
import contextlib
import shutil
import sqlite3
import threading
import time

import pytest

from datasetserver.book import Book
from datasetserver.ledger import Ledger, Writer, epochs_begun, look_into, stored_run
from datasetserver.owners import Sender
from datasetserver.refused import Refused
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig


def open_ledger(path, run_name="digits"):
    return Ledger(path, run=RunConfig(run_name=run_name), make_book=a_book)


def a_book(db):
    return Book(db, shards=[64] * 500, seed=1, clock=time.monotonic)


async def lease(ledger, peer="alice"):
    return await ledger.call(lambda book: book.lease(peer, 64))


async def totals(ledger):
    return await ledger.call(lambda book: book.shard_epochs.totals())


def test_a_full_disk_is_told_and_nothing_of_the_request_remains(tmp_path):
    async def scenario():
        ledger = open_ledger(tmp_path / "ledger.sqlite")
        pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
        ledger._db.execute(f"PRAGMA max_page_count = {pages + 2}")
        granted = 0
        with pytest.raises(sqlite3.OperationalError, match="full"):
            while granted < 10_000:
                await lease(ledger)
                granted += 1
        assert (await totals(ledger))["leased"] == 64 * granted
        ledger._db.execute("PRAGMA max_page_count = 1000000")
        await lease(ledger)
        assert (await totals(ledger))["leased"] == 64 * (granted + 1)
        ledger.close()
        again = open_ledger(tmp_path / "ledger.sqlite")
        assert (await totals(again))["leased"] == 64 * (granted + 1)
        again.close()

    asyncio.run(scenario())


def test_a_full_disk_is_one_line_a_minute_until_it_takes_something_and_a_fault_of_ours_is_told_each_time(tmp_path, caplog):
    def leases(book):
        for number in range(2000):
            book.lease(f"peer {number}", 8)

    def commit(operation=leases, pages=0):
        db.execute(f"PRAGMA max_page_count = {pages or 1_000_000}")
        caplog.clear()
        writer.commit([operation])
        return [(record.message, bool(record.exc_info)) for record in caplog.records]

    db, now = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None), [100.0]
    writer = Writer(db, where="here", run=RunConfig(), make_book=a_book, clock=lambda: now[0])
    full = [("cannot write the ledger: none of 1 requests was done (database or disk is full)", False)]
    assert commit(pages=1) == full and commit(pages=1) == []
    now[0] += 60
    assert commit(pages=1) == full
    assert commit(lambda book: None) == [] and commit(pages=1) == full
    assert [commit(lambda book: 1 / 0) for _ in range(2)] == 2 * [[("cannot write the ledger: none of 1 requests was done (division by zero)", True)]]
    db.close()


def test_a_refusal_does_not_touch_those_it_was_asked_with(tmp_path):
    async def scenario():
        ledger = open_ledger(tmp_path / "ledger.sqlite")
        answers = await asyncio.gather(
            lease(ledger), ledger.call(lambda book: book.renew("0" * 32, "bob")), lease(ledger, "carol"), return_exceptions=True
        )
        assert isinstance(answers[1], Refused) and answers[0].lease_id != answers[2].lease_id
        assert (await totals(ledger))["leased"] == 128
        ledger.close()

    asyncio.run(scenario())


def test_a_renewal_that_came_in_time_keeps_its_lease_also_when_the_disk_hung_for_longer_than_a_lease_lasts(tmp_path):
    async def scenario():
        now, hangs = [0.0], threading.Event()

        def at(seconds, operation):
            now[0] = seconds
            return asyncio.ensure_future(ledger.call(operation))

        ledger = Ledger(
            tmp_path / "ledger.sqlite", run=RunConfig(), clock=lambda: now[0],
            make_book=lambda db: Book(db, shards=[64] * 500, seed=1, lease_seconds=60, clock=lambda: now[0]),
        )  # fmt: skip
        grants = [await lease(ledger, peer) for peer in ("alice", "bob")]
        asked = []
        for seconds, operation in [
            (10, lambda book: hangs.wait(20)),
            (20, lambda book: book.lease("carol", 64)),
            (50, lambda book: book.renew(grants[0].lease_id, "alice")),
            (100, lambda book: book.lease("dave", 64)),
        ]:
            asked.append(at(seconds, operation))
            await asyncio.sleep(0)
        hangs.set()
        _, carols, _, daves = await asyncio.gather(*asked)
        assert daves.shard_epochs == grants[1].shard_epochs, "bob did not renew"
        now[0] = 159.0
        for grant, peer in ((grants[0], "alice"), (carols, "carol")):
            await ledger.call(lambda book, grant=grant, peer=peer: book.renew(grant.lease_id, peer))
        ledger.close()

    asyncio.run(scenario())


def test_a_fault_of_ours_in_one_request_leaves_the_ledger_whole(tmp_path):
    def faulty(book):
        book.lease("mallory", 64)
        raise ZeroDivisionError

    async def scenario():
        ledger = open_ledger(tmp_path / "ledger.sqlite")
        await lease(ledger)
        with pytest.raises(ZeroDivisionError):
            await ledger.call(faulty)
        assert (await totals(ledger))["leased"] == 64
        ledger.close()

    asyncio.run(scenario())


def test_a_disk_that_goes_away_and_comes_back_is_told_and_then_the_ledger_answers_again(tmp_path):
    def faulty(book):
        raise sqlite3.OperationalError("disk I/O error")

    async def scenario():
        ledger = open_ledger(tmp_path / "ledger.sqlite")
        await lease(ledger)
        make_book = ledger._writer._make_book
        ledger._writer._make_book = faulty
        for _ in range(3):
            with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
                await asyncio.wait_for(ledger.call(faulty), 30)
        ledger._writer._make_book = make_book
        assert (await asyncio.wait_for(totals(ledger), 30))["leased"] == 64
        ledger.close()

    asyncio.run(scenario())


def test_a_damaged_or_foreign_ledger_is_a_users_error(tmp_path):
    open_ledger(tmp_path / "ledger.sqlite", run_name="a").close()
    with pytest.raises(
        UserError, match=rf"'a' \({RunConfig(run_name='a').run_id}\) has begun here with other options: run_name was a, now b\."
    ):
        open_ledger(tmp_path / "ledger.sqlite", run_name="b")
    with pytest.raises(UserError, match="the model's weights had the digest aaaaaaaa, now bbbbbbbb"):
        RunConfig(model_digest="a" * 64).refuse_another({"model_digest": "b" * 64})
    (tmp_path / "damaged.sqlite").write_bytes(b"this is no database" * 1000)
    with pytest.raises(UserError, match="cannot be opened") as raised:
        open_ledger(tmp_path / "damaged.sqlite")
    assert raised.value.code == ExitCode.DISK
    with pytest.raises(UserError, match="cannot be opened"):
        stored_run(tmp_path / "damaged.sqlite")


def test_a_ledger_knows_its_run(tmp_path):
    assert stored_run(tmp_path / "ledger.sqlite") is None
    open_ledger(tmp_path / "ledger.sqlite", "digits").close()
    assert stored_run(tmp_path / "ledger.sqlite") == RunConfig(run_name="digits")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_look_into_a_ledger_changes_nothing_of_it_and_a_table_of_a_later_version_is_empty(tmp_path):
    path = tmp_path / "ledger.sqlite"
    open_ledger(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript("DROP TABLE wrong_state; DROP TABLE charged; INSERT INTO peer_token VALUES ('alice', 'hers');")
    before = contents(tmp_path)
    assert stored_run(path) == RunConfig(run_name="digits") and epochs_begun(path) == 0
    with look_into(tmp_path) as (run, store):
        assert run == RunConfig(run_name="digits") and dict(store.tokens_of_peers()) == {"alice": "hers"}
        assert list(store.wrong_states()) == list(store.contributions()) == []
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            store.set_token_of_peer("bob", "his")
            store.flush()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("gone", ["", "-shm"])
def test_a_look_sees_what_a_server_that_runs_or_was_killed_has_written_last(tmp_path, gone):
    """It is in the write-ahead log only."""
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "ledger.sqlite"
    ledger = open_ledger(path)
    asyncio.run(ledger.call(lambda book: book.admit("alice", Sender("hers", ("hers",)))))
    killed = shutil.copytree(tmp_path / "run", tmp_path / "killed")
    if gone:
        (killed / f"ledger.sqlite{gone}").unlink()
    for folder in (tmp_path / "run", killed):
        main = (folder / "ledger.sqlite").read_bytes()
        with look_into(folder) as (_, store):
            assert dict(store.tokens_of_peers()) == {"alice": "hers"}
        assert (folder / "ledger.sqlite").read_bytes() == main
    ledger.close()


def test_a_ledger_that_was_made_and_never_written_has_no_run_yet(tmp_path):
    (tmp_path / "ledger.sqlite").touch()
    assert stored_run(tmp_path / "ledger.sqlite") is None
    with pytest.raises(UserError, match="No run has begun"), look_into(tmp_path):
        pass
