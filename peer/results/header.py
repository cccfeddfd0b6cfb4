"""What a .safetensors file says of itself: ModelSpec's keys (github.com/Stability-AI/ModelSpec 1.0.1) and those that kohya's scripts write (`ss_...`).

Nothing but what all peers of a run agree on, so that equal states give equal files: no date, no names of pictures, no paths. What is not known is not said.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from peer.contracts import Model
from peer.methods.shared.tensor_file import read
from swarm import files
from swarm.run.family import Family
from swarm.run.method import Method, method_named

if TYPE_CHECKING:
    from peer.results.result import Result

_BLANK = "0" * 64
"""In the place of a digest until the file is written."""
_OF_ALL = "modelspec.hash_sha256"
_DIGESTS = {_OF_ALL: f"0x{_BLANK}", "sshs_model_hash": _BLANK}
"""Of the bytes behind the header."""


def header(model: Model, about: "Result | None", title: str = "", *, whole: bool = False) -> dict[str, str]:
    """Of a file with what was trained, under diffusers' names; whole: with the whole model, under those of the original checkpoints.

    title: where nothing is known about a model.
    """
    family, predicts = model.facts, model.pipeline.scheduler.config.get("prediction_type")
    names = family.called(model.parts[family.denoiser].config, predicts == "v_prediction")
    method = method_named(about.run.method) if about else None
    kind = "" if whole or method is None else "/textual-inversion" if method.learns_words else "/lora"
    spec = {
        "sai_model_spec": "1.0.1",
        "architecture": names.architecture + kind,
        "implementation": family.implementation if whole else "diffusers",
        "title": title,
        "prediction_type": {"v_prediction": "v", "epsilon": "epsilon"}.get(predicts),
        **(_trained(about, family) if about else {}),
    }
    options = (
        {}
        if whole or method is None
        else {"base_model_version": names.version, "v2": "_v2" in names.version, **_options(about, method, family)}
    )
    said = {f"modelspec.{name}": value for name, value in spec.items()} | {f"ss_{name}": value for name, value in options.items()}
    return {name: str(value) for name, value in said.items() if value is not None} | (_DIGESTS if options else {_OF_ALL: _DIGESTS[_OF_ALL]})


def original(said: Mapping[str, str], family: Family) -> dict[str, str]:
    """The same of a file whose layers have the names of the original checkpoints."""
    name = "modelspec.implementation"
    return {**said, **({name: family.implementation} if name in said else {})}


def _trained(about: "Result", family: Family) -> dict[str, Any]:
    """The base model by its digest: where it lies is each machine's own."""
    run = about.run
    base = f"{family.title} ({run.model_digest[:16]})" if run.model_digest else family.title
    done = f"{about.samples:,} samples in {about.round:,} rounds"
    return {
        "title": run.run_name,
        "description": f"Trained from {base} with distributed-diffusion, by the method {run.method}: {done}.",
        "resolution": f"{run.resolution}x{run.resolution}",
        "trigger_phrase": run.placeholder_token or None,
        "encoder_layer": run.clip_skip + 1 if run.clip_skip else None,
    }


def _options(about: "Result", method: Method, family: Family) -> dict[str, Any]:
    """Under kohya's names, in kohya's units: steps are rounds, of the samples of a round."""
    run = about.run
    return {
        "output_name": run.run_name,
        "resolution": (run.resolution, run.resolution),
        "steps": about.round,
        "total_batch_size": run.target_batch_size,
        "learning_rate": run.learning_rate,
        "unet_lr": run.learning_rate if not method.learns_words else None,
        "text_encoder_lr": (run.text_encoder_lr or run.learning_rate) if run.train_text_encoder else None,
        "optimizer": run.optimizer if run.optimizer != "auto" else None,  # each machine's own
        "lr_scheduler": run.lr_scheduler,
        "max_grad_norm": run.clip_norm,
        "seed": run.seed,
        "clip_skip": run.clip_skip + 1 if run.clip_skip else None,
        "caption_dropout_rate": run.ucg,
        "flip_aug": run.random_flip,
        "shuffle_caption": run.shuffle_tags,
        "keep_tokens": run.keep_tokens,
        "loss_type": run.loss_type,
        **{f"network_{name}": value for name, value in method.network(run, family).items()},
    }


def save(tensors: Mapping[str, Tensor], path: Path, said: Mapping[str, str]) -> None:
    """Write a file with this header, with the digests of its tensors in it where it has places for them; the same bytes each time."""
    from safetensors.torch import save_file

    blank = {name: _DIGESTS[name] for name in said.keys() & _DIGESTS}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {**said, **blank})
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        start = json.loads(file.read(length))
        digest = hashlib.sha256()
        while part := file.read(1 << 20):
            digest.update(part)
        # In order: safetensors writes what is said in another one each time.
        start["__metadata__"] = {
            name: text.replace(_BLANK, digest.hexdigest()) if name in blank else text
            for name, text in sorted(start["__metadata__"].items())
        }
        file.seek(8)
        file.write(json.dumps(start, ensure_ascii=False, separators=(",", ":")).encode().ljust(length))
    files.as_new(path)


def say(folder: Path, said: Mapping[str, str]) -> None:
    """Add it to what the files in a result's folder say."""
    for path in folder.glob("*.safetensors"):
        tensors, before = read(path)
        save(tensors, path, {**before, **said})
