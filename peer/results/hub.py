"""`--push_to_hub`: a result folder goes to the Hugging Face Hub. What is written here stays, whatever becomes of the upload."""

import json
import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from peer.results.result import NAME, public, read_result
from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)


def prepare(repo: str, token: str) -> str:
    """Make sure, before hours of training, that the Hub lets us write to `repo` (a name alone: one of the token's owner); its full id.

    Raises UserError (auth, network).
    """
    try:
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
        with TemporaryDirectory() as scratch:
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
