"""Whole swarms: a real server, real peers started as people start them, real kills. Each ends with the same questions:
equal digests, rounds that never go back, every sample counted once, no process left. Where the model is not the subject, computing is a sleep."""

import contextlib
import itertools
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from peer.figures.metrics import NAMES
from scripts.churn.checks import read_rounds
from scripts.demo.results import read_lines
from swarm.digest import digest_model
from swarm.errors import ExitCode
from tests import tiny
from tests.conftest import ROOT
from tests.datasetserver.hosting import Host
from tests.looking import alive, progress
from tests.warm import Warm

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(900)]

TARGET, BATCH = 128, 8
WAIT_SECONDS = 240.0
"""Never the time that anything takes: on a busy machine programs need a minute to start, and train a tenth of what they do alone."""
FINETUNE = str(ROOT / "peer" / "finetune.py")
SLEEPER = ("-m", "scripts.churn.peer", "--sample_seconds", "0.02")
"""All of a peer but its model: a third of the start, and next to no CPU time while it waits for others."""
LOCAL = ("--host_maddrs", "/ip4/127.0.0.1/tcp/0")
RUN = ("--resolution", "16", "--lr", "1e-3", "--target_batch_size", str(TARGET))
TWO, THREE = ("--min_peers", "2"), ("--min_peers", "3")
"""Nobody trains before all are there: else whoever starts first may come to the run's end alone."""


