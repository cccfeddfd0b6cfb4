"""A tiny but real Stable Diffusion pipeline and a folder of captioned pictures, both made in code in a second or two.

Every part is the genuine diffusers or transformers class, only narrow and with random weights: the folder is what
`save_pretrained` writes, and anything that loads Stable Diffusion loads it.
"""

from pathlib import Path

import torch
from PIL import Image

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "white": (250, 250, 250)}


def clip_tokenizer():
    """A CLIPTokenizer that knows single bytes only: any text can be encoded, a letter a token."""
    from transformers import CLIPTokenizer

    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    vocab = [*symbols, *(symbol + "</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(vocab)}, merges=[], pad_token="<|endoftext|>", model_max_length=77
    )


def build_pipeline(channels: tuple[int, int] = (16, 32), seed: int = 0, prediction_type: str = "epsilon"):
    """StableDiffusionPipeline for 16x16 pictures: VAE factor 2, 8x8 latents; channels: the UNet's two levels."""
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = clip_tokenizer()
        text_config = CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=77, projection_dim=16,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        vae = AutoencoderKL(
            block_out_channels=(8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=4, mid_block_add_attention=False, sample_size=16,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, scaling_factor=1.0,
        )  # fmt: skip
        unet = UNet2DConditionModel(
            sample_size=8, layers_per_block=1, block_out_channels=channels, norm_num_groups=8, attention_head_dim=4, cross_attention_dim=16,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip
        scheduler = DDPMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1, prediction_type=prediction_type
        )
        return StableDiffusionPipeline(
            vae=vae, text_encoder=CLIPTextModel(text_config), tokenizer=tokenizer, unet=unet, scheduler=scheduler,
            safety_checker=None, feature_extractor=None, requires_safety_checker=False,
        )  # fmt: skip


def write_model(folder: Path, **options) -> Path:
    build_pipeline(**options).save_pretrained(folder)
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
