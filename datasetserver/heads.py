"""`dd-datasetserver heads` and `discard`: what the ledger knows of a run's newest states, and how the host names a forged one.

Whether a server runs on the ledger or not: it is only read here. Discarding is one of the host's signed words, in a file that the server looks for.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from datasetserver import work_folder
from datasetserver.bans import say
from swarm.arguments import ArgumentParser
from swarm.bans import STATE
from swarm.errors import UserError

if TYPE_CHECKING:
    from datasetserver.tree import State

VERBS = ("heads", "discard")
_SHOWN, _REPORTERS = 20, 3


def main(argv: Sequence[str]) -> None:
    """`dd-datasetserver heads|discard`. Raises UserError."""
    verb = argv[0]
    about = {
        "heads": "List the states that no other follows, the head first, with what their reports say and what the ledger counts in them. "
        "branch= is the first state that is not the head's ancestor.",
        "discard": "Forget a state and all that follows from it, for good: the server does, and within a minute every peer that stands on it "
        "starts again from what was before it. It undoes a forged state, and brings a swarm together that has split: discard the smaller branch.",
    }
    parser = ArgumentParser(f"dd-datasetserver {verb}", description=about[verb])
    if verb == "discard":
        parser.add_argument("digest", help="all 64 characters, as 'heads' shows it")
        parser.add_argument("--reason", default="", help="one line, which the peers on it read")
    work_folder.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    work_dir = work_folder.given(args)
    if verb == "heads":
        print("\n".join(lines(work_dir)))
        return
    if not STATE.fullmatch(args.digest):
        raise UserError(f"'{args.digest}' is no digest of a state.", fix="dd-datasetserver heads shows them.")
    from datasetserver.ledger import look_into  # SQLite and the ledger's rules: the other commands need none of it

    with look_into(work_dir) as (run, _):
        say(work_dir, run, args.digest, banned=True, reason=args.reason)
    print(f"state {args.digest[:16]} and what follows from it are forgotten; the server knows within a second, the peers within a minute")


def lines(work_dir: Path) -> list[str]:
    """Raises UserError where there is no ledger."""
    from datasetserver.ledger import look_into
    from datasetserver.tree import StateTree

    with look_into(work_dir) as (run, store):
        registered = {(c.peer, c.number): c.samples + c.repeated for c in store.contributions()}
        tree = StateTree(lambda pair: registered.get(pair, 0), 2 * run.target_batch_size)
        for state in store.states():
            tree.add(state)
    tips, on_chain = tree.tips(), {state.digest for state in tree.chain()}
    shown = [_line(state, next((s for s in tree.chain(state) if s.digest not in on_chain), None)) for state in tips[:_SHOWN]]
    rest = [f"... and {len(tips) - _SHOWN} more"] if len(tips) > _SHOWN else []
    return [*shown, *rest] or ["no state was reported yet"]


def _line(state: "State", branch: "State | None") -> str:
    """branch: where its chain leaves the head's; None: it is the head."""
    names = ", ".join(state.reporters[:_REPORTERS]) + (", ..." if len(state.reporters) > _REPORTERS else "")
    gaps = f" gaps={state.gaps}" if state.gaps else ""
    mark, parted = ("    ", f" branch={branch.digest}") if branch else ("head", "")
    return f"{mark} {state.digest} round={state.round} reported={state.samples} counted={state.counted}{gaps}{parted} by {names}"
