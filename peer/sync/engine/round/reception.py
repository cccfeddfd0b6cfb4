"""What those who call us are told, and what we learn from them."""

from peer.sync.engine.cell import Bell, Cell, Phase
from peer.sync.engine.net.neighbours import Neighbours
from peer.sync.engine.round import span
from peer.sync.engine.round.catch_up import CatchUp
from peer.sync.engine.round.groups import Group, Standing
from peer.sync.engine.round.heads import Heads
from peer.sync.engine.round.next_round import NextRound
from peer.sync.engine.round.patience import patience_seconds
from peer.sync.engine.state import Head, State, highest_number
from peer.sync.engine.trainer.trainer import Trainer
from swarm.end import End


class Reception:
    """Only a peer whose signed record we know may make us average, or tell us anything."""

    def __init__(
        self,
        peer_id: str,
        state: Cell[State],
        phase: Cell[Phase],
        trainer: Trainer,
        neighbours: Neighbours,
        heads: Heads,
        catch_up: CatchUp,
        next_round: NextRound,
        end: End,
        bell: Bell,
        *,
        assists: bool = False,
    ):
        self._peer_id, self._state, self._phase, self._trainer, self._neighbours = peer_id, state, phase, trainer, neighbours
        self._heads, self._catch_up, self._next_round, self._end, self._bell = heads, catch_up, next_round, end, bell
        self._assists = assists

    def standing(self, caller: str) -> Standing:
        """What to tell `caller`."""
        state, members = self._state.value, self._neighbours.members
        has_samples, ready_seconds = self._brings(caller)
        return Standing(
            Head.of(state), has_samples, ready_seconds, state.header.included,
            busy=self._phase.value is Phase.AVERAGE, trusted=members.bans.trusted, has_roles=members.needed,
            highest_number=highest_number(state.header.round + 1),
        )  # fmt: skip

    def _brings(self, caller: str) -> tuple[bool, float]:
        """Whether we have samples to average with `caller`, or will after the step that we are in; seconds until then."""
        trainer = self._trainer
        silent, has_it = trainer.silent_seconds, self._assists or trainer.contribution is not None
        away = self._phase.value in (Phase.JOIN, Phase.FETCH, Phase.LEFT) or span.is_over(self._end, self._state.value.header)
        has_samples = self._knows(caller) and not away and (has_it or trainer.progress.brings_samples(silent))
        return has_samples, 0.0 if has_it else max(trainer.progress.step_seconds - silent, 0.0)

    def heard(self, peer: str, head: Head, ready: bool) -> bool:
        """`peer` stands at `head`, and is ready to average onto it or not. Returns whether we should rather fetch that."""
        if not self._knows(peer):
            return False
        if ready:
            self._next_round.call(peer, head.digest)
            self._let_go(peer, head.digest)
        self._heads.heard(peer, head)
        self._catch_up.look()
        if ready or head.digest != self._state.value.digest:  # who answers that it stands where we stand is no news
            self._bell.ring()
        return self._catch_up.held_back

    def failed(self, group: Group) -> None:
        """Its round failed here. Who alone brought samples may have made it all the same: of a state with one maker nobody else can sign first."""
        brought = [member.peer for member in group.members if member.samples]
        if len(brought) == 1 and brought != [self._peer_id]:
            self._heads.let_go(brought[0], group.parent)

    def _knows(self, peer: str) -> bool:
        return peer == self._peer_id or self._neighbours.knows(peer)

    def _let_go(self, peer: str, digest: str) -> None:
        """`peer` averages onto the state `digest`: without us, if we are not there, have nothing, or need longer than it has patience for."""
        has_samples, ready_seconds = self._brings(peer)
        if self._state.value.digest != digest or not has_samples or ready_seconds > patience_seconds(self._state.age_seconds):
            self._heads.let_go(peer, digest)
