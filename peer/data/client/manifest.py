"""Which shards the run has, by the word of its host: nothing else is trained, whatever is leased."""

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from peer.data.client.runs import check_run, unsigned
from peer.data.client.transport import Transport
from swarm import files, protocol
from swarm.digest import digest_bytes
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig
from swarm.signing import SIGNATURE_HEADER, BadSignature, KnownHosts, check_signature

log = logging.getLogger(__name__)


class SignedShards:
    """The shards in the newest manifest that was read; none before the first. path: where that is kept, for a start without the server."""

    def __init__(self, run: RunConfig, known_hosts: KnownHosts | None, path: Path):
        self._run, self._known_hosts, self._path = run, known_hosts, path
        self._manifest: protocol.Manifest | None = None
        if known_hosts is not None and path.exists():
            self._read_kept(known_hosts.key_of(run.run_id))

    def _read_kept(self, host_key: str) -> None:
        """What was kept, if the host that this peer knows has signed it."""
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            check_signature("manifest", digest_bytes(kept["manifest"].encode()), kept["signature"], host_key)
            self._manifest = protocol.Manifest.model_validate_json(kept["manifest"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, BadSignature) as error:
            log.warning("ignored %s: %s", self._path, error)

    async def check(self, transport: Transport, shard_epochs: Sequence[protocol.LeasedShard]) -> None:
        """Raises UserError (AUTH) unless every one of `shard_epochs` is a shard that the host has signed, as it has signed it."""
        if not all(map(self._has, shard_epochs)):
            await self._read(transport)  # the first time, or when the dataset has grown
        if not all(map(self._has, shard_epochs)):
            raise unsigned(transport.url, "shards", BadSignature("they are not in its manifest"))

    def of_epoch(self, epoch: int) -> Sequence[protocol.Shard]:
        """Those that an epoch has: a dataset may have grown."""
        if self._manifest is None:
            return []
        return self._manifest.shards[: max(each.shards for each in self._manifest.generations if each.from_epoch <= epoch)]

    def weight_of(self, key: str) -> float:
        """What the loss of the sample "epoch:shard:index" is multiplied with."""
        _, shard, index = map(int, key.split(":"))
        weights = self._manifest.shards[shard].weights if self._manifest else []
        return weights[index] if weights else 1.0

    async def held_out(self, transport: Transport) -> Sequence[protocol.Shard]:
        """Those of --validation_split, as the host has signed them. Raises UserError (AUTH)."""
        if self._manifest is None:
            await self._read(transport)
        return self._manifest.held_out

    def _has(self, item: protocol.LeasedShard) -> bool:
        shards = self.of_epoch(item.epoch)
        shard = shards[item.shard] if item.shard < len(shards) else None
        return shard is not None and (shard.digest, shard.bytes, shard.samples) == (item.digest, item.bytes, item.samples)

    async def _read(self, transport: Transport) -> None:
        reply = await transport.insist_get("/v1/run")
        answer = check_run(transport.url, reply.status, reply.body, self._run.run_id, self._known_hosts)
        reply = await transport.insist_get(f"/v1/manifest/{answer.manifest}")
        try:
            if digest_bytes(reply.body) != answer.manifest:
                raise BadSignature("it is another manifest than it says")
            signature = reply.headers.get(SIGNATURE_HEADER, "")
            check_signature("manifest", answer.manifest, signature, answer.host_key)
            self._manifest = protocol.Manifest.model_validate_json(reply.body)
            await asyncio.to_thread(self._keep, reply.body, signature)
        except BadSignature as error:
            raise unsigned(transport.url, "a manifest", error) from None
        except ValidationError as error:
            message = f"{transport.url} describes its dataset in a way this program does not know: {str(error).splitlines()[0]}."
            raise UserError(message, fix="Use the same version on both.", code=ExitCode.NETWORK) from None

    def _keep(self, manifest: bytes, signature: str) -> None:
        if self._known_hosts is None:  # nobody could tell later whose it is
            return
        try:
            files.replace(self._path, json.dumps({"signature": signature, "manifest": manifest.decode()}).encode())
        except OSError as error:
            log.warning("cannot keep %s, so a start without the server has no samples: %s", self._path, error.strerror)
