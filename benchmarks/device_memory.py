"""How much of a GPU's memory each family takes at its full size, by method and options: counted, and the count held against what real steps take.

    .venv/bin/python benchmarks/device_memory.py            all rows: some ten minutes, no GPU, 16 GiB of memory
    .venv/bin/python benchmarks/device_memory.py --rows sdxl         those whose name has this word; what is checked is left out
    .venv/bin/python benchmarks/device_memory.py --examples --keep   those of examples/, into benchmarks/records/device_memory.json
    .venv/bin/python benchmarks/device_memory.py --check sdxl        what is checked alone, or of it what has this word in its name; no rows

The count (peer/machine/counting.py) runs a model's own code at its real sizes on tensors without numbers. Checked are steps of tiny models, and at full
size of Stable Diffusion 1.5 and of SDXL's LoRA at 256 px, with random weights in float32 on the CPU: measured is the most that PyTorch's allocator had given
out at a time. No row was seen on a GPU.
Beside each row are the target of its card, less 1 GB for CUDA's context and the desktop, and whether it fits. GB are 10^9 bytes.

`need` is the worst moment: the largest of three turns (denoiser, text encoders, VAE) with --offload or both caches, else all parts at once. Not counted:
what flows through text encoders. Captions have the most tokens that the family reads: its own code says how large they and latents are. The rows, and
what they are held against, are in benchmarks/cards.py.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import diffusers
import torch
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.cards import EXAMPLES, RANK, ROWS, TABLE, Counted, Row, row_of, write_table
from benchmarks.common import ROOT, argument_parser, print_result, print_table
from peer.contracts import LatentBatch, Model, Params
from peer.loop.rounding import keep_in_bf16
from peer.machine.counting import away, bytes_of, count_held, count_step, flow_through, ids, let_go
from peer.machine.needs import CAPTION
from peer.machine.swap import spread
from peer.rooms import load_part
from peer.sync.engine.memory import available_bytes
from swarm.errors import ExitCode, UserError, run_program
from swarm.run.optimizer import OPTIMIZERS, LocalOptimizer
from swarm.run_config import RunConfig
from tests import tiny

BF16 = torch.bfloat16
CPU, META = torch.device("cpu"), torch.device("meta")
_CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")


@dataclass(frozen=True)
class Size:
    """A family's parts at their full size; encoders: those of texts, in the pipeline's order. side: of a picture, in pixels."""

    family: str
    denoiser: Callable[[], Any]
    encoders: tuple[Callable[[], Any], ...]
    vae: Callable[[], Any]
    side: int = 1024
    filed: torch.dtype = BF16
    """In what its text encoders are published."""


_SD = {"attention_head_dim": 8, "cross_attention_dim": 768, "sample_size": 64}
_SDXL = {
    "sample_size": 128, "block_out_channels": (320, 640, 1280), "layers_per_block": 2, "attention_head_dim": (5, 10, 20),
    "transformer_layers_per_block": (1, 2, 10), "cross_attention_dim": 2048, "use_linear_projection": True,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
_KLEIN_4B = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680, "guidance_embeds": False}
_KLEIN_9B = {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288, "guidance_embeds": False}


# Sizes as in the config.json of openai/clip-vit-large-patch14 (123 M parameters, its text side), laion/CLIP-ViT-bigG-14-laion2B-39B-b160k (695 M),
# google/t5-v1_1-xxl (4.76 B, its encoder), Qwen/Qwen3-4B (4.02 B), Qwen/Qwen3-8B (8.19 B) and Qwen/Qwen2.5-VL-7B-Instruct (8.29 B).
def _clip_l() -> Any:
    return transformers.CLIPTextModel(transformers.CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12))


def _clip_g() -> Any:
    config = {"hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 20, "num_hidden_layers": 32, "projection_dim": 1280}
    return transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**config))


def _t5_xxl() -> Any:
    config = {"d_model": 4096, "d_ff": 10240, "num_heads": 64, "num_layers": 24, "feed_forward_proj": "gated-gelu"}
    return transformers.T5EncoderModel(transformers.T5Config(**config))


def _qwen3(width: int, inner: int, tied: bool) -> Any:
    config = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(hidden_size=width, intermediate_size=inner, tie_word_embeddings=tied, **config)
    )


def _qwen3_4b() -> Any:
    return _qwen3(2560, 9728, True)


def _qwen3_8b() -> Any:
    return _qwen3(4096, 12288, False)


def _qwen25_vl() -> Any:
    text = {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064,
    }  # fmt: skip
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
    return transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def _vae(**options: Any) -> Any:
    """Stable Diffusion's and SDXL's, 84 M parameters."""
    levels = 4
    return diffusers.AutoencoderKL(
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels, **options,
    )  # fmt: skip


def _vae_of_16() -> Any:
    """FLUX.1's, Chroma's and Z-Image's."""
    return _vae(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1159)


