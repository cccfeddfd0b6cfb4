"""What every peer of a run must agree on: set once by whoever founds the run, hashed into every signed record."""

import dataclasses
import functools
from collections.abc import Mapping
from functools import partial
from typing import Any

from swarm import run_identity
from swarm.errors import UserError
from swarm.options import build, check_keys, options
from swarm.run.method import method_named, methods, owners, usual
from swarm.run.optimizer import default_rate
from swarm.run.sections import SECTIONS
from swarm.run_defaults import DEFAULTS
from swarm.run_identity import PLACES

LEFT_OPEN = {field.name: field.default for section in SECTIONS for field in dataclasses.fields(section) if field.metadata["found_out"]}
"""Values that leave it to the program, or to what the founder finds in the model; a peer that gives one agrees with any run."""


@options
class RunConfig(*reversed(SECTIONS)):  # type: ignore[misc]
    """The run (the same for every peer; taken from the server or the DHT when joining)."""

    sent: dataclasses.InitVar[tuple[str, ...] | None] = None
    """The options that a run by rule 1 was sent with; None for rule 2 (swarm/run_identity.py). No option itself; `dataclasses.replace` keeps it."""

    def __post_init__(self, sent: tuple[str, ...] | None) -> None:
        object.__setattr__(self, "sent", sent)
        self._resolve()
        for section in SECTIONS:
            if "check" in vars(section):
                section.check(self)
        self._check_method()

    def _resolve(self) -> None:
        """What was left to the program is decided at once: whoever founds, serves or joins a run sees the same values."""
        if self.method == "auto":
            asked = [name for name, method in methods().items() if method.asked_by and getattr(self, method.asked_by)]
            object.__setattr__(self, "method", asked[0] if asked else usual())
        method = method_named(self.method)
        resolved = dict(method.resolve(self))
        if self.learning_rate == 0:
            resolved["learning_rate"] = default_rate(self.optimizer, method.learning_rate)
        for name, owners_of in owners().items():
            if self.method not in owners_of and getattr(self, name) == LEFT_OPEN.get(name, self):
                resolved[name] = DEFAULTS[name]
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    def _check_method(self) -> None:
        """Raise UserError for an option that the run's method has no use for: whoever gave it meant another method."""
        for name, names in owners().items():
            if self.method not in names and self.was_given(name):
                theirs = " or ".join(names)
                raise UserError(
                    f"{name} is for --method {theirs}, but this run's method is {self.method}.",
                    fix=f"Add --method {theirs}, or remove --{name}.",
                )
        method_named(self.method).check(self)

    def was_given(self, name: str) -> bool:
        """Whether the founder must have given this option: it has neither this program's default nor the one of runs that do not send it."""
        return getattr(self, name) not in (type(self).__dataclass_fields__[name].default, DEFAULTS[name])

    @functools.cached_property  # a server compares it at every request
    def digest(self) -> str:
        """Names the run for ever (swarm/run_identity.py); peers whose digests differ never average together."""
        return run_identity.digest(dataclasses.asdict(self), self.sent)

    @property
    def run_id(self) -> str:
        """Name of the run in the DHT; two founders with equal configurations meet under it."""
        return self.digest[:16]

    def to_mapping(self) -> dict[str, Any]:
        """The run as it is sent, kept and signed: `from_mapping` makes the same run of it, with the same digest, also in another version."""
        return run_identity.written(dataclasses.asdict(self), self.sent)

    @classmethod
    def from_mapping(cls, run: Mapping[str, Any], *, where: str) -> "RunConfig":
        """A run that came over a network or from a file. Raises UserError for unknown keys or bad values, or for one that a newer program founded."""
        try:
            values, sent = run_identity.read(run)
            run_identity.check_known(values, partial(check_keys, cls=cls, where=where))
            return dataclasses.replace(build(cls, DEFAULTS, values), sent=sent)
        except UserError as error:
            raise run_identity.too_new(run, where, error) from None

    def refuse_differences(self, flags: Mapping[str, Any]) -> None:
        """Raise UserError naming the first flag of this peer that disagrees with the run it joins."""
        for name in self.differing(flags):
            raise UserError(
                f"The run '{self.run_name}' ({self.run_id}) has {name} = {getattr(self, name)}, but this peer was started with {flags[name]}.",
                fix=f"Remove --{name} to take the run's value, or found a run of your own.",
            )

    def refuse_another(self, said: Mapping[str, Any]) -> None:
        """Raise UserError naming what differs when `said`, of the host's options, is not this run, which has begun.

        What the host does not say stays as it began, also where another version of the program has other options or defaults.
        """
        if differ := self.differing(said):
            changes = "; ".join(_change(name, getattr(self, name), said[name]) for name in differ)
            fix = "Start with its own; or give another --work_dir for a new run, with a new host key: invite lines sent out before do not fit it."
            if set(differ) == {"total_samples"}:
                fix = f"Start without it; then `dd-datasetserver extend --total_samples {said['total_samples']}`, with the same --dataset or --work_dir."
            raise UserError(f"The run '{self.run_name}' ({self.run_id}) has begun here with other options: {changes}.", fix=fix)

    def differing(self, said: Mapping[str, Any]) -> list[str]:
        """Which of the options in `said` this run has otherwise; the model's places do not count, nor what is left to the program."""
        left_open = {name for name, value in LEFT_OPEN.items() if said.get(name) == value}
        return [name for name, value in said.items() if name not in {*PLACES, *left_open} and self._meant(name, value) != getattr(self, name)]

    def _meant(self, name: str, value: Any) -> Any:
        """What the value of an option stands for in this run: some words are kept as what they mean in it."""
        if value == getattr(self, name):
            return value
        try:
            return getattr(dataclasses.replace(self, **{name: value}), name)
        except UserError:  # no run like this one could have it
            return value



def _change(name: str, before: Any, now: Any) -> str:
    if name == "model_digest":  # nobody has given that: it is what lies where --model says
        return f"the model's weights had the digest {before[:8]}, now {now[:8]}"
    return f"{name} was {before}, now {now}"
