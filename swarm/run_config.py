"""What every peer of a run must agree on: set once by whoever founds the run, hashed into every signed record."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm import choices, run_identity
from swarm.errors import UserError
from swarm.options import build, check_keys, option
from swarm.run_defaults import DEFAULTS
from swarm.run_identity import PLACES

LEFT_OPEN = {
    "family": "auto",
    "method": "auto",
    "learning_rate": 0.0,
    "lora_init": "auto",
    "prediction_type": "auto",
    "rescale_betas_zero_snr": None,
}
"""Values that leave it to the program, or to what the founder finds in the model; a peer that gives one agrees with any run."""

LEARNING_RATES = {"full": 5e-6, "lora": 1e-4, "textual_inversion": 5e-4}
"""What learning_rate 0 stands for: the original's for a full fine-tune (diffusers' 1e-4 wrecks it), diffusers' usual ones for the others."""

OPTIONS_OF_METHOD = {
    "lora": ("rank", "lora_alpha", "lora_init"),
    "textual_inversion": ("placeholder_token", "initializer_token", "learnable_property", "num_vectors"),
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run (the same for every peer; taken from the server or the DHT when joining)."""

    sent: dataclasses.InitVar[tuple[str, ...] | None] = None
    """The options that a run by rule 1 was sent with; None for rule 2 (swarm/run_identity.py). No option itself; `dataclasses.replace` keeps it."""

    run_name: str = option("distributed-diffusion", "Name of the run, for people.", section="what is trained, and how peers agree")
    model: str = option("", "Base model: a diffusers folder, a Hub id or a .safetensors file.", aliases=("pretrained_model_name_or_path",))
    model_digest: str = option("", "Digest of the base model's weights; worked out by the founder.")
    family: str = option("auto", "What is trained; auto: the founder reads it from the model.", choices=("auto", *choices.FAMILIES))
    method: str = option(
        "auto",
        "Which tensors are trained; auto: textual_inversion with a --placeholder_token, else full.",
        choices=("auto", *choices.METHODS),
    )
    sync: str = option("parameters", "How peers agree.", choices=tuple(choices.SYNCS))
    wire: str = option(
        "fp16",
        "How contributions travel: 32, 16, 8.1 or 4.3 bits a value; what the last three lose goes into the next contribution.",
        choices=("fp32", "fp16", "int8", "int4"),
    )
    outer_learning_rate: float = option(0.7, "Step size of the outer Nesterov optimizer of --sync diloco.")
    outer_momentum: float = option(0.9, "Its momentum.")
    dataset_digest: str = option("", "Digest of the dataset's manifest; empty when each peer brings its own data.")
    total_samples: int = option(0, "The run ends when this many samples are in committed rounds; 0: no end.")
    target_batch_size: int = option(2048, "Samples of the whole swarm per round.")

    optimizer: str = option(
        "auto",
        "Local optimizer; auto: 8-bit AdamW on a GPU, fused AdamW on a CPU; adafactor: the least memory.",
        choices=("auto", "adamw", "adamw8bit", "adafactor"),
        switches={"use_8bit_adam": "adamw8bit"},
        section="the optimizer",
    )
    learning_rate: float = option(
        0.0,
        "Peak learning rate of the local optimizer; 0: the method's own, 5e-6 for full, 1e-4 for lora, 5e-4 for textual_inversion.",
        aliases=("lr",),
    )
    lr_scheduler: str = option(
        "constant", "Schedule over committed samples, as diffusers' get_scheduler has it.", choices=tuple(choices.LR_SCHEDULERS)
    )
    lr_warmup_samples: int = option(0, "Samples of the swarm over which the learning rate rises from 0.")
    lr_num_cycles: int = option(1, "Hard restarts of --lr_scheduler cosine_with_restarts.")
    lr_power: float = option(1.0, "Power of --lr_scheduler polynomial.")
    adam_beta1: float = option(0.9, "AdamW's first decay.")
    adam_beta2: float = option(0.999, "AdamW's second decay.")
    adam_weight_decay: float = option(1e-2, "The optimizer's decoupled weight decay.")
    adam_epsilon: float = option(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = option(1.0, "Clip each step's gradient to this norm, with --sync gradients the round's; 0: never.")

    resolution: int = option(
        512, "Side of the training square in pixels; with --num_buckets its square is the largest area.", section="pictures and captions"
    )
    center_crop: bool = option(False, "Crop the middle instead of a random square.")
    random_flip: bool = option(False, "Mirror half of the pictures.")
    ucg: float = option(0.1, "Share of samples whose caption is dropped; textual_inversion: none, they hold the word.", aliases=("proportion_empty_prompts",))
    seed: int = option(42, "Seed of data order and fresh weights; noise is seeded per peer as well.")
    shuffle_tags: bool = option(False, "Captions are tags between commas: put them in another order each time.")
    keep_tokens: int = option(0, "With --shuffle_tags: so many of the first tags keep their places.")
    num_buckets: int = option(
        0, "Crop pictures not to the square but to the nearest of at most so many ratios, each batch of one; 16 is usual, 0: squares only."
    )
    bucket_side_min: int = option(0, "With --num_buckets: shortest side in pixels; 0: half of the resolution.")
    bucket_side_max: int = option(0, "With --num_buckets: longest side in pixels; 0: one and a half of the resolution.")
    image_interpolation_mode: str = option(
        "lanczos", "How pictures are resized.", choices=("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
    )

    train_text_encoder: bool = option(
        False,
        "With full and lora: train the CLIP text encoders too, all that the family has; a T5 stays as it is, as in diffusers' scripts.",
        section="the method",
    )
    rank: int = option(4, "lora: rank of the two matrices of each layer.")
    lora_alpha: float = option(0.0, "lora: what the layers add is scaled by lora_alpha / rank; 0: the rank, so by 1.")
    lora_init: str = option(
        "auto",
        "lora: how the first matrix of each layer begins. gaussian: N(0, 1 / rank²), as in diffusers' scripts; uniform: within 1 / sqrt(inputs), "
        "which learns more slowly at small ranks; auto: gaussian.",
        choices=("auto", "gaussian", "uniform"),
    )
    placeholder_token: str = option(
        "", "textual_inversion: the new word that is learned, such as <dicoo>; the tokenizer must not know it yet."
    )
    initializer_token: str = option("", "textual_inversion: a word of one token whose meaning the new one starts from.")
    learnable_property: str = option(
        "object", "textual_inversion: what the word stands for; chooses the captions of bare pictures.", choices=("object", "style")
    )
    num_vectors: int = option(
        1, "textual_inversion: how many vectors the word has; more say more, and take more of the prompt's 77 tokens."
    )

    model_config: str = option(
        "",
        "For a .safetensors --model: diffusers folder or Hub id with its configs, tokenizers and missing parts; default: its family's own on the Hub.",
        section="the model and its loss",
    )
    clip_skip: int = option(
        0, "Read CLIP this many layers below the one that the family reads, 1: penultimate; not FLUX.", switches={"clip_penultimate": 1}
    )
    max_token_chunks: int = option(
        1,
        "Chunks of 75 tokens of a caption that are read, each with its own begin and end; not FLUX.",
        aliases=("extended_mode_chunks", "extended_chunks"),
    )
    max_sequence_length: int = option(512, "Tokens of a caption that T5 reads; FLUX.")
    prediction_type: str = option(
        "auto",
        "What the UNet predicts; auto: the founder reads it from the model's scheduler; not FLUX.",
        choices=("auto", "epsilon", "v_prediction", "sample"),
    )
    rescale_betas_zero_snr: bool | None = option(
        None, "Noise that leaves nothing of the picture at the last step; auto: as the model's scheduler has it, which the founder reads; not FLUX."
    )
    snr_gamma: float = option(0.0, "Weight the loss by min-SNR with this gamma, 5 is usual; 0: not; not FLUX.")
    noise_offset: float = option(
        0.0, "Add so much noise that is the same in all of a channel, for very dark and bright pictures; not FLUX."
    )
    input_perturbation: float = option(0.0, "Add so much further noise to what the UNet sees, but not to its target; not FLUX.")
    weighting_scheme: str = option(
        "none",
        "FLUX: how points between picture and noise are drawn (logit_normal, mode) or weighted (sigma_sqrt, cosmap).",
        choices=("none", "logit_normal", "mode", "sigma_sqrt", "cosmap"),
    )
    logit_mean: float = option(0.0, "Mean of --weighting_scheme logit_normal.")
    logit_std: float = option(1.0, "Its standard deviation.")
    mode_scale: float = option(1.29, "Scale of --weighting_scheme mode.")
    guidance_scale: float = option(
        3.5, "FLUX: what the transformer's guidance embedding is told; 1 for checkpoints that were not distilled."
    )
    timestep_bias_strategy: str = option(
        "none",
        "Which timesteps are drawn more often: the first or last of the schedule (--timestep_bias_portion) or a range; not FLUX.",
        choices=("none", "earlier", "later", "range"),
    )
    timestep_bias_multiplier: float = option(1.0, "How much more often; below 1: less often.")
    timestep_bias_begin: int = option(0, "First timestep of the range.")
    timestep_bias_end: int = option(1000, "Timestep before which the range ends.")
    timestep_bias_portion: float = option(0.25, "Share of the timesteps that earlier and later mean.")

    def __post_init__(self, sent: tuple[str, ...] | None) -> None:
        object.__setattr__(self, "sent", sent)
        self._resolve_method()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not (math.isfinite(value) and (value >= 0 or field.name == "logit_mean")):
                raise UserError(f"{field.name} is {value}.", fix="Use a finite number, 0 or more.")
        _at_least("target_batch_size", self.target_batch_size, 1)
        _at_least("total_samples", self.total_samples, 0)
        _at_least("resolution", self.resolution, 8)
        _at_least("clip_skip", self.clip_skip, 0)
        _at_least("max_token_chunks", self.max_token_chunks, 1)
        _at_least("max_sequence_length", self.max_sequence_length, 1)
        if self.timestep_bias_strategy != "none" and self.timestep_bias_multiplier == 0:
            raise UserError("timestep_bias_multiplier is 0.", fix="Use more than 0; 2 draws them twice as often.")
        if self.timestep_bias_portion > 1:
            raise UserError(f"timestep_bias_portion is {self.timestep_bias_portion}.", fix="Use a share in [0, 1].")
        if not 0 <= self.timestep_bias_begin < self.timestep_bias_end:
            raise UserError(
                f"timestep_bias_begin is {self.timestep_bias_begin}, timestep_bias_end {self.timestep_bias_end}.",
                fix="Begin before the end.",
            )
        _at_least("lr_warmup_samples", self.lr_warmup_samples, 0)
        _at_least("lr_num_cycles", self.lr_num_cycles, 1)
        for name in ("keep_tokens", "num_buckets", "bucket_side_min", "bucket_side_max"):
            _at_least(name, getattr(self, name), 0)
        if not 0 < self.learning_rate < 10:
            raise UserError(f"learning_rate is {self.learning_rate}.", fix="Use a value in (0, 10); 5e-6 suits a full fine-tune.")
        for name in ("adam_beta1", "adam_beta2", "outer_momentum"):
            if not getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}.", fix="Use a value in [0, 1).")
        if not 0 <= self.ucg <= 1:
            raise UserError(f"ucg is {self.ucg}.", fix="Use a share in [0, 1]; 0.1 is usual.")
        self._check_method()

    def _resolve_method(self) -> None:
        """What was left to the program is decided at once: whoever founds, serves or joins a run sees the same values."""
        if self.method == "auto":
            object.__setattr__(self, "method", "textual_inversion" if self.placeholder_token else "full")
        if self.learning_rate == 0:
            object.__setattr__(self, "learning_rate", LEARNING_RATES.get(self.method, LEARNING_RATES["full"]))
        if self.lora_init == "auto":
            object.__setattr__(self, "lora_init", "gaussian" if self.method == "lora" else DEFAULTS["lora_init"])

    def _check_method(self) -> None:
        """Raise UserError for an option that the run's method has no use for: whoever gave it meant another method."""
        _at_least("rank", self.rank, 1)
        _at_least("num_vectors", self.num_vectors, 1)
        for method, names in OPTIONS_OF_METHOD.items():
            for name in names:
                if method != self.method and self.was_given(name):
                    raise UserError(
                        f"{name} is for --method {method}, but this run's method is {self.method}.",
                        fix=f"Add --method {method}, or remove --{name}.",
                    )
        if self.method != "textual_inversion":
            return
        if self.train_text_encoder:
            raise UserError(
                "textual_inversion trains nothing of the text encoders but the new word.",
                fix="Remove --train_text_encoder, or choose full or lora.",
            )
        for name, example in (("placeholder_token", "<dicoo>"), ("initializer_token", "toy")):
            value = getattr(self, name)
            if not value or value != value.strip() or len(value.split()) > 1:
                raise UserError(f"{name} is '{value}', but must be one word.", fix=f"For example: --{name} '{example}'.")

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
            check_keys(values, cls, where=where)
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
            changes = "; ".join(f"{name} was {getattr(self, name)}, now {said[name]}" for name in differ)
            fix = "Start with its own; or give another --work_dir for a new run, with a new host key: invite lines sent out before do not fit it."
            if set(differ) == {"total_samples"}:
                fix = f"Start without it; then `dd-datasetserver extend --total_samples {said['total_samples']}`, with the same --dataset or --work_dir."
            raise UserError(f"The run '{self.run_name}' ({self.run_id}) has begun here with other options: {changes}.", fix=fix)

    def differing(self, said: Mapping[str, Any]) -> list[str]:
        """Which of the options in `said` this run has otherwise; the model's places do not count, nor what is left to the program."""
        left_open = {name for name, value in LEFT_OPEN.items() if said.get(name) == value}
        return [name for name, value in said.items() if name not in {*PLACES, *left_open} and value != getattr(self, name)]


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name} is {value}.", fix=f"Use {least} or more.")
