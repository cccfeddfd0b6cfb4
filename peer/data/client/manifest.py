"""Which shards the run has, by the word of its host: nothing else is trained, whatever is leased."""

from collections.abc import Sequence

from pydantic import ValidationError

from peer.data.client.runs import check_run, unsigned
from peer.data.client.transport import Transport
from swarm import protocol
from swarm.digest import digest_bytes
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig
from swarm.signing import SIGNATURE_HEADER, BadSignature, KnownHosts, check_signature


class SignedShards:
    """The shards in the newest manifest that was read; none before the first."""

    def __init__(self, run: RunConfig, known_hosts: KnownHosts | None):
        self._run, self._known_hosts = run, known_hosts
        self._manifest: protocol.Manifest | None = None

    async def check(self, transport: Transport, shard_epochs: Sequence[protocol.LeasedShard]) -> None:
        """Raises UserError (AUTH) unless every one of `shard_epochs` is a shard that the host has signed, as it has signed it."""
        if all(map(self._has, shard_epochs)):
            return
        await self._read(transport)  # the first time, or when the dataset has grown
        if not all(map(self._has, shard_epochs)):
            raise unsigned(transport.url, "shards", BadSignature("they are not in its manifest"))

    def of_epoch(self, epoch: int) -> Sequence[protocol.Shard]:
        """Those that an epoch has: a dataset may have grown."""
        if self._manifest is None:
            return []
        return self._manifest.shards[: max(each.shards for each in self._manifest.generations if each.from_epoch <= epoch)]

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
            check_signature("manifest", answer.manifest, reply.headers.get(SIGNATURE_HEADER, ""), answer.host_key)
            self._manifest = protocol.Manifest.model_validate_json(reply.body)
        except BadSignature as error:
            raise unsigned(transport.url, "a manifest", error) from None
        except ValidationError as error:
            message = f"{transport.url} describes its dataset in a way this program does not know: {str(error).splitlines()[0]}."
            raise UserError(message, fix="Use the same version on both.", code=ExitCode.NETWORK) from None
