"""`dd-datasetserver heads` and `discard`: what the ledger knows of a run's newest states, and how the host names a forged one.

Whether a server runs on the ledger or not: it is only read here. Discarding is one of the host's signed words, in a file that the server looks for.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from datasetserver import work_folder
from datasetserver.bans import say
from datasetserver.orders import BANS
from swarm.arguments import ArgumentParser
from swarm.bans import STATE, is_state, read_words
from swarm.digest import ELDER_CHARACTERS
from swarm.errors import UserError
from swarm.run_config import RunConfig

if TYPE_CHECKING:
    from datasetserver.tree import State, StateTree
    from datasetserver.wrong_states import Wrong

VERBS = ("heads", "discard")
_SHOWN, _REPORTERS = 20, 3
_PREFIX = re.compile("[0-9a-f]{8,64}")
"""Logs show 8 or 16 characters of a digest."""


def main(argv: Sequence[str]) -> None:
    """`dd-datasetserver heads|discard`. Raises UserError."""
    verb = argv[0]
    about = {
        "heads": "List the states that no other follows, the head first, with what their reports say and what the ledger counts in them. "
        "branch= is the oldest of its ancestors that the head does not descend from.",
        "discard": "Forget a state and all that follows from it, for good. Within a minute each peer that stands on it ends, and dd-peer starts it "
        "again from an earlier state. It undoes a forged state. It also brings a swarm together that has split: give it the branch= of heads.",
    }
    what = ' DIGEST --yes --reason "forged"' if verb == "discard" else ""
    parser = ArgumentParser(
        f"dd-datasetserver {verb}", description=about[verb], examples=[f"dd-datasetserver {verb}{what} --dataset pictures"]
    )
    if verb == "discard":
        parser.add_argument("digest", help="as 'heads' or a log shows it: all 64 characters, or the first 8 or more")
        parser.add_argument("--yes", action="store_true", help="forget it; without --yes, only show what would go")
        parser.add_argument("--reason", default="", help="one line, shown to the peers that end")
    work_folder.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    work_dir = work_folder.given(args)
    if verb == "heads":
        print("\n".join(lines(work_dir)))
        return
    run, tree, _ = _ledger(work_dir)
    discarded = {word.about for word in read_words(work_dir / BANS) if word.banned and is_state(word)}
    digest = _named(args.digest, {*discarded, *(state.digest for state in tree)})
    if digest in discarded:
        print(f"state {digest} is discarded already")
        return
    gone = _gone(tree, digest)
    before = gone[0].samples - gone[0].own_samples
    what = (
        f"state {digest} of round {gone[0].round} and what follows from it: {len(gone)} states, which by their reports add "
        f"{max(state.samples for state in gone) - before} samples to {before}"
    )
    if not args.yes:
        raise UserError(f"This would forget {what}, for good.", fix="Add --yes if that is what you want.")
    say(work_dir, run, digest, banned=True, reason=args.reason)
    print(f"forgot {what}")
    print("the server knows within a second, the peers within a minute: a peer on that state ends, and dd-peer starts it again from the one before")


def lines(work_dir: Path) -> list[str]:
    """Raises UserError where there is no ledger."""
    _, tree, wrong = _ledger(work_dir)
    tips, on_chain = tree.tips(), {state.digest for state in tree.chain()}
    shown = [_line(state, next((s for s in tree.chain(state) if s.digest not in on_chain), None)) for state in tips[:_SHOWN]]
    rest = [f"... and {len(tips) - _SHOWN} more"] if len(tips) > _SHOWN else []
    left = sorted({(each, accused) for (accused, _), each in wrong.items() if each.left})
    proven = [f"wrong {each.digest} round={each.round} by {accused}, left to you: {each.left}" for each, accused in left]
    return [*shown, *rest, *proven] or ["no state was reported yet"]


def _ledger(work_dir: Path) -> "tuple[RunConfig, StateTree, dict[tuple[str, str], Wrong]]":
    """Raises UserError where there is none."""
    from datasetserver.ledger import look_into  # SQLite and the ledger's rules: the other commands need none of it
    from datasetserver.owners import Owners
    from datasetserver.reports import Reports
    from datasetserver.wrong_states import read_wrong

    with look_into(work_dir) as (run, store):
        registered = {c.id: c.registered_samples for c in store.contributions()}
        reports = Reports(store, Owners(store), lambda pair: registered.get(pair, 0), 2 * run.target_batch_size)
        return run, reports.tree, read_wrong(store)


def _named(given: str, known: Collection[str]) -> str:
    """The one digest of `known` that begins with `given`. Raises UserError where there is none, or where several do."""
    found = sorted(digest for digest in known if digest.startswith(given)) if _PREFIX.fullmatch(given) and given not in known else []
    if len(found) > 1:
        raise UserError(f"{len(found)} states begin with {given}: {', '.join(found)}.", fix="Give all 64 characters of one.")
    return found[0] if found else given


def _gone(tree: "StateTree", digest: str) -> "list[State]":
    """What goes with that state. Raises UserError where it is none, or where peers could take an honest one for it."""
    if not STATE.fullmatch(digest):
        raise UserError(f"'{digest}' is not the digest of a state.", fix="dd-datasetserver heads shows them.")
    if not (gone := tree.following(digest)):
        raise UserError(f"Nobody has reported a state {digest[:16]}...", fix="dd-datasetserver heads shows those that were.")
    if twin := tree.twin(digest):
        raise UserError(
            f"State {twin.digest} begins with the same {ELDER_CHARACTERS} digits, and would go with it: somebody reported one of them on purpose.",
            fix=f"Find out which is real, and ban who reported the other: {_names(gone[0])} this one, {_names(twin)} that.",
        )
    return gone


def _line(state: "State", branch: "State | None") -> str:
    """branch: where its chain leaves the head's; None: it is the head."""
    gaps = f" gaps={state.gaps}" if state.gaps else ""
    mark, parted = ("    ", f" branch={branch.digest}") if branch else ("head", "")
    return f"{mark} {state.digest} round={state.round} reported={state.samples} counted={state.counted}{gaps}{parted} by {_names(state)}"


def _names(state: "State") -> str:
    return ", ".join(state.reporters[:_REPORTERS]) + (", ..." if len(state.reporters) > _REPORTERS else "")
