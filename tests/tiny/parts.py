"""Tiny but real parts of pipelines: tokenizers, text encoders, VAE, UNet and schedulers, with random weights."""

import torch

WORDS = ("a", "cat", "dog", "object", "of", "photo", "style", "toy")
"""Single tokens in the tokenizers of `build`, as in the real ones."""


def _bytes() -> list[str]:
    """The 256 symbols of byte-level BPE, in the order of CLIP's and GPT-2's vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def _merges(pieces: list[str]) -> dict[tuple[str, str], str]:
    """What makes one token of the pieces, in the order in which it is applied."""
    merges = {}
    while len(pieces) > 1:
        merges[pieces[0], pieces[1]] = pieces[0] + pieces[1]
        pieces[:2] = [pieces[0] + pieces[1]]
    return merges


def clip_tokenizer(words: tuple[str, ...] = (), pad_token: str = "<|endoftext|>"):
    """A CLIPTokenizer in CLIP's own order: bytes, bytes that end a word, then `words`, a token each; any other text is encoded by its letters."""
    from transformers import CLIPTokenizer

    symbols, merges = _bytes(), {}
    for word in words:
        merges |= _merges([*word[:-1], word[-1] + "</w>"])
    vocab = [*symbols, *(symbol + "</w>" for symbol in symbols), *merges.values(), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(vocab)}, merges=[*merges], pad_token=pad_token, model_max_length=77)


CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Qwen 3's, as far as one message of a user goes."""


def qwen_tokenizer(max_length: int = 64, **options):
    """A Qwen tokenizer of bytes and of `WORDS`, with and without a space before them; it pads on the right."""
    from transformers import Qwen2Tokenizer

    symbols, merges = _bytes(), {}
    for word in WORDS:
        merges |= _merges([*word]) | _merges(["\u0120", word])
    vocab = {token: i for i, token in enumerate([*symbols, *merges.values(), "<|endoftext|>"])}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[*merges], model_max_length=max_length, **{"chat_template": CHAT, **options})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def qwen3(tokenizer, layers: int = 2, width: int = 8):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def qwen25_vl(tokenizer, layers: int = 2, width: int = 8):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": len(tokenizer), "hidden_size": width, "intermediate_size": 16, "num_hidden_layers": layers, "num_attention_heads": 2,
        "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, width // 4 - 2]},
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": width, "patch_size": 8, "window_size": 16}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


MISTRAL_CHAT = "<s>{% for message in messages %}[{{ message.role }}]{% for block in message.content %}{{ block.text }}{% endfor %}[/{{ message.role }}]{% endfor %}"
"""Mistral 3's, as far as two messages of words go."""


def mistral_tokenizer(known: str, max_length: int = 48):
    """A byte-level tokenizer of `WORDS`, and of the text `known` as one token."""
    tokenizer = qwen_tokenizer(max_length, chat_template=MISTRAL_CHAT)
    tokenizer.add_tokens([known, "<s>", "[system]", "[/system]", "[user]", "[/user]"])
    return tokenizer


def mistral3(tokenizer, layers: int = 2, width: int = 8):
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

    text = MistralConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, sliding_window=None, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    vision = PixtralVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=16, patch_size=8
    )
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision, image_token_index=0))


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


def patched_vae():
    """FLUX.2's, of factor 2: its latents are normalised in patches of 2x2."""
    from diffusers import AutoencoderKLFlux2

    return AutoencoderKLFlux2(
        block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, mid_block_add_attention=False, sample_size=16, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def narrow_latents(model):
    """Latents of a few pictures, (4, C, 8, 8), after the posterior was made hardly wider than its mean."""
    last = model.quant_conv or model.encoder.conv_out
    last.bias[len(last.bias) // 2 :] -= 10.0
    return model.encode(torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1).latent_dist.mean


def scale_latents(model) -> None:
    latents = narrow_latents(model)
    model.register_to_config(scaling_factor=float(1 / latents.std()))
    if model.config.shift_factor is not None:
        model.register_to_config(shift_factor=float(latents.mean()))


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
