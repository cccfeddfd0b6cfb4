"""`python -m datasetserver` as a host runs it: its errors, its restarts, its end."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request

import pytest
from PIL import Image

from datasetserver.__main__ import cli
from swarm.errors import ExitCode
from tests.datasetserver.hosting import ROOT, Host, write_dataset, write_model
from tests.datasetserver.test_http import BASE, call, envelope, keys_of, lease
from tests.identities import id_of


def complaint(capsys, *argv):
    """(exit code, the one line on stderr) of a command that must fail."""
    code = cli(argv)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return code, lines[0]


def test_mistakes_are_answered_with_one_line(tmp_path, capsys):
    data, model = str(write_dataset(tmp_path / "data", 2)), str(write_model(tmp_path / "model"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "run.toml").write_text("learning_rat = 1e-4\n")
    good = ["--dataset", data, "--model", model, "--port", "0", "--ingest_workers", "0"]
    for argv, what in [
        ([], "--dataset"),
        (["--dataset", str(tmp_path / "nowhere")], "nowhere"),
        (["--dataset", str(tmp_path / "empty"), "--port", "0"], "no picture"),
        ([*good[:2], *good[4:], "--learning_rate", "1e-4"], "--model"),
        ([*good[:2], "--model", str(tmp_path / "empty"), *good[4:]], "not a diffusers pipeline"),
        ([*good, "--por", "1"], "--port"),
        ([*good, "--port", "70000"], "70000"),
        ([*good, "--public_url", "http://a,http://b"], "is not a URL"),
        ([*good, "--public_url", "http://HOST:PORT"], "public_url, 'http://HOST:PORT', is not a URL"),
        ([*good, "--public_url", "https://alice:secret@pictures.example"], "The URL of public_url has a name or a password in it"),
        ([*good, "--public_url", "203.0.113.7:9090"], "Write http://203.0.113.7:9090"),
        ([*good, "--config", data], "cannot be read: Is a directory"),
        ([*good, "--resolution", "abc"], "--resolution: invalid int value"),
        (["token", "add"], "The following arguments are required: name"),
        (["token", "take"], "invalid choice: 'take'"),
        (["bann", "--dataset", data], "Unknown command bann. Did you mean 'ban'? See --help."),
        (["serve"], "Unknown command serve. See --help."),
        (["pause", "--dataset"], "--dataset: expected one argument"),
        ([*good, "--config", str(tmp_path / "run.toml")], "learning_rate"),
        ([*good, "--lease_seconds", "0"], "lease_seconds"),
        ([*good, "--model_digest", "0" * 64], "digest"),
    ]:
        code, line = complaint(capsys, *argv)
        assert code == ExitCode.CONFIG and what in line, (argv, line)


def test_what_is_wrong_with_the_run_is_said_before_any_picture_is_looked_at(tmp_path, capsys):
    folder, model = write_dataset(tmp_path / "data", 2), str(write_model(tmp_path / "model"))
    for wrong, what in [
        (["--model", model, "--target_batch_size", "-5"], "target_batch_size is -5"),
        (["--model", str(tmp_path / "nowhere" / "model.safetensors" / "x")], "neither a folder nor a Hub id"),
        (["--model", model, "--model_digest", "0" * 64], "digest"),
    ]:
        code, line = complaint(capsys, "--dataset", str(folder), "--port", "0", "--no_dht", *wrong)
        assert code == ExitCode.CONFIG and what in line
    assert [path.name for path in (tmp_path / "data.datasetserver").iterdir()] == ["lock"]


def test_a_model_that_nobody_has_is_one_line_without_the_librarys_words(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, line = complaint(capsys, "--dataset", str(write_dataset(tmp_path / "data", 2)), "--model", "no-such-model", "--port", "0")
    fix = "Check the name and the network, and whether its licence must be accepted on the Hub (then HF_TOKEN); or give its folder with --model FOLDER."
    assert code == ExitCode.NETWORK
    assert line == f"error: There is no model 'no-such-model' on this machine, and it could not be loaded from the Hub. {fix}"


def test_a_port_in_use_is_named(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, line = complaint(capsys, "--dataset", str(write_dataset(tmp_path / "data", 1)), "--model", "m", "--port", port)
    assert code == ExitCode.NETWORK and port in line and "--port" in line


def test_serving_and_help_need_neither_torch_nor_hivemind(tmp_path):
    """Both are made impossible to import; the server says that it goes without the DHT, and serves."""
    for name in ("torch", "hivemind", "transformers", "diffusers", "datasets"):
        (tmp_path / "blocked" / name).mkdir(parents=True)
        (tmp_path / "blocked" / name / "__init__.py").write_text("raise ImportError('blocked')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "blocked")}
    helped = subprocess.run([sys.executable, "-m", "datasetserver", "--help", "all"], cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert helped.returncode == 0 and b"--lease_seconds" in helped.stdout
    data, model = write_dataset(tmp_path / "data", 2), write_model(tmp_path / "model")
    command = [
        sys.executable,
        "-m",
        "datasetserver",
        "--dataset",
        data,
        "--model",
        model,
        "--port",
        "0",
        "--no_dht",
        "--ingest_workers",
        "1",
    ]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert any(line.startswith("serving ") for line in process.stdout)
        finally:
            process.terminate()
        assert process.wait(20) == 0


def test_what_was_answered_survives_kill_9(tmp_path):
    """Peers lease, register and report as fast as they can while the server is killed again and again."""
    import threading

    host = Host(tmp_path, samples=200, shard_samples=4).start()
    run = envelope(host)["run_id"]
    answered, final, stop = [], [], threading.Event()

    def post(path, **body):
        try:
            status, _, data = call(host, path, {"run_id": run, **body})
        except OSError:  # killed under us: whether it was done is not known, so ask again
            return None
        if status == 403 and json.loads(data)["error"]["code"] == "clock_differs":  # signed before the server started: sign it anew
            return None
        assert status < 500, data
        return status, json.loads(data)

    def insist(path, **body):
        while (answer := post(path, **body)) is None:
            time.sleep(0.02)
        return answer

    def train(peer):
        number = 0
        while not stop.is_set():
            answer = post("/v1/leases", peer=id_of(peer), want_samples=3)
            if answer is None:
                continue
            keys = [f"{u['epoch']}:{u['shard']}:{i}" for u in answer[1]["shard_epochs"] for i in range(u["samples"]) if i not in u["skip"]]
            number += 1
            status, body = insist("/v1/contributions", peer=id_of(peer), number=number, keys=keys)
            assert status == 200, body
            answered.append((peer, number, keys))

    threads = [threading.Thread(target=train, args=(f"peer{n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    parent, samples = BASE, 0
    try:
        for round_ in range(1, 7):
            goal = len(answered) + 5
            deadline = time.monotonic() + 60
            while len(answered) < goal and time.monotonic() < deadline:
                time.sleep(0.01)
            oldest = {}  # of each peer: a later contribution would pass it
            for peer, number, keys in [entry for entry in answered[:] if entry not in final]:
                oldest.setdefault(peer, (peer, number, keys))
            members = [{"peer": id_of(peer), "number": number, "samples": len(keys)} for peer, number, keys in oldest.values()]
            samples += sum(member["samples"] for member in members)
            digest = f"{round_:064x}"
            status, body = insist("/v1/rounds", peer=id_of("peer0"), digest=digest, parent=parent, round=round_, samples=samples, members=members)
            assert status == 200, body
            final += list(oldest.values())
            parent = digest
            host.kill()
            host.start()
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    progress = json.loads(call(host, "/v1/progress")[2])
    keys = [key for _, _, keys in answered for key in keys]
    assert len(keys) == len(set(keys)), "a sample was registered twice"
    assert progress["ledger"]["counted"] == progress["samples"] == sum(len(keys) for _, _, keys in final)
    assert progress["ledger"]["counted"] + progress["ledger"]["pending"] == len(keys), "an answered registration was lost"
    assert sum(progress["ledger"].values()) % 200 == 0
    assert host.stop() == 0


def test_a_restart_resumes_the_run_and_another_run_is_refused_its_ledger(tmp_path, capsys):
    host = Host(tmp_path).start()
    granted = lease(host)
    assert call(host, "/v1/contributions", envelope(host, number=1, keys=keys_of(granted)))[0] == 200
    run = envelope(host)["run_id"]
    assert host.stop() == 0
    host.start()
    assert envelope(host)["run_id"] == run
    assert any("unchanged" in line for line in host.lines)
    assert call(host, f"/v1/leases/{granted.lease_id}/renew", envelope(host))[0] in (200, 410)
    assert json.loads(call(host, "/v1/progress")[2])["ledger"]["pending"] == len(keys_of(granted))
    assert host.stop() == 0
    code = cli([*host.flags, "--port", "0", "--learning_rate", "1e-3"])
    said, error = capsys.readouterr()
    assert code == ExitCode.CONFIG and "learning_rate was 5e-06, now 0.001" in error
    assert "--work_dir" in error and "new host key" in error and "samples in" not in said


def test_two_servers_cannot_share_a_work_dir(tmp_path, capsys):
    host = Host(tmp_path).start()
    code, line = complaint(capsys, *host.flags, "--port", "0")
    assert code == ExitCode.CONFIG and "Another server" in line
    assert host.stop() == 0


def test_bad_files_are_listed_when_the_server_starts(tmp_path):
    host = Host(tmp_path)
    (host.dataset / "0003.txt").write_bytes(b"\xff\xfe\xfa")
    (host.dataset / "0004.txt").unlink()
    host.start()
    text = "\n".join(host.lines)
    assert "38 samples" in text and "0003.png: caption is not UTF-8" in text and "0004.png: no caption" in text
    assert host.stop() == 0


def processes_of(host):
    """Pids of all that descends from the server."""
    import psutil

    return [child.pid for child in psutil.Process(host.process.pid).children(recursive=True)]


def lives(pid):
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids, seconds=20):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(map(lives, pids)):
            return True
        time.sleep(0.1)
    return False


def listening(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(5)
        return probe.connect_ex((host, port)) == 0


@pytest.mark.swarm
@pytest.mark.parametrize("deadly", [signal.SIGTERM, signal.SIGKILL])
def test_the_dht_node_serves_restarts_and_leaves_nothing_behind(serve, deadly):
    pytest.importorskip("hivemind")
    host = serve("--dht")
    first = json.loads(urllib.request.urlopen(host.url + "/v1/run", timeout=20).read())["initial_peers"]
    assert first and all(maddr.startswith("/ip4/127.0.0.1/tcp/") for maddr in first)
    import psutil

    (bootstrap,) = psutil.Process(host.process.pid).children()
    before = processes_of(host)
    os.kill(bootstrap.pid, signal.SIGKILL)
    assert gone(before), "p2pd outlived the DHT node"
    host_name, port = first[0].split("/")[2:5:2]
    deadline = time.monotonic() + 60
    while len(set(processes_of(host)) - set(before)) < 2 or not listening(host_name, int(port)):
        assert time.monotonic() < deadline, "the DHT node was not started again where it was"
        time.sleep(0.2)
    assert json.loads(urllib.request.urlopen(host.url + "/v1/run", timeout=20).read())["initial_peers"] == first
    family = processes_of(host)
    if deadly == signal.SIGTERM:
        assert host.stop() == 0
    else:
        host.kill()
    assert gone(family)


@pytest.mark.swarm
def test_a_peer_in_the_dht_is_seen_by_people_and_finds_the_run(tmp_path):
    pytest.importorskip("hivemind")
    import asyncio

    from swarm.dht import SwarmNode
    from swarm.records import PeerRecord

    host = Host(tmp_path, "--dht").start()
    run = json.loads(call(host, "/v1/run")[2])

    async def live():
        node = await SwarmNode.join(initial_peers=run["initial_peers"], identity_path=tmp_path / "identity.key")
        try:
            record = PeerRecord(
                peer_id=node.peer_id,
                config=run["run_id"],
                schema="",
                round=3,
                samples=30,
                digest="d" * 64,
                waiting_samples=7,
                samples_per_second=2.5,
                loss=0.25,
                maddrs=tuple(await node.maddrs()),
            )
            deadline = time.monotonic() + 60
            progress, runs = {"peers": []}, {}
            while not (progress["peers"] and runs) and time.monotonic() < deadline:
                await node.publish(run["run_id"], record)
                runs = await node.find_runs()
                await asyncio.sleep(0.5)
                progress = json.loads((await asyncio.to_thread(call, host, "/v1/progress"))[2])
            peers = json.loads((await asyncio.to_thread(call, host, "/v1/peers"))[2])["peers"]
            return record, progress, peers, runs
        finally:
            await node.close()

    record, progress, peers, runs = asyncio.run(live())
    assert (progress["waiting_samples"], progress["samples_per_second"], progress["loss"]) == (7, 2.5, 0.25)
    assert [(peer["peer_id"], peer["round"], peer["maddrs"]) for peer in peers] == [(record.peer_id, 3, list(record.maddrs))]
    far = json.loads(call(host, "/v1/peers", headers={"X-Forwarded-For": "1.1.1.1"})[2])["peers"]
    assert [peer["maddrs"] for peer in far] == [[]], "a remote caller is told no loopback address"
    assert json.loads(call(host, "/v1/run", headers={"X-Forwarded-For": "1.1.1.1"})[2])["initial_peers"] == []
    assert [(found.run_id, found.server_url, found.run) for found in runs.values()] == [(run["run_id"], host.url, run["run"])]
    assert host.stop() == 0


def test_a_dry_run_says_what_would_be_left_out_and_leaves_nothing(tmp_path, capsys):
    folder = write_dataset(tmp_path / "data", 6)
    (folder / "0001.txt").unlink()
    (folder / "0002.png").write_bytes((folder / "0003.png").read_bytes())
    assert cli(["--dataset", str(folder), "--dry_run", "--ingest_workers", "0"]) == 0
    said = capsys.readouterr().out
    assert "5 samples" in said and "0001.png: no caption" in said and "1 picture is there twice" in said and "1 shard" in said and "1 file left out" in said
    assert cli(["--dataset", str(folder), "--dry_run", "--ingest_workers", "0", "--wire", "fp12"]) == ExitCode.CONFIG
    assert "wire is 'fp12'" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
    assert cli(["--dataset", str(folder), "--missing_captions", "guess"]) == ExitCode.CONFIG
    assert "Use one of reject, empty, none" in capsys.readouterr().err


def test_bare_pictures_are_admitted_without_captions_under_either_name_of_the_option(tmp_path, capsys):
    folder = write_dataset(tmp_path / "data", 3)
    for caption in folder.glob("*.txt"):
        caption.unlink()
    options = ["--dataset", str(folder), "--dry_run", "--ingest_workers", "0"]
    assert cli(options) == ExitCode.CONFIG
    assert cli([*options, "--captions", "none"]) == cli([*options, "--missing_captions", "empty"]) == ExitCode.OK


def test_a_client_that_leaves_in_the_middle_of_a_shard_is_no_error_of_the_servers(tmp_path):
    host = Host(tmp_path, samples=1)
    Image.frombytes("RGB", (2000, 2000), os.urandom(12_000_000)).save(host.dataset / "0000.png", compress_level=0)
    host.start()
    (item,) = lease(host).shard_epochs
    with socket.create_connection(("127.0.0.1", host.port), 20) as client:
        client.sendall(f"GET /v1/blobs/{item.digest}.tar HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert client.recv(12) == b"HTTP/1.1 200"
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert call(host, "/healthz")[0] == 200
    assert host.stop() == 0
    assert "Traceback" not in host.stderr and " E " not in host.stderr, host.stderr