SIZES = {
    "SD 1.5, 512 px": Size("sd", lambda: diffusers.UNet2DConditionModel(**_SD), (_clip_l,), _vae, 512, torch.float32),
    "SDXL": Size("sdxl", lambda: diffusers.UNet2DConditionModel(**_SDXL), (_clip_l, _clip_g), _vae, filed=torch.float32),
    "FLUX.1": Size("flux", lambda: diffusers.FluxTransformer2DModel(guidance_embeds=True), (_clip_l, _t5_xxl), _vae_of_16),
    "Chroma": Size("chroma", diffusers.ChromaTransformer2DModel, (_t5_xxl,), _vae_of_16),
    "Z-Image": Size("z_image", diffusers.ZImageTransformer2DModel, (_qwen3_4b,), _vae_of_16),
    "FLUX.2 klein 4B": Size("klein", lambda: diffusers.Flux2Transformer2DModel(**_KLEIN_4B), (_qwen3_4b,), diffusers.AutoencoderKLFlux2),
    "FLUX.2 klein 9B": Size("klein", lambda: diffusers.Flux2Transformer2DModel(**_KLEIN_9B), (_qwen3_8b,), diffusers.AutoencoderKLFlux2),
    "Qwen-Image": Size("qwen_image", diffusers.QwenImageTransformer2DModel, (_qwen25_vl,), diffusers.AutoencoderKLQwenImage),
}
LETTERS = 512
"""That a tokenizer takes at most, where it is not CLIP's: as the families read them."""


def at_full_size(size: Size, fill: Callable[[Any], Any] = lambda part: part, whole: bool = True) -> Any:
    """A pipeline of the real classes and sizes, without numbers unless `fill` gives a part some. Tokenizers are tiny, and read as many tokens as real ones.

    whole: with the denoiser, else with a tiny one.
    """
    pipeline, facts = tiny.build(size.family), tiny.kind(size.family).facts
    with META:
        encoders, vae = [build() for build in size.encoders], size.vae()
        denoiser = size.denoiser() if whole else getattr(pipeline, facts.denoiser)
    names = [name for name in facts.text_encoders if getattr(pipeline, name, None) is not None]
    for name, encoder in zip(names, encoders, strict=True):
        # Where a family reads a language model's states alone, its folder has no head.
        alone = not isinstance(encoder, kind := type(getattr(pipeline, name))) and isinstance(encoder.base_model, kind)
        setattr(pipeline, name, fill(encoder.base_model if alone else encoder))
    setattr(pipeline, facts.denoiser, fill(denoiser))
    pipeline.vae = vae
    for name, part in pipeline.components.items():
        if name.startswith("tokenizer") and not type(part).__name__.startswith("CLIP"):
            part.model_max_length = LETTERS
    return pipeline


def model_of(size: str) -> Model:
    """The size's model as a run of its family's own options has it, on the meta device; its denoiser, which has two of three weights, is tiny."""
    its = SIZES[size]
    return tiny.kind(its.family)(at_full_size(its, whole=False), None, RunConfig(family=tiny.FAMILIES[its.family], resolution=its.side))


