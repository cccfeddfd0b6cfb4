"""Options: a class is the only place where an option's default, meaning, flag, choices and bounds are written; pydantic checks its values.

Order of precedence: defaults < file (TOML) < flags. Unknown flags and keys are errors that name the nearest right one.
"""

import argparse
import dataclasses
import difflib
import functools
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import dataclass_transform

from swarm.errors import UserError
from swarm.other_trainers import OUR_NAMES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Config = TypeVar("Config")
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_TOKEN_WITH_DASH = re.compile(r"-[\w-]{42}", re.ASCII)
"""32 bytes in base64, as `dd-datasetserver token add` makes them."""


def option(
    default: Any,
    help: str,
    *,
    aliases: Sequence[str] = (),
    choices: Sequence[str] | None = None,
    switches: Mapping[str, Any] | None = None,
    section: str = "",
    found_out: bool = False,
    since: str = "",
    unsaid: Any = None,
    founding: Mapping[str, float] | None = None,
    only_with: Mapping[str, Sequence[Any]] | None = None,
    **bounds: float | None,
) -> Any:
    """Declare one option of a class of `options`.

    aliases: further flag names, without the dashes; switches: flags that stand for a value; section: the heading of this option and those
    after it; found_out: the default leaves it to whoever founds the run; since, unsaid: of a run's options, see swarm/run_defaults.py; founding:
    closer bounds for runs that begin, those that have begun are read as they are; only_with: another option and its values beside which alone this
    one says anything; bounds: pydantic's ge, gt, le and lt. Numbers are 0 or more
    where no bound says otherwise.
    """
    if isinstance(default, int | float) and not isinstance(default, bool) and not bounds.keys() & {"ge", "gt"}:
        bounds["ge"] = 0
    ours = {"aliases": tuple(aliases), "choices": choices, "switches": dict(switches or {}), "section": section, "founding": dict(founding or {})}
    ours |= {"found_out": found_out, "since": since, "unsaid": unsaid, "only_with": dict(only_with or {})}
    # pydantic takes from the metadata of a field what its own Field() takes.
    metadata = {**ours, "description": help, **{name: bound for name, bound in bounds.items() if bound is not None}}
    if isinstance(default, list | tuple):
        return dataclasses.field(default_factory=lambda: tuple(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option,))
def options(cls: type[Config]) -> type[Config]:
    """A frozen pydantic dataclass whose values are checked whoever makes it; what is wrong is a UserError that names the option."""
    for name, default in vars(cls).items():
        if isinstance(default, dataclasses.Field) and default.metadata.get("choices"):
            cls.__annotations__[name] = Literal[tuple(default.metadata["choices"])]
    made = dataclass(frozen=True, kw_only=True, config=_STRICT)(cls)
    checked = made.__init__

    @functools.wraps(checked)
    def __init__(self: Any, **values: Any) -> None:
        try:
            checked(self, **values)
        except ValidationError as error:
            raise _told(made, error) from None

    made.__init__ = __init__
    return made


def _told(cls: type, error: ValidationError) -> UserError:
    """The first of a value's faults, in one line."""
    first = error.errors(include_url=False)[0]
    name, value, limits = str(first["loc"][0]), first["input"], first.get("ctx", {})
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if name not in fields:
        return UserError(f"There is no option '{name}'.{right_name(name, list(fields))}", fix="Correct or remove it.")
    meta = fields[name].metadata
    if first["type"] == "literal_error":
        return UserError(f"{name} is '{value}'.{nearest(str(value), meta['choices'])}", fix=f"Use one of {', '.join(meta['choices'])}.")
    if limits.keys() & {"ge", "gt", "le", "lt"}:
        return UserError(f"{name} is {value}.", fix=_range(meta))
    if first["type"] == "finite_number":
        return UserError(f"{name} is {value}.", fix="Use a finite number.")
    hint = _hints(cls)[name]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    words = ["text" if meta["choices"] else "auto" if kind is types.NoneType else getattr(kind, "__name__", str(kind)) for kind in kinds]
    expected = " or ".join(words)
    return UserError(f"{name} is {value!r}, which is not {expected}.", fix=f"Give {name} a value of type {expected}.")


