"""What a commit certificate is, who is believed by it, and that a newcomer, and one who comes back, take what is certified."""

import asyncio
import json
import time
from dataclasses import replace

import msgpack
import pytest
import torch

from peer.contracts import CommittedRound, Member
from peer.sync.engine.certificate import (
    MOST_SIGNERS,
    NOTHING,
    Certificate,
    Seals,
    Shown,
    Signer,
    certified,
    is_on,
    judged,
    line_of,
    strongest,
)
from peer.sync.engine.first_state import FirstState
from peer.sync.engine.net.messages import CERTIFICATE, BadMessage, Certified, read
from peer.sync.engine.net.streams import MAX_MESSAGE_BYTES, Streams
from peer.sync.engine.round import evidence
from peer.sync.engine.round.certificates import Certificates
from peer.sync.engine.round.evidence import Evidence, ask
from peer.sync.engine.state import ANCESTORS_KEPT, ELDERS_KEPT, MOST_COUNT, MOST_MEMBERS, State, next_state
from peer.sync.engine.transfer.kind import Kind, serve_kind
from peer.sync.parameters import Parameters
from swarm.bans import Bans, sign_word
from swarm.members import LIFE_SECONDS, Members, sign_membership
from swarm.peer_key import PeerKey, has_signed
from swarm.records import FINDINGS_PER_RECORD, MAX_RECORD_BYTES, Finding, Membership, PeerRecord
from swarm.run_config import RunConfig
from swarm.signing import HostKey
from tests.clock import Clock
from tests.peer.sync.replicas import SIZE, Liar, Peer, make_run
from tests.peer.sync.swarm_tools import Holder, state_of, until
from tests.peer.sync.test_members import member
from tests.peer.sync.test_messages import travelled


class Node:
    """What seals need of a node, with a real key."""

    def __init__(self, key: PeerKey, everybody: dict[str, str]):
        self.peer_id, self._key, self._everybody = key.peer_id, key, everybody

    def sign(self, statement):
        return self._key.sign(statement)

    def key_of(self, peer):
        return self._everybody.get(peer, "")

    def has_signed(self, peer, statement, key, signature):
        return has_signed(peer, statement, key, signature)


class Swarm:
    """Five members of a run, by the order of their ids; the host's key is `key`."""

    def __init__(self, key: HostKey, keys: list[PeerKey]):
        self.key, self.run, self.now = key, make_run(members_of=key.public), 0.0
        public = {each.peer_id: each.public for each in keys}
        self.nodes = [Node(each, public) for each in sorted(keys, key=lambda each: each.peer_id)]
        self.peers = [node.peer_id for node in self.nodes]

    def members(self, number: int = 0, run: RunConfig | None = None) -> Members:
        run = run or self.run
        own = sign_membership(self.key, run, self.peers[number], lambda: self.now)
        return Members(run, Bans(run, self.key.public), own, lambda: self.now)

    def seals(self, number: int = 0, run: RunConfig | None = None) -> Seals:
        return Seals(run or self.run, self.nodes[number], self.members(number, run))

    def made(self, *samples: int, digest: str = "d", total: int = 100) -> CommittedRound:
        """Of the first peers, with so many samples each."""
        members = tuple(Member(peer, 1, count) for peer, count in zip(self.peers, samples, strict=False))
        return CommittedRound(digest * 64, "e" * 64, 3, total, members)

    def certificate(self, made: CommittedRound, *by: int, run: RunConfig | None = None) -> Certificate:
        signers = [self.seals(number, run).own(made) for number in by]
        return Certificate(made, tuple(signers))

    def record(self, number: int, state: State) -> PeerRecord:
        signer = self.seals(number).own(state.header.committed_round(state.digest))
        return PeerRecord(
            peer_id=self.peers[number], config=self.run.digest, schema="schema", round=1, samples=8, digest=state.digest,
            seal=signer.seal if signer else "", membership=self.members(number).own,
        )  # fmt: skip

    def lineage(self, rounds: int, by: int = 3) -> list[State]:
        states = [state_of(torch.zeros(4), run=self.run.digest)]
        for number in range(1, rounds + 1):
            made = [Member(peer, number, 8) for peer in self.peers[:by]]
            states.append(next_state(states[-1], [[torch.full((4,), float(number))]], made))
        return states


