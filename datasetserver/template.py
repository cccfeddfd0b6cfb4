"""`dd-datasetserver init`: a run.toml with every option of host and run, its meaning and its default, for people to fill in.

What is not said in the file keeps its default, so a file that nobody edited says nothing; `--config run.toml` reads it.
"""

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasetserver.config import ServerConfig
from swarm.arguments import ArgumentParser
from swarm.errors import ExitCode, UserError
from swarm.options import build, parse_flags
from swarm.run.method import methods
from swarm.run_config import RunConfig

_CHOOSE = ("dataset", "model", "run_name", "method", "resolution", "target_batch_size", "total_samples", "host", "public_url", "tokens")
"""What nobody can choose for a host; first in the file."""
_EXAMPLES = {
    "dataset": "pictures",
    "model": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "run_name": "our first run",
    "method": next(name for name, method in methods().items() if method.adapter),
    "total_samples": 200_000,
    "host": "0.0.0.0",
    "public_url": "http://203.0.113.7:9090",
    "tokens": "tokens.txt",
}
_WORKED_OUT = ("model_digest", "dataset_digest", "lora_weights_digest", "members_of", "dry_run")
"""Not for this file: the founder works them out; dry_run is for a single start."""
_WIDTH = 118


def text(given: Mapping[str, Any]) -> str:
    """The file, with what is `given` set and everything else a comment."""
    parts = [
        "# A run, and the server that hosts it: dd-datasetserver --config run.toml",
        "# Take away the # before what you set; the rest keeps the value shown. Flags win over this file.",
        "# What it means in full: docs/host.md and docs/options.md.",
        "",
        "# ---- choose these first",
        *_entries([_field(name) for name in _CHOOSE], given),
    ]
    for cls, title in (
        (RunConfig, "the run: fixed once it has begun, the same for every peer"),
        (ServerConfig, "this server: may change at each start"),
    ):
        fields = [field for field in dataclasses.fields(cls) if field.name not in (*_CHOOSE, *_WORKED_OUT)]
        parts += [f"# ---- {title}", *_entries(fields, given)]
    return "\n".join(parts)


def main(argv: Sequence[str]) -> None:
    """`dd-datasetserver init [FILE] [any option of host or run]`. Raises UserError."""
    parser = ArgumentParser(
        "dd-datasetserver init",
        usage="%(prog)s [FILE] [options]",
        description="Write a run.toml to fill in, or the FILE that is named. Options given here are set in it.",
        allow_abbrev=False,
        first=("--dataset", "--model", "--run_name", "--method", "--resolution", "--total_samples", "--tokens", "--force"),
        examples=["dd-datasetserver init run.toml --dataset pictures --model my-model --tokens tokens.txt"],
    )
    parser.add_argument("file", nargs="?", type=Path, default=Path("run.toml"), help="file to write [run.toml]")
    parser.add_argument("--force", action="store_true", help="overwrite the file if it exists")
    server, run, rest = parse_flags(parser, argv, ServerConfig, RunConfig)
    build(RunConfig, run)  # what is wrong is better said now
    if server.get("dataset") or server.get("dataset_name"):  # without one there is no server yet to check
        build(ServerConfig, server)
    path: Path = rest["file"]
    if path.exists() and not rest["force"]:
        raise UserError(f"{path} is there already.", fix="Give another name, or --force to write over it.")
    try:
        path.write_text(text({**server, **run}), encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}.", fix="Choose another place.", code=ExitCode.DISK) from None
    print(f"wrote {path}: edit its first lines, then: dd-datasetserver --config {path}")


def _field(name: str) -> dataclasses.Field:
    return next(field for cls in (RunConfig, ServerConfig) for field in dataclasses.fields(cls) if field.name == name)


def _entries(fields: Sequence[dataclasses.Field], given: Mapping[str, Any]) -> Iterator[str]:
    for field in fields:
        choices = field.metadata["choices"]
        about = field.metadata["description"] + (f" One of {', '.join(choices)}." if choices else "")
        example = f" For example {_toml(_EXAMPLES[field.name])}." if field.name in _EXAMPLES else ""
        yield from textwrap.wrap(about + example, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False)
        if field.name in given:
            yield f"{field.name} = {_toml(given[field.name])}"
        else:
            default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
            yield f"#{field.name} = {_toml('auto' if default is None else default)}"
        yield ""


def _toml(value: Any) -> str:
    """Of the kinds that options have. JSON's strings are TOML's basic strings, but for DEL."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps("auto" if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")
