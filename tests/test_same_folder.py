"""One --output_dir, several starts: real processes, a real kill. A result is not lost to another run, and a killed peer goes on where it was."""

import re

import pytest

from peer.results.checkpoint import Checkpoints, of
from peer.results.output_folder import owner_of
from swarm.digest import digest_model
from tests.conftest import ROOT
from tests.test_swarm import RUN, TWO, Peer, swarm  # noqa: F401
from tests.warm import Warm

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(900)]


class Supervised(Peer):
    """A peer under `dd-peer`."""

    program, cwd = ("-m", "peer.supervise"), ROOT

    def begin(self, command):
        return Warm(command, self.cwd, self.log, forks=True)


def test_a_run_in_one_folder_outlives_a_kill_a_torn_checkpoint_and_another_run(swarm):  # noqa: F811
    out = swarm.folder / "out"

    def start(name, *flags, kind=Peer):
        """A peer with its own pictures, its log after that of those before; founds a run of that name."""
        own = ("--found", "--model", swarm.model, "--train_data_dir", swarm.pictures)
        return swarm.peer(out.name, *own, "--run_name", name, *RUN, *flags, kind=kind)

    dogs = swarm.folder / "dogs"
    first = ("first", "--total_samples", 512, "--checkpointing_steps", 2, "--with_prior_preservation", "--class_data_dir", dogs)
    first += ("--class_prompt", "a dog", "--num_class_images", 2, "--validation_inference_steps", 1)
    killed = start(*first, kind=Supervised)
    swarm.wait("two checkpoints", lambda: len(Checkpoints(out, keep=2).paths()) == 2)
    killed.kill()
    checkpoints = Checkpoints(out, keep=2).paths()
    assert {of(path)["run"] for path in checkpoints} == {owner_of(out).id} and "resumed" not in killed.text()
    (checkpoints[-1] / "state.json").write_bytes(b"torn")

    again = start(*first, kind=Supervised)  # the same command
    assert again.finish() == 0, again.text()
    resumed = re.findall(r"resumed checkpoint=(\S+) step=(\d+)", again.text())
    assert "damaged, state.json is not what was written" in again.text()
    assert len(resumed) == 1 and int(resumed[0][1]) >= 2 and resumed[0][0] == str(checkpoints[0]), resumed
    assert again.text().count("training first") == 2 and again.rounds()[-1]["samples"] >= 512
    assert len(list(dogs.glob("class-*.png"))) == 2, "what a peer learns of a class of its own goes into its contributions"
    result, checkpoints, run = digest_model(out / "model"), Checkpoints(out, keep=2).paths(), owner_of(out).id
    assert result != digest_model(swarm.model)

    second = start("second", *TWO)
    swarm.wait("word that it waits", lambda: "waiting for company: 1 of 2" in second.text())
    second.stop()
    assert second.finish() == 0, second.text()
    earlier = out / "earlier" / run
    assert digest_model(earlier / "model") == result and all((earlier / path.name / "manifest.json").is_file() for path in checkpoints)
    assert not (out / "model").exists() and not Checkpoints(out, keep=2).paths()
    assert "nothing is exported: this peer never had a state of the run" in second.text()
    assert f"moved its checkpoints and results to {earlier};" in second.text()

    # Without its states, as after a disk was cleared of them, it holds nothing but the base model while it waits for company.
    for state in (earlier / "state").glob("*.state"):
        state.unlink()
    back, told = start(*first, *TWO), second.text().count("waiting for company: 1 of 2")
    swarm.wait("word that it waits", lambda: back.text().count("waiting for company: 1 of 2") > told)
    back.stop()
    assert back.finish() == 0, back.text()
    assert digest_model(out / "model") == result and Checkpoints(out, keep=2).paths() == checkpoints and owner_of(out).id == run
    assert "Traceback" not in back.text() and swarm.orphans() == []
