"""A trainer for tests of its supervisor: each of its lives does the next thing that OUTPUT_DIR/lives.json says, and notes its flags."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from peer.watchdog.room import tell_room  # noqa: E402
from swarm.errors import ExitCode, UserError, run_program  # noqa: E402
from swarm.life import FOLDER, TRAINING, Life  # noqa: E402


class OutOfMemoryError(RuntimeError):
    """torch's is known by this name: to import torch takes 3 s of a core in each life."""


def hang_here():
    while True:
        time.sleep(100)


def main():
    output = Path(os.environ[FOLDER]).parent
    life = Life.of_process()
    with (output / "seen.jsonl").open("a") as seen:
        seen.write(json.dumps({"argv": sys.argv[1:], "rank": os.environ.get("RANK", ""), "pid": os.getpid()}) + "\n")
    lives = json.loads((output / "lives.json").read_text())
    (output / "lives.json").write_text(json.dumps(lives[1:]))
    what = lives[0]
    if what == "away":  # it has a wish in its ears, and no server
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a handler's signal could come between our last look and a wait
        (output / "listening").touch()
        signal.sigwait({signal.SIGTERM})
        raise UserError("The server does not answer.", fix="Check it.", code=ExitCode.NETWORK)
    life(TRAINING)
    if what == "saved":
        (output / "checkpoint-000002").mkdir()
        (output / "checkpoint-000002" / "manifest.json").touch()
        return 1
    if what == "hang":
        hang_here()
    elif what == "memory":
        raise MemoryError
    elif isinstance(what, dict):  # it tells what would make room on this device, and is out of memory as torch is
        tell_room(what["device"], what["ways"], what["batch"])
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    elif what == "orphan":
        orphan = subprocess.Popen(["sleep", "1000"], start_new_session=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        (output / "orphan").write_text(str(orphan.pid))
        return 1
    elif what == "talk":
        children = [
            subprocess.Popen([sys.executable, "-c", f"import os\nfor i in range(300): os.write(1, b'{c}' * 70 + b'\\n')"]) for c in "abc"
        ]
        return sum(child.wait() for child in children)
    elif isinstance(what, int):
        if what > 1:
            raise UserError(f"Failed by {what}.", fix="None.", code=ExitCode(what))
        return what
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