@pytest.fixture(scope="module")
def swarm_of_five(tmp_path_factory):
    return Swarm(HostKey(tmp_path_factory.mktemp("host") / "host.key"), [PeerKey.draw() for _ in range(5)])


@pytest.fixture
def five(swarm_of_five):
    swarm_of_five.now = time.time()
    return swarm_of_five


# ---------------------------------------------------------------- what a certificate is


def test_a_certificate_comes_over_a_stream_and_from_a_disk_as_it_was(five):
    given = five.certificate(five.made(8, 8, 8), 0, 2)
    assert read(CERTIFICATE, json.loads(json.dumps(given.to_json()))) == given
    said = Certified(certificate=given, line="ab" * 12)
    assert read(Certified, travelled(said.wire())) == said
    assert five.seals(4).checked(given) == given


def test_the_largest_certificate_fits_into_a_message_and_the_longest_record_with_a_seal_into_the_dht(five):
    made = replace(five.made(), samples=MOST_COUNT, members=tuple(Member(f"Qm{number:044}", MOST_COUNT, 8) for number in range(MOST_MEMBERS)))
    made = replace(made, members=tuple(replace(each, samples=100 if number < MOST_SIGNERS else 1) for number, each in enumerate(made.members)))
    seal, key = "A" * 342 + "==", five.nodes[0].key_of(five.peers[0])
    signers = {each.peer: Signer(each.peer, key, seal, Membership(until=MOST_COUNT, signature="f" * 320)) for each in made.members}
    largest = certified(made, signers)
    assert len(largest.signers) == MOST_SIGNERS
    said = Certified(certificate=largest, line="a" * 12 * (1 + ANCESTORS_KEPT + ELDERS_KEPT))
    assert read(Certified, travelled(said.wire())) == said
    assert len(msgpack.packb(said.wire())) < MAX_MESSAGE_BYTES
    *_, state = five.lineage(9)
    record = five.record(0, state)
    full = replace(
        record, parents=state.header.parents, maddrs=("/ip4/203.0.113.7/tcp/31337/p2p/" + "Q" * 46,) * 6, note="n" * 160, name="n" * 32,
        hardware="h" * 64, membership=Membership(until=MOST_COUNT, signature="f" * 320),
    )  # fmt: skip
    words = tuple(
        replace(sign_word(five.key, five.run, five.peers[0], banned=True, reason="r" * 120), signature="f" * 320) for _ in range(2)
    )
    assert len(replace(full, bans=words).pack()) < MAX_RECORD_BYTES
    found = (Finding(peer="Q" * 46, change=1 / 3, error=1 / 3, own=1 / 3, rounds=99, reported=True),) * FINDINGS_PER_RECORD
    assert len(replace(full, bans=words, seal="", findings=found).pack()) < MAX_RECORD_BYTES, "an auditor's, whose work is in no state"
    assert PeerRecord.unpack(record.pack(), owner=record.peer_id) == record


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda it: replace(it, signers=it.signers[:1]), "half of the round's samples or less"),
        (lambda it: replace(it, signers=()), "half of the round's samples or less"),
        (lambda it: replace(it, signers=(*it.signers, it.signers[-1])), "out of order"),
        (lambda it: replace(it, signers=it.signers[::-1]), "out of order"),
        (lambda it: replace(it, signers=(*it.signers[:2], replace(it.signers[2], peer="zz"))), "not a member of the round"),
        (lambda it: replace(it, signers=it.signers * MOST_SIGNERS), "at most 128 items"),
        (lambda it: replace(it, signers=(*it.signers[:2], replace(it.signers[2], seal="x"))), "pattern"),
        (lambda it: replace(it, signers=(*it.signers[:2], replace(it.signers[2], key="ssh-rsa " + "A" * 500))), "at most 400"),
        (lambda it: replace(it, made=replace(it.made, members=it.made.members[::-1])), "members out of order"),
    ],
)
def test_one_that_is_too_short_or_names_whom_it_may_not_is_no_message(five, change, says):
    whole = five.certificate(five.made(8, 8, 8, 8), 0, 1, 2)
    assert read(CERTIFICATE, whole.to_json()) == whole
    with pytest.raises(BadMessage, match=says):
        read(CERTIFICATE, change(whole).to_json())


