"""Asking a dataset server, once, which run it has, offering it one, and telling it of a round: for who does not stay connected to it."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from pydantic import ValidationError

from peer.contracts import CommittedRound
from peer.data.client.transport import Reply, ServerAway, exchange, open_session, retry_after
from swarm import protocol
from swarm.digest import digest_json
from swarm.errors import ExitCode, Unanswered, UserError
from swarm.members import is_signed
from swarm.records import Membership
from swarm.run_config import RunConfig
from swarm.signed_request import CLOCK_DIFFERS, Signer
from swarm.signing import BadSignature, KnownHosts, check_signature

log = logging.getLogger(__name__)


def fetch_run(
    url: str, timeout: float = 10.0, *, run_id: str = "", token: str = "", known_hosts: KnownHosts | None = None
) -> protocol.RunAnswer | None:
    """Ask a server what it serves, None if nothing was founded there yet; tries again for `timeout` seconds while nobody answers.

    Raises UserError (exit code NETWORK) when nobody answers, it is no dataset server, of another version, or has another run; with code
    AUTH when it wants another token, or what it says is not signed by its host, or by another host than `known_hosts` has; with code
    CONFIG when the URL has a path that the server does not know, or is https where it is http.
    """
    reply = asyncio.run(_ask("GET", url, "/v1/run", None, timeout, token))
    if reply.status == 404 and reply.code == "no_run":
        return None
    _refuse_path(url, reply)
    if reply.error:
        raise UserError(f"{url}: {reply.error.message}", fix=reply.error.fix, code=ExitCode.NETWORK)
    return check_run(url, reply.status, reply.body, run_id, known_hosts)


def found_run(
    url: str, run: RunConfig, timeout: float = 10.0, *, token: str = "", known_hosts: KnownHosts | None = None
) -> protocol.RunAnswer:
    """Offer `run` to a server that has none. The answer is what it serves from now on: this run, or that of a founder who was faster.

    Raises UserError as `fetch_run` does, and when the server finds fault with `run`.
    """
    reply = asyncio.run(_ask("PUT", url, "/v1/run", {"run": run.to_mapping()}, timeout, token))
    if reply.status == 409 and reply.code == "run_exists":
        reply = asyncio.run(_ask("GET", url, "/v1/run", None, timeout, token))
    elif reply.error:
        raise UserError(f"{url} does not take this run: {reply.error.message}", fix=reply.error.fix)
    return check_run(url, reply.status, reply.body, known_hosts=known_hosts)


def ask_membership(url: str, run: RunConfig, signer: Signer, *, token: str = "") -> Membership:
    """Ask the run's server to let this peer in. Raises UserError: NETWORK when it does not answer, AUTH when it does not want to."""
    peer = signer.key.peer_id
    reply = asyncio.run(_ask("POST", url, "/v1/members", {"run_id": run.run_id, "peer": peer}, 10.0, token, signer))
    if reply.error:
        code = ExitCode.AUTH if reply.status in (401, 403) and reply.code != CLOCK_DIFFERS else ExitCode.NETWORK
        raise UserError(f"{url} does not let this peer in: {reply.error.message}", fix=reply.error.fix, code=code)
    try:
        given = Membership(**vars(protocol.MemberAnswer.model_validate_json(reply.body)))
    except ValidationError:
        raise UserError(f"{url} gave an unexpected answer.", fix="Use the same version on both.", code=ExitCode.NETWORK) from None
    if not is_signed(run, peer, given):
        raise unsigned(url, "a membership", BadSignature(f"its signature is not that of the key {run.members_of[:16]}"))
    return given


def report_round(url: str, run: RunConfig, signer: Signer, committed_round: CommittedRound, timeout: float = 10.0, *, token: str = "") -> None:
    """Tell the server of a final round, once; for who takes no samples. Raises UserError (NETWORK) when it does not answer."""
    body = {"run_id": run.run_id, "peer": signer.key.peer_id, **round_body(committed_round)}
    reply = asyncio.run(_ask("POST", url, "/v1/rounds", body, timeout, token, signer))
    if reply.status >= 300:  # old news to a server that knows better is no fault
        log.warning("the dataset server did not take round %d: status %d %s", committed_round.round, reply.status, reply.code)


def send_picture(url: str, signer: Signer, body: Mapping[str, Any], *, token: str = "") -> str:
    """Put a `protocol.PictureRequest`, once; the code of the server's refusal, '' when it took it. Raises UserError when it does not answer."""
    reply = asyncio.run(_ask("PUT", url, "/v1/pictures", dict(body), 30.0, token, signer))
    return "" if reply.status < 300 else reply.code or f"status {reply.status}"


