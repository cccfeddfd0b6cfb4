"""`dd-datasetserver ban`, `unban`, `trust`, `distrust` and `members`: whom the host keeps out of its run, and whom it trusts to lead and reduce.

Each is a word signed with the host's key, in a file of the work folder. A running server reads it once a second, refuses a banned peer, and tells
the others, who hand the word on; so it holds also where nobody can reach the server.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from datasetserver import orders, work_folder
from datasetserver.proven import PROOFS_FILE, Proven
from datasetserver.wrong_states import read_wrong, said_of
from swarm import files
from swarm.arguments import ArgumentParser
from swarm.bans import STATE, TRUSTED_NEEDED, Bans, is_state, read_words, sign_word, write_words
from swarm.errors import UserError
from swarm.records import MAX_REASON, MOST_BANS, HostWord, words
from swarm.run_config import RunConfig
from swarm.signing import HostKey

VERBS = ("ban", "unban", "trust", "distrust", "members")
_DONE = {"ban": "banned", "unban": "let in again", "trust": "trusted to lead and to average", "distrust": "no longer trusted"}
_SHORTEST_ENDING = 6
"""Characters of a peer's id, as log lines show them."""


def main(argv: Sequence[str]) -> None:
    """`dd-datasetserver ban|unban|trust|distrust|members`, the server running or not. Raises UserError."""
    verb = argv[0]
    args = _arguments(verb, argv[1:])
    work_dir = work_folder.given(args)
    run, samples, tokens, wrong = _ledger(work_dir)
    bans, proven = _bans(work_dir, run), Proven(run, work_dir / PROOFS_FILE)
    if verb == "members":
        print("\n".join(_lines(samples, tokens, bans, proven.reasons(wrong))))
        return
    peer = _named(args.peer, {*samples, *tokens, *_spoken_of(bans), *proven.peers()})
    _refuse(verb, peer, run, bans, proven)
    if nothing := _nothing_to_take_back(verb, peer, bans):
        print(nothing)
        return
    trusted = verb == "trust" or (verb == "unban" and peer in bans.trusted)
    given = {word.about: word.reason for word in bans.words if word.banned}  # a second ban that gives none leaves it
    reason = (args.reason or given.get(peer, "")) if verb == "ban" else ""
    say(work_dir, run, peer, banned=verb == "ban", trusted=trusted, reason=reason)
    print(f"{peer} is {_DONE[verb]}; the server knows within a second, the other peers within a minute")
    if verb == "trust" and (missing := TRUSTED_NEEDED - len(_bans(work_dir, run).trusted)) > 0:
        print(f"others average, too, until you trust {missing} more that can be dialled", file=sys.stderr)
    if verb == "ban" and tokens.get(peer):
        hint = f"dd-datasetserver token remove {tokens[peer]} --tokens FILE keeps it from coming back under another id"
        print(f"its token is '{tokens[peer]}': {hint}", file=sys.stderr)


def _arguments(verb: str, argv: Sequence[str]) -> argparse.Namespace:
    about = {
        "ban": "Keep a peer out: the server gives it nothing, and within a minute the other peers neither call, hear nor answer it.",
        "unban": "Let a banned peer in again.",
        "trust": f"Trust a peer to average: it leads first, and once {TRUSTED_NEEDED} such peers take part in a round, only they average there. Good for machines of your own that every peer can dial.",
        "distrust": "Trust a peer no longer; it goes on training.",
        "members": "List the peers that the ledger knows, what each has trained, and who is banned or trusted.",
    }
    whom = {"members": "", "ban": ' Rk3fQ9 --reason "sends noise"'}.get(verb, " Rk3fQ9")
    parser = ArgumentParser(
        f"dd-datasetserver {verb}", description=about[verb], examples=[f"dd-datasetserver {verb}{whom} --dataset pictures"]
    )
    if verb != "members":
        parser.add_argument("peer", help=f"its id, or the last {_SHORTEST_ENDING} or more characters, as 'members' and log lines show them")
    if verb == "ban":
        parser.add_argument("--reason", default="", help="one line; the peer reads it, and so do the others")
    work_folder.add_arguments(parser)
    return parser.parse_args(argv)


def _refuse(verb: str, peer: str, run: RunConfig, bans: Bans, proven: Proven) -> None:
    """Raises UserError where the host cannot say this."""
    if verb == "unban" and (reason := proven.reason(peer)):
        raise UserError(f"{peer} is banned by a proof: {reason}.", fix="Nobody can take that back; its owner can come back with a new key.")
    if verb in ("trust", "distrust") and bans.reason(peer):
        raise UserError(f"{peer} is banned: {bans.reason(peer)}.", fix=f"Let it in first: dd-datasetserver unban {peer[-_SHORTEST_ENDING:]}")
    if verb == "trust" and not run.members_of:
        raise UserError("Only in a run for members does every peer know whom you trust.", fix="Begin one: --members yes, or --tokens.")


