"""`--push_to_hub`: a result folder goes to the Hugging Face Hub. What is written here stays, whatever becomes of the upload."""

import functools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peer.results.result import NAME, public, read_result
from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)

SECONDS = 60.0
"""For a connection, and for the next bytes of an answer: the Hub itself gives a commit 60 s."""
WRITE_SECONDS = 300.0
"""For the next bytes of an upload, which a slow line may hold up."""


def prepare(repo: str, token: str) -> str:
    """Make sure, before hours of training, that the Hub lets us write to `repo` (a name alone: one of the token's owner); its full id.

    Raises UserError (auth, network).
    """
    try:
        with _in_time():
            return str(_api(token).create_repo(repo, exist_ok=True).repo_id)
    except Exception as error:
        raise _refused(
            f"The Hub does not let this peer write to {repo}", error, "Then start again, or train without --push_to_hub."
        ) from error


def push(folder: Path, repo: str, token: str) -> str:
    """Upload a result folder; its page. Raises UserError: the folder is as it was, and can be pushed again."""
    about = read_result(folder)
    message = f"{about.run.run_name}: {about.samples} samples, round {about.round}" if about else folder.name
    again = f"The result is in {folder}; to try again: {by_hand(folder, repo)}"
    try:
        with TemporaryDirectory() as scratch, _in_time():
            api = _api(token)
            page = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, ignore_patterns=[NAME])
            if about:  # without the paths of this machine
                (Path(scratch) / NAME).write_text(json.dumps(public(about), indent=2), encoding="utf-8")
                api.upload_folder(repo_id=repo, folder_path=scratch, commit_message=f"{message}: what it was made from")
    except Exception as error:
        raise _refused(f"The upload to {repo} failed", error, again) from error
    log.info("pushed %s to %s", folder, repo)
    return str(page)


def by_hand(folder: Path, repo: str) -> str:
    """The command that uploads a result folder, without the file that names paths of this machine."""
    return f"hf upload {repo} {folder} --exclude {NAME}"


def _api(token: str):
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    return HfApi(token=token or None)


@contextmanager
def _in_time() -> Iterator[None]:
    """Within it, a Hub that takes a connection and then says nothing is an error. huggingface_hub itself waits for ever."""
    import huggingface_hub
    from huggingface_hub.utils import _http

    if hasattr(_http, "default_client_factory"):  # from 1.0: one client of httpx for all threads
        use, usual, limit = huggingface_hub.set_client_factory, _http.default_client_factory, _limit_client
    elif hasattr(_http, "_default_backend_factory"):  # before: a session of requests for each thread
        use, usual, limit = huggingface_hub.configure_http_backend, _http._default_backend_factory, _limit_session
    else:
        yield
        return
    use(lambda: limit(usual()))
    try:
        yield
    finally:
        use(usual)


def _limit_client(client: Any) -> Any:
    client.timeout = type(client.timeout)(SECONDS, write=WRITE_SECONDS)  # httpx's own class, or that of httpx2
    return client


def _limit_session(session: Any) -> Any:
    session.request = functools.partial(session.request, timeout=SECONDS)
    return session


def _refused(what: str, error: Exception, again: str) -> UserError:
    from huggingface_hub.errors import HFValidationError

    text = str(error).strip().splitlines()
    reason = (text[0] if text else type(error).__name__)[:200].rstrip(". ")
    if isinstance(error, HFValidationError):
        return UserError(f"{what}: {reason}.", fix="Give --hub_model_id as owner/name.")
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status in (401, 403):
        reason = "there is no token" if "Authorization" not in error.response.request.headers else f"the token was refused ({status})"
        fix = f"Give one that may write with --hub_token, HF_TOKEN or `hf auth login`. {again}"
        return UserError(f"{what}: {reason}.", fix=fix, code=ExitCode.AUTH)
    return UserError(f"{what}: {reason}.", fix=f"Check the network. {again}", code=ExitCode.NETWORK)
