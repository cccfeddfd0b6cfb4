"""Every row of attacks by its short id, which later work and tests use, and what its stranger does."""

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

MOST_PROGRESS_LOST = 0.1
"""Of four honest members, to the fifth that lies (`progress.py`)."""


@dataclass(frozen=True)
class Row:
    """module: where its attack is, a function of the row's name, or of the name `attack`. kind: what it is tried on: a swarm's rounds, a newcomer
    to a swarm, a server, or one program. members: whether only memberships, or a centered average, will end it. let_in: whether its
    stranger is a member, of a run for members, in which four others are honest. trains: it is a real trainer with this option of
    `toy.py`, and has no module. audited: an assisting peer audits. heavy: it costs the machine so much that what runs beside it is slowed
    too. stores: its attack is in the records that it stores. strategy: of the swarm. bound: the most that the row's own figure may be, where it has one. grown_mib: of all peers of the swarm, beyond
    what the undisturbed one's grew. banned_after_rounds: from its first lie, until the last honest peer has a proof. reported_after_rounds: from
    its arrival, until the auditor reports it."""

    id: str
    module: str
    does: str
    kind: str = "swarm"
    attack: str = ""
    members: bool = False
    let_in: bool = False
    trains: str = ""
    audited: bool = False
    heavy: bool = False
    stores: bool = False
    strategy: str = "parameters"
    figure: str = ""
    bound: float = 0.0

    def find(self) -> Callable[[Any], Awaitable[None]]:
        """Its attack, of a `Band`. Not of a row that `trains`."""
        return getattr(importlib.import_module(f"scripts.attacks.{self.module}"), (self.attack or self.id).replace("-", "_"))

    def bounds(self) -> dict[str, float]:
        """The most that its figures may be, by name. What a liar takes until its host has read of it is the same without an audit."""
        own = {self.figure: self.bound} if self.figure else {}
        return own | ({"progress_lost": MOST_PROGRESS_LOST} if self.let_in and not self.audited else {})


def _member(name: str, module: str, does: str, **more: Any) -> Row:
    """One of five members."""
    return Row(f"member-{name}", module, f"a member: {does}", **{"attack": name, "let_in": True} | more)


def _audited(name: str, module: str, does: str, **more: Any) -> Row:
    """One of five members, and a sixth assists with --audit 1."""
    figure = {"figure": "reported_after_rounds", "bound": 50}
    return Row(f"audited-{name}", module, f"a member, and a helper audits: {does}", **{"let_in": True, "audited": True} | figure | more)


