"""What each rank of test_all_ranks.py runs: rank 0 takes longer than the group's timeout, before the steps begin and while it writes a result alone."""

import time

import torch

from peer.machine.device import Rank, RankGroup
from swarm.errors import UserError

SECONDS = 3.0


def main() -> None:
    torch.set_num_threads(1)
    group = RankGroup(Rank.from_environment(), torch.device("cpu"), timeout_seconds=SECONDS)
    if group.is_main:
        time.sleep(2 * SECONDS)
    print(group.broadcast_object("started"), flush=True)
    group.begin()
    if group.is_main:
        time.sleep(2 * SECONDS)
    group.barrier()
    print("written", flush=True)
    if group.is_main:
        time.sleep(3 * SECONDS)
        return
    try:
        group.broadcast_object(None)
    except UserError as error:
        print(error.message, flush=True)


if __name__ == "__main__":
    main()
