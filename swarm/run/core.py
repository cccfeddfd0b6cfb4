"""What no part of a run owns: what is trained, how much of it, the local optimizer, the loss of all families, pictures and captions."""


from swarm import choices
from swarm.choices import FALLING
from swarm.errors import UserError
from swarm.options import option, options
from swarm.run.method import methods, usual
from swarm.run.optimizer import OPTIMIZERS, reading
from swarm.run.strategy import told
from swarm.run.strategy import usual as usual_strategy


def _asks() -> str:
    return ", ".join(f"{name} with a --{method.asked_by}" for name, method in methods().items() if method.asked_by)


def _rates() -> str:
    return ", ".join(f"{method.learning_rate:.0e}".replace("e-0", "e-") + f" for {name}" for name, method in methods().items())


def _own_rates() -> str:
    shares = [f"a {1 / facts.of_method:g}th of it for {name}" for name, facts in OPTIMIZERS.items() if facts.of_method != 1]
    return ", ".join([*shares, *(f"1 for {name}, as a factor of the rate that it finds" for name, facts in OPTIMIZERS.items() if facts.finds_rate)])


@options
class Agreement:
    """What is trained, and how peers agree."""

    run_name: str = option("distributed-diffusion", "Name of the run, for people.", section="what is trained, and how peers agree")
    model: str = option("", "Base model: a diffusers folder, a Hub id or a .safetensors file.", aliases=("pretrained_model_name_or_path",))
    model_config: str = option(
        "",
        "For a .safetensors --model: diffusers folder or Hub id with its configs, tokenizers and missing parts; default: its family's own on the Hub.",
    )
    model_digest: str = option("", "Digest of the base model's weights; worked out by the founder.")
    family: str = option("auto", "What is trained; auto: the founder reads it from the model.", choices=("auto", *choices.FAMILIES), found_out=True)
    method: str = option("auto", f"Which tensors are trained; auto: {_asks()}, else {usual()}.", choices=("auto", *choices.METHODS), found_out=True)
    sync: str = option(usual_strategy(), f"How peers agree. {told()}.", choices=tuple(choices.SYNCS))
    wire: str = option(
        "fp16",
        "How contributions travel: 32, 16, 8.1 or 4.3 bits a value; what the last three lose goes into the next contribution.",
        choices=("fp32", "fp16", "int8", "int4"),
    )
    clip_members: float = option(
        20.0,
        "In a round, no member's contribution counts as longer than N times the members' median, per sample where peers step locally; 0: any length.",
        since="0.1.1", unsaid=0.0,
    )
    averaging: str = option(
        "mean",
        "How three members and more are averaged. centered, for members you do not know, of about one speed: what is far from most counts less, none more than a third.",
        choices=("mean", "centered"),
        since="0.1.1", unsaid="mean",
    )
    dataset_digest: str = option("", "Digest of the dataset's manifest; empty when each peer brings its own data.")
    members_of: str = option(
        "",
        "Key of the host that signs memberships: peers ignore a peer without one. The server sets it (--members); empty: the run is open to everybody.",
        since="0.1.1", unsaid="",
    )
    total_samples: int = option(0, "The run ends when this many samples are in finished rounds; 0: no end.", ge=0)
    target_batch_size: int = option(2048, "Samples of the whole swarm per round.", ge=1)

    def check(self) -> None:
        if 0 < self.clip_members < 1:
            raise UserError(
                f"clip_members is {self.clip_members}: every contribution would be shortened.", fix="Use 0, or 1 and more; 20 does not touch honest peers."
            )


@options
class Optimizer:
    """The local optimizer and its schedule."""

    optimizer: str = option(
        "auto",
        "Local optimizer, its state each peer's own; auto: 8-bit AdamW on a GPU, fused AdamW on a CPU; adafactor: the least memory.",
        choices=tuple(choices.LOCAL_OPTIMIZERS),
        switches={"use_8bit_adam": "adamw8bit"},
        section="the optimizer",
    )
    learning_rate: float = option(
        0.0, f"Peak learning rate of the local optimizer; 0: the method's own, {_rates()}; {_own_rates()}.", aliases=("lr",), found_out=True
    )
    lr_scheduler: str = option(
        "constant", "Schedule over committed samples, as diffusers' get_scheduler has it; constant warms up, too, if told to.", choices=tuple(choices.LR_SCHEDULERS)
    )
    lr_warmup_samples: int = option(0, "Samples of the swarm over which the learning rate rises from 0.", ge=0)
    lr_min_ratio: float = option(
        0.0, "A falling schedule ends at this share of its peak, not at 0.", lt=1, only_with={"lr_scheduler": FALLING}, since="0.1.1", unsaid=0.0
    )
    lr_num_cycles: int = option(1, "Hard restarts of --lr_scheduler cosine_with_restarts.", ge=1)
    lr_power: float = option(1.0, "Power of --lr_scheduler polynomial.")
    adam_beta1: float = option(0.9, "AdamW's first decay.", lt=1, only_with={"optimizer": reading("adam_beta1")})
    adam_beta2: float = option(0.999, "AdamW's second decay.", lt=1, only_with={"optimizer": reading("adam_beta2")})
    adam_weight_decay: float = option(1e-2, "The optimizer's decoupled weight decay.")
    adam_epsilon: float = option(1e-8, "AdamW's epsilon.", founding={"gt": 0}, only_with={"optimizer": reading("adam_epsilon")})
    max_grad_norm: float = option(
        1.0,
        "Clip each step's gradient to this norm, with --sync gradients the round's; 0: never.",
        only_with={"clip_grad": ("global", "tensor")},
    )
    clip_grad: str = option(
        "global",
        "What --max_grad_norm clips: global, the gradient of all that is trained; tensor, each tensor's by itself, as peers with --fused_step need it; "
        "none: nothing.",
        choices=("global", "tensor", "none"),
        since="0.1.1",
        unsaid="global",
    )

    @property
    def clip_norm(self) -> float:
        """The norm to which gradients are clipped; 0: never."""
        return self.max_grad_norm if self.clip_grad != "none" else 0.0

    def check(self) -> None:
        if not 0 < self.learning_rate < 10:
            raise UserError(f"learning_rate is {self.learning_rate}.", fix="Use a value in (0, 10); 5e-6 suits a full fine-tune.")


