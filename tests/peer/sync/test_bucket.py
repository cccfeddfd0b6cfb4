"""`--max_upload_mbit`, by bytes against a clock that is told."""

import asyncio
import contextlib

import pytest

from peer.config import PeerConfig
from peer.sync.engine.net.bucket import Bucket
from peer.sync.engine.net.streams import Channel, PeerLost
from swarm.errors import UserError
from swarm.pipe import Pipe
from tests.clock import Clock


class SleptClock(Clock):
    """Whoever sleeps moves it on."""

    async def sleep(self, seconds):
        self.now += seconds


def test_no_more_goes_through_than_the_limit_however_the_messages_are_cut():
    async def scenario():
        clock = SleptClock()
        bucket, sent = Bucket(8.0, clock, clock.sleep), 0
        for size in [100, 300_000, 1, 256 << 10, 50_000] * 20:
            await bucket.take(size)
            sent += size
            # One megabyte a second, a tenth of one at once, the large message that is on its way, and short ones after it.
            assert sent <= 1e6 * clock.now + 1e5 + 300_000 + 200
        await bucket.take(50_000)  # waits until those before are paid for
        assert sent == pytest.approx(1e6 * clock.now + 1e5)

    asyncio.run(scenario())


def test_a_short_word_does_not_wait_behind_pieces_of_downloads_but_is_paid_for():
    async def scenario():
        clock = SleptClock()
        bucket = Bucket(1.0, clock, clock.sleep)
        for _ in range(2):
            await bucket.take(256 << 10)
        began = clock.now
        await bucket.take(4096)
        assert clock.now == began
        await bucket.take(256 << 10)
        assert clock.now == pytest.approx((2 * (256 << 10) + 4096) / 125_000 - 0.1)

    asyncio.run(scenario())


def test_a_part_of_a_round_waits_for_no_download_and_is_paid_for_by_the_next_ones():
    async def scenario():
        clock = SleptClock()
        bucket = Bucket(1.0, clock, clock.sleep)
        for _ in range(8):
            await bucket.take(256 << 10)
        began = clock.now
        for _ in range(2):  # the second waits for the first
            await bucket.take(500_000, of_round=True)
        assert clock.now - began == pytest.approx(4.0 - 0.1)
        await bucket.take(256 << 10)
        assert clock.now == pytest.approx((8 * (256 << 10) + 1_000_000) / 125_000 - 0.1)

    asyncio.run(scenario())


def test_what_could_not_go_in_its_time_is_refused_at_once_and_takes_nobodys_place():
    async def scenario():
        clock = SleptClock()
        bucket = Bucket(1.0, clock, clock.sleep)
        await bucket.take(5_000_000)
        with pytest.raises(TimeoutError, match="spoken for, for 40 s"):
            await bucket.take(256 << 10, seconds=30.0)
        assert not clock.now
        with pytest.raises(PeerLost, match="spoken for"):
            await Channel("QmPeer", None, bucket).send({}, bytes(100_000), seconds=30.0)
        await bucket.take(256 << 10, seconds=41.0)
        assert clock.now == pytest.approx(40.0 - 0.1, abs=0.2)

    asyncio.run(scenario())


def test_what_was_not_used_is_not_saved_up():
    async def scenario():
        clock = SleptClock()
        bucket = Bucket(8.0, clock, clock.sleep)
        clock.now = 3600.0
        for _ in range(10):
            await bucket.take(100_000)
        assert clock.now == pytest.approx(3600.8)

    asyncio.run(scenario())


def test_all_streams_of_a_peer_share_one_limit(tmp_path):
    async def scenario():
        clock = SleptClock()
        bucket = Bucket(8.0, clock, clock.sleep)
        arrived, ended = bytearray(), asyncio.Semaphore(0)

        async def read(reader, writer):
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    arrived.extend(data)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            ended.release()

        path = str(tmp_path / "socket")
        async with await asyncio.start_unix_server(read, path):
            channels = [Channel("QmPeer", Pipe(*await asyncio.open_unix_connection(path)), bucket) for _ in range(3)]
            for _ in range(4):
                for channel in channels:
                    await channel.send({}, bytes(100_000), seconds=10)
            sent = sum(channel.sent for channel in channels)
            while len(arrived) < sent:
                await asyncio.sleep(0.01)
            for channel in channels:
                channel.close()
            for _ in channels:
                await ended.acquire()
        await bucket.take(50_000)
        assert sent > 1_200_000 and sent == pytest.approx(1e6 * clock.now + 1e5)

    asyncio.run(scenario())


def test_a_limit_so_low_that_others_would_wait_in_vain_is_refused():
    with pytest.raises(UserError, match=r"max_upload_mbit is 0\.5"):
        PeerConfig(max_upload_mbit=0.5)
