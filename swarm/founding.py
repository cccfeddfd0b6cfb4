"""What every peer would refuse of a run, found out by whoever founds it: before it is signed, and without torch."""

import contextlib
import json
import re
import unicodedata
from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path

from swarm.base_model import AUTO, family_of
from swarm.choices import FALLING
from swarm.errors import UserError
from swarm.options import names_of
from swarm.run.family import Family, families, family_named, refused
from swarm.run.loss import losses
from swarm.run.losses.denoising import check_noise
from swarm.run.method import method_named, methods
from swarm.run.optimizer import AUTO as OPTIMIZER_AUTO
from swarm.run.optimizer import optimizer_named
from swarm.run.strategy import strategies, swarms
from swarm.run_config import RunConfig

_LONGEST_NAME = 200
_NOT_IN_A_LINE = ("Cc", "Zl", "Zp", "Cs")
"""Unicode's categories of control characters, of ends of lines and paragraphs, and of halves of characters."""
LEAST_FACTOR = 0.05
"""Of a rate that the optimizer finds: below, it must be a rate for AdamW."""
_MOST_OF_ALL = 2**40
"""Of whole numbers: ledgers count in 64 bits, and generators take seeds of 64, into which more than the run's goes."""


def with_noise(run: RunConfig, source: Path) -> RunConfig:
    """The run with what its loss reads of the base model at `source`, a folder or a file, where that was left open. Raises UserError."""
    family = family_named(run.family)
    return replace(run, **losses()[family.loss].found_in(run, source)) if family else run


def with_family(run: RunConfig, source: Path) -> RunConfig:
    """The run with the family of its model where that was left open. Raises UserError when the model is of none, or says that it is of another."""
    if run.family == AUTO:
        return replace(run, family=family_of(source))
    try:
        found = family_of(source)
    except UserError:  # that the model does not say what it is is the reason to say it
        return run
    if found != run.family:
        raise UserError(f"family is {run.family}, but {run.model} is of {found}.", fix="Remove --family: it is read from the model.")
    return run


def with_defaults(run: RunConfig, given: Collection[str] = ()) -> RunConfig:
    """The run with its family's own defaults for options that are not among those `given` and have the program's."""
    family = family_named(run.family)
    usual = family.defaults.items() if family else ()
    return replace(run, **{name: value for name, value in usual if name not in given and not run.was_given(name)})


def with_beginning(run: RunConfig, given: Collection[str] = ()) -> RunConfig:
    """The run with what its method reads of the files that it begins with. Raises UserError."""
    return replace(run, **method_named(run.method).found(run, given))


def check_digest(run: RunConfig, found: str) -> None:
    """found: of the model's weights. Raises UserError when the run says another."""
    if run.model_digest not in ("", found):
        raise UserError(
            f"model_digest is {run.model_digest[:16]}, but the weights of {run.model} have {found[:16]}.",
            fix="Give the model that the run began with; or remove --model_digest.",
        )


def check_model(run: RunConfig, source: Path) -> None:
    """Raise UserError for what no peer could train with the model in folder `source`, as far as its parts' configs tell."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no peer can load such a model, and each says why
        check_resolution(run, resolution_multiple(run.family, source))
    family = family_named(run.family)
    encoders = family.text_encoders.items() if family else ()
    layers = {name: encoder.layers_above for name, encoder in encoders if encoder.layers_above is not None}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        check_clip_skip(run.clip_skip, **{name: _config(source, name)["num_hidden_layers"] - above for name, above in layers.items()})


def resolution_multiple(family: str, source: Path) -> int:
    """What the sides of pictures must be multiples of, from the configs of a model's parts."""
    facts = families()[family]
    vae = facts.vae_factor(_config(source, "vae"))
    return vae * (facts.patch or 2 ** (len(_config(source, facts.denoiser)["block_out_channels"]) - 1))


def _config(source: Path, part: str) -> dict:
    return json.loads((source / part / "config.json").read_text(encoding="utf-8"))


def check_resolution(run: RunConfig, multiple: int) -> None:
    if run.resolution % multiple:
        raise UserError(
            f"resolution is {run.resolution}, but this model needs a multiple of {multiple}.",
            fix=f"Use {run.resolution // multiple * multiple or multiple}.",
        )


def check_clip_skip(clip_skip: int, **layers_read: int) -> None:
    """Raise UserError when an encoder has no layer `clip_skip` below the usual one; layers_read: how many of an encoder's layers are read usually."""
    for name, layers in layers_read.items():
        if clip_skip >= layers:
            raise UserError(
                f"clip_skip is {clip_skip}, but this model uses {layers} layers of its {name}.", fix=f"Use {layers - 1} or less."
            )