def test_half_of_the_samples_are_not_enough_and_signers_count_by_their_samples(five):
    signers = {signer.peer: signer for signer in five.certificate(five.made(8, 8), 0, 1).signers}
    one = {peer: signers[peer] for peer in five.peers[:1]}
    assert certified(five.made(8, 8), one) is None and certified(five.made(9, 8), one).peers == set(one)
    assert certified(five.made(8, 8), {}) is None


def test_a_forged_or_foreign_one_is_refused(five):
    made, seals = five.made(8, 8, 8), five.seals(4)
    whole = five.certificate(made, 0, 1)
    assert seals.checked(whole) == whole
    for other in (replace(made, digest="c" * 64), replace(made, parent="c" * 64), replace(made, round=4), replace(made, samples=2**53)):
        assert seals.checked(replace(whole, made=other)) is None, "the seals are for another state"
    fewer = replace(made, members=made.members[:2])
    assert seals.checked(replace(whole, made=fewer)) is None, "the members are part of what is sealed"
    assert seals.checked(five.certificate(made, 0, 1, run=make_run(members_of=five.key.public, target_batch_size=41))) is None
    one, two = whole.signers
    assert seals.checked(replace(whole, signers=(one, replace(two, seal=one.seal, key=one.key)))) is None, "one peer's seal twice"
    assert Seals(make_run(), five.nodes[4], Members(make_run())).checked(whole) is None, "in an open run none counts"


def test_who_is_no_member_or_banned_does_not_count_and_what_is_left_must_be_enough(five):
    made = five.made(8, 8, 8)
    whole = five.certificate(made, 0, 1, 2)
    stranger = replace(whole.signers[2], membership=whole.signers[1].membership)
    assert five.seals(4).checked(replace(whole, signers=(*whole.signers[:2], stranger))).peers == set(five.peers[:2])
    banning = five.members(4)
    banning.bans.hear([sign_word(five.key, five.run, five.peers[0], banned=True)])
    assert Seals(five.run, five.nodes[4], banning).checked(whole).peers == set(five.peers[1:3])
    banning.bans.hear([sign_word(five.key, five.run, five.peers[1], banned=True)])
    assert Seals(five.run, five.nodes[4], banning).checked(whole) is None
    five.now += LIFE_SECONDS + 1
    assert five.seals(4).checked(whole) is None, "memberships have ended, as those of a removed token do"


def test_who_is_not_in_a_round_or_not_a_member_of_the_run_seals_nothing(five):
    made = five.made(8, 8)
    assert five.seals(0).own(made) is not None and five.seals(3).own(made) is None
    assert Seals(five.run, five.nodes[0], Members(five.run)).own(made) is None
    assert Seals(make_run(), five.nodes[0], Members(make_run())).own(made) is None


# ---------------------------------------------------------------- which one is gone by


def of_size(signers: int, samples: int, digest: str = "d") -> Certificate:
    names = [f"{digest}{number}" for number in range(signers)]
    made = CommittedRound(digest * 64, "e" * 64, 3, samples, tuple(Member(name, 1, 8) for name in names))
    return Certificate(made, tuple(Signer(name, "", "", Membership(until=0, signature="")) for name in names))


@pytest.mark.parametrize(
    ("given", "best"),
    [
        ([], None),
        ([(1, 8)], 0),
        ([(6, 100), (6, 200)], 1),
        ([(10, 100), (6, 200)], 1),
        ([(6, 100), (3, 2**53)], 0),
        ([(2, 100), (1, 2**53)], 0),
        ([(6, 100), (4, 2**53)], 1),
        ([(10, 100), (6, 200), (3, 2**53)], 1),
    ],
)
def test_the_most_samples_count_among_those_with_more_than_half_of_the_most_signers(given, best):
    certificates = [of_size(signers, samples, digest) for (signers, samples), digest in zip(given, "abc", strict=False)]
    for order in (certificates, certificates[::-1]):
        assert strongest(order) is (None if best is None else certificates[best])


def shown(line: str, certificate: Certificate | None = None) -> Shown:
    """line: of one letter a state."""
    return Shown(certificate, "".join(letter * 12 for letter in line))