def _range(bounds: Mapping[str, Any]) -> str:
    low = f"[{bounds['ge']:g}" if "ge" in bounds else f"({bounds['gt']:g}" if "gt" in bounds else "(-inf"
    high = f"{bounds['le']:g}]" if "le" in bounds else f"{bounds['lt']:g})" if "lt" in bounds else ""
    return f"Use a value in {low}, {high}." if high else f"Use {bounds['ge']:g} or more." if "ge" in bounds else f"Use more than {bounds['gt']:g}."


@functools.cache  # of a run's 86 options they take 0.6 ms, three quarters of making a run
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def names_of(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def nearest(word: str, right: Iterable[str]) -> str:
    """' Did you mean X?' for the right word nearest to `word`, or '' when none is near."""
    # At 0.6, --network_dim was answered with --work_dir; one wrong letter of four is 0.75.
    match = difflib.get_close_matches(word, list(right), n=1, cutoff=0.75)
    return f" Did you mean '{match[0]}'?" if match else ""


def right_name(word: str, known: Sequence[str]) -> str:
    """What an option that does not exist is called here: by other trainers' names for it, else by its spelling; '' when nobody can tell."""
    dashes = "--" if word.startswith("--") else ""
    ours = OUR_NAMES.get(word.removeprefix("--").replace("-", "_"))
    return f" It is '{dashes}{ours}' here." if ours and f"{dashes}{ours}" in known else nearest(word, known)


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str], *classes: type) -> list[dict[str, Any]]:
    """Read `argv` into one mapping per dataclass that holds only what was given explicitly.

    Flags already added to `parser` by the caller come last, as one further mapping.
    Raises UserError for an unknown flag, naming the nearest right one.
    """
    parser.usage = parser.usage or "%(prog)s [options]"  # a hundred of them, each explained below
    for cls in classes:
        (name, about), hints = _title(cls), _hints(cls)
        for number, (section, fields) in enumerate(sections(cls)):
            group = parser.add_argument_group(f"{name}: {section}" if section else name, None if number else about)
            for field in fields:
                _add_flag(group, field, hints[field.name])
    namespace, unknown = parser.parse_known_args(with_token(argv))
    if unknown:
        flag = unknown[0].split("=")[0]
        known = [name for action in parser._actions for name in action.option_strings]
        kind = "flag" if flag.startswith("-") else "argument"
        raise UserError(f"Unknown {kind} {flag}.{right_name(flag, known)}", fix=f"See {getattr(parser, 'full_help', '--help')} for all of them.")
    given = vars(namespace)
    names = [{field.name for field in dataclasses.fields(cls)} for cls in classes]
    result = [{name: given[name] for name in group if name in given} for group in names]
    return [*result, {name: value for name, value in given.items() if not any(name in group for group in names)}]


def sections(cls: type) -> list[tuple[str, list[dataclasses.Field]]]:
    """The options of `cls` in order, below their headings."""
    found: list[tuple[str, list[dataclasses.Field]]] = []
    for field in dataclasses.fields(cls):
        if field.metadata["section"] or not found:
            found.append((field.metadata["section"], []))
        found[-1][1].append(field)
    return found


def with_token(argv: Sequence[str]) -> list[str]:
    """`--token -abc` as `--token=-abc`: a host of before may have given a token that begins with a dash, which argparse takes for a flag."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] == "--token" and _TOKEN_WITH_DASH.fullmatch(word):
            joined[-1] = f"--token={word}"
        else:
            joined.append(word)
    return joined


def load_toml(path: Path) -> dict[str, Any]:
    """Raises UserError for a file that cannot be read, or is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Notepad's begin with a mark
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.", fix="Check the path.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.", fix="Check the path.") from None
    except (ValueError, RecursionError) as error:  # tomllib raises both of hostile values, besides its own
        raise UserError(f"{path} is not valid TOML: {error}.", fix="Correct that line.") from None


