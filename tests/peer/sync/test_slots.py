"""Who may download from us when more ask than there is room for."""

import contextlib
import random
from dataclasses import dataclass

import pytest

from peer.sync.engine.net.streams import PeerLost
from peer.sync.engine.transfer.slots import DAWDLING_BYTES_PER_SECOND, MAX_DOWNLOADS, Slots
from tests.clock import Clock


@dataclass
class Taker:
    peer: str
    place: str
    closed: bool = False

    def close(self) -> None:
        self.closed = True


class House:
    """Slots, and who has one."""

    def __init__(self, *met: str):
        self.clock, self.taken = Clock(), {}
        self.slots = Slots(set(met), self.clock)

    def comes(self, peer: str, place: str = "home") -> None:
        self.taken[peer] = self.slots.take(Taker(peer, place))

    def takes(self, *peers: str, seconds: int, bytes_per_second: float = 10 * DAWDLING_BYTES_PER_SECOND) -> None:
        """These take at that rate for so long, the others nothing."""
        for slot in self.taken.values():
            slot.credit.wait()
        for _ in range(seconds):
            self.clock.now += 1
            for peer in peers:
                self.taken[peer].credit.moved(int(bytes_per_second))
        for slot in self.taken.values():
            slot.credit.rest()

    @property
    def lost(self) -> set[str]:
        return {peer for peer, slot in self.taken.items() if slot.lost}


def full(place=lambda number: "home", met=()) -> House:
    house = House(*met)
    for number in range(MAX_DOWNLOADS):
        house.comes(f"taker{number}", place(number))
    return house


def test_nobody_gives_way_to_one_with_no_better_claim():
    house = full()
    with pytest.raises(PeerLost, match="too many downloads"):
        house.comes("another")
    assert not house.lost and len(house.slots) == MAX_DOWNLOADS


def test_of_an_address_that_has_all_slots_the_slowest_gives_way_to_another_address_until_both_have_as_many():
    house = full()
    house.takes("taker0", "taker2", "taker3", seconds=5)
    house.comes("elsewhere", "203.0.113.7")
    assert house.lost == {"taker1"}
    house.comes("elsewhere too", "203.0.113.7")
    with pytest.raises(PeerLost):
        house.comes("and a third", "203.0.113.7")
    assert len(house.lost) == 2 and len(house.slots) == MAX_DOWNLOADS


def test_a_stranger_gives_way_to_a_peer_that_we_have_met_and_not_the_other_way_round():
    house = full(met=["friend", "taker0", "taker1", "taker2"])
    house.comes("friend")
    assert house.lost == {"taker3"}
    with pytest.raises(PeerLost):
        house.comes("stranger", "203.0.113.7")


@pytest.mark.parametrize("seconds_a_chunk", [59, 45, 200])
def test_one_that_asks_for_a_chunk_now_and_then_gives_way_to_anybody(seconds_a_chunk):
    house = full(met=[f"taker{number}" for number in range(MAX_DOWNLOADS)])
    others = [f"taker{number}" for number in range(1, MAX_DOWNLOADS)]
    for _ in range(12):
        house.taken["taker0"].credit.moved(4 << 20)
        house.takes(*others, seconds=seconds_a_chunk)
    house.comes("stranger")
    assert house.lost == {"taker0"}


def test_one_whose_line_takes_its_time_behind_full_buffers_keeps_its_slot():
    house = full()
    for _ in range(10):  # 8 MiB at once into the buffers, then nothing for as long as they take at 1.2 Mbit/s
        for slot in house.taken.values():
            slot.credit.moved(8 << 20)
        house.takes(seconds=55)
    with pytest.raises(PeerLost):
        house.comes("stranger")


def test_a_new_stream_is_no_new_beginning():
    house = full()
    for _ in range(5):
        house.takes(*(f"taker{number}" for number in range(1, MAX_DOWNLOADS)), seconds=9)
        earlier = house.taken["taker0"]
        house.comes("taker0")
        assert earlier.channel.closed
    house.comes("stranger")
    assert house.lost == {"taker0"}


def test_hogs_of_many_identities_leave_everybody_else_a_slot_sooner_or_later(seed):
    rng, house = random.Random(seed), House()
    served = 0
    for number in range(300):
        with contextlib.suppress(PeerLost):
            house.comes(f"hog{rng.randrange(40)}", rng.choice(["198.51.100.1", "198.51.100.2"]))
        house.takes(seconds=rng.randrange(1, 30), bytes_per_second=0)
        if number % 10 == 9:
            try:
                house.comes(f"honest{number}", "203.0.113.7")
                served += 1
                house.slots.leave(house.taken[f"honest{number}"])
            except PeerLost:
                pass
    assert served >= 25


def test_what_is_remembered_of_takers_is_bounded():
    house = House()
    for number in range(1000):
        house.comes(f"taker{number}")
        house.slots.leave(house.taken.pop(f"taker{number}"))
    assert len(house.slots._credits) <= 256 and len(house.slots) == 0
