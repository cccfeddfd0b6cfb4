"""`dd-export`: a result in another form, `dd-export output --format single_file --out mine.safetensors`.

What to export is a result, a checkpoint, a state that an assisting peer kept, or the newest one of a run, fetched from who holds it.
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from swarm.arguments import ArgumentParser
from swarm.entries import ended_quietly
from swarm.errors import UserError, run_program
from swarm.interrupts import interruptible
from swarm.logs import setup_logging
from swarm.options import build, option, options, parse_flags

log = logging.getLogger(__name__)

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""PyTorch's names for them."""
_FORMATS = ("diffusers", "single_file", "lora_diffusers", "lora_kohya", "embedding")


@options
class ExportConfig:
    """What to turn into what."""

    state: str = option(
        "",
        "A result's folder; an --output_dir, for its result or else its newest checkpoint; a checkpoint's folder; the --output_dir of a "
        "helper (--assist), for its newest final state; one of the files in its settled/; or the URL of a run's server, or a peer's multiaddr, for "
        "the run's newest state, fetched from those who hold it. The word --state may be left out.",
        aliases=("result", "checkpoint"),
    )
    out: str = option("model", "Folder or file to write; the one before stays until the new one is whole.")
    format: str = option(
        "diffusers",
        "diffusers: the whole pipeline's folder, a LoRA merged; single_file: that in one .safetensors as A1111 and ComfyUI read it; "
        "lora_diffusers (ComfyUI, Forge), lora_kohya (kohya's scripts, A1111, ComfyUI, Forge), embedding: what was trained alone, in one file.",
        choices=_FORMATS,
    )
    dtype: str = option("fp32", "Precision of the numbers in a file; folders are fp32.", choices=tuple(DTYPES))
    model: str = option("", "The run's base model; default: where the run says.")
    model_config: str = option("", "For a .safetensors --model: diffusers folder or Hub id whose configs it is read with.")
    token: str = option("", "With a URL: what the host gave you; better in the environment, as DD_TOKEN.")
    host_key: str = option("", "With a URL: the host's key, to be sure that it is its run.")
    wait_seconds: float = option(120.0, "With a URL: give up when no peer or helper has given the whole state after N seconds; a full model needs more.")


def main(argv: Sequence[str]) -> None:
    parser = ArgumentParser(
        prog="dd-export",
        description="Turn what a run left behind into the form that another tool reads.",
        examples=[
            "dd-export http://203.0.113.7:9090 --out model",
            "dd-export --state out --format lora_kohya --out my-lora.safetensors",
        ],
    )
    if argv and not argv[0].startswith("-"):
        argv = ["--state", *argv]
    flags, _ = parse_flags(parser, argv, ExportConfig)
    config = build(ExportConfig, {"token": os.environ.get("DD_TOKEN", "").strip()}, flags)
    if not config.state:
        raise UserError(
            "Nothing to export was given.", fix="For example: dd-export --state output --format single_file --out mine.safetensors"
        )
    setup_logging()
    out = Path(config.out)
    if config.format != "diffusers" and out.name not in ("", "..") and out.suffix != ".safetensors":
        out = out.with_name(f"{out.name}.safetensors")
    with ended_quietly():
        from peer.results.exporting import export  # with PyTorch, for which --help need not wait 5 s

    export(config, out)
    log.info("exported %s from %s", out, config.state)


def cli() -> int:
    return run_program(interruptible()(lambda: main(sys.argv[1:])))


if __name__ == "__main__":
    sys.exit(cli())
