"""One --output_dir, several starts: real processes, real kills. A result is not lost to another run, and a killed peer goes on where it was."""

import re
import subprocess
import sys

import pytest

from peer.results.checkpoint import Checkpoints, of
from peer.results.output_folder import owner_of
from swarm.digest import digest_model
from tests.conftest import ROOT
from tests.test_swarm import BATCH, LOCAL, RUN, TWO, Peer, swarm  # noqa: F401

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(900)]


class Supervised(Peer):
    """A peer under `dd-peer`."""

    def __init__(self, folder, *flags):
        self.folder, self.log, self.tree = folder, folder.with_suffix(".log"), set()
        command = [sys.executable, "-m", "peer.supervise", "--output_dir", folder, "--train_batch_size", BATCH, *LOCAL, *flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command], cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )


@pytest.fixture
def start(swarm):  # noqa: F811
    """Starts a peer with its own pictures in the one folder, its log after that of those before; founds a run of that name."""

    def peer(name, *flags, kind=Peer):
        made = kind(
            swarm.folder / "out", "--found", "--model", swarm.model, "--train_data_dir", swarm.pictures, "--run_name", name, *RUN, *flags
        )
        swarm.peers.append(made)
        return made

    return peer


def test_a_finished_result_outlives_a_peer_that_waits_for_another_run_and_comes_back_with_its_own(swarm, start):  # noqa: F811
    out = swarm.folder / "out"
    first = start("first", "--total_samples", 256)
    assert first.finish() == 0, first.text()
    result, (*_, last) = digest_model(out / "model"), Checkpoints(out, keep=2).paths()
    assert result != digest_model(swarm.model)
    run = owner_of(out).id

    second = start("second", *TWO)
    swarm.wait("word that it waits", lambda: "waiting for company: 1 of 2" in second.text())
    second.stop()
    assert second.finish() == 0, second.text()
    earlier = out / "earlier" / run
    assert digest_model(earlier / "model") == result and (earlier / last.name / "manifest.json").is_file()
    assert not (out / "model").exists() and not Checkpoints(out, keep=2).paths()
    assert "nothing is exported: this peer came to no state of the run" in second.text()
    assert f"its checkpoints and results lie in {earlier} now" in second.text()

    again = start("first", "--total_samples", 256)
    assert again.finish() == 0, again.text()
    assert digest_model(out / "model") == result and owner_of(out).id == run
    assert "Traceback" not in again.text() and swarm.orphans() == []

    # Without its states, as after a disk was cleared of them, it holds nothing but the base model while it waits for company.
    checkpoints = Checkpoints(out, keep=2).paths()
    for state in (out / "state").glob("*.state"):
        state.unlink()
    waiting, told = start("first", "--total_samples", 256, *TWO), again.text().count("waiting for company: 1 of 2")
    swarm.wait("word that it waits", lambda: waiting.text().count("waiting for company: 1 of 2") > told)
    waiting.stop()
    assert waiting.finish() == 0, waiting.text()
    assert digest_model(out / "model") == result and Checkpoints(out, keep=2).paths() == checkpoints


def test_a_killed_dd_peer_started_with_the_same_command_goes_on_from_its_latest_checkpoint_that_is_whole(swarm, start):  # noqa: F811
    out, flags = swarm.folder / "out", ("--total_samples", 10**9, "--checkpointing_steps", 2)
    killed = start("first", *flags, kind=Supervised)
    swarm.wait("two checkpoints", lambda: len(Checkpoints(out, keep=2).paths()) == 2)
    killed.kill()
    checkpoints = Checkpoints(out, keep=2).paths()
    assert {of(path)["run"] for path in checkpoints} == {owner_of(out).id} and "resumed" not in killed.text()
    (checkpoints[-1] / "state.json").write_bytes(b"torn")
    before = killed.rounds()[-1]["round"]

    again = start("first", *flags, kind=Supervised)
    swarm.wait("rounds after the kill", lambda: again.rounds()[-1]["round"] >= before + 3)
    again.stop()
    assert again.finish() == 0, again.text()
    resumed = re.findall(r"resumed checkpoint=(\S+) step=(\d+)", again.text())
    assert "damaged, state.json is not what was written" in again.text()
    assert len(resumed) == 1 and int(resumed[0][1]) >= 2 and resumed[0][0] == str(checkpoints[0]), resumed
    assert again.text().count("training first") == 2 and "Traceback" not in again.text()
    assert swarm.orphans() == []
