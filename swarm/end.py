"""Where a run ends: at its own total_samples, or later where its host has said so since.

total_samples is part of a run's identity, so a longer run would be another run. An extension is therefore no new configuration but
an order of the host, signed with its key for this run. The largest signed one counts: orders can be repeated, come late and in any order,
and nobody can make a run shorter with an old one (docs/decisions/0008).
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm import files
from swarm.digest import digest_json
from swarm.errors import UserError
from swarm.run_config import RunConfig
from swarm.signing import BadSignature, HostKey, check_signature

log = logging.getLogger(__name__)
EXTENSION_FILE = "extension.json"
_MOST = 1 << 53
_LAST_ROUND_STRETCH = 1.25
"""The run's last round may be larger than the target by this factor, so that no tiny one is left over."""


class End:
    """host_key: whose extensions count; '': those of the host whose members the run is for, if any.

    extension: the one in force, to be handed on: {total_samples, host_key, signature}; path: where it is kept, for a start when nobody is there to tell it; None: nowhere.
    """

    def __init__(self, run: RunConfig, host_key: str = "", extension: Mapping[str, Any] | None = None, path: Path | None = None):
        self._run, self.host_key, self._path = run, host_key or run.members_of, None
        self.total, self.extension = run.total_samples, None
        self.extend(_kept(path) if path else None)
        self._path = path
        self.extend(extension)

    @property
    def may_be_extended(self) -> bool:
        """Whether there is a host whose word we could take, and an end to put off."""
        return bool(self.host_key) and not why_not(self._run)

    def extend(self, extension: Mapping[str, Any] | None) -> bool:
        """Take over an extension that somebody told of, if it is the host's and longer; whether it was."""
        if not extension or not self.may_be_extended:
            return False
        try:
            total, signature = extension["total_samples"], extension["signature"]
            if isinstance(total, bool) or not isinstance(total, int) or not self.total < total <= _MOST:
                return False
            check_signature("extension", _digest(self._run, total), signature, self.host_key)
        except (KeyError, TypeError, BadSignature):
            return False
        self.total, self.extension = total, {"total_samples": total, "host_key": self.host_key, "signature": signature}
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)  # of a peer that starts for the first time
                files.replace(self._path, json.dumps(self.extension).encode())
            except OSError as error:
                log.warning("%s is not kept, so a start without the server may end the run too soon: %s", self._path, error.strerror)
        return True


def _kept(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def sign_extension(key: HostKey, run: RunConfig, total_samples: int) -> dict[str, Any]:
    """The host's order that `run` shall go on to `total_samples`."""
    return {"total_samples": total_samples, "host_key": key.public, "signature": key.sign("extension", _digest(run, total_samples))}


def why_not(run: RunConfig) -> str:
    """Why this run cannot be extended; '' when it can."""
    if not run.total_samples:
        return "it has no end"
    if not run.lr_scheduler.startswith("constant"):
        # Its rate is next to 0 at the end, so that more samples would train nothing. With --sync gradients the rate is part of the step that all
        # peers repeat to the bit: one that heard of a longer schedule later than others would leave them.
        return f"its learning rate ({run.lr_scheduler}) ends with it, at {run.total_samples} samples"
    return ""


def refuse_extension(run: RunConfig, total_samples: int, total: int) -> None:
    """Raise UserError unless `run`, which ends at `total` now, can go on to `total_samples`."""
    if reason := why_not(run):
        raise UserError(
            f"The run '{run.run_name}' cannot be extended: {reason}.",
            fix="Found a new run with its result as --model."
            if run.total_samples
            else "dd-datasetserver end ends it; until then it goes on.",
        )
    if not total < total_samples <= _MOST:
        raise UserError(
            f"The run '{run.run_name}' ends at {total} samples already; {total_samples} is not later.",
            fix="Give more samples, counted from the run's beginning; dd-datasetserver end ends it now.",
        )


def round_samples(total: int, samples: int, target: int) -> int:
    """How many samples must wait before the next round begins. total: where the run ends (0: nowhere); samples: in the state; target: of a round."""
    left = total - samples
    return left if total and left <= _LAST_ROUND_STRETCH * target else target


def _digest(run: RunConfig, total_samples: int) -> str:
    return digest_json({"run": run.digest, "total_samples": total_samples})
