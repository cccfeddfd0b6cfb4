"""Tiny but real parts of pipelines: tokenizers, text encoders, VAE, UNet and schedulers, with random weights."""

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
        block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, mid_block_add_attention=False, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **{"latent_channels": 4, "scaling_factor": 1.0, **options},
    )  # fmt: skip


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


def t5_encoder(tokenizer, width: int = 16):
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer), d_model=width, d_kv=8, d_ff=32, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu",
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    return T5EncoderModel(config)
