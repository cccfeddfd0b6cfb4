"""How a run is written down, and what names it: which of its options are sent and hashed.

Two rules, since a run keeps its id for as long as it lives, whatever the programs of its host and its peers become:

1. All options that the founder's program had, as a flat mapping. So wrote programs before rule 2 existed. Whoever reads such a run sends
   and hashes those very options again, and takes an option that it knows beyond them at its frozen default.
2. Options that differ from the frozen defaults (`run_defaults.py`): `{schema: 2, needs_version, values}`. Runs that begin now are written so. An option
   that is new to a program changes no run that does not use it, and a changed default of the program changes no run at all.

`schema` names the table of defaults and what the values mean. `needs_version` is for people: the first version of the program that knows all that
the run uses. It is not hashed, since it follows from the values.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from swarm import choices, run_defaults
from swarm.digest import digest_json
from swarm.errors import UserError
from swarm.version import VERSION, is_version, order

SCHEMA = 2
PLACES = ("model", "model_config", "lora_weights")
"""Where a peer has the base model, and the LoRA that the run begins with: one on its disk, another one on the Hub. Sent, but no part of what the run is."""
_KEYS = {"schema", "needs_version", "values"}
_EXACT = 2**53
_UPDATE = "Update: git pull, then ./scripts/setup; then start again."
_LONGEST_ERROR = 500
"""Characters of an error about what a stranger may have written."""


def with_own_places(run: Any, given: Mapping[str, Any]) -> Any:
    """The run with a peer's places where it gave some: those of the host say nothing on another machine."""
    return dataclasses.replace(run, **{name: given[name] for name in PLACES if given.get(name)})


def written(values: Mapping[str, Any], sent: Iterable[str] | None) -> dict[str, Any]:
    """The run with these values of all its options, as it travels and is kept; sent: the options of a run by rule 1, None for rule 2."""
    differing = {name: _plain(value) for name, value in values.items() if value != run_defaults.DEFAULTS[name]}
    if sent is not None:  # those that were not sent are at their frozen defaults, unless somebody changed one since
        return {name: values[name] for name in dict.fromkeys([*sent, *differing])}
    return {"schema": SCHEMA, "needs_version": needs_version(differing), "values": differing}


def digest(values: Mapping[str, Any], sent: Iterable[str] | None) -> str:
    """Hash of the run with these values; its places left out."""
    run = written(
        {name: value for name, value in values.items() if name not in PLACES}, sent and [name for name in sent if name not in PLACES]
    )
    run.pop("needs_version", None)
    return digest_json(run)


def read(run: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...] | None]:
    """The options that a run sends, unchecked, and `sent` for `written`. Raises UserError for what neither rule wrote."""
    flat = "schema" not in run
    values = run if flat else run.get("values")
    known = flat or (run["schema"] == SCHEMA and set(run) == _KEYS)
    if not (known and isinstance(values, Mapping) and all(_is_name(name) for name in values)):
        raise UserError("This program cannot read the description of the run.", fix="Use the host's version of the program.")
    return dict(values), tuple(values) if flat else None


def needs_version(differing: Mapping[str, Any]) -> str:
    """The first version of this program that knows these options with these values."""
    since = [run_defaults.SINCE[name] for name in differing]
    since += [versions[differing[name]] for name, versions in choices.SINCE.items() if differing.get(name) in versions]
    return max(since, key=order, default=next(iter(run_defaults.BY_VERSION)))


def check_known(values: Mapping[str, Any], check: Callable[[Mapping[str, Any]], None]) -> None:
    """As `check`, for options that a program has written. Nobody can correct them; this program may be too old to know them.

    Raises UserError.
    """
    try:
        check(values)
    except UserError as error:
        raise UserError(error.message, fix=_UPDATE, code=error.code) from None


def too_new(run: Mapping[str, Any], where: str, error: UserError) -> UserError:
    """`error`, for which this program cannot read the run; or the version that it needs, where the run says that this one is too old."""
    said = "".join(letter if letter.isprintable() else "?" for letter in error.message)[:_LONGEST_ERROR]
    needs = run.get("needs_version")
    if "schema" not in run or not is_version(needs) or order(needs) <= order(VERSION):
        return UserError(said, fix=error.fix, code=error.code)
    return UserError(
        f"{where}: the run needs version {needs} of this program, and this is {VERSION}: {said.removeprefix(f'{where}: ')}",
        fix=_UPDATE,
    )


def _is_name(name: object) -> bool:
    """Whether a key could be an option's name: it may come into an error's line."""
    return isinstance(name, str) and name.isidentifier() and len(name) <= 64


def _plain(value: Any) -> Any:
    """1 and 1.0 are the same value, whether an option counts or measures: it is written as 1."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
    return int(value) if whole else value
