"""What `dd-peer` does by itself, without a trainer to look after: pause, resume, --check, --purge."""

from collections.abc import Callable, Sequence

from peer.volunteer import resting


def own_command(argv: Sequence[str]) -> Callable[[], int] | None:
    """The command that `argv` is; None when it is for the trainer."""
    if argv and argv[0] in resting.VERBS:
        return lambda: resting.main(argv)
    if any(word == "--check" or word.startswith("--check=") for word in argv):
        from peer.volunteer.check.command import main as check  # torch's and hivemind's import is for who needs them

        return lambda: check(argv)
    if "--purge" in argv:
        from peer.volunteer.purge import main as purge

        return lambda: purge(argv)
    return None
