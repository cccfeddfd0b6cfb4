"""Whose an output folder is: another run's things are set aside and come back, and nothing of a run is ever lost or mixed with another's."""

import contextlib
import dataclasses
import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from peer.config import PeerConfig
from peer.results import output_folder
from peer.results.output_folder import Owner, claim, link_result, links, lock, mark, owner_of
from peer.wiring import claim_output
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig
from tests.conftest import ROOT

THINGS = ("model/unet.bin", "model-steps-5/unet.bin", "validation/1.png", "checkpoint-000007/manifest.json", "state/one.state",
          "settled/two.state", "rounds.jsonl", "metrics.jsonl", "peers_met.json", "kind.json", "logs/events")  # fmt: skip
MACHINES = (
    "identity.key",
    "known_hosts.json",
    "contribution_number",
    "peer_state",
    "cache/shards/x.tar",
    "supervised/life",
    "peer.log",
    "mine.txt",
)


def swarm(letter, name="first"):
    return Owner(id=letter * 16, name=name, alone=False, about={"run": {"run_name": name, "sync": "parameters"}})


def alone(letter):
    return Owner(id=letter * 16, name="mine", alone=True, about={"run": {"run_name": "mine", "sync": "none"}})


def fill(folder, text, names=(*THINGS, *MACHINES)):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def there(folder, names=THINGS):
    return {name: (folder / name).read_text() for name in names if (folder / name).exists()}


@pytest.fixture
def output(tmp_path):
    """A folder in which the run A has trained."""
    assert not claim(tmp_path, swarm("a"))
    fill(tmp_path, "A")
    return tmp_path


def test_the_same_run_finds_all_it_has(output):
    assert claim(output, swarm("a")) and there(output) == dict.fromkeys(THINGS, "A") and not (output / "earlier").exists()


def test_of_another_run_everything_is_set_aside_and_what_is_the_machines_stays(output, caplog):
    assert not claim(output, swarm("b"))
    assert there(output) == {} and there(output / "earlier" / ("a" * 16)) == dict.fromkeys(THINGS, "A")
    assert there(output, MACHINES) == dict.fromkeys(MACHINES, "A")
    assert owner_of(output).id == "b" * 16 and owner_of(output / "earlier" / ("a" * 16)).id == "a" * 16
    assert f"held the run 'first' ({'a' * 16}): moved its checkpoints and results to {output / 'earlier' / ('a' * 16)};" in caplog.text


def test_a_run_that_is_joined_again_has_its_things_again(output):
    claim(output, swarm("b"))
    fill(output, "B", THINGS)
    assert claim(output, swarm("a")) and there(output) == dict.fromkeys(THINGS, "A")
    assert there(output / "earlier" / ("b" * 16)) == dict.fromkeys(THINGS, "B")
    assert not (output / "earlier" / ("a" * 16)).exists()
    assert claim(output, swarm("b")) and there(output) == dict.fromkeys(THINGS, "B")


def test_a_run_that_had_come_to_nothing_leaves_nothing(tmp_path):
    claim(tmp_path, swarm("a"))
    claim(tmp_path, swarm("b"))
    assert not (tmp_path / "earlier").exists() and owner_of(tmp_path).id == "b" * 16


class Killed(BaseException):
    pass


@pytest.mark.parametrize("next_run", ["a", "b", "c"])
def test_who_is_killed_between_any_two_moves_loses_and_mixes_nothing(tmp_path, monkeypatch, next_run):
    """B was here, then A; then B comes back, and is killed after each number of moves; then one of three runs starts."""
    real, folder, left = Path.rename, tmp_path / "x", 0

    def rename(path, target):
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        return real(path, target)

    for moves in range(2 * len(THINGS) + 3):
        folder = tmp_path / str(moves)
        folder.mkdir()
        for letter in "ba":
            claim(folder, swarm(letter))
            fill(folder, letter, THINGS)
        left = moves
        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", rename)
            with contextlib.suppress(Killed):
                claim(folder, swarm("b"))
        claim(folder, swarm(next_run))
        for letter in "ab":
            place = folder if letter == next_run else folder / "earlier" / (letter * 16)
            assert there(place) == dict.fromkeys(THINGS, letter), (moves, letter)
    assert left, "the last of them was not killed"