def round_body(committed_round: CommittedRound) -> dict[str, Any]:
    members = [{"peer": member.peer, "number": member.number, "samples": member.samples} for member in committed_round.members]
    return {**{name: getattr(committed_round, name) for name in ("digest", "parent", "round", "samples")}, "members": members}


def check_run(url: str, status: int, body: bytes, run_id: str = "", known_hosts: KnownHosts | None = None) -> protocol.RunAnswer:
    """What a server answered to GET /v1/run. Raises UserError as `fetch_run` does."""

    def wrong(what: str, fix: str) -> UserError:
        return UserError(f"{url} {what}.", fix=fix, code=ExitCode.NETWORK)

    try:
        values = json.loads(body)
        version = values["protocol"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise wrong(f"answers, but is not a dataset server (status {status}, {body[:40]!r})", "Check the URL and the port.") from None
    if version != protocol.PROTOCOL_VERSION:
        raise wrong(f"speaks protocol {version}, this program {protocol.PROTOCOL_VERSION}", "Use the same version of the program on both.")
    try:
        answer = protocol.RunAnswer.model_validate_json(body)
    except ValidationError as error:
        first = str(error).splitlines()[0]
        raise wrong(f"describes its run in a way this program does not know: {first}", "Use the same version on both.") from None
    try:
        check_signature("run", digest_json(answer.run), answer.signature, answer.host_key)
    except BadSignature as error:
        raise unsigned(url, "a run", error) from None
    run = RunConfig.from_mapping(answer.run, where=url)
    if run.run_id != answer.run_id:
        raise wrong(f"calls its run {answer.run_id}, but its configuration makes it {run.run_id}", "Use the same version on both.")
    if run.members_of not in ("", answer.host_key):
        raise unsigned(url, "a run", BadSignature(f"it is for members of the key {run.members_of[:16]}"))
    if run_id not in ("", answer.run_id):
        raise wrong(f"serves run {answer.run_id} ('{run.run_name}'), not {run_id}", "Check the URL, or remove --run_id.")
    if known_hosts:
        known_hosts.check(url, answer.run_id, answer.host_key)
    return answer


def unsigned(url: str, what: str, error: BadSignature) -> UserError:
    fix = "Somebody may have changed it on its way: use https, or ask the host."
    return UserError(f"{url} serves {what} that its host has not signed: {error}.", fix=fix, code=ExitCode.AUTH)


async def _ask(method: str, url: str, path: str, body: Any, timeout: float, token: str, signer: Signer | None = None) -> Reply:
    """The server's answer. Raises UserError when nobody answers within `timeout` seconds, or the token opens nothing."""
    deadline, pause = time.monotonic() + timeout, 0.2
    async with open_session() as session:
        while True:
            left = max(0.1, deadline - time.monotonic())
            try:
                reply = await exchange(session, method, url, path, body, seconds=left, token=token, signer=signer)
                if reply.status != 429 and reply.status < 500:  # 502 without a code of ours: a proxy says that its server is away
                    return reply
                raise ServerAway(f"status {reply.status} ({reply.code or 'try later'})", retry_after(reply.headers))
            except ServerAway as away:
                _refuse_hopeless(url, away.__cause__)
                pause = max(pause, away.wait_seconds)
                if time.monotonic() + pause > deadline:
                    reason = str(away) or "no answer in time"
                    raise Unanswered(
                        f"The dataset server {url} does not answer: {reason}.",
                        fix="Check the URL, that the server runs, and that its port is open.",
                        code=ExitCode.NETWORK,
                    ) from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)


def _refuse_path(url: str, reply: Reply) -> None:
    """Raise UserError for a path behind host and port that nobody serves. A proxy may serve one, so it is asked first."""
    path = urlsplit(url).path.strip("/")
    if path and reply.status == 404 and reply.code in ("", "not_found"):
        short = url.rstrip("/").removesuffix(f"/{path}")
        raise UserError(f"{url} has no dataset server (status 404).", fix=f"Write {short}, if that is what the host said.")


def _refuse_hopeless(url: str, error: BaseException | None) -> None:
    """Raise UserError for what trying again cannot mend."""
    if isinstance(error, aiohttp.InvalidURL):
        raise UserError(f"'{url}' is not a URL.", fix="It looks like http://203.0.113.7:9090.", code=ExitCode.NETWORK) from None
    if isinstance(error, aiohttp.ClientSSLError) and "WRONG_VERSION_NUMBER" in str(error):
        raise UserError(
            f"{url} does not speak https.", fix=f"Write http://{url.removeprefix('https://')}, if that is what the host said."
        ) from None
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
        raise UserError(
            f"{url} shows a certificate that is not trusted: {reason}.",
            fix="Use the name that the certificate is for; where the host signed it itself, get the file and set SSL_CERT_FILE to it.",
            code=ExitCode.NETWORK,
        ) from None
