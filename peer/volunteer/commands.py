"""What `dd-peer` does by itself, without a trainer to look after: pause, resume, --check, --purge."""

from collections.abc import Callable, Sequence

from peer.volunteer import resting
from swarm.entries import ended_quietly
from swarm.errors import UserError
from swarm.options import nearest

_CHECK, _PURGE = "--check", "--purge"


def own_command(argv: Sequence[str]) -> Callable[[], int] | None:
    """The command that `argv` is; None when it is for the trainer. Raises UserError for a first word that is no command."""
    if argv and argv[0] in resting.VERBS:
        return lambda: resting.main(argv)
    if argv and not argv[0].startswith("-"):
        near = nearest(argv[0], (*resting.VERBS, _CHECK, _PURGE))
        raise UserError(f"Unknown command {argv[0]}.", fix=f"{near} See --help.".lstrip())
    flags = {word.split("=")[0] for word in argv}
    if _CHECK in flags:
        with ended_quietly():
            from peer.volunteer.check.command import main as check  # torch's and hivemind's import is for who needs them

        return lambda: check(argv)
    if _PURGE in flags:
        from peer.volunteer.purge import main as purge

        return lambda: purge(argv)
    return None