_ALL = (
    Row("made-up-state", "states", "signs a made-up state with up to 2^53 samples and gives it to whoever asks"),
    Row("one-more-sample", "states", "signs made-up children of the newest state, with one sample more or a round's"),
    Row("burnt-number", "states", "signs such a child in which the other peers' contribution numbers are next to 2^53"),
    Row("long-header", "states", "signs such a child whose header is 120 to 250 kB long"),
    Row("sign-flip", "rounds", "contributes the last mean turned round x10, or full-range values", members=True),
    Row("opposite", "lies", "claims two rounds' samples, states its norm truly, and contributes the last mean turned round x20", members=True),
    Row(
        "over-claimed",
        "rounds",
        "in a run without receipts: claims two rounds' samples, now and then with a forged receipt, and contributes nothing but zeros",
        members=True,
    ),
    Row("wrong-means", "rounds", "assists without samples and sends everybody one wrong mean"),
    Row("split-means", "rounds", "assists without samples and sends each member another wrong mean"),
    Row("huge-norm", "rounds", "assists and sends square norms of 1e280 to 1e301", strategy="gradients"),
    Row("nan", "rounds", "contributes NaN to every round"),
    Row("absent", "rounds", "joins every group and goes to no reducer"),
    Row("silent", "rounds", "joins every group, opens its streams and says nothing"),
    Row("wrong-tickets", "rounds", "joins with no samples, too many, no number, twice at once, or where it should lead itself"),
    Row("stalling-leader", "rounds", "promises to lead and never closes a group"),
    Row("stalling-leaders", "rounds", "the same with three identities"),
    Row("invented-records", "records", "publishes records of three peers every 2 s that answer nobody, with samples that wait", heavy=True, stores=True),
    Row("record-flood", "records", "publishes records of 400 invented peers at once", heavy=True, stores=True, figure="grown_mib", bound=300),
    Row("prefix-records", "records", "stores 3,000 long records of one signer under one key", heavy=True, stores=True, figure="grown_mib", bound=300),
    Row("junk-keys", "records", "stores records under random keys as fast as they are answered", heavy=True, stores=True, figure="grown_mib", bound=300),
    Row(
        "third-party-dials",
        "records",
        "names a third party's address in the records of 44 peers",
        heavy=True,
        stores=True,
        figure="knocks_a_minute",
        bound=20,
    ),
    Row("dial-me", "records", "asks everybody all the time to be dialled, with five identities", heavy=True),
    Row("drip-donor", "states", "signs a better state with three identities and gives it byte by byte"),
    Row("drip-newcomer", "states", "the same while a newcomer arrives", kind="newcomer", attack="drip-donor"),
    Row("slot-hog", "states", "holds everybody's download slots with four identities while a newcomer arrives", kind="newcomer"),
    Row("false-copies", "states", "signs the newest state and gives what others give, with a byte, a length or the header changed"),
    Row("forged-run", "records", "publishes the run's record with another model under the real run's id", kind="lookup"),
    Row("export-votes", "states", "outvotes dd-export with one real and six invented keys", kind="export"),
    Row("unknown-parent", "server", "with a token: reports a state of an unknown parent with up to 2^53 samples", kind="ledger"),
    Row("stolen-peer-id", "server", "with a token: takes another peer's numbers and withdraws its work", kind="ledger"),
    Row("story-in-a-circle", "server", "with a token: tells of two states so that each would come before the other", kind="ledger"),
    Row(
        "unleased-samples", "server", "with a token: reports states of samples that it registers without a lease", kind="ledger",
        figure="counted", bound=6000,
    ),
    Row("unearned-receipts", "server", "with a token: asks for receipts of samples that it did not lease, twice, or gave back", kind="ledger"),
    Row(
        "lease-hog", "server", "with a token: leases all that it can for 20 invented peers", kind="ledger", figure="progress_ms", bound=100
    ),
    Row("browser-post", "server", "a web page in the host's browser: posts as text/plain with a foreign Origin", kind="open server"),
    Row("shared-cache", "server", "asks a cache in front of the server for what a member has fetched through it", kind="ledger"),
    Row("xz-member", "server", "a lying host: a shard with an xz member of 0.25 MB", kind="shard", figure="grown_mib", bound=300),
    Row(
        "two-faced",
        "two_faced",
        "a member: assists, gives one member another mean than the others, and signs both",
        let_in=True,
        figure="banned_after_rounds",
        bound=20,
    ),
    _member(
        "wrong-means", "wrong_mean", "assists, gives all members of a group one wrong mean, and signs it",
        attack="wrong-mean-to-all", figure="banned_after_rounds", bound=20,
    ),
    Row("met-child", "met_child", "a member: assists honestly, and signs made-up children of the newest state in half of its looks", let_in=True),
    _member("sign-flip", "lies", "contributes the last mean turned round", attack="turned"),
    _member("x10", "lies", "contributes the last mean x10"),
    _member("x1e6", "lies", "contributes the last mean x1,000,000"),
    _member("random", "lies", "contributes noise ten times as long as the last mean", attack="noise"),
    _member("copies", "lies", "trains nothing, and contributes what the last round learned"),
    _member("nan", "rounds", "contributes NaN to every round"),
    _member("over-claimed", "rounds", "claims two rounds' samples without a receipt, or with a forged one, and contributes zeros"),
    _member("wrong-labels", "", "trains with a receipt for all that it does, towards the opposite of what the others learn", trains="--labels=turned"),
    _member("absent", "rounds", "joins every group and goes to no reducer"),
    _member("stalling", "rounds", "promises to lead and never closes a group", attack="stalling-leader"),
    _member("state-flood", "states", "signs made-up children of the newest state, one after the other", attack="one-more-sample"),
    _member("drip", "states", "signs a better state and gives it byte by byte while a newcomer arrives", kind="newcomer", attack="drip-alone"),
    _audited("sign-flip", "lies", "contributes the last mean turned round", attack="turned"),
    _audited("wrong-labels", "", "trains towards the opposite of what the others learn", trains="--labels=turned"),
)
ROWS = {row.id: row for row in _ALL}