def test_the_certified_states_signers_count_and_where_there_are_none_those_on_its_line():
    best = of_size(3, 100, "d")
    liars = {f"liar{number}": shown("xba") for number in range(5)}
    above = {"new": shown("fdba", best), "late": shown("gfdba")}
    assert judged(liars | above).peers == {"new", "late"} and judged(liars | above).best is best
    assert judged(liars | above | {"d1": shown("ba"), "d2": NOTHING}).peers == {"d1", "d2"}, "whatever they have said of their line"
    assert judged(liars).peers == liars.keys() and judged(liars).best is None
    assert judged(liars, shown("dba", best)) == (liars.keys(), None, "", False), "ours alone keeps us nowhere"
    assert judged(liars | {"late": above["late"]}, shown("dba", best)).peers == {"late"}
    assert not is_on("x" * 6 + "d" * 12 + "x" * 6, "d" * 64), "digests stand side by side"


def test_those_on_or_after_what_the_host_countersigned_come_first_and_certificates_decide_among_them():
    large, small, host = of_size(4, 2**53, "x"), of_size(2, 100, "d"), "b" * 64
    liars = {f"liar{number}": shown("xza", large) for number in range(4)}
    honest = {"d1": shown("dba", small), "late": shown("edba")}
    assert judged(liars | honest).peers == liars.keys(), "they are as many as may not lie together"
    judgement = judged(liars | honest, countersigned=host)
    assert judgement.peers == {"d1"} and judgement.states == ["d" * 64, host]
    assert judged({"late": honest["late"]} | liars, countersigned=host) == ({"late"}, None, host, False)
    assert judged({"late": honest["late"]}, shown("xza", large), host).peers == {"late"}, "ours is elsewhere"
    assert judged(liars, countersigned=host) == judged(liars), "where nobody stands there it says nothing"


# ---------------------------------------------------------------- how one is gathered and kept


def test_seals_are_gathered_after_the_commit_and_kept_for_the_next_start(five, tmp_path):
    *_, before, state = five.lineage(5)
    ours = Certificates(five.seals(0), tmp_path / "certificate.json", before)
    assert ours.seal and ours.shown == Shown(None, line_of(before))
    ours.see([five.record(1, state), five.record(2, before)])
    assert ours.shown.certificate.peers == {five.peers[0], five.peers[2]} and ours.shown.certificate.made.digest == before.digest
    ours.moved(state)
    assert ours.shown.certificate.made.digest == state.digest, "who committed before us has said so before us"
    ours.see([five.record(2, state)])
    assert ours.shown.certificate.peers == set(five.peers[:3])
    ours.saved(state)
    kept = Certificates(five.seals(3), tmp_path / "certificate.json", state)
    assert kept.shown.certificate.peers == set(five.peers[:3]) and not kept.seal


def test_after_a_power_cut_a_peer_knows_the_certificate_of_the_state_that_its_disk_has(five, tmp_path):
    """Seed 60003437: the file was of the next state already, which the disk had lost. So nothing was known, and liars led the peer at once."""
    *_, before, state = five.lineage(5)
    ours = Certificates(five.seals(0), tmp_path / "certificate.json", before)
    ours.see([five.record(2, before)])
    ours.saved(before)
    ours.moved(state)
    ours.see([five.record(1, state)])
    ours.saved(before)  # a disk that is slower than the rounds
    back = Certificates(five.seals(0), tmp_path / "certificate.json", before)
    assert back.shown.certificate.made.digest == before.digest and back.others == {five.peers[2]}
    ours.saved(state)
    assert Certificates(five.seals(0), tmp_path / "certificate.json", state).others == {five.peers[1]}
    ours.moved(elsewhere := five.lineage(2, by=2)[-1])
    ours.saved(elsewhere)
    assert Certificates(five.seals(0), tmp_path / "certificate.json", state).others, "of that branch nothing is known"


def test_who_has_lost_its_states_and_not_their_certificate_waits_for_those_who_sealed_it(five, tmp_path):
    """Seed 93003720: a bit flipped in the only state, and a liar that waited led the peer at once."""
    base, *_, state = five.lineage(5)
    ours = Certificates(five.seals(0), tmp_path / "certificate.json", state)
    ours.see([five.record(2, state)])
    ours.saved(state)
    back = Certificates(five.seals(0), tmp_path / "certificate.json", base)
    assert back.others == {five.peers[2]} and back.shown.certificate is None
    back.moved(five.lineage(2, by=2)[-1])
    assert not back.others
    assert not Certificates(five.seals(0), tmp_path / "certificate.json", base, forsaken=True).others