def check_values(run: RunConfig) -> None:
    """Raise UserError for values that no peer can use. Runs that have begun with one are read as they are: some peer may make do with it."""
    if not run.run_name or len(run.run_name) > _LONGEST_NAME or not run.run_name.isprintable():
        raise UserError(f"run_name has {len(run.run_name)} characters.", fix=f"Use 1 to {_LONGEST_NAME} printable ones.")
    for name in ("caption_prefix", "caption_suffix"):
        if any(unicodedata.category(char) in _NOT_IN_A_LINE for char in getattr(run, name)):
            raise UserError(f"{name} is {getattr(run, name)[:80]!r}.", fix="Use one line without control characters.")
    for name in ("model_digest", "dataset_digest", "lora_weights_digest"):
        if getattr(run, name) and not re.fullmatch("[0-9a-f]{64}", getattr(run, name)):
            raise UserError(f"{name} is '{getattr(run, name)[:80]}'.", fix="Use 64 digits and small letters a to f, or leave it out.")
    idle = {name for other, facts in strategies().items() if other != run.sync for section in facts.sections for name in names_of(section)}
    for field in (field for field in fields(run) if field.name not in idle):
        value, bounds = getattr(run, field.name), field.metadata["founding"]
        most = bounds.get("le", _MOST_OF_ALL)
        if isinstance(value, int) and not -most <= value <= most:
            raise UserError(f"{field.name} is {value}.", fix=f"Use {most} or less.")
        if "gt" in bounds and not value > bounds["gt"]:
            raise UserError(f"{field.name} is {value:g}.", fix=f"Use more than {bounds['gt']:g}; {field.default:g} is usual.")


def check_founding(run: RunConfig) -> None:
    """Raise UserError for what no peer of `run` could train; run: with its family, where that is known."""
    if run.members_of:
        raise UserError("members_of is for the dataset server to set.", fix="Leave it out; a server with --members yes makes its run for members.")
    check_values(run)
    check_noise(run.rescale_betas_zero_snr, run.prediction_type)
    check_schedule(run)
    check_optimizer(run)
    check_sides(run.resolution, run.num_buckets, run.bucket_side_min, run.bucket_side_max)
    check_family(run.family, run)
    check_idle(run)


def check_idle(run: RunConfig) -> None:
    """Raise UserError for an option that says nothing beside the others: whoever gave it expects that it does."""
    for field in (field for field in fields(run) if run.was_given(field.name)):
        for other, values in field.metadata["only_with"].items():
            if getattr(run, other) not in values:
                needed = f"--{other}" if values == (True,) else f"--{other} {' or '.join(values)}"
                raise UserError(
                    f"{field.name} is {getattr(run, field.name)}, but has no effect without {needed}.", fix=f"Add {needed}, or remove --{field.name}."
                )
    if run.keep_tokens and not (run.shuffle_tags or run.caption_tag_dropout_rate):
        needed = "--shuffle_tags or --caption_tag_dropout_rate"
        raise UserError(
            f"keep_tokens is {run.keep_tokens}, but has no effect without {needed}.", fix=f"Add {needed}, or remove --keep_tokens."
        )
    if run.was_given("multires_noise_discount") and not run.multires_noise_iterations:
        raise UserError(
            f"multires_noise_discount is {run.multires_noise_discount:g}, but has no effect without --multires_noise_iterations.",
            fix="Add --multires_noise_iterations 6, or remove --multires_noise_discount.",
        )
    if run.model_config and not run.model.endswith(".safetensors"):
        raise UserError(
            f"model_config is {run.model_config[:80]}, but {run.model} has a configuration of its own.", fix="Remove --model_config: it is for a .safetensors --model."
        )


def check_family(family: str, run: RunConfig) -> None:
    """Raise UserError for a method or an option of `run` that the family has no use for: whoever gave it meant another model."""
    facts = family_named(family)
    if facts and not takes(facts, run.method):
        raise UserError(
            f"method is {run.method}, but {family} cannot take it: diffusers' {facts.pipeline} loads no embeddings.",
            fix=f"Use --method {' or '.join(name for name in methods() if takes(facts, name))}.",
        )
    if facts and run.train_text_encoder and not facts.trains_texts:
        raise UserError(
            f"train_text_encoder is True, but no text encoder of {family} can be trained: {facts.reader} stays as it is.",
            fix="Remove --train_text_encoder.",
        )
    for name, reason in refused(facts).items() if facts else ():
        if run.was_given(name):
            raise UserError(f"{name} is {getattr(run, name)}, but {family} {reason}.", fix=f"Remove --{name}.")
    if facts:
        method_named(run.method).check_with(run, facts)


