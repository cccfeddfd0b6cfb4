"""What models of all families have in common: a pipeline's parts, the VAE, and how the result is written."""

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from peer.contracts import Hold, Text
from peer.models.diffusion.packed import PackedLinear, pack
from peer.models.diffusion.pipeline import load_pipeline, save_pipeline
from swarm.errors import UserError
from swarm.run.family import Family
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)

_CAST = (nn.Linear, nn.Conv2d)
"""What autocast computes in its own format, whatever its weights are in."""
_PIXELS_AT_ONCE = 1024 * 1024
"""That the VAE encodes: one picture of 1,024 px, or four of 512. SDXL's takes 2.7 GB for it, and took 10.8 for a batch of four, more than the denoiser.
Small pictures still go together: one by one each would wait for its kernels to start."""


class DiffusionModel:
    """The parts of a pipeline on a device. A family adds its `facts`, `encode_text` and `loss`, and its constructor takes the run, too."""

    facts: Family
    arguments: Mapping[str, str] = MappingProxyType({"states": "prompt_embeds", "pooled": "pooled_prompt_embeds"})
    """What a text's tensors are called where the pipeline is called with them."""

    trained_by = ""
    """What the log says of the loss beside the run's own options: a file or a scheduler may have decided it."""
    drawn_with: Mapping[str, Any] = MappingProxyType({})
    """Arguments of the pipeline's call that this very model wants, where nobody gives others."""

    def __init__(self, pipeline: Any, device: torch.device | None):
        """device None: left on the CPU as the pipeline is, until `place`."""
        self.pipeline, self.device = pipeline, torch.device("cpu")
        self.read: Callable[[], Any] | None = None
        """Reads the pipeline anew, in float32 on the CPU."""
        self._held: dict[str, torch.dtype] = {}
        self._packed: dict[str, PackedLinear] = {}
        names = (self.facts.denoiser, "vae", *self.facts.text_encoders)
        self.parts: dict[str, nn.Module] = {name: getattr(pipeline, name) for name in names if getattr(pipeline, name) is not None}
        self.vae = self.parts["vae"]
        self.denoiser = self.parts[self.facts.denoiser]
        self.vae_factor = self.facts.vae_factor(self.vae.config)
        side = self.denoiser.config.get("sample_size")
        self.made_for = self.vae_factor * side if isinstance(side, int) else 0
        if device is not None:
            self.move(device)

    @classmethod
    def load(cls, source: Path, device: torch.device | None, run: RunConfig) -> "DiffusionModel":
        """The model from a diffusers folder, a Hub id or a .safetensors file, in float32.

        device None: as it is in its files, until it is placed. Raises UserError when it is of another family.
        """
        read = partial(load_pipeline, cls.facts, source, run.model_config)
        model = cls(read(as_filed=device is None), device, run)
        model.read = read
        return model

    def cast(self, dtype: torch.dtype) -> None:
        """Hold all weights in `dtype`, to draw with. Buffers stay: rounded to bfloat16, a language model would read the 512th word 0.6 radians away."""
        for part in self.parts.values():
            for parameter in part.parameters():
                parameter.data = parameter.data.to(dtype)

    def move(self, device: torch.device) -> None:
        for part in self.parts.values():  # pipeline.to would look through each of them five times for hooks that we never set
            part.to(device)
        self.device = device

    def place(self, device: torch.device, dtype: torch.dtype | None = None, whole: Collection[str] = (), *, hold: Hold | None = None) -> None:
        """Move to `device`. Of the parts that are not trained as a `whole`, the weights that autocast computes with are held in its `dtype`.

        It would cast them to that at every step: so the results have the same bits, in half the memory. So have tables of words that are in
        it in their files. All else is float32. A VAE that overflows in fp16 says so in its config, and stays as it is. hold: nothing moves
        yet (peer/machine/turns.py, swap.py), and `hold` keeps what is cast.
        """
        # One by one: all of it in float32 may be more than the host's memory.
        where = device if device.type == "cuda" and not hold else None
        for name, part in self.parts.items():
            if dtype is not None and name not in whole and not (name == "vae" and self._vae_overflows):
                self._held[name] = dtype
            low = self._held.get(name, torch.float32)
            words = _words(part, low) if name in self.facts.text_encoders else {}
            others = [module for module in part.modules() if not isinstance(module, _CAST)]
            exact = {id(tensor) for module in others for tensor in module.parameters(recurse=False)} - words.keys()
            for module in part.modules():
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    if tensor.is_floating_point():
                        # a packed layer's scales are buffers; a language model's words may be where it answers, too
                        cast = isinstance(tensor, nn.Parameter) and id(tensor) not in exact
                        placed = tensor.data.to(where, low if cast else torch.float32)
                        tensor.data = hold(placed) if hold and placed.data_ptr() != tensor.data_ptr() else placed
        self.device = device
        if not hold:
            self.move(device)

    def blocks(self) -> list[nn.Module]:
        return [block for name in self.facts.blocks for block in self.denoiser.get_submodule(name)]

    def pack(self, precision: str, device: torch.device, *, hold: Hold | None = None) -> None:
        """Hold the linear layers of the denoiser's blocks in fewer bits, on `device` or where `hold` keeps them. Before `place`, of a denoiser that is not trained."""
        self._packed, error = pack(self.denoiser, self.facts.layers.all, precision, device, hold)
        if device.type != "meta":  # where memory is counted there are no weights, and nobody has chosen this precision
            log.info("base_precision=%s layers=%d, whose weights differ from the model's by %.2g of their length", precision, len(self._packed), error)

    @contextlib.contextmanager
    def unpacked(self) -> Iterator[None]:
        """Within it, packed layers compute with the model's own weights: those of its files, brought to the device one layer at a time. Raises UserError."""
        own = getattr(self.read(as_filed=True), self.facts.denoiser)
        try:
            for name, layer in self._packed.items():
                layer.own = own.get_submodule(name).weight.detach()
            yield
        finally:
            for layer in self._packed.values():
                layer.own = None

    def enable_gradient_checkpointing(self) -> None:
        """Of whatever may be trained: the denoiser and the text encoders, which honour it only in training mode."""
        self.denoiser.enable_gradient_checkpointing()
        for name, part in self.parts.items():
            if name in self.facts.text_encoders:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # transformers 5 will call it otherwise, 4 knows that name only
                    part.gradient_checkpointing_enable({"use_reentrant": False})
                # transformers 5 has a frozen encoder's embeddings ask for gradients: all of it was then computed backwards, and cached nowhere.
                with contextlib.suppress(AttributeError):  # 4 does not, and has nothing to take back
                    part.disable_input_require_grads()

    @torch.no_grad()
    def encode_pixels(self, pixels: Tensor) -> Tensor:
        if self.device.type == "xla":  # spreads a batch over its chips, and compiles anew for each size
            return self._encode_at_once(pixels)
        some = max(1, _PIXELS_AT_ONCE // math.prod(pixels.shape[-2:]))
        return torch.cat([self._encode_at_once(few) for few in pixels.split(some)])

    def _encode_at_once(self, pixels: Tensor) -> Tensor:
        half = torch.is_autocast_enabled(self.device.type) and not self._vae_overflows
        with torch.autocast(self.device.type, enabled=half):
            posterior = self.vae.encode(self.framed(pixels.to(self.device))).latent_dist
        return torch.cat(self.scaled(posterior.mean.float(), posterior.std.float()), dim=1)

    @contextlib.contextmanager
    def decoding_exactly(self) -> Iterator[None]:
        """Within it a VAE that overflows in fp16 decodes in float32, also where autocast computes in fp16.

        Its pipeline sees to that only while its weights are fp16, and `place` holds them in float32: SDXL then drew black pictures.
        """
        decode, kind = self.vae.decode, self.device.type

        def exact(latents: Tensor, *args: Any, **options: Any) -> Any:
            if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) is not torch.float16:
                return decode(latents, *args, **options)
            with torch.autocast(kind, enabled=False):
                return decode(latents.float(), *args, **options)

        if not self._vae_overflows:
            yield
            return
        self.vae.decode = exact
        try:
            yield
        finally:
            del self.vae.decode

    def framed(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) pixels as the VAE takes them."""
        return pixels

    def scaled(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """The VAE's mean and deviation as the denoiser takes latents, both (B, c, h, w): of mean 0 and variance 1 over many pictures."""
        shift, factor = self.vae.config.shift_factor or 0.0, self.vae.config.scaling_factor
        return (mean - shift) * factor, std * factor

    @property
    def _vae_overflows(self) -> bool:
        """In fp16, as its config says. Where it says nothing, AutoencoderKL's default is yes: of SD 1.x, 2.x, SD 3 and FLUX.1 as well, not of SDXL
        alone. The VAEs of FLUX.2 and Qwen-Image are of other classes, whose configs do not know the word."""
        return bool(self.vae.config.get("force_upcast"))

    def encode_text(self, captions: Sequence[str]) -> Text:
        raise NotImplementedError

    def prompt_arguments(self, prompts: Sequence[str]) -> dict[str, Any]:
        """What the pipeline is called with, in place of the prompts, so that it reads them, and nothing as the negative prompt, as captions are read in training."""
        told = self._as_arguments(self.encode_text(prompts))
        if not self.facts.negative_prompts:
            return told
        empty = self.encode_text([""] * len(prompts))
        if self.pipeline.config.get("force_zeros_for_empty_prompt"):
            empty = {name: torch.zeros_like(states) for name, states in empty.items()}
        return {**told, **self._as_arguments(empty, "negative_")}

    def _as_arguments(self, text: Text, prefix: str = "") -> dict[str, Any]:
        """A text as the pipeline is called with it; a family whose pipeline takes other things than tensors says so here."""
        return {prefix + self.arguments[name]: states for name, states in text.items()}

    def unread(self) -> Sequence[nn.Module]:
        return ()

    def save(self, folder: Path) -> None:
        with self._as_read():
            save_pipeline(self.pipeline, folder, self.facts.text_encoders)

    @contextlib.contextmanager
    def _as_read(self) -> Iterator[None]:
        """Within the block what is held in less than float32 is as its source has it, on the CPU; afterwards as before."""
        exact = self._exact() if self._held else {}
        held = {parameter: parameter.data for parameter in exact}
        try:
            for parameter, tensor in exact.items():
                parameter.data = tensor
            yield
        finally:
            for parameter, tensor in held.items():
                parameter.data = tensor

    def _exact(self) -> dict[nn.Parameter, Tensor]:
        """The source's tensors of what is held in less; of none when the source is gone, or another by now: a result is written all the same."""
        assert self.read is not None
        try:
            pipeline = self.read()
        except UserError as error:
            log.warning("%s Writing the untrained weights as this peer held them.", error.message)
            return {}
        found = {}
        for name, dtype in self._held.items():
            theirs = dict(getattr(pipeline, name).named_parameters())
            ours = [(key, parameter) for key, parameter in self.parts[name].named_parameters() if parameter.dtype is dtype]
            if all(key in theirs and torch.equal(theirs[key].to(dtype), parameter.cpu()) for key, parameter in ours):
                found.update((parameter, theirs[key].data) for key, parameter in ours)
            else:
                log.warning("The model's %s has changed on the disk since it was read; writing it as this peer held it, in %s.", name, dtype)
        return found


def _words(part: nn.Module, dtype: torch.dtype) -> dict[int, Tensor]:
    """The part's tables of words that are in `dtype` already, by id. What is looked up in them is float32 from here on, with the bits of a float32 table.

    Qwen3 4B's takes 1.6 GB in float32, and half in bf16.
    """
    if dtype is torch.float32:
        return {}
    tables = [module for module in part.modules() if isinstance(module, nn.Embedding) and module.weight.dtype is dtype]
    for table in tables:
        table.register_forward_hook(lambda _table, _inputs, embedded: embedded.float())
    return {id(table.weight): table.weight for table in tables}
