"""By hand: the layers that kohya's own programs give a LoRA of each full-size model, as the count and digest that test_kohya.py holds.

    git clone https://github.com/kohya-ss/sd-scripts && git clone https://github.com/kohya-ss/musubi-tuner
    python tests/peer/results/kohyas_layers.py sd-scripts musubi-tuner

Their modules are imported from these folders; what those import and is not installed is replaced by nothing. Models are on `meta`.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from unittest.mock import MagicMock

ABSENT = ("cv2", "imagesize", "torchvision", "toml", "voluptuous", "einops", "open_clip", "rich", "av", "easydict", "sentencepiece", "ftfy")


def digest(layers: Iterable[tuple[str, int, int]]) -> tuple[int, str]:
    """Of layers by name, outputs and inputs: how many there are, and the beginning of the SHA-256 of their list."""
    lines = sorted(" ".join(map(str, layer)) for layer in layers)
    return len(lines), hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


class Nothing:
    """Imports mocks for what is not installed."""

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def networks():
    """kohya's networks by the names of test_kohya.py: all layers that they take, where weights of all are given or where nobody chooses."""
    import torch
    from library import chroma_models, flux_models, sd3_models
    from musubi_tuner.flux_2 import flux2_models
    from musubi_tuner.networks import lora_flux_2, lora_qwen_image, lora_zimage
    from musubi_tuner.qwen_image.qwen_image_model import QwenImageTransformer2DModel
    from musubi_tuner.zimage.zimage_model import ZImageTransformer2DModel
    from networks import lora_flux, lora_sd3

    def of_weights(module, model):
        layers = [f"lora_unet_{name.replace('.', '_')}" for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
        ends = {"lora_down.weight": torch.empty(1, 1), "lora_up.weight": torch.empty(1, 1), "alpha": torch.ones((), device="cpu")}
        weights = {f"{layer}.{end}": tensor for layer in layers for end, tensor in ends.items()}
        return module.create_arch_network_from_weights(1.0, weights, [], model)

    sizes = {"patch_size": 2, "adm_in_channels": 2048, "qk_norm": "rms", "context_embedder_in_features": 4096}
    medium = {
        "depth": 24,
        "num_patches": 147456,
        "pos_embed_max_size": 384,
        "x_block_self_attn_layers": list(range(13)),
        "model_type": "5-medium",
    }
    large = {"depth": 38, "num_patches": 36864, "pos_embed_max_size": 192, "x_block_self_attn_layers": [], "model_type": "5-large"}
    sd3 = {"medium": (1536, medium), "large": (2432, large)}
    flux2 = {"dev": flux2_models.Flux2Params, "klein 4B": flux2_models.Klein4BParams, "klein 9B": flux2_models.Klein9BParams}
    with torch.device("meta"):
        yield "FLUX.1", lora_flux.LoRANetwork([], flux_models.Flux(flux_models.configs["dev"].params), lora_dim=1)
        yield "Chroma", lora_flux.LoRANetwork([], chroma_models.Chroma(chroma_models.chroma_params), lora_dim=1)
        for name, (width, config) in sd3.items():
            params = sd3_models.SD3Params(**sizes, **config, context_embedder_out_features=width)
            yield f"SD 3.5 {name}", lora_sd3.LoRANetwork([], sd3_models.create_sd3_mmdit(params), lora_dim=1)
        for name, params in flux2.items():
            yield f"FLUX.2 {name}", lora_flux_2.create_arch_network(1.0, 1, 1, None, [], flux2_models.Flux2(params()))
        yield "Z-Image", of_weights(lora_zimage, ZImageTransformer2DModel())
        yield "Qwen-Image", of_weights(lora_qwen_image, QwenImageTransformer2DModel(attn_mode="torch"))


if __name__ == "__main__":
    import diffusers
    import transformers

    # These two look for what is installed: they come before the mocks, with all that kohya's modules take from them.
    assert (
        diffusers.AutoencoderKL and transformers.CLIPTextModelWithProjection and transformers.T5EncoderModel and transformers.CLIPTokenizer
    )
    sys.meta_path.append(Nothing())
    sys.path[:0] = [sys.argv[1], f"{sys.argv[2]}/src"]
    for name, network in networks():
        print(name, digest((layer.lora_name, layer.lora_up.out_features, layer.lora_down.in_features) for layer in network.unet_loras))
