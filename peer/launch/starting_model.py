"""The base model of a run: which family it is of, whether this copy is the right one, and its parts loaded."""

import dataclasses
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.rooms import load_part
from swarm.base_model import AUTO, could_be_on_hub, family_of
from swarm.digest import digest_model
from swarm.errors import UserError
from swarm.founding import check_digest, check_model, with_beginning, with_defaults, with_family, with_noise
from swarm.run_config import RunConfig

if TYPE_CHECKING:
    from peer.contracts import Model

log = logging.getLogger(__name__)


def complete(run: RunConfig, *, given: Collection[str] = (), digest: bool = False) -> RunConfig:
    """The run with all that its founder works out for the others; given: the options that were; digest: as one of a swarm. Raises UserError when its base model is not there or of no known family."""
    from peer.models.diffusion.source import locate

    source = locate(run.model)
    left_open, run = run.family == AUTO, with_family(run, source)
    if left_open:
        log.info("the model %s is of family=%s", run.model, run.family)
    run = with_beginning(with_defaults(run, given), given)
    check_model(run, source)
    if not digest:
        return run
    check_digest(run, found := digest_model(source))
    return dataclasses.replace(with_noise(run, source), model_digest=found)


def load_model(run: RunConfig, given: Mapping[str, Any], device: Any) -> "Model":
    """The run's base model, or this peer's copy of it elsewhere (`--model`). Raises UserError when the weights are others."""
    return _read(source_of(run, given), run, given, device)


def load_unchecked(run: RunConfig, given: Mapping[str, Any]) -> "Model":
    """The same without its digest, which takes a minute, and unplaced: to count what it takes of memory."""
    return _read(locate_for(run, given), run, given, None)


def _read(source: Path, run: RunConfig, given: Mapping[str, Any], device: Any) -> "Model":
    run = dataclasses.replace(run, **{name: given[name] for name in ("model", "model_config") if given.get(name)})
    family = family_of(source) if run.family == AUTO else run.family
    return load_part("models", family).load(source, device, run)


def source_of(run: RunConfig, given: Mapping[str, Any]) -> Path:
    """The folder or file of `load_model`, without loading it. Raises UserError when it is not there, or the weights are others."""
    source = locate_for(run, given)
    if run.model_digest and digest_model(source) != run.model_digest:
        raise UserError(
            f"{source} is not the base model of the run '{run.run_name}': its weights have another digest than {run.model_digest[:16]}.",
            fix=f"Fetch {run.model or 'the model'} as the founder has it, or give its folder with --model.",
        )
    return source


def locate_for(run: RunConfig, given: Mapping[str, Any]) -> Path:
    """Where this peer has the run's base model, or has it fetched to from the Hub. Raises UserError when it is nowhere."""
    from peer.models.diffusion.source import locate

    try:
        return locate(given.get("model") or run.model)
    except UserError as error:
        its_founders = run.model_digest and not given.get("model")
        if not its_founders or could_be_on_hub(run.model):
            raise
        raise UserError(
            f"The run's base model '{run.model}' is a folder or file on the host's machine.",
            fix="Ask the host for it, and give it with --model FOLDER.",
        ) from error