@options
class Distance:
    """How far an answer is from its target."""

    loss_type: str = option(
        "l2",
        "What a difference between answer and target counts: its square, or by huber or smooth_l1 less where it is larger than --huber_c.",
        choices=("l2", "huber", "smooth_l1"),
        section="the loss of all families",
        since="0.1.1",
        unsaid="l2",
    )
    huber_c: float = option(
        0.1,
        "Differences above this count less; with a --huber_schedule at the noisiest timestep.",
        gt=0,
        only_with={"loss_type": ("huber", "smooth_l1")},
        since="0.1.1",
        unsaid=0.1,
    )
    huber_schedule: str = option(
        "snr",
        "--huber_c at all timesteps (constant), or from 1 without noise down to it: as huber_c ** share of the timesteps, or by signal-to-noise ratio.",
        choices=("constant", "exponential", "snr"),
        only_with={"loss_type": ("huber", "smooth_l1")},
        since="0.1.1",
        unsaid="snr",
    )
    masked_loss: bool = option(
        False,
        "Learn only where a mask is white: a picture's alpha channel, or NAME.mask.png beside it; a picture without either counts as a whole.",
        since="0.1.1",
        unsaid=False,
    )


@options
class Pictures:
    """Pictures and captions."""

    resolution: int = option(
        512, "Side of the training square in pixels; with --num_buckets its square is the largest area.", ge=8, founding={"le": 16_384}, section="pictures and captions"
    )
    center_crop: bool = option(False, "Crop the middle instead of a random square.")
    random_flip: bool = option(False, "Mirror half of the pictures.")
    ucg: float = option(
        0.1, "Share of samples whose caption is dropped; none where captions hold a new word.", le=1, aliases=("proportion_empty_prompts",)
    )
    seed: int = option(42, "Seed of data order and fresh weights; noise is seeded per peer as well.", ge=None)
    shuffle_tags: bool = option(False, "Captions are tags between commas: put them in another order each time.")
    keep_tokens: int = option(
        0, "With --shuffle_tags or --caption_tag_dropout_rate: this many of the first tags stay in place and are never dropped.", ge=0
    )
    caption_tag_dropout_rate: float = option(
        0.0, "Captions are tags between commas: drop each with this probability, again in each epoch.", le=1, since="0.1.1", unsaid=0.0
    )
    caption_prefix: str = option(
        "", "Text before every caption, such as a trigger word; a dropped caption stays empty.", since="0.1.1", unsaid=""
    )
    caption_suffix: str = option("", "Text after every caption.", since="0.1.1", unsaid="")
    enable_wildcard: bool = option(
        False,
        "In captions {a|b|c} stands for one of a, b and c, chosen again in each epoch; {{ and }} are braces.",
        since="0.1.1",
        unsaid=False,
    )
    validation_split: float = option(
        0.0,
        "Hold this share of the pictures out of training, at most 256, and measure their loss at fixed noise as --validation_steps says.",
        lt=1,
        since="0.1.1",
        unsaid=0.0,
    )
    num_buckets: int = option(
        0,
        "Maximum number of aspect-ratio buckets, each batch from one of them (16 is usual); 0 crops to a square.",
        ge=0,
    )
    bucket_side_min: int = option(0, "With --num_buckets: shortest side in pixels; 0: half of the resolution.", ge=0)
    bucket_side_max: int = option(0, "With --num_buckets: longest side in pixels; 0: one and a half of the resolution.", ge=0)
    image_interpolation_mode: str = option(
        "lanczos", "How pictures are resized.", choices=("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
    )