def test_records_without_a_seal_with_another_states_or_of_no_member_bring_nothing(five, tmp_path):
    *_, before, state = five.lineage(5)
    ours = Certificates(five.seals(0), tmp_path / "certificate.json", state)
    one, other = five.record(1, state), five.record(1, before)
    ours.see([replace(one, seal=""), replace(one, membership=None), replace(one, seal=other.seal)])
    ours.see([five.record(3, state), replace(one, peer_id=five.peers[3]), replace(one, digest="c" * 64)])
    assert ours.shown.certificate is None
    ours.see([one])
    assert ours.shown.certificate.peers == set(five.peers[:2])


def test_a_round_made_alone_ends_no_waiting_for_those_who_sealed_the_one_before(five, tmp_path):
    """Seed 8001104: a newcomer whose only friend had gone made a round alone after 20 s, and then followed liars at once instead of after 300 s."""
    state = next_state(five.lineage(2)[-1], [[torch.ones(4)]], [Member(five.peers[2], 9, 16)])
    ours = Certificates(five.seals(0), tmp_path / "certificate.json", state)
    ours.see([five.record(2, state)])
    assert ours.others == {five.peers[2]}
    ours.moved(next_state(state, [[torch.ones(4)]], [Member(five.peers[0], 9, 16)]))
    assert ours.shown.certificate.peers == {five.peers[0]} and ours.others == {five.peers[2]}
    ours.moved(five.lineage(0)[0])
    assert not ours.others


def test_what_is_of_another_line_is_shown_no_more_and_a_small_round_outdoes_no_large_one(five, tmp_path):
    *_, state = five.lineage(5)
    ours = Certificates(five.seals(0), tmp_path / "certificate.json", state)
    ours.see([five.record(1, state), five.record(2, state)])
    alone = next_state(state, [[torch.ones(4)]], [Member(five.peers[0], 9, 16)])
    ours.moved(alone)
    assert ours.seal and ours.shown.certificate.made.digest == state.digest, "one signer is no more than half of three"
    *_, elsewhere = five.lineage(2, by=2)
    ours.moved(elsewhere)
    assert ours.shown.certificate is None
    ours.moved(five.lineage(0)[0])
    assert not ours.seal


@pytest.mark.parametrize("content", ["", "{", "[]", '{"made": 1}', None])
def test_a_file_that_is_damaged_or_forged_is_passed_over(five, tmp_path, content):
    *_, state = five.lineage(5)
    path = tmp_path / "certificate.json"
    forged = five.certificate(state.header.committed_round(state.digest), 0, 1)
    forged = replace(forged, made=replace(forged.made, samples=2**53))
    path.write_text(content if content is not None else json.dumps(forged.to_json()))
    ours = Certificates(five.seals(3), path, state)
    assert ours.shown.certificate is None
    ours.see([five.record(0, state), five.record(1, state)])
    assert ours.shown.certificate is not None


def test_a_disk_that_takes_nothing_costs_no_more_than_the_file(five, tmp_path, caplog):
    *_, state = five.lineage(5)
    ours = Certificates(five.seals(0), tmp_path / "nowhere" / "certificate.json", state)
    ours.see([five.record(1, state)])
    ours.saved(state)
    assert ours.shown.certificate is not None and "cannot keep the state's certificate" in caplog.text


def test_in_an_open_run_nothing_is_sealed_or_kept(five, tmp_path):
    *_, state = five.lineage(5)
    ours = Certificates(Seals(make_run(), five.nodes[0], Members(make_run())), tmp_path / "certificate.json", state)
    ours.see([five.record(1, state)])
    ours.moved(state)
    assert ours.seal == "" and ours.shown == NOTHING and not list(tmp_path.iterdir())


# ---------------------------------------------------------------- who is asked