def prepared(
    family: str,
    method: str,
    device: torch.device,
    dtype: torch.dtype | None,
    weights: str = "fp32",
    denoiser: Any = None,
    base: str = "auto",
) -> tuple[Model, Params]:
    """A model of tests.tiny with its method attached and gradient checkpointing. denoiser: in place of its own; all other parts are then left out."""
    options = {"rank": RANK} if method == "lora" else {}
    run = RunConfig(method=method, resolution=16, family=tiny.FAMILIES[family], **options, **tiny.MODELS[family].run)
    pipeline = tiny.build(family)
    if denoiser is not None:
        setattr(pipeline, tiny.kind(family).facts.denoiser, denoiser)
    model = tiny.kind(family)(pipeline, None, run)
    if denoiser is not None:
        model.parts = {model.facts.denoiser: model.denoiser}
    the_method = load_part("methods", method).build(run)
    if base != "auto":
        model.pack(base, device)
    model.place(device, dtype, the_method.whole(model))
    model.enable_gradient_checkpointing()
    params = the_method.attach(model)
    if weights == "bf16":
        keep_in_bf16(params)
    return model, params


@functools.cache
def flowing(size: str, side: int = 0) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """What the family's own code makes of a picture of `side` pixels, or of its usual one, and of a long caption, both without the batch's dimension:
    (C, h, w) of latents, and the shape of each of a text's tensors."""
    model, side = model_of(size), side or SIZES[size].side
    parts = model.parts  # each weight is made without numbers anew
    model.parts = {name: part for name, part in parts.items() if name in model.facts.text_encoders}
    _, text = flow_through(model, lambda shape: model.encode_text([CAPTION]))
    model.parts = {"vae": parts["vae"]}
    _, (both,) = flow_through(model, lambda shape: model.encode_pixels(shape(torch.empty(1, 3, side, side, device=META))))
    channels, *sides = both.shape
    return (channels // 2, *sides), {name: tuple(states.shape[1:]) for name, states in text.items()}


def batch_of(latents: Sequence[int], text: Mapping[str, Sequence[int]], count: int, device: torch.device) -> LatentBatch:
    """latents, text: as `flowing` tells them."""
    told = {name: torch.ones(count, *shape, device=device) for name, shape in text.items()}
    return LatentBatch(torch.zeros(count, *latents, device=device), told, torch.zeros(count, 6, dtype=torch.int64, device=device))


@dataclass(frozen=True)
class Need:
    """Bytes of the device's memory."""

    parts: Mapping[str, int]
    """What is not trained, by the model's part, buffers included."""
    trained: int
    optimizer: int
    """Its state."""
    step: int
    """Gradients and what flows through the layers, at the moment when both together are most."""

    @property
    def total(self) -> int:
        return sum(self.parts.values()) + self.trained + self.optimizer + self.step


def count(
    model: Model,
    params: Params,
    batch: LatentBatch,
    optimizer: LocalOptimizer,
    *,
    dtype: torch.dtype | None = None,
    on_gpu: bool = True,
    micro_batches: int = 1,
    fused: bool = False,
    swapped: int = 0,
) -> Need:
    """What a step of `model`, placed and with its method attached, takes; its weights may be on the meta device.

    swapped: blocks that wait elsewhere (--blocks_to_swap). For all else see `count_held` and `count_step`.
    """
    parts, trained, states = count_held(model, params, optimizer)
    if swapped:
        parts[model.facts.denoiser] -= away(spread(model, swapped), but=ids(params))
    step = count_step(model, batch, dtype=dtype, on_gpu=on_gpu, micro_batches=micro_batches, fused=fused)
    return Need(parts, trained, states, step)


def count_encoding(model: Model, pixels: Tensor, *, dtype: torch.dtype | None = None, on_gpu: bool = True) -> int:
    """The most bytes that flow through the VAE of `model` while it encodes (B, 3, H, W) `pixels`."""
    return flow_through(model, lambda shape: model.encode_pixels(shape(pixels)), dtype=dtype, on_gpu=on_gpu)[0]


def without_numbers(size: str) -> Any:
    """Its denoiser, on the meta device."""
    with META:
        return SIZES[size].denoiser()


def counted(row: Row) -> Need:
    model, params = prepared(SIZES[row.size].family, row.method, META, BF16, row.weights, without_numbers(row.size), row.base)
    batch = batch_of(*flowing(row.size), row.batch, META)
    return count(model, params, batch, OPTIMIZERS[row.optimizer], dtype=BF16, fused=row.fused, swapped=row.swap)


@functools.cache
def text_bytes(size: str, filed: torch.dtype = torch.float32) -> int:
    """What the weights of all text encoders take as a peer holds them that computes in bf16, if their files are in `filed`: norms in float32, words as filed."""
    model = model_of(size)
    model.parts = {name: part.to(filed) for name, part in model.parts.items() if name in model.facts.text_encoders}
    model.place(META, BF16)
    return sum(sum(bytes_of(part).values()) for part in model.parts.values())


@functools.cache
def vae_bytes(size: str, batch: int) -> tuple[int, int]:
    """What the VAE's weights take, and the most that flows through it while it encodes the pictures of a batch."""
    model, side = model_of(size), SIZES[size].side
    model.parts = {"vae": model.vae}
    model.place(META, BF16)
    weights = sum(bytes_of(model.vae).values())
    return weights, count_encoding(model, torch.zeros(batch, 3, side, side, device=META), dtype=BF16)


def measured(step: Callable[[], object]) -> int:
    """The most bytes that PyTorch's allocator had given out at a time since `step` began, but for what a convolution takes while it runs: on a CPU with
    AVX-512 a copy of its weights or of a tensor in another order, up to 118 MB for SDXL, and none of it on a GPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    now = most = until = 0
    for event in events:
        if event.name() in _CONVOLUTIONS:
            until = max(until, event.start_ns() + event.duration_ns())
        elif event.name() == "[memory]":
            after = now + event.nbytes()
            if event.start_ns() > until:
                most = max(most, now, after)
            now = after
    return most


def compared(model: Model, params: Params, need: Need, batch: LatentBatch, dtype: torch.dtype | None, fused: bool = False) -> float:
    """What a step's gradients and layers take, measured over counted. need: the count of the same model."""
    if fused:
        let_go(params.values())

    def step() -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            losses = model.loss(batch, torch.Generator())
        losses.sum().backward()

    step()  # what is made once and kept, such as places of pictures, is there then
    for parameter in params.values():
        parameter.grad = None
    return measured(step) / need.step


def check_tiny(family: str, method: str, dtype: torch.dtype | None, fused: bool = False) -> float:
    model, params = prepared(family, method, CPU, dtype)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        latents = model.encode_pixels(torch.zeros(2, 3, 16, 16)).chunk(2, dim=1)[0].contiguous()
        batch = LatentBatch(latents, model.encode_text(["a cat"] * 2), torch.zeros(2, 6, dtype=torch.int64))
    need = count(*prepared(family, method, CPU, dtype), batch, OPTIMIZERS["adamw"], dtype=dtype, on_gpu=False, fused=fused)
    return compared(model, params, need, batch, dtype, fused)


def check_full_size(size: str, method: str, dtype: torch.dtype | None, side: int = 256) -> float:
    """A step of one picture of `side` pixels. Raises UserError where there is less memory than the count, a quarter, and a gigabyte for the program."""
    family, shapes = SIZES[size].family, flowing(size, side)
    need = count(
        *prepared(family, method, META, dtype, denoiser=without_numbers(size)), batch_of(*shapes, 1, META), OPTIMIZERS["adamw"], dtype=dtype, on_gpu=False
    )
    held = sum(need.parts.values()) + need.trained
    if (free := available_bytes()) < (wanted := 1.25 * (held + need.step) + 1e9):
        raise UserError(
            f"A step of {size}, {method}, needs {wanted / 1e9:.1f} GB of memory, and {free / 1e9:.1f} are free.",
            fix="End other programs, or choose another with --check.", code=ExitCode.MEMORY,
        )  # fmt: skip
    model, params = prepared(family, method, CPU, dtype, denoiser=filled(without_numbers(size), dtype or torch.float32))
    return compared(model, params, need, batch_of(*shapes, 1, CPU), dtype)


def filled(part: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A module of tensors without numbers, with some: matrices of spread 0.02, as language models begin with; vectors of ones and zeros.

    One million numbers, repeated: drawing twelve billion takes minutes. Buffers that a constructor computes must be there already.
    """
    part = part.to(dtype).to_empty(device="cpu")
    some = 0.02 * torch.randn(2**20, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            flat = parameter.view(-1)
            for piece in flat.split(some.numel()):
                piece.copy_(some[: piece.numel()])
    if hasattr(part, "tie_weights"):
        part.tie_weights()
    return part


def checks() -> dict[str, Callable[[], float]]:
    """What is measured and held against its count, by name. SDXL's LoRA is the largest: 10.3 GB of weights, for bf16 takes minutes a step on many CPUs."""
    small = {f"tiny {name} {method}": functools.partial(check_tiny, name, method, None) for name in tiny.ONE_OF_EACH for method in ("lora", "full")}
    large = {f"SD 1.5, 256 px, {method}": functools.partial(check_full_size, "SD 1.5, 512 px", method, None) for method in ("lora", "full")}
    return {**small, **large, "SDXL, 256 px, lora": functools.partial(check_full_size, "SDXL", "lora", None)}


def in_gb(row: Row) -> Counted:
    """All turns of a row."""
    need = counted(row)
    vae, encoding = vae_bytes(row.size, row.batch)
    told = (sum(need.parts.values()), need.trained, need.optimizer, need.step, text_bytes(row.size, SIZES[row.size].filed), vae, encoding)
    return Counted(*(round(value / 1e9, 4) for value in told))


def rows_of_examples() -> list[Row]:
    """The rows of `ROWS` that a file of examples/ is."""
    taken = {row_of(path) for path in sorted(EXAMPLES.glob("*gb_*.toml"))}
    return [row for row in ROWS if row in taken]


def counted_rows(chosen: Sequence[Row], keep: bool) -> list[dict[str, Any]]:
    """Of each row what is printed; keep: into the table as well, as soon as it is counted."""
    table = []
    for row in chosen:
        gb = in_gb(row)
        if keep:
            write_table({row: gb})
        need = gb.need(row.offload)
        table.append({"row": row.name, **vars(gb), "need": need, "card": row.card, "fits": row.fits(need), "how": "counted"})
        print_table(table[-1:])
    print_table(table)
    return table


def named(word: str, names: Iterable[str], kind: str) -> list[str]:
    """Those of `names` that have this word. Raises UserError where none has."""
    names = list(names)
    if not (found := [name for name in names if word.lower() in name.lower()]):
        raise UserError(f"No {kind} has '{word}' in its name.", fix=f"There are: {'; '.join(names)}.")
    return found


def main(argv: Sequence[str]) -> None:
    parser = argument_parser(__doc__, "device_memory")
    parser.add_argument("--rows", default="", help="only those whose name has this word")
    parser.add_argument("--examples", action="store_true", help="only those of examples/")
    parser.add_argument("--keep", action="store_true", help=f"write each row into {TABLE.relative_to(ROOT)} as soon as it is counted")
    parser.add_argument("--check", nargs="?", const="", metavar="WORD", help="check alone, and only what has this word in its name")
    flags = parser.parse_args(argv)
    among = {row.name: row for row in (rows_of_examples() if flags.examples else ROWS)}
    rows = [] if flags.check is not None else [among[name] for name in named(flags.rows, among, "row")]
    asked = named(flags.check, checks(), "check") if flags.check is not None else [*checks()] if rows == list(ROWS) else []
    table = counted_rows(rows, flags.keep) if rows else []
    checked = {}
    for name in asked:
        checked[name] = checks()[name]()
        print_table([{"check": name, "measured over counted": checked[name]}])
    told = {name: {row["row"]: row[name] for row in table} for name in ("fits", "need")}
    print_result({**told, "checked": checked})


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
