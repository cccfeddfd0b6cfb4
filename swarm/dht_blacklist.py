"""Which peers the DHT does not ask for a while, since they did not answer."""

from hivemind.dht.node import Blacklist
from hivemind.p2p import PeerID

_SECONDS, _MOST_DOUBLINGS, _MOST_REMEMBERED = 5.0, 4, 4096


class Forgiving(Blacklist):
    """For 5 s, then 10 s, up to 80 s, of at most 4,096 peers. hivemind's doubles without end: a server that was away for 8 h was not asked for 3.4 h
    more. And hivemind remembers every peer that never answered; a stranger can name 20 such peers in each answer."""

    def __init__(self) -> None:
        super().__init__(base_time=_SECONDS, backoff_rate=2.0)

    def register_failure(self, peer: PeerID) -> None:
        super().register_failure(peer)
        self.ban_counter[peer] = min(self.ban_counter[peer], _MOST_DOUBLINGS)
        while len(self.ban_counter) > _MOST_REMEMBERED:
            del self.ban_counter[next(iter(self.ban_counter))]
