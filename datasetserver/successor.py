"""`dd-datasetserver successor FILE`: a spare for the host's key, which peers take as soon as it is in the key's place."""

from collections.abc import Sequence
from pathlib import Path

from datasetserver import work_folder
from swarm.arguments import ArgumentParser
from swarm.signing import HostKey


def main(argv: Sequence[str]) -> None:
    """Raises UserError."""
    parser = ArgumentParser(
        "dd-datasetserver successor",
        description=f"Write a spare for {work_folder.HOST_KEY} that {work_folder.HOST_KEY} has signed. Peers take what it signs for the host's word.",
        examples=["dd-datasetserver successor /media/stick/host.key --dataset pictures"],
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="where to write it: on a stick, or to be moved to another machine")
    work_folder.add_arguments(parser)
    args = parser.parse_args(argv)
    path = work_folder.given(args) / work_folder.HOST_KEY
    HostKey(path, missing="refuse").write_successor(args.file)
    print(f"{args.file}: anyone who has it can speak for this host, so keep it away from the server.")
    print(f"When {work_folder.HOST_KEY} is lost, put it there ({path}) and start the server: peers notice nothing.")