class Peer:
    """A peer process in a session of its own, its log in a file. How the program itself starts is shown by `AsWritten`, and `Cold` on TPUs."""

    program, cwd = (FINETUNE,), "/"

    def __init__(self, folder: Path, *flags):
        self.folder, self.log, self.tree = folder, folder.with_suffix(".log"), set()
        command = [*self.program, "--output_dir", folder, "--train_batch_size", BATCH, *LOCAL, *flags]
        self.process = self.begin([str(part) for part in command])

    def begin(self, command: list[str]) -> Warm | subprocess.Popen:
        return Warm(command, self.cwd, self.log)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def rounds(self) -> list[dict]:
        return read_rounds(self.folder)

    def members(self) -> int:
        """Of the largest group that this peer was in."""
        return max((len(line["members"]) for line in self.rounds()), default=0)

    def on_disk(self) -> int:
        """Samples of the latest state that a kill leaves to this peer."""
        return max((int(path.name.split("-")[1]) for path in (self.folder / "state").glob("samples-*.state")), default=0)

    def watch(self) -> None:
        """Remember who belongs to this peer, so that a kill reaches all of them and nobody is overlooked at the end."""
        with contextlib.suppress(psutil.NoSuchProcess):
            trunk = psutil.Process(self.process.pid)
            self.tree |= {trunk, *trunk.children(recursive=True)}

    def programs(self, name: str) -> int:
        """How many processes of this peer have `name` in their command."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        return sum(name in " ".join(child.cmdline()) for child in family if alive(child))

    def kill(self) -> None:
        self.watch()
        for process in self.tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(WAIT_SECONDS)

    def stop(self) -> None:
        """Ask it to leave in order."""
        self.watch()
        self.process.send_signal(signal.SIGTERM)

    def finish(self) -> int:
        deadline = time.monotonic() + WAIT_SECONDS
        while self.process.poll() is None:
            self.watch()
            assert time.monotonic() < deadline, f"did not end:\n{self.text()}"
            time.sleep(0.5)  # each look reads the whole table of processes
        return self.process.returncode


class Cold(Peer):
    """A peer that this Python (`sys.executable`) starts as people do."""

    def begin(self, command: list[str]) -> subprocess.Popen:
        command = [sys.executable, *command]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, cwd=self.cwd, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)


class Sleeper(Peer):
    program, cwd = SLEEPER, ROOT


class AsWritten(Peer):
    """A peer that is started by a line of a shell, in a folder of its own, and with no flag but those in the line.

    Torchrun and its ranks are forked: that it starts our program anew is shown in tests/peer/test_finetune.py.
    """

    def __init__(self, place: Path, line: str):
        self.folder, self.log, self.tree = place / "output", place.with_suffix(".log"), set()
        torchrun, *rest = shlex.split(line)
        assert Path(sys.executable).with_name(torchrun).is_file()
        standalone = {"PET_STANDALONE": "1"}  # as on machines of their own: torchrun's usual port is free
        self.process = Warm(["-m", "torch.distributed.run", *rest], place, self.log, env=standalone, forks=True)


class Swarm:
    def __init__(self, folder: Path, model: Path):
        self.folder, self.model, self.peers, self.hosts = folder, model, [], []
        self.pictures = tiny.write_pictures(folder / "pictures", 40, 16)

    def host(self, *flags) -> Host:
        """Of a run for members; quickstart and soak have runs for everybody."""
        host = Host(self.folder / "host", "--dht", "True", "--members", "yes", *RUN, *flags)
        shared = host.flags.index("--dataset") + 1, host.flags.index("--model") + 1
        host.flags[shared[0]], host.flags[shared[1]] = str(self.pictures), str(self.model)
        self.hosts.append(host)
        return host.start()

    def peer(self, name: str, *flags, kind: type[Peer] = Peer) -> Peer:
        peer = kind(self.folder / name, *flags)
        self.peers.append(peer)
        return peer

    def sleeper(self, name: str, *flags) -> Peer:
        return self.peer(name, *flags, kind=Sleeper)

    def as_written(self, name: str, line: str) -> Peer:
        place = self.folder / name
        place.mkdir()
        (place / "diffusermodel").symlink_to(self.model)
        self.peers.append(AsWritten(place, line))
        return self.peers[-1]

    def wait(self, what, condition) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            for peer in self.peers:
                peer.watch()
            assert time.monotonic() < deadline, f"no {what}:\n" + "\n".join(
                f"--- {peer.folder.name}\n{peer.text()[-3000:]}" for peer in self.peers
            )
            time.sleep(0.25)

    def check(self, final: int | None = None) -> None:
        """What must hold however the swarm fared. final: samples that were final when all were killed at once: a round that was on nobody's
        disk yet may be lost then, and only that."""
        digests: dict[tuple, set] = {}
        for peer in self.peers:
            rounds = peer.rounds()
            back = [later["samples"] for earlier, later in itertools.pairwise(rounds) if later["samples"] < earlier["samples"]]
            assert not back or (final is not None and len(back) == 1 and back[0] >= final), "a round went back"
            for line in rounds:
                digests.setdefault((line["round"], line["parent"], str(line["members"])), set()).add(line["digest"])
        assert all(len(found) == 1 for found in digests.values()), digests

    def close(self) -> None:
        for peer in self.peers:
            peer.kill()
        for host in self.hosts:
            host.stop()

    def orphans(self) -> list[psutil.Process]:
        return psutil.wait_procs({process for peer in self.peers for process in peer.tree if alive(process)}, timeout=30)[1]


@pytest.fixture
def swarm(tmp_path, tiny_model):
    made = Swarm(tmp_path, tiny_model)
    yield made
    made.close()


def counted(host: Host) -> int:
    return sum(progress(host)["samples_by_peer"].values())


def address(peer: Peer) -> str:
    return next(word for line in peer.text().splitlines() if "--peers " in line for word in line.split() if word.startswith("/ip4/"))


def test_peers_of_unlike_precision_that_know_only_the_url_train_one_model(swarm):
    host = swarm.host("--total_samples", "512", "--validation_split", "0.1")
    kinds = {
        "single": ("--mixed_precision", "no", "--log_format", "json"),
        "autocast": ("--mixed_precision", "bf16"),
        "kept": ("--weights", "bf16"),
    }
    peers = {name: swarm.peer(name, "--datasetserver", host.url, *THREE, *flags) for name, flags in kinds.items()}

    assert [peer.finish() for peer in peers.values()] == [0, 0, 0], "".join(peer.text() for peer in peers.values())
    late = swarm.sleeper("late", "--datasetserver", host.url)

    swarm.check()
    single, autocast, kept = peers.values()
    assert {name: peer.members() for name, peer in peers.items()} == dict.fromkeys(kinds, 3)
    assert {line["how"] for line in single.rounds()} <= {"averaged", "fetched", "solo"}
    assert len({peer.rounds()[-1]["digest"] for peer in peers.values()}) == 1 and single.rounds()[-1]["samples"] >= 512
    assert ["autocast=bf16" in peer.text() for peer in peers.values()] == [False, True, True]
    events = [json.loads(line) for line in single.text().splitlines()]  # of trainer and sidecar
    assert {"averaged", "finished"} <= {event["event"] for event in events} and {event["peer"] for event in events} == {"single"}
    figures = read_lines(autocast.folder / "metrics.jsonl")[-1]
    assert {"loss", "validation_loss", "live_peers", "round_target", "sent_bytes", "share_lost"} <= figures.keys() <= {"time", *NAMES}
    assert progress(host)["dataset_samples"] == 37 and all("pictures=3" in peer.text() for peer in (autocast, kept)), "3 of 40 are held out"
    swarm.wait("complete ledger", lambda: counted(host) == single.rounds()[-1]["samples"])

    assert digest_model(single.folder / "model") == digest_model(autocast.folder / "model")
    results = [unet_of(peer.folder / "model") for peer in (single, kept)]
    for name, tensor in unet_of(swarm.model).items():
        exact, near = (result[name].float() for result in results)
        assert (near - exact).abs().le(exact.abs() * 2**-7).all(), "within the last bit of bf16"
        assert not torch.equal(exact, tensor) or name.endswith("bias")

    assert late.finish() == ExitCode.OVER
    assert "is over: all" in late.text() and "Traceback" not in late.text()
    assert swarm.orphans() == []


def test_peers_with_their_own_pictures_need_no_server_and_one_that_nobody_can_dial_takes_part(swarm):
    own = ("--train_data_dir", swarm.pictures, *TWO)
    founder = swarm.sleeper("founder", "--found", "--model", swarm.model, *own, *RUN, "--total_samples", "512")
    swarm.wait("address", lambda: "--peers /ip4/" in founder.text())
    hidden = swarm.sleeper("hidden", "--peers", address(founder), "--client_mode", *own)

    assert (founder.finish(), hidden.finish()) == (0, 0), founder.text() + hidden.text()

    swarm.check()
    assert hidden.members() == 2 and "--peers /ip4/" not in hidden.text()
    assert founder.rounds()[-1]["digest"] == hidden.rounds()[-1]["digest"]
    assert swarm.orphans() == []


def unet_of(model: Path) -> dict:
    return load_file(model / "unet" / "diffusion_pytorch_model.safetensors")


NEW_SESSION = (
    'torchrun --nproc_per_node=N finetune.py --datasetserver="URL of my dataset server" --wantedimages=300 --model ./diffusermodel'
    ' --run_name myFinetunedModel --hivemind="True" '
)
EXISTING_SESSION = NEW_SESSION + '--peers="Provided DHT peers"'
"""The original's own lines, as its page has them."""


