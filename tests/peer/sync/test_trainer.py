"""The training process as the replica knows it: what it says is news once."""

from types import SimpleNamespace

from peer.sync.engine.trainer.messages import Progress
from peer.sync.engine.trainer.trainer import Trainer


class Bell:
    rings = 0

    def ring(self) -> None:
        self.rings += 1


def test_a_trainer_that_says_the_same_again_is_alive_and_wakes_nobody():
    bell, now = Bell(), [0.0]
    state = SimpleNamespace(value=SimpleNamespace(digest="ours"))
    trainer = Trainer(SimpleNamespace(), state, SimpleNamespace(), "us", bell, lambda: now[0])
    said = Progress(waiting=4, samples_per_second=2.0, stands_on="ours")
    trainer.hear(said)
    now[0] = 1.5
    assert (trainer.progress, trainer.silent_seconds, bell.rings) == (said, 1.5, 1)
    trainer.hear(Progress(waiting=4, samples_per_second=2.0, stands_on="ours"))
    assert (trainer.silent_seconds, bell.rings) == (0.0, 1)
    trainer.hear(Progress(waiting=5, samples_per_second=2.0, stands_on="ours"))
    assert trainer.progress.waiting == 5 and bell.rings == 2
    trainer.hear(Progress(waiting=9, samples_per_second=2.0, stands_on="the state before"))
    assert trainer.progress.waiting == 5 and bell.rings == 3  # what it counts may be in ours already
