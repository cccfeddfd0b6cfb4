"""A server without a run, and the peer that founds one there."""

import dataclasses
import json
import threading
from dataclasses import asdict

import pytest

from datasetserver.founding import advice
from datasetserver.ingest import Policy, ingest
from swarm.errors import ExitCode
from swarm.protocol import MAX_RUN_BYTES, PeersAnswer, RunAnswer
from swarm.run_config import RunConfig
from tests.datasetserver.hosting import Host
from tests.datasetserver.test_http import POSTS, call, get_run, lease, refused
from tests.datasetserver.test_program import complaint

RUN = RunConfig(run_name="digits", model="/models/tiny", model_digest="ab" * 32, total_samples=1000, learning_rate=1e-3)


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path, founds=False).start()
    yield host
    host.stop()


def put(host, run):
    return call(host, "/v1/run", {"run": run if isinstance(run, dict) else asdict(run)}, method="PUT")


def test_without_a_run_there_is_only_a_dataset(host):
    assert "run=none, waiting for a peer that founds one" in host.lines[-1]
    answer = call(host, "/v1/run")
    refused(answer, 404, "no_run")
    digest = json.loads(answer[2])["error"]["message"].rpartition(" ")[2].rstrip(".")
    assert call(host, f"/v1/manifest/{digest}")[0] == 200
    refused(call(host, "/v1/progress"), 404, "no_run")
    assert PeersAnswer.model_validate_json(call(host, "/v1/peers")[2]).peers == []
    for path, body in POSTS.items():
        refused(call(host, path, {"run_id": RUN.run_id, "peer": "alice", **body}), 409, "no_run")


def test_the_first_founder_gives_the_run_and_everyone_else_that_one_or_none(host):
    status, _, data = put(host, RUN)
    answer = RunAnswer.model_validate_json(data)
    founded = RunConfig.from_mapping(answer.run, where="server")
    assert status == 201 and answer.run == {**asdict(RUN), "dataset_digest": answer.manifest}
    assert get_run(host).run_id == answer.run_id == founded.run_id
    lease(host)
    for again in (RUN, founded, {**asdict(RUN), "model": "elsewhere"}):
        status, _, data = put(host, again)
        assert status == 200 and RunAnswer.model_validate_json(data).run == answer.run
    other = put(host, {**asdict(RUN), "learning_rate": 1e-4})
    refused(other, 409, "run_exists")
    assert f"'digits' ({founded.run_id}), with learning_rate = 0.001" in json.loads(other[2])["error"]["message"]