def test_a_swarms_checkpoint_is_not_resumed_in_another_run_and_nothing_is_moved(output):
    wishes = ("latest", str(output / "checkpoint-000007"))
    for wanted in wishes:
        for owner in (swarm("b"), alone("c")):
            with pytest.raises(UserError, match=r"holds the run 'first' \(a{16}\): there is no checkpoint of") as raised:
                claim(output, owner, wanted=wanted)
            assert raised.value.code == ExitCode.CONFIG and "Remove --resume_from_checkpoint" in raised.value.fix
    assert owner_of(output).id == "a" * 16 and there(output) == dict.fromkeys(THINGS, "A")
    assert not claim(output, swarm("b"), wanted="none")


def test_alone_other_options_go_on_with_a_checkpoint_when_that_is_asked_for(tmp_path):
    claim(tmp_path, alone("a"))
    fill(tmp_path, "A", THINGS)
    assert claim(tmp_path, alone("b"), wanted="latest") and there(tmp_path) == dict.fromkeys(THINGS, "A")
    assert owner_of(tmp_path).id == "a" * 16, "they are the first one's until the other has gone on with them"
    mark(tmp_path, alone("b"))
    assert owner_of(tmp_path).id == "b" * 16
    assert not claim(tmp_path, alone("c")) and there(tmp_path) == {}
    assert claim(tmp_path, alone("b"), wanted="latest") and there(tmp_path) == dict.fromkeys(THINGS, "A"), "its own, not that of the last"


def test_what_this_start_needs_is_not_moved_away(output):
    with pytest.raises(UserError, match=r"model is part of the run 'first' \(a{16}\), which .* holds"):
        claim(output, swarm("b"), used=[output / "pictures", output / "model"])
    assert there(output) == dict.fromkeys(THINGS, "A")
    assert claim(output, swarm("a"), used=[output / "model"])


def test_a_folder_that_a_file_names_is_needed_like_one_that_is_given(output):
    (output / "data.toml").write_text('[[datasets]]\n[[datasets.subsets]]\nimage_dir = "validation"')
    joined = SimpleNamespace(run=RunConfig(run_name="other", sync="none"), about=dict)
    peer = PeerConfig(train_data_dir=str(output / "data.toml"))
    with pytest.raises(UserError, match="validation is part of the run 'first'"):
        claim_output(SimpleNamespace(joined=joined, peer=peer, given={}, output=output))
    assert there(output) == dict.fromkeys(THINGS, "A")


@pytest.mark.parametrize("said", [None, "", "{}", "[]", '{"run": 7}', '{"run": {"run_name": "x", "sync": "none"}, "id": "../../etc"}'])
def test_where_nothing_says_whose_a_result_is_it_is_not_touched(output, said):
    (output / "run.json").unlink()
    if said is not None:
        (output / "run.json").write_text(said)
    with pytest.raises(UserError, match=r"run\.json is (missing|damaged), which names the run of checkpoint-000007, ") as raised:
        claim(output, swarm("a"))
    assert raised.value.code == ExitCode.CONFIG and there(output) == dict.fromkeys(THINGS, "A")


def test_a_damaged_word_over_nothing_of_worth_is_written_anew(tmp_path):
    fill(tmp_path, "x", MACHINES)
    (tmp_path / "run.json").write_bytes(random.Random(20).randbytes(50))
    assert not claim(tmp_path, swarm("a")) and owner_of(tmp_path).id == "a" * 16


