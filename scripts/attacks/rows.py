"""Every row of attacks by its short id, which later work and tests use, and what its stranger does."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """module: where its attack is, a function of the row's name. kind: what it is tried on: a swarm's rounds, a newcomer to a swarm, a
    server, or one program. members: whether only memberships, or a centered average, will end it. let_in: whether its
    stranger is a member, of a run for members. heavy: it costs the machine so much that what runs beside it is slowed
    too. strategy: of the swarm. bound: the most that the row's own figure may be, where it has one. grown_mib: of all peers of the swarm, beyond
    what the undisturbed one's grew. banned_after_rounds: from its first lie, until the last honest peer has a proof."""

    id: str
    module: str
    does: str
    kind: str = "swarm"
    members: bool = False
    let_in: bool = False
    heavy: bool = False
    strategy: str = "parameters"
    figure: str = ""
    bound: float = 0.0


_ALL = (
    Row("made-up-state", "states", "signs a made-up state with up to 2^53 samples and gives it to whoever asks"),
    Row("one-more-sample", "states", "signs made-up children of the newest state, with one sample more or a round's"),
    Row("burnt-number", "states", "signs such a child in which the other peers' contribution numbers are next to 2^53"),
    Row("long-header", "states", "signs such a child whose header is 120 to 250 kB long"),
    Row("sign-flip", "rounds", "contributes the last mean turned round x10, or full-range values", members=True),
    Row("opposite", "rounds", "claims two rounds' samples, states its norm truly, and contributes the last mean turned round x20", members=True),
    Row(
        "over-claimed",
        "rounds",
        "in a run without receipts: claims two rounds' samples, now and then with a forged receipt, and contributes nothing but zeros",
        members=True,
    ),
    Row("wrong-means", "rounds", "assists without samples and sends everybody one wrong mean"),
    Row("split-means", "rounds", "assists without samples and sends each member another wrong mean"),
    Row("huge-norm", "rounds", "assists and sends square norms of 1e280 to 1e301", strategy="gradients"),
    Row(
        "two-faced",
        "two_faced",
        "a member: assists, gives one member another mean than the others, and signs both",
        let_in=True,
        figure="banned_after_rounds",
        bound=20,
    ),
    Row(
        "wrong-mean-to-all",
        "wrong_mean",
        "a member: assists, gives all members of a group one wrong mean, and signs it",
        let_in=True,
        figure="banned_after_rounds",
        bound=20,
    ),
    Row("nan", "rounds", "contributes NaN to every round"),
    Row("absent", "rounds", "joins every group and goes to no reducer"),
    Row("silent", "rounds", "joins every group, opens its streams and says nothing"),
    Row("wrong-tickets", "rounds", "joins with no samples, too many, no number, twice at once, or where it should lead itself"),
    Row("stalling-leader", "rounds", "promises to lead and never closes a group"),
    Row("stalling-leaders", "rounds", "the same with three identities"),
    Row("invented-records", "records", "publishes records of three peers every 2 s that answer nobody, with samples that wait", heavy=True),
    Row("record-flood", "records", "publishes records of 400 invented peers at once", heavy=True, figure="grown_mib", bound=300),
    Row("prefix-records", "records", "stores 3,000 long records of one signer under one key", heavy=True, figure="grown_mib", bound=300),
    Row("junk-keys", "records", "stores records under random keys as fast as they are taken", heavy=True, figure="grown_mib", bound=300),
    Row(
        "third-party-dials",
        "records",
        "names a third party's address in the records of 44 peers",
        heavy=True,
        figure="knocks_a_minute",
        bound=20,
    ),
    Row("dial-me", "records", "asks everybody all the time to be dialled, with five identities", heavy=True),
    Row("drip-donor", "states", "signs a better state with three identities and gives it byte by byte"),
    Row("drip-newcomer", "states", "the same while a newcomer arrives", kind="newcomer"),
    Row("slot-hog", "states", "holds everybody's download slots with four identities while a newcomer arrives", kind="newcomer"),
    Row("false-copies", "states", "signs the newest state and gives what others give, with a byte, a length or the header changed"),
    Row("forged-run", "records", "publishes the run's record with another model under the real run's id", kind="lookup"),
    Row("export-votes", "states", "outvotes dd-export with one real and six invented keys", kind="export"),
    Row("unknown-parent", "server", "with a token: reports a state of an unknown parent with up to 2^53 samples", kind="ledger"),
    Row("stolen-peer-id", "server", "with a token: takes another peer's numbers and withdraws its work", kind="ledger"),
    Row("unearned-receipts", "server", "with a token: asks for receipts of samples that it did not lease, twice, or gave back", kind="ledger"),
    Row(
        "lease-hog", "server", "with a token: leases all that it can for 20 invented peers", kind="ledger", figure="progress_ms", bound=100
    ),
    Row("browser-post", "server", "a web page in the host's browser: posts as text/plain with a foreign Origin", kind="open server"),
    Row("shared-cache", "server", "asks a cache in front of the server for what a member has fetched through it", kind="ledger"),
    Row("xz-member", "server", "a lying host: a shard with an xz member of 0.25 MB", kind="shard", figure="grown_mib", bound=300),
)
ROWS = {row.id: row for row in _ALL}
