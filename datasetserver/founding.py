"""Which run a server serves, whoever founds it: the host's file and flags, a start before this one, or a peer over HTTP."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasetserver.refused import Refused
from datasetserver.work_folder import HOST_KEY
from swarm.base_model import AUTO, not_found
from swarm.digest import canonical_json, digest_model
from swarm.errors import UserError
from swarm.founding import check_digest, check_founding, check_model, with_beginning, with_defaults, with_family, with_noise
from swarm.options import build
from swarm.protocol import MAX_RUN_BYTES
from swarm.run.strategy import swarms
from swarm.run_config import RunConfig
from swarm.run_identity import PLACES
from swarm.signing import HostKey


def run_to_serve(values: Mapping[str, Any], stored: RunConfig | None) -> RunConfig | None:
    """The run that the host's `values` found, with its model's digest; else the one of the ledger that is there; None when a peer is to found it.

    All that needs no dataset, so that nobody waits for pictures to be checked to hear of a mistyped option. Raises UserError when the values
    are wrong, there is no such model, or the ledger's run is another.
    """
    if not values.get("model") and (stored or not values):
        if stored:
            stored.refuse_differences(values)
        return stored
    run, source = _with_model(build(RunConfig, values))
    run = with_beginning(with_defaults(run, values), values)
    if stored:
        return _as_it_began(stored, values, run)
    if source:
        check_model(run, source)
        run = with_noise(run, source)
    check_founding(run)
    return run


def _as_it_began(stored: RunConfig, values: Mapping[str, Any], run: RunConfig) -> RunConfig:
    """The ledger's run, as its peers know it, when `run`, which the host's `values` make now, is the same. Raises UserError when it is another.

    Only what the host says is compared: since the run began this program may have got new options, or other defaults.
    """
    said = {name: getattr(run, name) for name in values if not (name == "dataset_digest" and not values[name])}
    found = ["model_digest", *(["lora_weights_digest"] if "lora_weights" in values else [])]
    stored.refuse_another({**said, **{name: getattr(run, name) for name in found}})
    return replace(stored, **{name: getattr(run, name) for name in PLACES if name in values})


def with_dataset(run: RunConfig, dataset_digest: str) -> RunConfig:
    """The run with the dataset's digest, which every peer will check against its own. Raises UserError when it is of another dataset."""
    _check_dataset(run, dataset_digest)
    return replace(run, dataset_digest=dataset_digest)


def advice(run: RunConfig) -> str:
    """What the host of a run that begins should know and can change only now; '' where there is nothing."""
    if not run.members_of or run.averaging != "mean" or not swarms(run.sync):
        return ""
    return (
        "one member that lies can undo the others' work until you ban it; unless you know all members, found the run with --averaging centered, "
        "which is for peers of about one speed, and trust three machines (docs/host.md, Members only)"
    )


def check_host_key(run: RunConfig, key: HostKey, work_dir: Path) -> None:
    """Raise UserError when the key is lost that signs the run's memberships: another key can let nobody in."""
    if run.members_of not in ("", key.public):
        found = "there is none" if key.is_new else f"it holds {key.public[:16]}"
        raise UserError(
            f"The run '{run.run_name}' is for members of the key {run.members_of[:16]}, "
            f"which {HOST_KEY} should hold, and {found}.",
            fix=f"Restore {HOST_KEY} in {work_dir}; without it the server can let nobody in: "
            "found a new run from the newest state.",
        )


def acceptable_run(values: Mapping[str, Any], dataset_digest: str, members_of: str = "") -> RunConfig:
    """The run that a peer asks to found, complete with the dataset's digest and whose members take part. Raises Refused with 400."""
    try:
        run = RunConfig.from_mapping(values, where="run")
        check_founding(replace(run, members_of="") if run.members_of == members_of else run)  # a run founded here says so
        _check_dataset(run, dataset_digest)
    except UserError as error:
        raise Refused(400, "bad_run", error.message, error.fix) from None
    if not re.fullmatch("[0-9a-f]{64}", run.model_digest):
        raise Refused(400, "bad_run", f"model_digest is '{run.model_digest[:80]}'.", "Send the digest of the base model's weights.")
    run = replace(run, dataset_digest=dataset_digest, members_of=members_of)
    size = len(canonical_json(run.to_mapping()))
    if size > MAX_RUN_BYTES:
        raise Refused(
            400, "bad_run", f"The run's options take {size} bytes, more than {MAX_RUN_BYTES}.", "Shorten its name or its model's path."
        )
    return run


def _check_dataset(run: RunConfig, dataset_digest: str) -> None:
    if run.dataset_digest not in ("", dataset_digest):
        raise UserError(
            f"The run's dataset is {run.dataset_digest[:16]}, but this folder's is {dataset_digest[:16]}.",
            fix="Give the folder of that run; or found a new one, without dataset_digest and with another --work_dir.",
        )


def _with_model(run: RunConfig) -> tuple[RunConfig, Path | None]:
    """The run with the digest of its base model and with its family; and where that is, None where it need not be here. Raises UserError when there is no model, or not the one whose digest was given."""
    if not run.model:
        raise UserError(
            "No model is given.", fix="Add --model with a diffusers folder or a Hub id; or give no option of the run, and a peer founds it."
        )
    source = Path(run.model)
    if not source.exists():
        if run.model_digest and run.family != AUTO:
            return run, None
        source = _download(run.model)
    check_digest(run, found := digest_model(source))
    return replace(with_family(run, source), model_digest=found), source


def _download(model: str) -> Path:
    """The weights of a Hub id in the local cache, fetched when they are not there."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=["model_index.json", "*/*.json", "*/*.safetensors"]))
    except HFValidationError:
        raise UserError(f"{model} is neither a folder nor a Hub id.", fix="Check --model.") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise not_found(model) from error