def test_a_folder_from_before_it_had_an_id_is_its_runs(tmp_path):
    sent = dataclasses.asdict(RunConfig(model="m", run_name="old"))
    run = RunConfig.from_mapping(sent, where="here")
    (tmp_path / "run.json").write_text(json.dumps({"run": sent, "server_url": "", "peers": []}))
    fill(tmp_path, "A", THINGS)
    assert claim(tmp_path, Owner(id=run.run_id, name="old", alone=False)) and there(tmp_path) == dict.fromkeys(THINGS, "A")


def test_a_disk_that_refuses_is_a_users_error(output, monkeypatch):
    def refuse(path, target):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UserError, match="Permission denied") as raised:
        claim(output, swarm("b"))
    assert raised.value.code == ExitCode.DISK and there(output) == dict.fromkeys(THINGS, "A")


def test_a_folder_in_use_is_not_moved_under_its_user(output):
    code = f"import sys; from pathlib import Path; from peer.results.output_folder import lock; kept = lock(Path({str(output)!r})); print('mine', flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "mine\n"
        with pytest.raises(UserError, match="Another peer is using"):
            lock(output)
    finally:
        other.kill()
        other.communicate()
    lock(output).close()
    with pytest.raises(UserError) as raised:
        lock(output / "nowhere")
    assert raised.value.code == ExitCode.DISK


PARTS = ("model/model_index.json", "model/unet/weights", "model/README.md", "model/result.json")


def test_a_result_is_linked_part_by_part_and_the_links_go_where_it_goes(tmp_path):
    claim(tmp_path, swarm("a"))
    fill(tmp_path, "A", PARTS)
    (tmp_path / "vae").symlink_to("model/vae")  # of a result with another part
    link_result(tmp_path)
    assert {path.name for path in links(tmp_path)} == {"model_index.json", "unet"}
    claim(tmp_path, swarm("b"))
    assert not links(tmp_path) and (tmp_path / "earlier" / ("a" * 16) / "unet" / "weights").read_text() == "A"
    claim(tmp_path, swarm("a"))
    assert (tmp_path / "unet" / "weights").read_text() == "A" and not (tmp_path / "earlier").exists()


def test_a_link_to_a_result_takes_nobodys_place(tmp_path):
    fill(tmp_path, "A", PARTS)
    fill(tmp_path, "mine", ["unet/weights"])
    link_result(tmp_path)
    assert (tmp_path / "unet" / "weights").read_text() == "mine" and (tmp_path / "model_index.json").is_symlink()


def test_a_folder_that_is_loaded_by_its_links_is_not_emptied_by_the_run_that_loads_it(tmp_path):
    """`--model OUT --output_dir OUT`: the links go aside with what they point to."""
    claim(tmp_path, swarm("a"))
    fill(tmp_path, "A", PARTS)
    link_result(tmp_path)
    with pytest.raises(UserError, match=r"is part of the run 'first'"):
        claim(tmp_path, swarm("b"), used=[tmp_path])
    assert (tmp_path / "unet" / "weights").read_text() == "A" and owner_of(tmp_path).id == "a" * 16


def test_a_link_that_leads_nowhere_is_somebodys_and_keeps_no_other_part_from_its_link(tmp_path):
    fill(tmp_path, "A", PARTS)
    (tmp_path / "model_index.json").symlink_to("gone")
    link_result(tmp_path)
    assert os.readlink(tmp_path / "model_index.json") == "gone" and (tmp_path / "unet" / "weights").read_text() == "A"


def test_a_disk_without_links_is_no_error(tmp_path, monkeypatch):
    fill(tmp_path, "A", PARTS)

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    link_result(tmp_path)
    assert not links(tmp_path)


def test_what_purge_calls_results_is_what_is_set_aside():
    assert set(output_folder.RESULTS) < set(output_folder._OF_A_RUN)


def test_the_words_of_one_runs_host_are_not_written_over_by_those_of_another(output):
    """A helper's bans.json lies in the folder itself: after a visit to another run it began without those of its own."""
    (output / "bans.json").write_text("A")
    claim(output, swarm("b"))
    (output / "bans.json").write_text("B")
    claim(output, swarm("a"))
    assert (output / "bans.json").read_text() == "A"