def read_toml(path: Path, *classes: type) -> dict[str, Any]:
    """The options of `classes` that a TOML file sets, under their own names or aliases, by their own names.

    Raises UserError for an unreadable file, an unknown key, or an option that is set under two of its names.
    """
    values = load_toml(path)
    fields = [field for cls in classes for field in dataclasses.fields(cls)]
    names = {alias: field.name for field in fields for alias in (field.name, *field.metadata["aliases"], *field.metadata["switches"])}
    check_names(values, names, where=str(path))
    switches = {switch: (on, field.default) for field in fields for switch, on in field.metadata["switches"].items()}
    result: dict[str, Any] = {}
    for key, value in values.items():
        if names[key] in result:
            raise UserError(f"{path}: '{key}' is set under two of its names.", fix=f"Set '{names[key]}' alone.")
        if key in switches and not isinstance(value, bool):
            raise UserError(f"{path}: {key} is {value!r}.", fix="Use true or false.")
        result[names[key]] = switches[key][not value] if key in switches else value
    return result


def check_keys(values: Mapping[str, Any], cls: type, *, where: str) -> None:
    """Raise UserError when `values` has a key that `cls` lacks, naming the nearest right one."""
    check_names(values, [field.name for field in dataclasses.fields(cls)], where=where)


def check_names(values: Iterable[str], known: Iterable[str], *, where: str) -> None:
    known = list(known)
    for key in values:
        if key not in known:
            raise UserError(f"{where}: there is no option '{key}'.{right_name(key, known)}", fix="Correct or remove it.")


def build(cls: type[Config], *layers: Mapping[str, Any]) -> Config:
    """An instance of defaults and layers, the later one winning. Raises UserError for a value that is none."""
    values: dict[str, Any] = {}
    for layer in layers:
        values.update(layer)
    hints = _hints(cls)
    return cls(**{name: _as_said(value, hints.get(name)) for name, value in values.items()})


def _as_said(value: Any, hint: Any) -> Any:
    """What files and flags have no word for: a tuple is a list in them, and None is 'auto'."""
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple(map(str, value))
    return None if value == "auto" and hint in (bool | None, int | None) else value


def _title(cls: type) -> tuple[str, str | None]:
    """'The run', 'the same for every peer', of a docstring that begins with 'The run (the same for every peer).'."""
    name, _, about = cls.__doc__.strip().splitlines()[0].rstrip(".").partition(" (")
    return name, about.rstrip(")") or None


def _add_flag(group: argparse._ArgumentGroup, field: dataclasses.Field, hint: Any) -> None:
    kinds = [kind for kind in (typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)) if kind is not type(None)]
    kind, meta = kinds[0], field.metadata
    flags = [f"--{field.name}", *(f"--{alias}" for alias in meta["aliases"])]
    default = field.default if field.default is not dataclasses.MISSING else ""
    default = "auto" if default is None and kind in (bool, int) else default
    shown = f" [{default}]" if default not in ("", None, ()) else ""
    common = {"dest": field.name, "default": argparse.SUPPRESS, "help": (meta["description"] + shown).replace("%", "%%")}
    if kind is bool:
        # The original project passes booleans as strings (--hivemind="True"), diffusers as bare flags: both work.
        optional = kind is not hint
        group.add_argument(
            *flags,
            nargs="?",
            const=True,
            type=_boolean_or_auto if optional else _boolean,
            metavar="BOOL|auto" if optional else "BOOL",
            **common,
        )
        group.add_argument(f"--no_{field.name}", dest=field.name, action="store_false", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    elif typing.get_origin(kind) is tuple:
        group.add_argument(*flags, nargs="*", action="extend", metavar="VALUE", **common)
    elif kind is int and kind is not hint:
        group.add_argument(*flags, type=_int_or_auto, metavar="INT|auto", **common)
    elif meta["choices"]:
        group.add_argument(*flags, metavar="{" + ",".join(meta["choices"]) + "}", **common)
    else:
        group.add_argument(*flags, type=kind, metavar=kind.__name__.upper(), **common)
    for name, value in meta["switches"].items():
        # A const that is text is converted as a word would be.
        told = {"const": "true", "type": partial(_switch, value, field.default), "metavar": "BOOL"}
        group.add_argument(f"--{name}", nargs="?", **told, **common | {"help": f"The same as --{field.name} {value}."})


def _switch(on: Any, off: Any, text: str) -> Any:
    return on if _boolean(text) else off


def _boolean_or_auto(text: str) -> bool | None:
    return None if text.lower() == "auto" else _boolean(text)


def _int_or_auto(text: str) -> int | None:
    try:
        return None if text.lower() == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a whole number nor auto") from None


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"'{text}' is neither True nor False")