def test_who_shows_what_does_not_hold_is_as_one_who_shows_nothing(virtual, five):
    good = five.certificate(five.made(8, 8), 0, 1)
    answers = {
        "good": Certified(certificate=good, line="d" * 12).wire(),
        "of another line": Certified(certificate=good, line="a" * 24).wire(),
        "forged": Certified(certificate=replace(good, made=replace(good.made, samples=2**53)), line="d" * 12).wire(),
        "no message": {"certificate": 5, "line": "d" * 12},
        "none": Certified(line="a" * 12).wire(),
        "silent": None,
    }

    async def scenario(nodes):
        run = five.run

        async def streams_of(node):
            return Streams(node, members=Members(run, own=sign_membership(five.key, run, node.peer_id, nodes.wall), wall=nodes.wall))

        def answering(said):
            async def answer(channel):
                if said is None:
                    await channel.hung_up(3600)
                await channel.send(said, seconds=5)

            return answer

        peers = {}
        for name, said in answers.items():
            streams = await streams_of(node := await nodes.node())
            await streams.serve(evidence.CERTIFICATE, answering(said))
            peers[node.peer_id] = name
        asking = await nodes.node()
        members = Members(run, own=sign_membership(five.key, run, asking.peer_id, nodes.wall), wall=nodes.wall)
        seals = Seals(run, Node.__new__(Node), members)  # real signatures, which a simulated node cannot check
        found = await ask(await streams_of(asking), seals, [*peers, "Qm" + "0" * 44])
        named = {peers.get(peer, "nobody"): each for peer, each in found.items()}
        assert named.pop("good").certificate.peers == good.peers
        assert named.pop("none") == Shown(None, "a" * 12)
        assert named == dict.fromkeys(["of another line", "forged", "no message", "silent", "nobody"], NOTHING)

    virtual(scenario)


class Board:
    """What our own certificates show."""

    shown = NOTHING


def test_each_stranger_is_asked_once_a_minute_and_counts_only_then(virtual, five, monkeypatch):
    asked = []

    async def answered(streams, seals, peers):
        asked.extend(peers)
        return {peer: Shown(None, "a" * 12) for peer in peers}

    monkeypatch.setattr(evidence, "ask", answered)

    async def scenario(nodes):
        clock = Clock()
        ours = Evidence(None, five.seals(0), Board(), clock=clock)
        nodes.ends_with_the_test(asyncio.create_task(ours.ask_forever()))
        many = [f"peer{number}" for number in range(40)]
        assert not ours.judge(many).peers and ours.is_pending
        await until(lambda: not ours.is_pending)
        assert set(ours.judge(many).peers) == set(many) and sorted(asked) == sorted(many)
        assert set(ours.judge([*many[:2], "new"]).peers) == set(many[:2]) and ours.is_pending
        await until(lambda: not ours.is_pending)
        clock.now += 61
        assert set(ours.judge(many[:2]).peers) == set(many[:2]) and not ours.is_pending, "what it showed counts until it shows more"
        await until(lambda: len(asked) == 43)
        assert asked[-3:] == ["new", *many[:2]]

    virtual(scenario)


def test_a_countersigned_state_is_gone_by_for_ten_minutes(five):
    members = five.members()
    seals = Seals(five.run, five.nodes[0], members)
    assert seals.countersigned == ""
    members.bans.hear([sign_word(five.key, five.run, "b" * 64, trusted=True, clock=lambda: five.now)])
    assert seals.countersigned == "b" * 64
    five.now += 599
    assert seals.countersigned == "b" * 64
    five.now += 2
    assert seals.countersigned == "" and members.bans.countersigned == "b" * 64


def test_what_is_countersigned_counts_once_everybody_has_been_asked_since(virtual, five, monkeypatch):
    """A liar that is asked last could show a line with it, when the others were asked too early to have it on theirs."""
    lines = {"one": "a" * 12, "liar": "b" * 12 + "a" * 12}

    async def answered(streams, seals, peers):
        return {peer: Shown(None, lines[peer]) for peer in peers}

    monkeypatch.setattr(evidence, "ask", answered)

    async def scenario(nodes):
        clock, members = Clock(), five.members()
        ours = Evidence(None, Seals(five.run, five.nodes[0], members), Board(), clock=clock)
        nodes.ends_with_the_test(asyncio.create_task(ours.ask_forever()))
        ours.judge(["one"])
        await until(lambda: not ours.is_pending)
        members.bans.hear([sign_word(five.key, five.run, "b" * 64, trusted=True)])
        clock.now += 1
        ours.judge(["one", "liar"])
        await until(lambda: not ours.is_pending)
        assert set(ours.judge(["one", "liar"]).peers) == {"one", "liar"}
        lines["one"] = "b" * 12 + "a" * 12
        clock.now += 61
        ours.judge(["one", "liar"])
        await until(lambda: ours.judge(["one", "liar"]).countersigned)
        assert set(ours.judge(["one", "liar"]).peers) == {"one", "liar"} and not ours.holds_us(ours.judge(["one", "liar"]))

    virtual(scenario)


