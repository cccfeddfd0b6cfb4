"""Strangers at a dataset server, over HTTP: with a token of their own, in the host's browser, or beside a cache; and a host that lies."""

import asyncio
import io
import json
import lzma
import secrets
import statistics
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from scripts.attacks.band import Band
from scripts.attacks.wire import Key, say
from swarm.digest import digest_bytes, digest_json

_MOST = 2**53
_ANSWER_SECONDS = 30.0
_HOG_SECONDS = 45.0
_MADE_UP_ROUNDS = 60


class Http:
    """A client of the server at `url`, with or without a token."""

    def __init__(self, url: str, token: str = ""):
        self._url, self._token = url, token

    async def ask(
        self, path: str, body: Mapping[str, Any] | None = None, *, key: Key | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and JSON (or bytes) of the answer; status 0 without one. key: who signs the request."""
        data = None if body is None else json.dumps(body).encode()
        head = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        head |= _signature(key, path, data) if key and data else {}
        head |= {"Content-Type": "application/json"} | dict(headers or {})
        request = urllib.request.Request(self._url + path, data, head)
        return await asyncio.to_thread(_exchange, request)


def _signature(key: Key, path: str, body: bytes) -> dict[str, str]:
    """What a peer of that key says beside a request, so that the server knows who speaks."""
    at = f"{time.time():.3f}"
    statement = f"distributed-diffusion request POST {path} {at} {digest_bytes(body)}".encode()
    public = key.private.get_public_key().to_bytes().decode()
    return {"X-Peer-Key": public, "X-Peer-Time": at, "X-Peer-Signature": key.private.sign(statement).decode()}


def _exchange(request: urllib.request.Request) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
            status, data = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, data = error.code, error.read()
    except (OSError, ValueError) as error:
        return 0, str(error)
    try:
        return status, json.loads(data)
    except ValueError:
        return status, data


async def _run_id(http: Http) -> str:
    return (await http.ask("/v1/run"))[1]["run_id"]


def _report(band: Band, run_id: str, peer: str) -> dict[str, Any]:
    """A state whose parent nobody knows, with as many samples as a count can be."""
    samples = _MOST - band.rng.randint(0, 1000)
    members = [{"peer": peer, "number": band.rng.randint(1, 1000), "samples": band.rng.randint(1, 1000)}]
    digests = {"digest": digest_json(band.rng.random()), "parent": digest_json(band.rng.random())}
    return {"run_id": run_id, "peer": peer, **digests, "round": band.rng.randint(2, 10**6), "samples": samples, "members": members}


async def unknown_parent(band: Band) -> None:
    http, key = Http(band.url, band.token), Key()
    run_id = await _run_id(http)
    for _ in range(3):
        status, answer = await http.ask("/v1/rounds", _report(band, run_id, key.peer_id), key=key)
        await asyncio.sleep(1)
    _, progress = await http.ask("/v1/progress")
    over = progress.get("state") == "ended" or progress.get("samples", 0) > 2**40
    _tell(succeeded=over, how=f"{status}: {str(answer)[:150]}; the run is {progress.get('state')} at {progress.get('samples')} samples")


async def stolen_peer_id(band: Band) -> None:
    """Say in each live peer's name that it gives back all its samples, and that its next numbers hold others."""
    http, own = Http(band.url, band.token), Key()
    run_id = await _run_id(http)
    _, peers = await http.ask("/v1/peers")
    taken, said, keys = 0, [], await _every_key(http)
    for victim in [peer["peer_id"] for peer in peers["peers"]]:
        for _ in range(3):
            mine = {"run_id": run_id, "peer": victim}
            status, answer = await http.ask(f"/v1/leases/{'0' * 32}/release", {**mine, "keys": keys}, key=own)
            taken += status < 300 and answer.get("released", 0) > 0
            said.append(f"{status}: {str(answer)[:100]}")
            number = band.rng.randrange(2**20, _MOST)
            status, answer = await http.ask("/v1/contributions", {**mine, "number": number, "keys": [], "offered": True}, key=own)
            taken += status < 300
            said.append(f"{status}: {str(answer)[:100]}")
            await asyncio.sleep(1)
    _tell(succeeded=taken > 0, how=f"{taken} of {len(said)} requests in others' names were taken; " + "; ".join(said[-2:]))


async def unleased_samples(band: Band) -> None:
    """Register the same samples again and again without a lease, as after an outage, and report states that have them."""
    http, key, keys = Http(band.url, band.token), Key(), []
    run_id, before = await _run_id(http), await _counted_without_a_peer(http)
    for number in range(1, _MADE_UP_ROUNDS + 1):
        _, run = await http.ask("/v1/run")
        keys = keys or (await _every_key(http))[: 2 * (await http.ask("/v1/progress"))[1]["target_batch_size"]]
        await http.ask("/v1/contributions", {"run_id": run_id, "peer": key.peer_id, "number": number, "keys": keys, "offered": True}, key=key)
        head, member = run["head"], {"peer": key.peer_id, "number": number, "samples": len(keys)}
        state = {"digest": digest_json(band.rng.random()), "parent": head["digest"], "round": head["round"] + 1, "samples": head["samples"] + len(keys)}
        await http.ask("/v1/rounds", {"run_id": run_id, "peer": key.peer_id, **state, "members": [member]}, key=key)
    counted = await _counted_without_a_peer(http) - before
    _tell(succeeded=False, counted=counted, how=f"{_MADE_UP_ROUNDS} states of {len(keys)} samples each")


async def _counted_without_a_peer(http: Http) -> int:
    """Samples that count in the run, and as no peer's: repeated ones."""
    _, progress = await http.ask("/v1/progress")
    return progress["samples"] - sum(progress["samples_by_peer"].values())


async def story_in_a_circle(band: Band) -> None:
    """Report a state, one that seems to come after it, and the first one again, as of a much later round: each would come before the other."""
    http, key = Http(band.url, band.token), Key()
    mine = {"run_id": await _run_id(http), "peer": key.peer_id}
    await http.ask("/v1/contributions", {**mine, "number": 1, "keys": ["0:0:0"], "offered": True}, key=key)
    first, second = digest_json(band.rng.random()), digest_json(band.rng.random())
    for digest, number, samples, contribution in ((first, 2, 1, 900), (second, 4, 2, 901), (first, 100, 3, 1)):
        told = {"digest": digest, "parent": digest_json(band.rng.random()), "round": number, "samples": samples}
        members = [{"peer": key.peer_id, "number": contribution, "samples": 1}]
        status, answer = await http.ask("/v1/rounds", {**mine, **told, "members": members}, key=key)
    alive, _ = await http.ask("/v1/progress")
    _tell(succeeded=alive != 200, how=f"{status}: {str(answer)[:100]}; the server answers {alive}")


async def unearned_receipts(band: Band) -> None:
    """A receipt is for samples that its peer leased: each of these requests is for others."""
    http, key = Http(band.url, band.token), Key()
    mine = {"run_id": await _run_id(http), "peer": key.peer_id}

    async def receipt(number: int, keys: list[str], **more: Any) -> str:
        _, answer = await http.ask("/v1/contributions", {**mine, "number": number, "keys": keys, **more}, key=key)
        return answer.get("receipt") or ""

    _, leased = await http.ask("/v1/leases", {**mine, "want_samples": 8}, key=key)
    shard = leased["shard_epochs"][0]
    own = [f"{shard['epoch']}:{shard['shard']}:{i}" for i in range(shard["samples"]) if i not in shard["skip"]]
    others = [name for name in await _every_key(http) if name not in own]
    earned = await receipt(1, own)
    asked = [(1, own + others[:8]), (2, own), (3, own[:1]), (4, others[:8]), (5, own + others[:8])]
    unearned = [await receipt(number, keys) for number, keys in asked]
    for offered in (True, False):
        unearned.append(await receipt(6, others[:8], **({"offered": True} if offered else {})))
    await http.ask(f"/v1/leases/{'0' * 32}/release", {**mine, "keys": own}, key=key)
    unearned += [await receipt(number, own) for number in (1, 7)]
    given = sum(map(bool, unearned))
    _tell(succeeded=given > 0 or not earned, how=f"{given} of {len(unearned)} were given; the earned one {'was' if earned else 'was NOT'}")


async def _every_key(http: Http) -> list[str]:
    """Names of all samples up to the epoch that is being trained, from what every member may read."""
    _, run = await http.ask("/v1/run")
    _, manifest = await http.ask(f"/v1/manifest/{run['manifest']}")
    _, progress = await http.ask("/v1/progress")
    sizes = [(shard["index"], shard["samples"]) for shard in manifest["shards"]]
    return [f"{epoch}:{shard}:{index}" for epoch in range(progress["epoch"] + 1) for shard, size in sizes for index in range(size)]


async def lease_hog(band: Band) -> None:
    http = Http(band.url, band.token)
    run_id = await _run_id(http)
    before, epoch = await _progress_ms(http), (await http.ask("/v1/progress"))[1]["epoch"]
    answers: dict[int, int] = {}
    until = time.monotonic() + _HOG_SECONDS
    for key in [Key() for _ in range(20)] * 2:
        if time.monotonic() < until:
            status, _ = await http.ask("/v1/leases", {"run_id": run_id, "peer": key.peer_id, "want_samples": 200_000}, key=key)
            answers[status] = answers.get(status, 0) + 1
    after = await _progress_ms(http)
    _, progress = await http.ask("/v1/progress")
    _tell(
        succeeded=False, progress_ms=after, how=f"{before:.1f} -> {after:.1f} ms; epoch {epoch} -> {progress['epoch']}; answers {answers}"
    )


async def _progress_ms(http: Http) -> float:
    times = []
    for _ in range(7):
        began = time.perf_counter()
        await http.ask("/v1/progress")
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


async def browser_post(band: Band) -> None:
    """What a page of another site can make a browser send: text/plain, without a question beforehand; and after DNS rebinding any Host."""
    http, foreign = Http(band.url), f"http://{secrets.token_hex(4)}.example"
    run_id = await _run_id(http)
    done = []
    for headers in (
        {"Content-Type": "text/plain", "Origin": foreign},
        {"Content-Type": "application/json", "Origin": foreign},
        {"Content-Type": "text/plain;charset=UTF-8", "Host": foreign[7:], "Origin": foreign},
        {"Content-Type": "application/json", "Host": foreign[7:]},
    ):
        key = Key()
        status, answer = await http.ask("/v1/rounds", _report(band, run_id, key.peer_id), key=key, headers=headers)
        done.append((status, str(answer)[:100]))
    status, _ = await http.ask("/v1/progress", headers={"Host": foreign[7:]})
    _, progress = await http.ask("/v1/progress")
    taken = progress.get("samples", 0) > 0 or any(status < 300 for status, _ in done)
    _tell(succeeded=taken or 0 < status < 300, how=f"posts {done}; a foreign Host is answered {status}; the run is {progress.get('state')}")


async def shared_cache(band: Band) -> None:
    """A cache between members and server, which keeps what RFC 9111 lets it keep of requests with a token: what says `public`."""
    member, kept = Http(band.url, band.token), {}
    _, run = await member.ask("/v1/run")
    _, manifest = await member.ask(f"/v1/manifest/{run['manifest']}")
    path = f"/v1/blobs/{manifest['shards'][0]['digest']}.tar"
    request = urllib.request.Request(band.url + path, headers={"Authorization": f"Bearer {band.token}"})
    with await asyncio.to_thread(urllib.request.urlopen, request, timeout=_ANSWER_SECONDS) as answer:
        control = {word.strip().lower() for word in answer.headers.get("Cache-Control", "").split(",")}
        if "public" in control and not control & {"private", "no-store", "no-cache"}:
            kept[path] = answer.read()
    status, _ = await Http(band.url).ask(path)
    _tell(succeeded=path in kept or status == 200, how=f"Cache-Control: {', '.join(sorted(control))}; without a token {status}")


async def xz_member(band: Band) -> None:
    """Two shards of one sample: a harmless one, and one with a member that is 5,000 times as large as it looks."""
    folder, mib = Path(band.folder), band.rng.randint(500, 800)
    picture = io.BytesIO()
    Image.new("L", (16, 16)).save(picture, "jpeg")
    sample = {"0000.jpg": picture.getvalue(), "0000.txt": b"a picture"}
    _write_tar(folder / "harmless.tar", sample)
    packed = await asyncio.to_thread(_squeeze, mib)
    _write_tar(folder / "shard.tar", {**sample, f"0000.{band.rng.choice(['bin', 'txt', 'json'])}.xz": packed})
    say(event="arrived", shard=str(folder / "shard.tar"), harmless=str(folder / "harmless.tar"), packed_bytes=len(packed), mib=mib)
    await asyncio.sleep(300)


def _squeeze(mib: int) -> bytes:
    packer = lzma.LZMACompressor()
    return b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(mib)), packer.flush()])


def _write_tar(path: Path, members: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def _tell(**figures: Any) -> None:
    say(event="arrived")
    say(event="figures", over=True, **figures)
