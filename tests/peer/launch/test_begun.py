"""A run that a peer of another version founded, served or began: who reads it takes part in that very run, or hears which version it needs."""

import dataclasses
import json
import time

import pytest

from peer.data.client.runs import check_run
from peer.launch.begun import as_it_began
from peer.watchdog.policy import End, Policy
from swarm.digest import digest_json
from swarm.errors import ExitCode, UserError
from swarm.protocol import PROTOCOL_VERSION
from swarm.run_config import RunConfig
from swarm.signing import HostKey
from swarm.version import VERSION
from tests.swarm.test_run_identity import NEWER_VERSION, Newer, by_rule_1, newer_program

URL = "http://host:9090"


def answer(folder, run: RunConfig) -> bytes:
    """What a host of that run says to GET /v1/run."""
    key, sent = HostKey(folder / "host.key"), run.to_mapping()
    told = {
        "protocol": PROTOCOL_VERSION, "run": sent, "run_id": run.run_id, "url": URL, "initial_peers": [], "manifest": "a" * 64, "head": None,
        "server_time": time.time(), "host_key": key.public, "signature": key.sign("run", digest_json(sent)), "extension": None,
    }  # fmt: skip
    return json.dumps(told).encode()


@pytest.mark.parametrize("old", [True, False])
def test_a_peer_takes_part_in_the_run_that_its_host_serves_by_either_rule(tmp_path, old):
    run = RunConfig(model="m", method="lora", snr_gamma=5.0)
    run = by_rule_1(run) if old else run
    told = check_run(URL, 200, answer(tmp_path, run))
    assert RunConfig.from_mapping(told.run, where=URL).digest == run.digest and told.run_id == run.run_id


def test_a_run_that_is_too_new_ends_the_peer_with_one_line_and_no_restart(tmp_path):
    with newer_program():
        body = answer(tmp_path, Newer(model="m", sparkle=0.25))
    with pytest.raises(UserError) as caught:
        check_run(URL, 200, body)
    error = caught.value
    assert (
        error.message
        == f"{URL}: the run needs version {NEWER_VERSION} of this program, and this is {VERSION}: there is no option 'sparkle'."
    )
    assert "\n" not in str(error) and "git pull" in error.fix
    assert error.code == ExitCode.CONFIG == 2
    assert Policy(5).after(End(error.code), can_shrink=True).pause is None, "dd-peer must not start it again"


def keep(folder, run: RunConfig) -> None:
    (folder / "run.json").write_text(json.dumps({"run": run.to_mapping(), "server_url": "", "peers": []}))


def test_a_founder_that_starts_again_in_a_newer_version_keeps_its_run(tmp_path):
    said = {"model": "/new/place", "method": "lora", "seed": 7}
    for began in (RunConfig(model="m", method="lora", seed=7), by_rule_1(RunConfig(model="m", method="lora", seed=7))):
        keep(tmp_path, began)
        again = as_it_began(tmp_path, said, RunConfig(**said))
        assert again.digest == began.digest and again.model == "/new/place" and again.sent == began.sent
        with newer_program():
            newer = Newer(**said)
            keep(tmp_path, Newer.from_mapping(began.to_mapping(), where="here"))
        with pytest.MonkeyPatch.context() as patch, newer_program():
            patch.setattr("peer.launch.begun.RunConfig", Newer)
            again = as_it_began(tmp_path, said, newer)
            assert again.digest == began.digest and again.rank == 4, "the changed default is not what the founder said"


def test_a_founder_that_now_finds_out_what_its_run_left_open_keeps_that_run(tmp_path):
    """Since 0.1.1 the founder reads from the model's scheduler what is predicted."""
    keep(tmp_path, began := RunConfig(seed=7))
    found = RunConfig(seed=7, prediction_type="epsilon", rescale_betas_zero_snr=False)
    assert found.digest != began.digest
    for said in ({"seed": 7}, {"seed": 7, "prediction_type": "auto", "rescale_betas_zero_snr": None}):
        assert as_it_began(tmp_path, said, found).digest == began.digest
    assert as_it_began(tmp_path, {"seed": 7, "prediction_type": "epsilon"}, found).digest == found.digest


def test_a_founder_that_says_otherwise_founds_another_run(tmp_path):
    said = {"method": "lora", "rank": 8}
    run = RunConfig(**said)
    assert as_it_began(tmp_path, said, run) is run, "nothing began here"
    for began in (RunConfig(method="lora", rank=16), RunConfig(method="lora", rank=8, seed=7), RunConfig()):
        keep(tmp_path, began)
        assert as_it_began(tmp_path, said, run) is run
    for damaged in ("", "[]", "{}", '{"run": 5}', '{"run": {"rank": "x"}}'):
        (tmp_path / "run.json").write_text(damaged)
        assert as_it_began(tmp_path, said, run) is run


def test_both_founders_of_two_versions_meet_under_one_id():
    with newer_program():
        newer = Newer(method="lora", rank=4, model="elsewhere").run_id
    assert newer == RunConfig(method="lora").run_id != dataclasses.replace(RunConfig(method="lora"), seed=1).run_id