def takes(family: Family, method: str) -> bool:
    """Whether models of the family can be trained by the method."""
    return family.learned_words or not method_named(method).learns_words


def check_schedule(run: RunConfig) -> None:
    """Raise UserError for a learning rate that falls towards an end which the run does not have."""
    if not run.total_samples and run.lr_scheduler in FALLING:
        raise UserError(
            f"lr_scheduler '{run.lr_scheduler}' must know where the run ends.", fix="Give --max_train_steps or --total_samples."
        )


def check_optimizer(run: RunConfig) -> None:
    """Raise UserError for an optimizer that does not work with the rest of the run."""
    facts, strategy, texts = optimizer_named(run.optimizer), strategies()[run.sync], run.was_given("text_encoder_lr")
    own, its_texts = f"optimizer is {run.optimizer}", f"text_encoder_lr is {run.text_encoder_lr:g}"
    together = f"with --sync {run.sync} all peers take one step together, {strategy.optimizer}'s, with one rate"
    refused = [
        (
            strategy.optimizer and run.optimizer not in (OPTIMIZER_AUTO, strategy.optimizer),
            f"{own}, but {together}.", "Remove --optimizer, or use another --sync.",
        ),
        (strategy.optimizer and texts, f"{its_texts}, but {together}.", "Remove --text_encoder_lr, or use another --sync."),
        (
            strategy.optimizer and run.clip_grad == "tensor",
            f"clip_grad is tensor, but {together}, whose gradient is clipped as a whole.", "Remove --clip_grad, or use another --sync.",
        ),
        (
            run.clip_grad == "tensor" and not run.max_grad_norm,
            "clip_grad is tensor, but max_grad_norm is 0: nothing is clipped.", "Remove --max_grad_norm, or use --clip_grad none.",
        ),
        (
            facts.finds_rate and run.learning_rate < LEAST_FACTOR,
            f"learning_rate is {run.learning_rate:g}, but {facts.title} finds the rate itself and multiplies it by that.",
            "Remove --learning_rate, or give a factor such as 0.5.",
        ),
        (
            facts.finds_rate and texts,
            f"{its_texts}, but {facts.title} finds one rate for all that is trained.", "Remove --text_encoder_lr, or use another --optimizer.",
        ),
        (
            facts.finds_rate and run.clip_members and swarms(run.sync),
            f"{own}, and clip_members {run.clip_members:g}: a newcomer's {facts.title} begins with a rate of nearly 0, and all others would be cut to it.",
            "Add --clip_members 0, or use another --optimizer.",
        ),
        (
            facts.averages and not strategy.mean_alone,
            f"{own}, whose weights are an average, but --sync {run.sync} would move that further than the peers' mean.",
            "Use --sync parameters, or another --optimizer.",
        ),
        (
            facts.averages and run.lr_scheduler in FALLING,
            f"lr_scheduler is {run.lr_scheduler}, but {facts.title} averages its steps in place of a falling rate.",
            "Use --lr_scheduler constant; a warm-up is of use.",
        ),
        (
            facts.averages and run.adam_beta1 == 0,
            f"adam_beta1 is 0, and {facts.title} divides by it.", "Use more than 0; 0.9 is usual.",
        ),
        (
            facts.matrices and method_named(run.method).learns_words,
            f"{own}, which is for matrices that map vectors, and the rows of a word are none.", "Use another --optimizer.",
        ),
    ]  # fmt: skip
    for found, message, fix in refused:
        if found:
            raise UserError(message, fix=fix)


def check_sides(resolution: int, num_buckets: int, side_min: int, side_max: int) -> tuple[int, int]:
    """The shortest and longest side of a bucket; 0 stands for half and one and a half of the resolution. Raises UserError where no square is left."""
    side_min, side_max = side_min or resolution // 2, side_max or resolution * 3 // 2
    if num_buckets > 1 and not side_min <= resolution <= side_max:
        raise UserError(
            f"bucket_side_min is {side_min} and bucket_side_max {side_max}, but resolution {resolution} must lie between them.",
            fix="Leave them out to use half and one and a half times the resolution.",
        )
    return side_min, side_max
