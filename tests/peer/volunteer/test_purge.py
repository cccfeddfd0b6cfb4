"""`dd-peer --purge` deletes what a peer stored, after a list of it, and nothing else."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from peer.config import PeerConfig
from peer.contracts import SourceContext
from peer.data import directory
from peer.data.client.runs import fetch_run
from peer.data.dataset_server import build
from peer.data.unsaid import Unsaid
from peer.results.output_folder import link_result
from peer.samples.caches import TensorCache, latents_name
from peer.samples.pictures import Frame
from peer.supervise import _own_folder
from peer.supervise import cli as main
from peer.volunteer import purge
from swarm.errors import ExitCode, UserError
from swarm.identity import Identity
from swarm.run_config import RunConfig

HEX = "0123456789abcdef" * 4
OURS = (
    "contribution_number", "in_use.lock", "known_hosts.json", "state/met.json", "state/proofs.json", "state/certificate.json", f"earlier/{HEX[:16]}/run.json", f"earlier/{HEX[:16]}/rounds.jsonl",
    f"earlier/{HEX[:16]}/checkpoint-000007/manifest.json", f"earlier/{HEX[:16]}/state/samples-0000000000000064-round-00000001-{HEX[:12]}.state", "metrics.jsonl", "peer_state", "rounds.jsonl", "run.json",
    f"state/samples-0000000000000064-round-00000001-{HEX[:12]}.state", f"state/means/{HEX[:32]}.mean",
    f"settled/round-00000001-samples-0000000064-{HEX[:12]}.state",
    f"cache/shards/{HEX}.tar", f"cache/shards/{HEX}.tar.part", f"cache/latents/{HEX[:32]}/ab/{HEX}.safetensors", f"cache/unsaid-{HEX[:16]}-QmPeer.jsonl", f"cache/pictures-{HEX[:16]}.json",
    "checkpoint-000001/manifest.json", "checkpoint-000001/tensors.safetensors", "run.json.17-140.part", f"cache/latents/{HEX[:32]}/ab/{HEX}.safetensors.17.140.part", "logs/run/events.out.tfevents.123", "supervised/life", "supervised/lock", "supervised/room",
    ".checkpoint-000002.writing/tensors.safetensors", ".model.writing/unet/x.safetensors", f"earlier/{HEX[:16]}/.checkpoint-000006.old/tensors.safetensors",
    f"audit/{HEX[:12]}.state", "cache/train_batch_size.json", "profile/trace-20261128-024500.json",
)  # fmt: skip
RESULTS = (f"earlier/{HEX[:16]}/model/model_index.json", "model/model_index.json", "model-steps-5/unet/x.safetensors", "validation/1.png")
STRANGERS = (
    "notes.txt",
    "cache/my.tar",
    "cache/shards/my.tar",
    "state/notes.txt",
    "checkpoint-mine/weights.bin",
    "pictures/a.png",
    "cache/latents/other/x.safetensors",
)


@pytest.fixture
def output(tmp_path):
    for name in (*OURS, *RESULTS, *STRANGERS):
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")
    Identity(tmp_path / "out" / "identity.key").close()
    return tmp_path / "out"


def there(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_the_peer_stored_goes_and_results_and_strangers_stay(output, capsys):
    assert main(["--purge", "--output_dir", str(output), "--yes"]) == 0
    assert there(output) == {*RESULTS, *STRANGERS}
    text = capsys.readouterr().out
    assert f"stays: earlier/{HEX[:16]}/model, model, model-steps-5, validation" in text and "35 bytes  " in text and "together" in text
    assert not (output / "settled").exists() and not (output / "state" / "means").exists()
    assert all(str(output / name) in text for name in STRANGERS) and text.endswith("deleted, except what stays\n")


@pytest.mark.parametrize("flags", [["--purge", "all"], ["--purge=all"]])
def test_all_takes_the_results_too(output, flags):
    assert main([*flags, "--output_dir", str(output), "--yes"]) == 0
    assert there(output) == {*STRANGERS} and not (output / "earlier").exists()


def test_links_to_a_result_stay_and_go_with_it(output, capsys):
    link_result(output)
    link = output / "model_index.json"
    assert main(["--purge", "--output_dir", str(output), "--yes"]) == 0
    assert link.is_file() and str(link) not in capsys.readouterr().out
    assert main(["--purge", "all", "--output_dir", str(output), "--yes"]) == 0
    assert not link.is_symlink()


def test_what_wandb_wrote_goes_with_its_links(output, capsys):
    wandb = output / "logs" / "wandb"
    run = wandb / "offline-run-20261128_024500-a1b2c3d4"
    for name in ("run-a1b2c3d4.wandb", "files/media/images/validation_1_0.png", "logs/debug.log"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(b"12345")
    (run / "tmp" / "code").mkdir(parents=True)
    (run / "logs" / "debug-core.log").symlink_to("/nowhere/core-debug.log")
    (wandb / "latest-run").symlink_to(run.name)
    (wandb / "debug.log").symlink_to(run / "logs" / "debug.log")
    (wandb / "run-of-mine.txt").write_text("mine")
    assert main(["--purge", "--output_dir", str(output), "--yes"]) == 0
    assert list(wandb.iterdir()) == [wandb / "run-of-mine.txt"]
    assert [word for word in capsys.readouterr().out.split() if "logs/wandb" in word] == [f"{wandb / 'run-of-mine.txt'},"]


def test_a_folder_with_nothing_else_in_it_goes_as_well(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{}")
    assert main(["--purge", "--output_dir", str(tmp_path / "out"), "--yes"]) == 0
    assert not (tmp_path / "out").exists()


def test_nothing_stays_of_what_the_sources_and_caches_of_a_peer_wrote(serve, tmp_path, capsys):
    host, output = serve(samples=4, shard_samples=2), tmp_path / "out"
    run = RunConfig.from_mapping(fetch_run(host.url, 20).run, where=host.url)
    cache = output / "cache"
    identity = Identity(output / "identity.key")
    peer = PeerConfig(output_dir=str(output), cache_gib=1.0)
    source = build(SourceContext(run=run, url=host.url, peer=peer, peer_id=identity.peer_id, batch_samples=2))
    next(iter(source))
    source.close()
    Unsaid(cache / f"unsaid-{run.run_id}-QmPeer.jsonl").keep({"path": "/v1/rounds"})
    TensorCache(cache / "latents", HEX, 2**20).put(latents_name(b"a picture", Frame(8, 8)), {"latents": torch.zeros(2)})
    TensorCache(cache / "texts", HEX, 2**20)
    (tmp_path / "mine").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "mine" / "1.png")
    directory.good_pairs(tmp_path / "mine", directory.Rules(prompt=""), cache)
    identity.close()
    assert len(there(cache)) >= 3 and any(name.startswith("cache/shards/") for name in there(output))
    assert main(["--purge", "--output_dir", str(output), "--yes"]) == 0
    assert not output.exists() and capsys.readouterr().out.endswith("\ndeleted\n")


def test_of_many_files_of_others_some_are_named(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    for name in ("run.json", *(f"mine-{i:02}" for i in range(13))):
        (tmp_path / "out" / name).write_text("{}")
    assert main(["--purge", "--output_dir", str(tmp_path / "out"), "--yes"]) == 0
    said = capsys.readouterr().out
    assert "mine-09, and 3 more\n" in said and "mine-10" not in said


def test_nothing_goes_without_a_yes(output, capsys):
    before = there(output)
    for answer in ("", "n", "what"):
        assert purge.main(["--purge", "--output_dir", str(output)], ask=lambda question, answer=answer: answer) == 0

    def nobody(question):
        raise EOFError

    assert purge.main(["--purge", "--output_dir", str(output)], ask=nobody) == 0
    assert there(output) == before and "add --yes" in capsys.readouterr().err
    assert purge.main(["--purge", "--output_dir", str(output)], ask=lambda question: "y") == 0
    assert there(output) != before


def test_a_cache_elsewhere_is_cleared_of_our_files_alone(output, tmp_path):
    shared = tmp_path / "shared"
    (shared / "shards").mkdir(parents=True)
    for name in (f"shards/{HEX}.tar", "holiday.tar"):
        (shared / name).write_bytes(b"1")
    assert main(["--purge", "--output_dir", str(output), "--cache_dir", str(shared), "--yes"]) == 0
    assert there(shared) == {"holiday.tar"} and there(output) == {*RESULTS, *STRANGERS}, "also what a start without --cache_dir kept"


def test_its_log_goes_where_it_is_named(output, tmp_path):
    logs = [tmp_path / "logs" / name for name in ("peer[1].log", "peer[1].log.1", "peer[1].log.12")]
    mine = [tmp_path / "logs" / name for name in ("peer[1].log.mine", "peer1.log.1")]
    logs[0].parent.mkdir()
    for path in (*logs, *mine):
        path.write_text("a line")
    assert main(["--purge", "--output_dir", str(output), "--log_file", str(logs[0]), "--yes"]) == 0
    assert sorted(logs[0].parent.iterdir()) == sorted(mine) and there(output) == {*RESULTS, *STRANGERS}


def test_a_peer_that_runs_is_not_purged_and_a_folder_that_is_not_there_is_a_mistake(output, tmp_path, capsys):
    before = there(output)
    for running in (lambda: contextlib.closing(Identity(output / "identity.key")), lambda: _own_folder(output / "supervised")):
        with running():
            assert main(["--purge", "--output_dir", str(output), "--yes"]) == ExitCode.CONFIG and there(output) == before
        assert f"The peer in {output} is running. Stop it first (Ctrl-C" in capsys.readouterr().err
    assert main(["--purge", "--output_dir", str(tmp_path / "nowhere")]) == ExitCode.CONFIG
    (tmp_path / "empty").mkdir()
    assert main(["--purge", "--output_dir", str(tmp_path / "empty")]) == 0


def test_a_folder_in_which_a_trainer_runs_alone_is_not_purged(output, capsys):
    """It takes its lock with lockf, which flock does not see, and its checkpoints were deleted under it."""
    before = there(output)
    hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", hold, output / "in_use.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        assert main(["--purge", "--output_dir", str(output), "--yes"]) == ExitCode.CONFIG and there(output) == before
    finally:
        other.communicate()
    assert f"The peer in {output} is running." in capsys.readouterr().err
    assert main(["--purge", "--output_dir", str(output), "--yes"]) == ExitCode.OK and there(output) != before


def test_a_link_is_deleted_and_not_what_it_leads_to(output, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "a").write_text("a")
    (output / "model-steps-9").symlink_to(kept)
    (output / "run.json").unlink()
    (output / "run.json").symlink_to(kept / "a")
    assert main(["--purge", "all", "--output_dir", str(output), "--yes"]) == 0
    assert there(kept) == {"a"} and not (output / "model-steps-9").is_symlink()


def test_what_cannot_be_deleted_is_a_users_error(output, monkeypatch):
    def refuse(self, missing_ok=False):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UserError, match="Cannot delete"):
        purge.main(["--purge", "--output_dir", str(output), "--yes"])


@pytest.mark.parametrize(("word", "fix"), [("purge", "Did you mean '--purge'? See --help."), ("resum", "Did you mean 'resume'? See --help."), ("go", "See --help.")])
def test_a_first_word_that_is_no_command_is_answered_with_the_nearest_one(word, fix, capsys):
    assert main([word, "--output_dir", "out"]) == ExitCode.CONFIG
    assert capsys.readouterr().err == f"error: Unknown command {word}. {fix}\n"
