"""The live page in a real browser: what it says, that it follows the run, what it does with what strangers wrote, and how it fails."""

import asyncio
import json

import pytest

from swarm.page.history import History
from swarm.protocol import LedgerTotals, StateInfo
from tests.datasetserver.hosting import Host, until
from tests.page.chromium import PROGRAM, connected, running
from tests.page.scenes import HOSTILE, Scene, a_peer, a_run, served

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(PROGRAM is None, reason="no chromium here: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def devtools(tmp_path_factory):
    """Where one browser for all tests is spoken to: what they open shares nothing, and to start it takes longer than most of them."""
    with running(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def browse(devtools):
    """`browse(scenario)` runs `scenario(browser)`."""

    def browsed(scenario):
        async def scene():
            async with connected(devtools) as browser:
                await scenario(browser)

        asyncio.run(scene())

    return browsed


def test_the_page_shows_the_run_and_follows_it(browse):
    history = History(None, period_seconds=0)
    for number in range(20):
        history.note("0123456789abcdef", (1e9 + 10.0 * number, number, 512 * number, 1 / (1 + number), 7.0, 2, 0.9))
    found = [
        dict(peer="QmPeer1", change=0.0123, error=0.002, rounds=12, own=-0.5, reported=True),
        dict(peer="QmPeer3", change=-0.001, error=0.0001, rounds=1, own=None, reported=False),
    ]
    peers = [
        a_peer(1, name="Ada's cellar", hardware="NVIDIA H100 80GB HBM3"),
        a_peer(2, name=HOSTILE, note=f"round 7 not averaged: {HOSTILE}", hardware=HOSTILE, phase="averaging", client_mode=True),
        a_peer(3, phase="catching_up", round=5, note="fetching a newer state: 40% of it is here"),
        a_peer(4, phase="assist", samples_per_second=0.0, loss=None, findings=found),
    ]

    async def scenario(browser):
        scene = Scene(a_run(peers, run_name=HOSTILE))
        async with served(scene, history) as (url, _watch):
            tab = await browser.tab()
            await tab.open(url)
            await tab.until("document.querySelectorAll('#peers tbody tr').length === 4")
            text = await tab.text()
            for words in (
                "14,336 of 65,536",
                "22%",
                "next: 512 of 2,048 samples",
                "0.1250",
                "Ada's cellar",
                "NVIDIA H100",
                "↑ 99 ↓ 99 Mbit/s",
            ):
                assert words in text, f"{words} in {text}"
            for words in ("5 (2 behind)", "40% of it is here", "cannot be dialled", "75%", "300 of 1,000 samples", "3 train, 1 assist"):
                assert words in text, f"{words} in {text}"
            reported = "makes the model worse: loss +0.012 ± 0.0020 by one contribution, of its own pictures −0.50 (12 rounds, by …QmPeer4)"
            assert reported in text and "audited: loss −0.0010 ± 0.00010 by one contribution (1 round, by …QmPeer4)" in text
            assert await tab.text("#name") == HOSTILE and text.count(HOSTILE) == 4
            assert await tab.run("document.querySelectorAll('main img').length") == 0
            await tab.until("Chart.getChart('loss-chart')?.data.datasets[0].data.length >= 20")

            how = await tab.text("#model-section")
            assert "The peers hold the state of round 7, 14,336 samples" in how and f"dd-export {url} --out model" in how
            assert await tab.run("document.getElementById('model-link').hidden")

            scene.now = a_run(peers[:1], round=8, samples=16384, waiting_samples=0)
            await tab.until("document.getElementById('samples').innerText.startsWith('16,384')")
            await tab.until("document.querySelectorAll('#peers tr.gone').length === 3")
            assert "40% of it is here" in await tab.text("#peers"), "why it failed stays to be read"

            banned = {"QmPeer2": HOSTILE, "QmNeverCame": "spam", "QmPeer1": "late"}
            scene.now = a_run(peers[:1], banned=banned, proven={"QmProven": "it lies"}, trusted=[peers[0].peer_id, "QmNotHere"])
            await tab.until("[...document.querySelectorAll('#peers tbody tr')].filter((row) => row.innerText.includes('banned')).length === 4")
            rows = await tab.text("#peers")
            assert f"banned by the host: {HOSTILE}" in rows and "banned by the host: spam" in rows and "banned by the host: late" in rows
            assert "banned by a proof: it lies" in rows
            assert rows.count("trusted to average") == 1
            assert await tab.run("document.querySelectorAll('main img').length") == 0

            last = StateInfo(digest="ab" * 32, round=32, samples=65536, bytes=12_000_000)
            scene.now = a_run([], finished=True, samples=65536, round=32, checkpoint=last)
            await tab.until("document.getElementById('state').innerText === 'finished'")
            how = await tab.text("#model-section")
            assert "The result" in how and "The server keeps the state of round 32, 65,536 samples" in how and "12 MB" in how
            assert await tab.run("document.getElementById('model-link').getAttribute('href')") == f"v1/states/{last.digest}.state"
            assert "all of them are trained" in await tab.text()
            assert tab.errors == []

    browse(scenario)


def test_empty_paused_and_lost_are_said_and_end(browse):
    async def scenario(browser):
        scene = Scene(None)
        async with served(scene) as (url, _watch):
            tab = await browser.tab()
            await tab.open(url)
            await tab.until("document.getElementById('empty-title').innerText === 'No run yet'")
            scene.now = a_run([], samples_by_peer={})
            await tab.until("document.getElementById('state').innerText === 'nobody trains'")
            assert "Nobody is here to give it" in await tab.text("#model-section") and "dd-export" not in await tab.text("#model-section")
            assert "Nobody is here yet" in await tab.text()
            scene.now = a_run([], finished=True, samples=20000)
            await tab.until("document.getElementById('eta').innerText.startsWith('the host ended it early')")
            scene.now = a_run([], finished=True, samples=0, round=0)
            await tab.until("document.getElementById('model-text').innerText === 'There is none: nothing was trained.'")
            scene.now = a_run([], finished=True) | dict.fromkeys(("ledger", "samples_by_peer", "epoch", "checkpoint"))
            await tab.until("document.getElementById('model-text').innerText.startsWith('Every peer that was there at the end')")
            scene.now = a_run([a_peer(1)]) | dict.fromkeys(("ledger", "samples_by_peer", "epoch", "checkpoint"))
            await tab.until("document.getElementById('model-command').innerText.startsWith('dd-export /ip4/')")
            scene.now = a_run([a_peer(1)], state="paused")
            await tab.until("document.getElementById('state').innerText === 'paused by the host'")
            scene.now = RuntimeError("the DHT does not answer")
            await tab.until("document.getElementById('banner').innerText.includes('the DHT does not answer')")
            assert await tab.text("#state") == "stale" and "QmPeer1"[-8:] in await tab.text("#peers"), "the last that was known stays"
            scene.now = a_run([a_peer(1, validation_loss=0.25, validation_round=6)])
            await tab.until("document.getElementById('state').innerText === 'live' && document.getElementById('banner').hidden")
            assert await tab.text("#validation-text") == "held-out pictures: 0.2500 after round 6"
            assert tab.errors == []
        await tab.until("document.getElementById('banner').innerText.startsWith('No news from the server')")
        assert await tab.run("document.body.classList.contains('stale')")

    browse(scenario)


def finished_run(history: History) -> dict:
    """After 20 rounds in 190 s; the server was started again since, and knows of its peers what the ledger says."""
    for number in range(20):
        loss = None if number == 19 else 1 / (1 + number)
        history.note("0123456789abcdef", (1e9 + 10.0 * number, number, 3276 * number, loss, 330.0, 2, 0.9))
    return a_run(
        [], finished=True, round=20, samples=65536, repeated_samples=536, loss=None, waiting_samples=0, epoch=64, epoch_samples=61,
        model="stable-diffusion-v1-5/stable-diffusion-v1-5", method="lora",
        ledger=LedgerTotals(available=900, leased=0, pending=0, counted=65000), samples_by_peer={"QmPeer1": 48750, "QmPeer2": 16250},
    )  # fmt: skip


def test_a_finished_run_says_how_it_went(browse):
    """It said "Loss -", "0.0 samples/s" and "no round averaged between peers yet"."""

    async def scenario(browser):
        history = History(None, period_seconds=0)
        async with served(Scene(finished_run(history)), history) as (url, _watch):
            tab = await browser.tab()
            await tab.open(url)
            await tab.until("document.getElementById('speed-text').innerText.startsWith('on average')")
            said = {name: await tab.text(f"#{name}") for name in ("speed", "loss", "loss-text", "utilisation", "traffic", "epoch", "eta", "about", "sum")}
            assert said["speed"] == "328" and said["loss"] == "0.0526" and said["loss-text"] == "at the end"
            assert said["utilisation"] == "90%" and said["traffic"] == "of the peers' time, in training"
            assert said["epoch"] == "65.0" and "in 3 min" in said["eta"]
            assert said["about"] == "stable-diffusion-v1-5/stable-diffusion-v1-5 · lora · 512 pixels · 3 min in all"
            assert said["sum"] == "65,000 counted once each and 536 repeated are 65,536 in the state"
            peers = await tab.text("#peers")
            assert "75%" in peers and "25%" in peers, "a share outlives the server's restart"
            assert await tab.run("document.getElementById('join-section').hidden")
            assert "A100" not in await tab.text() and tab.errors == []

    browse(scenario)


def test_a_page_tells_how_to_join_and_copies_it(browse):
    async def scenario(browser):
        async with served(Scene(a_run([a_peer(1)]))) as (url, _watch):
            tab = await browser.tab()
            await tab.open(url)
            await tab.until("document.getElementById('join-command').innerText.startsWith('dd-peer')")
            assert await tab.text("#join-command") == f"dd-peer --datasetserver {url}"
            await tab.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
            await tab.run("document.querySelector('#join-section button').click()")
            await tab.until("document.querySelector('#join-section button').innerText === 'Copied'")
            assert await tab.run("window.copied") == f"dd-peer --datasetserver {url}"

    browse(scenario)


def test_axes_of_time_say_what_differs_and_a_chart_of_nothing_is_not_drawn(browse):
    ticks = "Chart.getChart('speed-chart').scales.x.ticks.map((tick) => tick.label)"

    async def scenario(browser):
        history = History(None, period_seconds=0)
        scene = Scene(a_run([]))  # nobody is there: the watch itself adds nothing
        async with served(scene, history) as (url, watch):
            tab = await browser.tab()
            await tab.open(url)
            await tab.until("!document.getElementById('charts-empty').hidden")
            assert await tab.run("document.getElementById('speed-figure').hidden && document.getElementById('loss-figure').hidden")
            for number in range(9):
                history.note("0123456789abcdef", (1e9 + 5.0 * number, number, 512 * number, None, 7.0, 2, 0.9))
            await watch.look()
            await tab.until("window.Chart?.getChart('speed-chart')?.scales.x.ticks.length > 1")
            labels = await tab.run(ticks)
            assert len(set(labels)) == len(labels) > 1, labels
            assert await tab.run("document.getElementById('loss-figure').hidden"), "nobody told a loss"

    browse(scenario)


def test_a_picture_that_is_not_here_yet_is_no_broken_icon(browse):
    async def scenario(browser):
        async with served(Scene(a_run([a_peer(1)]))) as (url, _watch):
            tab = await browser.tab()
            await tab.open(url)
            await tab.until("document.getElementById('board') && !document.getElementById('board').hidden")
            await tab.run("document.body.insertAdjacentHTML('beforeend', '<div class=strip><img alt=cat></div>')")
            style = "getComputedStyle(document.querySelector('.strip img')).visibility"
            assert await tab.run(style) == "hidden"
            await tab.run("document.querySelector('.strip img').src = 'page/icon.svg'")
            assert await tab.run(style) == "visible"

    browse(scenario)


def test_a_token_opens_the_page_of_a_server_and_does_not_stay_in_its_address(tmp_path, browse):
    from datasetserver import tokens

    token, helper, state = tokens.add(tmp_path / "tokens", "ada"), tmp_path / "helper", tmp_path / "round-3-samples-96.state"
    (helper / "settled").mkdir(parents=True)
    kept = json.dumps({"digest": "ab" * 32, "header": {"round": 3, "samples": 96}}).encode() + b"\n" + bytes(64)
    (helper / "settled" / "round-00000003-samples-0000000096-abababababab.state").write_bytes(kept)
    host = Host(tmp_path, "--tokens", str(tmp_path / "tokens"), "--run_name", "secret cats", "--states", str(helper), samples=16)

    async def scenario(browser):
        asked, given = await browser.tab(), await browser.tab()
        await asked.open(host.url)
        await asked.until("!document.getElementById('gate').hidden")
        for wrong in ("not-a-token", token):
            script = "document.getElementById('token').value = {}; document.querySelector('#gate button').click()"
            await asked.run(script.format(json.dumps(wrong)))
            await asked.until("!document.getElementById(" + ("'refused'" if wrong != token else "'board'") + ").hidden")
        assert await asked.text("#name") == "secret cats" and [error for error in asked.errors if "401" not in error] == []

        await given.open(f"{host.url}/#token={token}")
        await given.until("document.getElementById('name').innerText === 'secret cats'")
        assert await given.run("location.hash") == ""
        await given.download_to(tmp_path)
        await given.until("!document.getElementById('model-link').hidden")
        await given.run("document.getElementById('model-link').click()")
        await asyncio.to_thread(until, state.exists)
        assert state.read_bytes() == kept and given.errors == []

    try:
        host.start()
        browse(scenario)
    finally:
        host.stop()