# ---------------------------------------------------------------- whom a newcomer, and one who comes back, believe


async def liars(nodes, key, run, state, count: int = 4) -> list[Liar]:
    """Members that give a state which they made up, and hide that they show nothing for it."""
    made = []
    for _ in range(count):
        node = await nodes.node()
        own = sign_membership(key, run, node.peer_id, nodes.wall)
        streams = Streams(node, members=Members(run, own=own, wall=nodes.wall))
        await Holder(nodes, node, streams, state, nodes.clock).donor.start()
        await serve_kind(streams, Kind("schema", (SIZE, 0)))
        made.append(Liar(node, run))
        claims = {
            "digest": state.digest, "samples": state.header.samples, "round": state.header.round, "parents": state.header.parents,
            "membership": own,
        }  # fmt: skip
        await made[-1].keep_saying(nodes, lambda claims=claims: claims)
    return made


def test_a_newcomer_takes_what_is_certified_though_most_who_are_live_sign_another_state(virtual, key):
    async def scenario(nodes):
        run = make_run(members_of=key.public)
        couple = [await member(nodes, key, run) for _ in range(2)]
        await until(lambda: all(peer.replica.certificates.shown.certificate for peer in couple))
        forged = next_state(couple[0].head, [[torch.full((SIZE,), 9.0)]], [Member("gone", 1, 80)])
        await liars(nodes, key, run, forged)
        await until(lambda: len(couple[0].replica.neighbours.others()) == 5)
        newcomer = await member(nodes, key, run)
        await until(lambda: newcomer.id in {each.peer for each in couple[0].head.header.members})
        assert forged.digest not in {line["digest"] for line in newcomer.rounds()}

        visitor = await nodes.node()
        members = Members(run, own=sign_membership(key, run, visitor.peer_id, nodes.wall), wall=nodes.wall)
        taken = await FirstState(run, Parameters(), visitor, members).within(60)
        assert taken.digest != forged.digest and taken.header.included.keys() >= {peer.id for peer in couple}

    virtual(scenario)


def test_who_comes_back_to_strangers_takes_what_is_certified(virtual, key):
    """It has met one peer, which is gone. Two that it never met went on; four others sign what would come after its own state."""

    async def scenario(nodes):
        run = make_run(members_of=key.public)
        first, ours = [await member(nodes, key, run) for _ in range(2)]
        await until(lambda: ours.head.header.round > 3 and set(ours.replica.met) == {first.id})
        await ours.stop()
        second = await member(nodes, key, run)
        await until(lambda: first.id in second.replica.met)
        await first.stop()
        third = await member(nodes, key, run)
        await until(lambda: third.id in second.replica.met and {m.peer for m in second.head.header.members} == {second.id, third.id})
        await until(lambda: second.replica.certificates.shown.certificate.peers == {second.id, third.id})
        forged = next_state(ours.head, [[torch.full((SIZE,), 9.0)]], [Member("gone", 1, 80)])
        await liars(nodes, key, run, forged)
        node = await nodes.node(again=ours.node)
        own = sign_membership(key, run, node.peer_id, nodes.wall)
        back = Peer(nodes, node, run, members=Members(run, Bans(run, key.public, rng=nodes.rng), own, nodes.wall), resumes=True, number=ours.number)
        assert back.head.header.round and set(back.replica.met) == {first.id}
        await back.start(nodes)
        await until(lambda: back.id in {each.peer for each in second.head.header.members})
        assert forged.digest not in {line["digest"] for line in back.rounds()}

    virtual(scenario)
