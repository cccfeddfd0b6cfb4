"""The host's server offers the newest final state that a helper keeps, and `dd-export` takes it."""

import json
import os
import urllib.error
import urllib.request

import pytest
import torch

from datasetserver.states import LOOK_SECONDS, States
from peer import export
from peer.results import fetching
from peer.results.fetching import fetch_state
from peer.sync.engine.transfer.disk import StateStore, read_state
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.datasetserver.hosting import Host
from tests.peer.data.meddler import Meddler
from tests.peer.sync.swarm_tools import state_of


def keep(folder, value, round_, run="run"):
    """A state as a helper keeps it: a link in settled/."""
    state = state_of(torch.full((10,), float(value)), run=run)
    source = StateStore(folder / "state").save(state)
    (folder / "settled").mkdir(exist_ok=True)
    target = folder / "settled" / f"round-{round_:08d}-samples-{round_ * 8:010d}-{state.digest[:12]}.state"
    os.link(source, target)
    return state, target


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as response:
        return response.status, response.read(), response.headers


def test_the_newest_state_that_can_be_read_is_offered(tmp_path):
    now = [0.0]
    states = States(tmp_path, clock=lambda: now[0])
    assert States(None).newest() is None and states.newest() is None, "the helper has not begun"
    first, path = keep(tmp_path, 1, 1)
    assert states.newest() is None
    now[0] += LOOK_SECONDS
    assert states.newest().digest == first.digest and states.path(first.digest) == path and states.path("0" * 64) is None
    (tmp_path / "settled" / "round-00000009-samples-0000000072-0123456789ab.state").write_text("torn")
    (tmp_path / "settled" / "zzz.state").write_text("a stranger's")
    second, _ = keep(tmp_path, 2, 2)
    now[0] += LOOK_SECONDS
    assert states.newest().digest == second.digest, "one that cannot be read is passed over"
    for file in (tmp_path / "settled").iterdir():
        file.unlink()
    now[0] += LOOK_SECONDS
    assert states.newest() is None


def test_a_server_gives_the_state_and_export_fetches_it_without_any_peer(tmp_path, capsys):
    helper = tmp_path / "helper"
    helper.mkdir()
    host = Host(tmp_path, "--states", str(helper)).start()
    try:
        run = RunConfig.from_mapping(json.loads(get(host.url + "/v1/run")[1])["run"], where=host.url)
        assert json.loads(get(host.url + "/v1/progress")[1])["checkpoint"] is None
        with pytest.raises(urllib.error.HTTPError) as none:
            get(f"{host.url}/v1/states/{'0' * 64}.state")
        assert none.value.code == 404 and json.loads(none.value.read())["error"]["code"] == "no_such_state"
        for away in ("/nowhere", ""):  # said before anybody is asked for the state, which nobody has
            host.model.rename(tmp_path / "moved")
            with pytest.raises(UserError, match="There is no model /nowhere" if away else "is a folder or file on the host's machine"):
                export.main([host.url, "--model", away, "--wait_seconds", "0.1", "--out", str(tmp_path / "out")])
            (tmp_path / "moved").rename(host.model)
        host.stop()
        state, path = keep(helper, 3, 1, run.digest)
        host.start()
        offered = json.loads(get(host.url + "/v1/progress")[1])["checkpoint"]
        assert offered["digest"] == state.digest and offered["bytes"] == path.stat().st_size
        url = f"{host.url}/v1/states/{state.digest}.state"
        status, body, headers = get(url)
        assert status == 200 and body == path.read_bytes() and path.name in headers["Content-Disposition"]
        assert get(url, Range="bytes=5-9")[:2] == (206, body[5:10])
        (tmp_path / "scratch").mkdir()
        fetched = fetch_state(host.url, tmp_path / "scratch", seconds=1)
        assert read_state(fetched, state.buffer.num_bytes).digest == state.digest
        assert json.loads((fetched.parent.parent / "run.json").read_text())["run"]["values"]["model"] == run.model
        # One that the server has offered, and has no more when it is asked for it.
        with Meddler(host.url, change=lambda path, headers, body: body.replace(state.digest.encode(), b"0" * 64)) as between:
            assert fetching._of_server(between.url, tmp_path / "gone", "") is None
            between.shutdown()
        assert "does not give the state that it keeps: This server does not offer that state." in capsys.readouterr().err
    finally:
        host.stop()