def _nothing_to_take_back(verb: str, peer: str, bans: Bans) -> str:
    """The line for it; "" where there is something, or nothing is taken back."""
    if verb == "unban" and peer not in bans.peers():
        return f"{peer} is not banned: nothing to take back"
    if verb == "distrust" and peer not in bans.trusted:
        return f"{peer} is not trusted: nothing to take back"
    return ""


def say(
    work_dir: Path, run: RunConfig, about: str, *, banned: bool, trusted: bool = False, reason: str = "", clock: Callable[[], float] = time.time
) -> HostWord:
    """Put the word about a peer or a state into the file, and return it. Raises UserError when there is no room for it or the disk does not take it."""
    try:
        with files.locked(work_dir):  # the server says words, too
            return _said(work_dir, run, about, banned, trusted, reason, clock)
    except OSError as error:
        raise work_folder.unwritable(work_dir, error, "Check --work_dir.") from None


def _said(work_dir: Path, run: RunConfig, about: str, banned: bool, trusted: bool, reason: str, clock: Callable[[], float]) -> HostWord:
    bans = _bans(work_dir, run)
    known = {word.about: word for word in bans.words}
    if about not in known and sum(word.banned or word.trusted for word in known.values()) >= MOST_BANS:
        raise UserError(
            f"{MOST_BANS} peers and states are banned, trusted or discarded: there is room for no more.",
            fix="Take back what is no longer needed (unban, distrust); with --tokens, remove the tokens of harmful peers.",
        )
    latest = known[about].at if about in known else 0
    reason = words(reason, MAX_REASON)
    word = sign_word(
        HostKey(work_dir / work_folder.HOST_KEY, missing="refuse"), run, about, banned=banned, trusted=trusted, reason=reason,
        clock=lambda: max(clock(), (latest + 1) / 1000),  # a clock that was put back
    )  # fmt: skip
    bans.hear([word])
    write_words(work_dir / orders.BANS, bans.words)
    return word


def _bans(work_dir: Path, run: RunConfig) -> Bans:
    key = HostKey(work_dir / work_folder.HOST_KEY, missing="refuse")
    return Bans(run, key.public, read_words(work_dir / orders.BANS))


def _ledger(work_dir: Path) -> tuple[RunConfig, Counter[str], dict[str, str], dict[str, str]]:
    """The run there, and of each peer how many of its samples count, the name of its token, and what became of the state that its wrong mean made.
    Raises UserError where there is none."""
    from datasetserver.ledger import look_into  # SQLite and the ledger's rules: the other commands need none of it

    with look_into(work_dir) as (run, store):
        samples: Counter[str] = Counter()
        for contribution in store.contributions():
            samples[contribution.peer] += contribution.samples if contribution.live else 0
        return run, samples, dict(store.tokens_of_peers()), said_of(read_wrong(store))


def _lines(samples: Counter[str], tokens: dict[str, str], bans: Bans, proven: Mapping[str, str]) -> list[str]:
    """proven: peers that a proof bans, and why."""
    peers = sorted({*samples, *tokens, *_spoken_of(bans), *proven}, key=lambda peer: (-samples[peer], peer))
    lines = []
    for peer in peers:
        token, reason, proof = tokens.get(peer, ""), bans.reason(peer), proven.get(peer, "")
        says = f" BANNED: {reason}" if reason else f" BANNED by a proof: {proof}" if proof else " trusted" if peer in bans.trusted else ""
        lines.append(f"{peer} samples={samples[peer]}" + (f" token={token}" if token else "") + says)
    return lines or ["no peer has come yet"]


def _spoken_of(bans: Bans) -> set[str]:
    return {word.about for word in bans.words if not is_state(word)}


def _named(text: str, known: set[str]) -> str:
    """The peer that `text` names: an id, also one that never came, or the ending of one of those known. Raises UserError."""
    if STATE.fullmatch(text):
        raise UserError(f"'{text[:16]}...' is the digest of a state.", fix="Discard that: dd-datasetserver discard DIGEST.")
    found = sorted(peer for peer in known if peer == text or (len(text) >= _SHORTEST_ENDING and peer.endswith(text)))
    if text in found or (not found and 40 <= len(text) <= 64 and text.isalnum()):
        return text
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"'{text}' ends the ids of {len(found)} peers.", fix="Give more of it: dd-datasetserver members lists them.")
    raise UserError(f"No peer's id ends with '{text}'.", fix=f"dd-datasetserver members lists them; give {_SHORTEST_ENDING} characters or more.")
