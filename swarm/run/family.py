"""Facts about model families: whoever needs one asks here, and names no family."""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarm.options import names_of
from swarm.run.loss import losses
from swarm.run.rooms import modules
from swarm.run.texts import READERS

CLIP = "clip"
OPEN_CLIP = "open_clip"
"""Layouts of a CLIP text encoder's tensors in original checkpoints: OpenAI's and OpenCLIP's."""


def _by_levels(config: Mapping[str, Any]) -> int:
    """Of a VAE that halves its pictures between its levels."""
    return 2 ** (len(config["block_out_channels"]) - 1)


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers in a part's blocks, by the ends of their names; of each name only linear layers and 2-D convolutions are meant."""

    attention: tuple[str, ...]
    feed_forward: tuple[str, ...]
    linear: tuple[str, ...] = ()
    """The blocks' other linear layers; a 1x1 convolution at the beginning or end of a transformer is one."""
    convolutions: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.attention, *self.feed_forward, *self.linear, *self.convolutions)


CLIP_LAYERS = Layers(attention=("q_proj", "k_proj", "v_proj", "out_proj"), feed_forward=("fc1", "fc2"))
UNET_LAYERS = Layers(
    attention=("to_k", "to_q", "to_v", "to_out.0"),
    feed_forward=("ff.net.0.proj", "ff.net.2"),
    linear=("proj_in", "proj_out", "time_emb_proj"),
    convolutions=("conv1", "conv2", "conv_shortcut", "downsamplers.0.conv", "upsamplers.0.conv"),
)
"""diffusers' names."""