def test_of_many_founders_at_once_one_is_first(host):
    answers, barrier = [], threading.Barrier(8)

    def found(number):
        barrier.wait(20)
        answers.append(put(host, {**asdict(RUN), "seed": number}))

    threads = [threading.Thread(target=found, args=(number % 4,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(status for status, *_ in answers) == [200, 201] + [409] * 6
    seeds = {RunAnswer.model_validate_json(data).run["seed"] for status, _, data in answers if status < 300}
    assert seeds == {get_run(host).run["seed"]}


def test_a_founded_run_survives_kill_9_and_goes_on_as_if_the_host_had_given_it(host, capsys):
    assert put(host, RUN)[0] == 201
    run, granted = get_run(host), lease(host)
    host.kill()
    host.start()
    assert f"run={run.run_id}" in host.lines[-1]
    assert get_run(host).run == run.run
    assert lease(host, "bob").shard_epochs[0].shard != granted.shard_epochs[0].shard, "its lease survived too"
    assert host.stop() == 0
    host.flags += ["--learning_rate", "1e-3"]
    host.start()
    assert host.stop() == 0
    code, line = complaint(capsys, *host.flags[:-1], "1e-4", "--port", "0")
    assert code == ExitCode.CONFIG and "has learning_rate = 0.001" in line
    (host.dataset / "0000.txt").write_text("another caption")
    code, line = complaint(capsys, *host.flags, "--port", "0")
    assert code == ExitCode.CONFIG and "has changed since the run" in line and "--work_dir" in line


@pytest.mark.parametrize(
    ("change", "status", "code", "what"),
    [
        ({"learning_rat": 1e-3}, 400, "bad_run", "learning_rat"),
        ({"learning_rate": 11.0}, 400, "bad_run", "learning_rate is 11"),
        ({"resolution": "512"}, 400, "bad_run", "resolution"),
        ({"wire": "fp8"}, 400, "bad_run", "wire"),
        ({"dataset_digest": "0" * 64}, 400, "bad_run", "dataset is 0000"),
        ({"model_digest": ""}, 400, "bad_run", "model_digest"),
        ({"model_digest": "AB" * 32}, 400, "bad_run", "model_digest"),
        ({"model": "x" * MAX_RUN_BYTES}, 400, "bad_run", "bytes"),
        ({"run_name": "two\nlines"}, 422, "bad_request", "run_name"),
        ({"total_samples": 2**60}, 400, "bad_run", "total_samples"),
        ({"adam_beta1": float("nan")}, 422, "bad_request", "adam_beta1"),
        ({"seed": [1]}, 422, "bad_request", "seed"),
        ({"masked_loss": True}, 400, "bad_run", "have no masks"),
        ({"validation_split": 0.1}, 400, "bad_run", "validation_split is 0.1, but the pictures here were prepared with 0"),
    ],
)
def test_a_run_that_is_none_is_refused_and_the_next_may_be_founded(host, change, status, code, what):
    answer = put(host, {**asdict(RUN), **change})
    refused(answer, status, code)
    assert what in json.loads(answer[2])["error"]["message"]
    refused(call(host, "/v1/run", method="PUT", raw=b"{"), 400, "bad_request")
    refused(call(host, "/v1/run", {"run": asdict(RUN), "surprise": 1}, method="PUT"), 422, "bad_request")
    assert put(host, RUN)[0] == 201


def test_who_founds_a_run_over_prepared_pictures_takes_their_held_out_share(tmp_path):
    host = Host(tmp_path, founds=False)
    work = host.dataset.with_name("data.datasetserver")
    ingest(host.dataset, work, workers=0, policy=Policy(held_out=0.3))
    host.flags = ["--work_dir", str(work), "--no_dht"]
    host.start()
    try:
        for share in (0.1, 0.0):
            answer = put(host, {**asdict(RUN), "validation_split": share})
            refused(answer, 400, "bad_run")
            assert "Give --validation_split 0.3" in json.loads(answer[2])["error"]["fix"]
        assert put(host, {**asdict(RUN), "validation_split": 0.3})[0] == 201
    finally:
        host.stop()


def test_a_server_with_a_run_of_its_own_takes_no_other(tmp_path):
    host = Host(tmp_path, "--run_name", "the host's").start()
    try:
        refused(put(host, RUN), 409, "run_exists")
        assert put(host, get_run(host).run)[0] == 200
    finally:
        host.stop()


@pytest.mark.swarm
def test_a_run_founded_by_a_peer_is_told_in_the_dht(tmp_path):
    pytest.importorskip("hivemind")
    from swarm.discovery import find_run

    host = Host(tmp_path, "--dht", founds=False).start()
    try:
        answer = RunAnswer.model_validate_json(put(host, RUN)[2])
        found = find_run(answer.initial_peers)
        assert (found.run.run_id, dataclasses.asdict(found.run), found.server_url) == (answer.run_id, answer.run, host.url)
        host.kill()
        host.start()
        again = get_run(host)
        assert find_run(again.initial_peers).run == found.run
    finally:
        assert host.stop() == 0


@pytest.mark.parametrize(
    ("options", "is_advised"),
    [({}, True), ({"averaging": "centered"}, False), ({"sync": "none"}, False), ({"members_of": ""}, False)],
)
def test_the_host_of_a_run_for_members_is_told_of_the_other_average(options, is_advised):
    said = advice(RunConfig(**{"model": "m", "members_of": "k", **options}))
    assert bool(said) is is_advised and ("--averaging centered" in said) is is_advised
