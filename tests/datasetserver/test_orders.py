"""The host pauses, resumes and ends a run, whether its server is running or not."""

import json

import pytest

from datasetserver.__main__ import cli
from datasetserver.orders import Orders, give
from swarm.end import End
from swarm.errors import UserError
from swarm.files import lock_folder
from swarm.run_config import RunConfig
from tests.datasetserver.hosting import Host, until
from tests.datasetserver.test_http import call, envelope, keys_of, lease, refused


def test_an_order_is_followed_within_a_second_and_a_later_server_follows_it_too(tmp_path, caplog):
    now = [0.0]
    orders = Orders(tmp_path, clock=lambda: now[0])
    assert orders() == "running"
    give(tmp_path, "paused")
    assert orders() == "running"
    now[0] += 1
    assert orders() == "paused" == Orders(tmp_path)()
    (tmp_path / "run_state").write_text("perhaps")
    now[0] += 1
    assert orders() == "paused", "what nobody understands changes nothing"
    now[0] += 1
    assert orders() == "paused" and caplog.text.count("says neither") == 1  # and is said once, not each second
    give(tmp_path, "running")
    now[0] += 1
    assert orders() == "running"


def test_an_order_that_cannot_be_given_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match="Cannot write"):
        give(tmp_path / "nowhere", "paused")
    assert cli(["pause"]) == cli(["end", "--dataset", str(tmp_path / "nowhere")]) == 2


def test_an_order_to_a_folder_that_is_no_servers_is_refused(tmp_path, capsys):
    """It was written there, said to be in force, and read by nobody."""
    for words in (["pause"], ["extend", "--total_samples", "40"]):
        assert cli([*words, "--work_dir", str(tmp_path)]) == 2
        said = capsys.readouterr()
        assert said.err == f"error: No server was ever started on {tmp_path}. Give the server's --dataset or --work_dir.\n" and not said.out
    assert not list(tmp_path.iterdir())


def test_a_paused_run_says_so_and_an_ended_one_stays_ended(tmp_path):
    host = Host(tmp_path).start()
    work_dir = str(host.dataset) + ".datasetserver"
    granted = lease(host, "alice", want=1)
    renew = f"/v1/leases/{granted.lease_id}/renew"

    def state():
        return json.loads(call(host, renew, envelope(host, "alice"))[2])["state"]

    assert state() == "running"
    assert cli(["pause", "--dataset", str(host.dataset)]) == 0
    until(lambda: state() == "paused")
    answer = call(host, "/v1/leases", envelope(host, "bob", want_samples=1))
    refused(answer, 503, "run_paused")
    assert int(answer[1]["Retry-After"]) > 0
    assert call(host, "/v1/contributions", envelope(host, "alice", number=1, keys=keys_of(granted)))[0] == 200
    host.kill()
    host.start()
    refused(call(host, "/v1/leases", envelope(host, "bob", want_samples=1)), 503, "run_paused")
    assert call(host, "/v1/run")[0] == 200  # looks for an extension, in the same folder
    assert cli(["resume", "--work_dir", work_dir]) == 0
    until(lambda: call(host, "/v1/leases", envelope(host, "bob", want_samples=1))[0] == 201)
    assert cli(["end", "--work_dir", work_dir]) == 0
    until(lambda: json.loads(call(host, "/v1/progress")[2])["finished"])
    refused(call(host, "/v1/leases", envelope(host, "bob", want_samples=1)), 410, "run_finished")
    assert host.stop() == 0
    assert [host.stderr.count(f"the host's order: {state}") for state in ("paused", "running", "ended")] == [1, 1, 1]


def test_a_run_is_extended_by_its_host_and_peers_are_told_with_its_signature(tmp_path, capsys):
    host = Host(tmp_path, "--total_samples", "16").start()
    folder = ["--dataset", str(host.dataset)]
    granted = lease(host, "alice", want=1)
    renew = f"/v1/leases/{granted.lease_id}/renew"

    def told(path, body=None):
        return json.loads(call(host, path, body)[2])

    assert told(renew, envelope(host, "alice"))["extension"] is None and told("/v1/run")["extension"] is None
    assert cli(["extend", *folder, "--total_samples", "40"]) == 0
    until(lambda: told(renew, envelope(host, "alice"))["extension"])
    answer = told("/v1/run")
    end = End(RunConfig.from_mapping(answer["run"], where=""), answer["host_key"], answer["extension"])
    assert end.total == 40 == told("/v1/progress")["total_samples"] and answer["run"]["values"]["total_samples"] == 16
    assert cli(["extend", *folder, "--total_samples", "40"]) == 2 and "not later" in capsys.readouterr().err
    host.kill()
    host.start()
    assert told("/v1/run")["extension"] == answer["extension"], "no order is lost with the server"
    assert host.stop() == 0


def test_what_is_no_run_or_no_number_is_not_extended(tmp_path, capsys):
    lock_folder(tmp_path).close()
    assert cli(["extend", "--work_dir", str(tmp_path), "--total_samples", "40"]) == 2 and "No run has begun" in capsys.readouterr().err
    now = [0.0]
    orders = Orders(tmp_path, clock=lambda: now[0])
    (tmp_path / "run_extension").write_text("5000\n")
    assert orders.extended() == 5000
    (tmp_path / "run_extension").write_text("many")
    now[0] += 1
    assert orders.extended() == 5000, "what nobody understands changes nothing"
    assert orders() == "running"