@dataclass(frozen=True, kw_only=True)
class TextEncoder:
    """One of a pipeline's text encoders."""

    tokenizer: str
    """The pipeline's component."""
    trainable: bool
    """Whether a fine-tune may train it: CLIP; diffusers' scripts leave T5 (4.7 G parameters) as it is."""
    in_file: tuple[str, ...]
    """How its tensors' names begin in single files; (): it is never taken from one."""
    optional: bool = False
    """Whether the pipeline draws without it, too: model_index.json then has null for it."""
    layers: Layers | None = None
    """Those of a trainable one."""
    layers_above: int | None = None
    """Layers above the one that is read without --clip_skip; None: its layers are not chosen."""
    vectors: tuple[str, ...] = ()
    """Keys of its vectors in a file that holds a learned word for several text encoders; the first is the one that is written."""
    layouts: Mapping[str, str] = field(default_factory=dict)
    """CLIP or OPEN_CLIP: how its tensors' names begin when they are written so. Where both are there, the activation decides."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """What other programs call a model in the header of a file."""

    architecture: str
    """ModelSpec's, as kohya's scripts write it."""
    version: str
    """kohya's `ss_base_model_version`."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything about a family that is not a tensor."""

    title: str
    since: str
    """The version of this program that first had it."""
    pipeline: str
    """diffusers' class, which model_index.json names."""
    unused: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the pipeline's constructor for components that neither training nor drawing needs."""
    is_in_file: Callable[[Collection[str]], bool]
    """Whether a single file with tensors of these names holds one, by names that no other family has."""
    denoiser: str
    """The part that predicts."""
    blocks: tuple[str, ...] = ()
    """The denoiser's lists of blocks, in the order in which it calls them; (): it is no chain of blocks, and none can be swapped."""
    patch: int = 0
    """Latents on a side of what the denoiser takes as one; 0: it halves the latents once for each of its levels but one."""
    text_encoders: Mapping[str, TextEncoder]
    """By the pipeline's names for them, in the order of the pipeline."""
    vae_factor: Callable[[Mapping[str, Any]], int] = _by_levels
    """How many pixels are a latent's side, by the VAE's config."""
    vae_in_file: tuple[str, ...] = ("first_stage_model.", "vae.")
    learned_words: bool
    """Whether diffusers' pipeline reads words that were learned: its class is a TextualInversionLoaderMixin."""
    layers: Layers
    """The denoiser's."""
    lora: tuple[str, ...] = ()
    """Those that a LoRA takes where nobody chooses, as in diffusers' scripts; (): the attention. Runs of before --lora_targets have these: they stay."""
    lora_processors: bool
    """Whether a LoRA's file names the denoiser's layers by attention processors, which is what ComfyUI's list has for UNets."""
    original: Mapping[str, tuple[str, Mapping[str, tuple[str, ...]]]] = field(default_factory=dict)
    """By diffusers' list of blocks: the list in original checkpoints, and of each of its layers which of diffusers' are in it, in their order.

    kohya's scripts and ComfyUI know a LoRA's layers by these names. What is not here is called as in diffusers.
    """
    outputs: Mapping[str, int] = field(default_factory=dict)
    """How many times as many outputs a layer has as the others that are in one original layer with it; 1 where it is not here."""
    swapped: tuple[str, ...] = ()
    """Layers whose outputs, where they are two for each input, are shift and scale in original checkpoints, and scale and shift in diffusers."""
    single_file: bool
    """Whether a whole pipeline can be written as one file in the original layout."""
    marks_prediction: bool = False
    """Whether such a file needs empty tensors that say what is predicted."""
    text_options: tuple[str, ...] = ("clip_skip", "max_token_chunks", "max_sequence_length")
    """Options of the run on which the text encoders' answers depend. All families of 0.1 have these three in the names of what is cached."""
    language_model: str = ""
    """What reads captions in full, for people; '': CLIP or T5, as the options of the family say."""
    caption_tokens: int
    """Tokens of a caption that are read by default."""
    loss: str
    """The module of swarm/run/losses by which it is trained, whose options it takes."""
    sections: tuple[type, ...]
    """The further options that it takes: how captions are read, and its own."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the founder takes for options that nobody gave, where it is not the program's default."""
    tag: str
    """The Hub's."""
    called: Callable[[Mapping[str, Any], bool], Names]
    """By the denoiser's config, and by whether it predicts v."""
    implementation: str
    """Where the original names of its layers are from: ModelSpec's `implementation`."""
    network: str = "networks.lora"
    """kohya's module that reads a LoRA of it."""
    guidance: float
    """How strongly prompts usually guide its drawing."""
    guided_by: str = "guidance_scale"
    """The argument of the pipeline's call that says it."""
    negative_prompts: bool
    ddim: bool
    """Whether pictures are drawn with DDIM; else with the pipeline's own scheduler."""
    half: str
    """torch's half precision in which it draws on a GPU."""

    @property
    def name(self) -> str:
        return next(name for name, family in families().items() if family is self)

    @property
    def reader(self) -> str:
        """What reads captions in full, for people."""
        return self.language_model or next(READERS[section] for section in self.sections if section in READERS)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that have weights, in the order of the model's digest."""
        return (self.denoiser, *self.text_encoders, "vae")

    @property
    def trains_texts(self) -> bool:
        """Whether a fine-tune may train any of its text encoders."""
        return any(encoder.trainable for encoder in self.text_encoders.values())

    def trained(self, texts: bool) -> dict[str, Layers]:
        """The layers of the parts that are trained; texts: those of the text encoders, too."""
        encoders = {name: encoder.layers for name, encoder in self.text_encoders.items() if texts and encoder.layers}
        return {self.denoiser: self.layers, **encoders}

    def original_layer(self, name: str) -> tuple[str, tuple[str, ...]]:
        """What original checkpoints call the layer of the denoiser that this one is, or is in, and all of diffusers' layers in it, in their order."""
        blocks, number, layer = (*name.split(".", 2), "", "")[:3]
        if blocks not in self.original:
            return name, (name,)
        place, layers = self.original[blocks]
        own, parts = next((own, parts) for own, parts in layers.items() if layer in parts)
        return f"{place}.{number}.{own}", tuple(f"{blocks}.{number}.{part}" for part in parts)

    @property
    def prefixes(self) -> dict[str, str]:
        """kohya's of the parts. A text encoder that is the only one has no number: kohya's scripts pass over one with it, without a word."""
        several = len(self.text_encoders) > 1
        encoders = {name: f"lora_te{number}" if several else "lora_te" for number, name in enumerate(self.text_encoders, start=1)}
        return {self.denoiser: "lora_unet", **encoders}

    @property
    def in_file(self) -> dict[str, tuple[str, ...]]:
        """How the names of the parts besides the denoiser begin in single files: many of those hold the denoiser alone."""
        return {"vae": self.vae_in_file, **{name: encoder.in_file for name, encoder in self.text_encoders.items()}}


@functools.cache
def families() -> dict[str, Family]:
    return {name: module.FAMILY for name, module in modules("families").items()}


def family_named(name: str) -> Family | None:
    return families().get(name)


def family_of_pipeline(kind: object) -> Family | None:
    """By the name of a diffusers class, which may be whatever a file says."""
    return next((family for family in families().values() if family.pipeline == kind), None)


def known_parts() -> tuple[str, ...]:
    """The parts of all families, denoisers first: what weights are looked for in a folder that does not say what it is."""
    found = families().values()
    denoisers, encoders = (family.denoiser for family in found), (name for family in found for name in family.text_encoders)
    return (*sorted(set(denoisers)), *sorted(set(encoders)), "vae")


def refused(family: Family) -> dict[str, str]:
    """Options that belong to other families: why this one has no use for each."""
    theirs = (*family.sections, losses()[family.loss].options)
    because = {
        **{loss.options: f"is trained by {losses()[family.loss].title}, which has no such thing" for loss in losses().values()},
        **{section: f"reads captions with {family.reader}" for section in READERS},
    }
    sections = {*because, *(section for other in families().values() for section in other.sections)} - {*theirs}
    return {name: because.get(section, "has no such thing") for section in sections for name in names_of(section)}


def titles() -> str:
    """'A, B or C', for people."""
    *others, last = (family.title for family in families().values())
    return f"{', '.join(others)} or {last}" if others else last