def test_the_originals_own_lines_start_a_peer_of_two_ranks_and_one_that_joins_it(swarm):
    # A peer that was told to wait asks again after 5 s; in that time the other one trained 64 samples, the whole run as it was.
    host = swarm.host("--total_samples", "320", "--target_batch_size", "32", "--run_name", "myFinetunedModel")
    order(host, "pause")  # nobody trains before both are there

    def line(words, ranks, peers=""):
        words = words.replace("=N", f"={ranks}").replace("finetune.py", FINETUNE).replace("URL of my dataset server", host.url)
        return words.replace("Provided DHT peers", peers)

    pair = swarm.as_written("pair", line(NEW_SESSION, ranks=2))
    swarm.wait("address", lambda: "--peers /ip4/" in pair.text())
    single = swarm.as_written("single", line(EXISTING_SESSION, ranks=1, peers=address(pair)))
    swarm.wait("second peer", lambda: "others can join with" in single.text())
    found = {name: pair.programs(name) for name in ("peer.sync.engine.trainer.sidecar", "p2pd")}
    assert found == {"peer.sync.engine.trainer.sidecar": 1, "p2pd": 1}, "one upload for both ranks"
    order(host, "resume")

    assert (pair.finish(), single.finish()) == (0, 0), pair.text() + single.text()

    swarm.check()
    assert single.members() == 2
    assert digest_model(pair.folder / "model") == digest_model(single.folder / "model") != digest_model(swarm.model)
    assert swarm.orphans() == []


def order(host: Host, word: str) -> None:
    log = host.dataset.with_name("orders.log")
    assert Warm(["-m", "datasetserver", word, *host.flags[:2]], ROOT, log).wait(WAIT_SECONDS) == 0, log.read_text()


def test_a_peer_told_to_stop_gives_back_what_it_did_not_use(swarm):
    host = swarm.host("--lease_seconds", "86400", "--grace_seconds", "86400")  # nothing expires: what is free was given back
    one, two = (swarm.sleeper(name, "--datasetserver", host.url, *TWO) for name in ("one", "two"))
    swarm.wait("round of both", lambda: one.members() == 2)

    for peer in (one, two):
        peer.stop()
        assert peer.finish() == 0, peer.text()

    swarm.check()
    assert "Traceback" not in one.text() + two.text()
    assert swarm.orphans() == []
    assert progress(host)["ledger"]["leased"] == 0
    assert counted(host) == max(peer.rounds()[-1]["samples"] for peer in (one, two))


def test_after_all_were_killed_they_go_on_from_their_last_state_and_a_stranger_waits_for_it(swarm):
    host = swarm.host()
    one, two = (swarm.sleeper(name, "--datasetserver", host.url, *TWO) for name in ("one", "two"))
    swarm.wait("final round of both", lambda: counted(host) > 0 and len(one.rounds()) > 1)
    final = counted(host)
    # Two peers that hold a state make it final; that is a moment before it is on the disk of either.
    swarm.wait("final state on a disk", lambda: max(one.on_disk(), two.on_disk()) >= final)
    one.kill()
    two.kill()
    stranger = swarm.sleeper("stranger", "--datasetserver", host.url)
    swarm.wait("word of who has the state", lambda: "waiting for one who has that state" in stranger.text())
    assert stranger.rounds() == []

    again = swarm.sleeper("one", "--datasetserver", host.url)
    other = swarm.sleeper("two", "--datasetserver", host.url)

    swarm.wait("round of all", lambda: stranger.members() == 3)
    for peer in (again, other, stranger):
        peer.stop()
    assert [peer.finish() for peer in (again, other, stranger)] == [0, 0, 0], again.text() + other.text() + stranger.text()
    swarm.check(final)
    assert stranger.rounds()[0]["how"] == "fetched"
    assert stranger.rounds()[0]["samples"] >= final
    assert swarm.orphans() == []
