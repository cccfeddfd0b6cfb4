"""Tiny but real pipelines of every family and a folder of captioned pictures, all made in code in a second or two.

Every part is the genuine diffusers or transformers class, only narrow and with random weights: the folder is what
`save_pretrained` writes, and anything that loads such a family loads it.
"""

from pathlib import Path

import torch
from PIL import Image

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "white": (250, 250, 250)}
FAMILIES = {"sd": "stable_diffusion", "sd2v": "stable_diffusion", "sdxl": "sdxl", "flux": "flux"}
"""What `build` takes: the module of peer/models that trains it. sd2v: v-prediction with zero-terminal SNR."""
WORDS = ("a", "cat", "dog", "object", "of", "photo", "style", "toy")
"""Single tokens in the tokenizers of `build`, as in the real ones."""


def clip_tokenizer(words: tuple[str, ...] = (), pad_token: str = "<|endoftext|>"):
    """A CLIPTokenizer in CLIP's own order: bytes, bytes that end a word, then `words`, a token each; any other text is encoded by its letters."""
    from transformers import CLIPTokenizer

    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    merges = {}  # in the order in which they are applied
    for word in words:
        pieces = [*word[:-1], word[-1] + "</w>"]
        while len(pieces) > 1:
            merges[pieces[0], pieces[1]] = pieces[0] + pieces[1]
            pieces[:2] = [pieces[0] + pieces[1]]
    vocab = [*symbols, *(symbol + "</w>" for symbol in symbols), *merges.values(), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(vocab)}, merges=[*merges], pad_token=pad_token, model_max_length=77)


def t5_tokenizer(max_length: int = 32):
    """A T5 tokenizer of whole `WORDS` and single characters."""
    from transformers import T5TokenizerFast

    pieces = [("\u2581" + word, -3.0) for word in WORDS] + [(chr(code), -8.0) for code in range(33, 127)]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    return T5TokenizerFast(vocab=special + pieces, extra_ids=0, model_max_length=max_length)


def clip_text(tokenizer, *, projection: bool = False, layers: int = 1, act: str = "quick_gelu", width: int = 16):
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    # The config's eos must be the tokenizer's: the value 2 switches a legacy way of pooling on.
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        max_position_embeddings=77, projection_dim=width, hidden_act=act,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)


def vae(**options):
    """Factor 2: 16x16 pixels become 8x8 latents."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=4, mid_block_add_attention=False, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **{"scaling_factor": 1.0, **options},
    )  # fmt: skip


@torch.no_grad()
def scale_latents(model) -> None:
    """Give latents of random weights what real ones have: mean 0, variance 1, and a posterior that is hardly wider than its mean."""
    last = model.quant_conv or model.encoder.conv_out
    last.bias[len(last.bias) // 2 :] -= 10.0
    pixels = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = model.encode(pixels).latent_dist.mean
    model.register_to_config(scaling_factor=float(1 / latents.std()))
    if model.config.shift_factor is not None:
        model.register_to_config(shift_factor=float(latents.mean()))


def unet(cross_dim: int, channels: tuple[int, int] = (16, 32), **options):
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=channels, norm_num_groups=8, cross_attention_dim=cross_dim,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **{"attention_head_dim": 4, **options},
    )  # fmt: skip


def ddpm(prediction_type: str = "epsilon", zero_snr: bool = False):
    from diffusers import DDPMScheduler

    return DDPMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1, prediction_type=prediction_type,
        rescale_betas_zero_snr=zero_snr, timestep_spacing="trailing" if zero_snr else "leading",
    )  # fmt: skip


def build_pipeline(channels: tuple[int, int] = (16, 32), seed: int = 0, prediction_type: str = "epsilon"):
    """StableDiffusionPipeline for 16x16 pictures: VAE factor 2, 8x8 latents; channels: the UNet's two levels."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = clip_tokenizer()
        encoder, autoencoder = clip_text(tokenizer), vae()
        return _stable_diffusion(autoencoder, encoder, tokenizer, unet(16, channels), ddpm(prediction_type))


def _stable_diffusion(autoencoder, encoder, tokenizer, denoiser, scheduler):
    from diffusers import StableDiffusionPipeline

    return StableDiffusionPipeline(
        vae=autoencoder, text_encoder=encoder, tokenizer=tokenizer, unet=denoiser, scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def build(family: str, seed: int = 0):
    """A pipeline of one of `FAMILIES` for 16x16 pictures; every text encoder has two layers, and knows `WORDS`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = {"sd": _sd, "sd2v": _sd2v, "sdxl": _sdxl, "flux": _flux}[family]()
    scale_latents(pipeline.vae)
    return pipeline


def _sd():
    tokenizer = clip_tokenizer(WORDS)
    return _stable_diffusion(vae(), clip_text(tokenizer, layers=2), tokenizer, unet(16), ddpm())


def _sd2v():
    tokenizer = clip_tokenizer(WORDS, pad_token="!")
    encoder = clip_text(tokenizer, layers=2, act="gelu")
    return _stable_diffusion(
        vae(), encoder, tokenizer, unet(16, attention_head_dim=[2, 4], use_linear_projection=True), ddpm("v_prediction", zero_snr=True)
    )


def _sdxl():
    from diffusers import StableDiffusionXLPipeline

    tokenizer, tokenizer_2 = clip_tokenizer(WORDS), clip_tokenizer(WORDS, pad_token="!")
    # The second encoder is wider, as in the real one: from_single_file tells the two apart by that.
    encoder_2 = clip_text(tokenizer_2, projection=True, layers=2, act="gelu", width=24)
    denoiser = unet(
        16 + 24, addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=6 * 8 + 24,
        transformer_layers_per_block=(1, 2), use_linear_projection=True,
    )  # fmt: skip
    return StableDiffusionXLPipeline(
        vae=vae(), text_encoder=clip_text(tokenizer, layers=2), text_encoder_2=encoder_2,
        tokenizer=tokenizer, tokenizer_2=tokenizer_2, unet=denoiser, scheduler=ddpm(), force_zeros_for_empty_prompt=True, add_watermarker=False,
    )  # fmt: skip


def _flux():
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import T5Config, T5EncoderModel

    tokenizer, tokenizer_2 = clip_tokenizer(WORDS), t5_tokenizer()
    t5 = T5Config(
        vocab_size=len(tokenizer_2), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu",
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16,
        pooled_projection_dim=16, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return FluxPipeline(
        vae=vae(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0), text_encoder=clip_text(tokenizer, layers=2),
        tokenizer=tokenizer, text_encoder_2=T5EncoderModel(t5), tokenizer_2=tokenizer_2, transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )  # fmt: skip


def write_model(folder: Path, **options) -> Path:
    build_pipeline(**options).save_pretrained(folder)
    return folder


def write_family(folder: Path, family: str, seed: int = 0) -> Path:
    build(family, seed).save_pretrained(folder)
    return folder


def write_pictures(folder: Path, count: int = 12, side: int = 16) -> Path:
    """`count` PNGs of a coloured square on grey, each different, with a .txt beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        name, colour = list(COLOURS.items())[i % len(COLOURS)]
        picture = Image.new("RGB", (side, side), (128, 128, 128))
        picture.paste(colour, (i % 5, i % 3, side // 2 + i % 5, side // 2 + i % 3))
        picture.save(folder / f"{i:03}.png")
        (folder / f"{i:03}.txt").write_text(f"a {name} square", encoding="utf-8")
    return folder
