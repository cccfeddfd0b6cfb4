"""`dd-datasetserver heads` and `discard`: what the ledger knows of a run's newest states, and how the host names a forged one.

Whether a server runs on the ledger or not: it is only read here, and an order is a file that the server looks for.
"""

from collections.abc import Sequence
from pathlib import Path

from datasetserver import orders, work_folder
from swarm.arguments import ArgumentParser
from swarm.errors import UserError

VERBS = ("heads", "discard")
_SHOWN, _REPORTERS = 20, 3


def main(argv: Sequence[str]) -> None:
    """`dd-datasetserver heads|discard`. Raises UserError."""
    verb = argv[0]
    about = {
        "heads": "List the states that no other follows, the head first, with what their reports say and what the ledger counts in them.",
        "discard": "Forget a state and all that follows from it, and take neither again: the run goes on from the best of the others.",
    }
    parser = ArgumentParser(f"dd-datasetserver {verb}", description=about[verb])
    if verb == "discard":
        parser.add_argument("digest", help="all 64 characters, as 'heads' shows it")
    work_folder.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    work_dir = work_folder.given(args)
    if verb == "heads":
        print("\n".join(lines(work_dir)))
        return
    if not (work_dir / work_folder.LEDGER).exists():
        raise UserError(f"No run has begun in {work_dir}.", fix="Give --dataset or --work_dir as to the server.")
    orders.discard(work_dir, args.digest)
    print(f"state {args.digest[:16]} and what follows from it are forgotten, within a second where a server runs")
    print("a peer that has it on its disk goes on once the newer files in its --output_dir/state are removed")


def lines(work_dir: Path) -> list[str]:
    """Raises UserError where there is no ledger."""
    from datasetserver.ledger import look_into  # SQLite and the ledger's rules: the other commands need none of it
    from datasetserver.tree import StateTree

    with look_into(work_dir) as (run, store):
        registered = {(c.peer, c.number): c.samples + c.repeated for c in store.contributions()}
        tree = StateTree(lambda pair: registered.get(pair, 0), 2 * run.target_batch_size)
        for state in store.states():
            tree.add(state)
    tips = tree.tips()
    shown = [_line(state, "head" if state is tree.head else "    ") for state in tips[:_SHOWN]]
    rest = [f"... and {len(tips) - _SHOWN} more"] if len(tips) > _SHOWN else []
    return [*shown, *rest] or ["no state was reported yet"]


def _line(state, mark: str) -> str:
    names = ", ".join(state.reporters[:_REPORTERS]) + (", ..." if len(state.reporters) > _REPORTERS else "")
    gaps = f" gaps={state.gaps}" if state.gaps else ""
    return f"{mark} {state.digest} round={state.round} reported={state.samples} counted={state.counted}{gaps} by {names}"
