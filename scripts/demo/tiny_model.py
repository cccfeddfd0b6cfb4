"""A Stable Diffusion that fits in a few megabytes: the real diffusers and transformers classes, only narrow.

Its VAE is trained for seconds on the pictures given; UNet and text encoder have random weights. The folder loads with
`StableDiffusionPipeline.from_pretrained` like any other.
"""

import json
import string
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from torch.nn.functional import mse_loss
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

# Stable Diffusion 1.x's own schedule.
SCHEDULE = {"num_train_timesteps": 1000, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
TEXT_WIDTH = 32


def build(
    folder: Path,
    pictures: Sequence[Image.Image],
    captions: Iterable[str],
    *,
    vae_steps: int = 200,
    seed: int = 0,
    show: Callable[[int, int], None] = lambda step, of: None,
) -> None:
    """Write the model to `folder`; the same arguments give the same weights. pictures: RGB, all of one size. show: told each step of the VAE."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = make_tokenizer(captions)
        vae = make_vae(pictures[0].width)
        train_vae(vae, to_pixels(pictures), vae_steps, show)
        pipeline = StableDiffusionPipeline(
            vae=vae,
            text_encoder=make_text_encoder(tokenizer),
            tokenizer=tokenizer,
            unet=make_unet(pictures[0].width // 2),
            scheduler=DDIMScheduler(**SCHEDULE, clip_sample=False, set_alpha_to_one=False, steps_offset=1),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipeline.save_pretrained(folder)


def to_pixels(pictures: Sequence[Image.Image]) -> torch.Tensor:
    """(N, 3, H, W) in [-1, 1]."""
    array = np.stack([np.asarray(one.convert("RGB"), dtype=np.float32) for one in pictures])
    return torch.from_numpy(array).permute(0, 3, 1, 2) / 127.5 - 1


def make_tokenizer(captions: Iterable[str]) -> CLIPTokenizer:
    """CLIP's tokenizer with one token for each word of `captions`; other printable ASCII text falls back to single characters."""
    symbols = sorted(set(string.printable) - set(string.whitespace))
    vocabulary = symbols + [symbol + "</w>" for symbol in symbols]
    merges = []
    for word in sorted({word for text in captions for word in text.lower().split()}):
        left, *rest = [*word[:-1], word[-1] + "</w>"]
        for right in rest:
            if (left, right) not in merges:
                merges.append((left, right))
                vocabulary.append(left + right)
            left += right
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    # By way of CLIP's two files: what a constructor takes differs between transformers 4 and 5.
    with tempfile.TemporaryDirectory() as scratch:
        ids = {token: index for index, token in enumerate(dict.fromkeys(vocabulary))}
        Path(scratch, "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
        Path(scratch, "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
        settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "pad_token": "<|endoftext|>"}
        Path(scratch, "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return CLIPTokenizer.from_pretrained(scratch)


def make_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = CLIPTextModel(config).eval()
    # CLIP starts its embeddings at 0.02, and learns. This one never learns: at 0.02 it hears a word's place more than the word, and
    # "one" may sound like "zero" (87 % of the digits right after 65,536 samples).
    torch.nn.init.normal_(encoder.get_input_embeddings().weight)
    return encoder


def make_vae(side: int) -> AutoencoderKL:
    """One that halves each side and keeps four channels."""
    return AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        layers_per_block=1,
        sample_size=side,
        mid_block_add_attention=False,
    )


def train_vae(vae: AutoencoderKL, pixels: torch.Tensor, steps: int, show: Callable[[int, int], None]) -> None:
    """Teach it to reconstruct `pixels` (N, 3, H, W), and set its scaling factor so that latents have unit variance."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3)
    for step in range(steps):
        some = pixels[torch.randint(0, len(pixels), (32,))]
        posterior = vae.encode(some).latent_dist
        values = posterior.mean[0].numel()
        loss = mse_loss(vae.decode(posterior.sample()).sample, some) + 1e-4 * posterior.kl().mean() / values
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(step + 1, steps)
    vae.eval()
    with torch.no_grad():
        latents = vae.encode(pixels[:256]).latent_dist.mean
    vae.register_to_config(scaling_factor=float(1 / latents.std()))


def make_unet(side: int) -> UNet2DConditionModel:
    """About a million weights, with cross-attention to the text where the picture is smallest. side: of the latents."""
    return UNet2DConditionModel(
        sample_size=side,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=8,
        norm_num_groups=8,
    )
