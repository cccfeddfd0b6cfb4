"""By hand: ComfyUI's own code loads what a run leaves of each family, and the weights that it makes are compared with diffusers'.

    git clone https://github.com/Comfy-Org/ComfyUI
    python -m tests.peer.results.comfys_reader ComfyUI

Its `comfy/lora.py`, `comfy/utils.py` and `comfy/weight_adapter/` are imported from that folder, the rest of it is replaced by nothing. The
models are tiny. A line says how many of a file's tensors ComfyUI does not know, how many layers it leaves as they were, and the largest relative
distance of a layer's change. Ends with 1 if a tensor is unknown or a distance is above 1e-5, but for what docs/train.md says ComfyUI does not read.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file
from torch import Tensor

from peer import export
from swarm.run.family import families
from tests import tiny
from tests.peer.results.test_results import LORA, Trained, plain

KINDS = {
    "flux": "Flux",
    "chroma": "Flux",
    "flux2": "Flux",
    "flux2_klein": "Flux",
    "sd3": "SD3",
    "qwen_image": "QwenImage",
    "z_image": "Lumina2",
}
"""The classes of comfy/model_base.py that its list of names asks for; those of Chroma and FLUX.2 are made from FLUX's."""
TEXTS = {"text_encoder": "clip_l.transformer.", "text_encoder_2": "clip_g.transformer."}
UNREAD = {"z_image lora lora_kohya"}


def comfy(folder: Path) -> tuple[ModuleType, ModuleType]:
    """Its `lora` and `utils`. Weights are cast by torch, since its own memory management needs a GPU."""

    def cast(tensor: Tensor, device: torch.device, dtype: torch.dtype, copy: bool = False) -> Tensor:
        return tensor.to(device, dtype, copy=copy)

    def module(name: str, path: Path, **options) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, path, **options)
        sys.modules[name] = loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded

    root = folder / "comfy"
    base = SimpleNamespace(cast_to_device=cast, cast_to=lambda tensor, dtype, device, **_: tensor.to(device, dtype))
    sys.modules |= {name: MagicMock() for name in ("comfy", "comfy.checkpoint_pickle", "comfy.memory_management", "einops", "comfy_aimdo")}
    sys.modules |= {"comfy.model_management": base, "comfy.model_base": _Kinds("comfy.model_base")}
    utils = module("comfy.utils", root / "utils.py")
    adapters = root / "weight_adapter"
    package = module("comfy.weight_adapter", adapters / "__init__.py", submodule_search_locations=[str(adapters)])
    sys.modules["comfy"].__dict__.update(
        utils=utils, model_base=sys.modules["comfy.model_base"], model_management=base, weight_adapter=package
    )
    return module("comfy.lora", root / "lora.py"), utils


class _Kinds(ModuleType):
    """Each class of comfy/model_base.py, empty."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


class _Depth(int):
    """SD 3's width is 64 times its depth, and ComfyUI computes it so; a tiny one's is not."""

    def __new__(cls, depth: int, width: int):
        self = super().__new__(cls, depth)
        self.width = width
        return self

    def __mul__(self, other: int) -> int:
        return self.width


def sizes(family: str, denoiser) -> dict[str, object]:
    """What ComfyUI finds out about a checkpoint, of a tiny model: `unet_config` of comfy/model_detection.py."""
    config = denoiser.config
    if "block_out_channels" in config:
        widths, blocks, depths = config.block_out_channels, config.layers_per_block, config.transformer_layers_per_block
        depths = [depths] * len(widths) if isinstance(depths, int) else depths
        kinds = zip(config.down_block_types, depths, strict=True)
        levels = [depth if "CrossAttn" in kind else 0 for kind, depth in kinds]
        return {
            "num_res_blocks": [blocks] * len(widths),
            "channel_mult": [width // widths[0] for width in widths],
            "transformer_depth": [depth for depth in levels for _ in range(blocks)],
            "transformer_depth_output": [depth for depth in levels for _ in range(blocks + 1)],
            "transformer_depth_middle": depths[-1],
        }
    if family == "z_image":
        return {"n_layers": config.n_layers, "n_refiner_layers": config.n_refiner_layers, "dim": config.dim}
    width = config.num_attention_heads * config.attention_head_dim
    if family == "sd3":
        return {"depth": _Depth(config.num_layers, width), "num_blocks": config.num_layers}
    singles = {"depth_single_blocks": config.num_single_layers} if "num_single_layers" in config else {}
    return {"depth": config.num_layers, **singles, "hidden_size": width}


def targets(utils: ModuleType, family: str, denoiser) -> dict[str, tuple]:
    """diffusers' weight -> (ComfyUI's weight, its slice or None, what is done to it or None)."""
    config = sizes(family, denoiser)
    if "num_res_blocks" in config:
        found = utils.unet_to_diffusers(config)
    elif family == "qwen_image":
        found = {name: name for name in denoiser.state_dict()}
    else:
        name = {"sd3": "mmdit", "z_image": "z_image"}.get(family, "flux")
        found = getattr(utils, f"{name}_to_diffusers")(config)
    whole = {key: (target, None, None) if isinstance(target, str) else (*target, None)[:3] for key, target in found.items()}
    return {key: target for key, target in whole.items() if key in denoiser.state_dict() and key.endswith("weight")}


def as_comfys(state: dict[str, Tensor], found: dict[str, tuple]) -> dict[str, Tensor]:
    """The denoiser's weights under ComfyUI's names, and in its layers, by ComfyUI's own list."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for key, (name, piece, change) in found.items():
        parts.setdefault(f"diffusion_model.{name}", []).append((piece[1] if piece else 0, change(state[key]) if change else state[key]))
    return {name: torch.cat([tensor for _, tensor in sorted(each, key=lambda one: one[0])]) for name, each in parts.items()}


def main(folder: Path) -> int:
    lora, utils = comfy(folder)
    failed = 0
    for family in [name for name in tiny.ONE_OF_EACH if families()[tiny.FAMILIES[name]].prefixes]:
        facts = families()[tiny.FAMILIES[family]]
        for options in (LORA | {"lora_targets": "all-linear"}, {**LORA, "method": "loha"}, {**LORA, "method": "lokr"}):
            text = facts.trains_texts and options["method"] == "lora"
            with tempfile.TemporaryDirectory() as place:
                base, work = Path(place) / "base", Path(place) / "run"
                tiny.build(family).save_pretrained(base)
                done = Trained(base, family, work / "model", train_text_encoder=text, **options).written()
                files = {"lycoris": work / "model" / "lycoris.safetensors"}
                if options["method"] == "lora":
                    files = {form: work / f"{form}.safetensors" for form in ("lora_kohya", "lora_diffusers")}
                    for form, path in files.items():
                        export.main(["--state", str(work), "--format", form, "--out", str(path.with_suffix(""))])
                before = plain(base)
                texts = {name: getattr(before, name).state_dict() for name in TEXTS if text and hasattr(before, name)}
                denoiser = getattr(before, facts.denoiser)
                found, config = targets(utils, facts.name, denoiser), sizes(facts.name, denoiser)
                old, wanted = as_comfys(denoiser.state_dict(), found), as_comfys(merged(done, facts.denoiser), found)
                keys = known(lora, facts.name, config, old, texts)
                for form, path in files.items():
                    failed += differs(lora, keys, load_file(path), old, wanted, f"{family} {options['method']} {form}")
    return failed


def merged(done: Trained, part: str) -> dict[str, Tensor]:
    """The part's weights with what was trained in them, by peft."""
    module = getattr(done.model.pipeline, part)
    for layer in [each for each in module.modules() if hasattr(each, "merge")]:
        layer.merge()
    state = {key.replace(".base_layer", ""): tensor.detach() for key, tensor in module.state_dict().items()}
    return {key: tensor for key, tensor in state.items() if ".lora_" not in key and ".hada_" not in key and ".lokr_" not in key}


def known(lora: ModuleType, family: str, config: dict[str, object], old: dict[str, Tensor], texts: dict[str, dict]) -> dict[str, object]:
    """ComfyUI's list: a layer's name in files -> the weight that it changes, with its slice."""
    model = getattr(sys.modules["comfy.model_base"], KINDS.get(family, "BaseModel"))()
    model.state_dict, model.model_config = lambda: old, SimpleNamespace(unet_config=config)
    clips = {
        f"{TEXTS[name]}text_model.{key.removeprefix('text_model.')}": tensor
        for name, state in texts.items()
        for key, tensor in state.items()
    }
    return lora.model_lora_keys_clip(SimpleNamespace(state_dict=lambda: clips), lora.model_lora_keys_unet(model, {}))


def differs(lora: ModuleType, keys: dict[str, object], tensors: dict[str, Tensor], old, wanted, what: str) -> bool:
    """Print what ComfyUI makes of one file; whether that is not what was trained."""
    read: set[str] = set()
    patches: dict[str, list] = {}
    for name, target in keys.items():
        own = {key: tensor for key, tensor in tensors.items() if key.startswith((f"{name}.", f"{name}_"))}
        for key, patch in lora.load_lora(own, {name: target}, log_missing=False).items():
            place, piece, change = (key, None, None) if isinstance(key, str) else (*key, None)[:3]
            patches.setdefault(place, []).append((1.0, patch, 1.0, piece, change))
            read |= patch.loaded_keys
    changed = {place for place in wanted if not torch.equal(wanted[place], old[place])}
    distances = []
    for place in changed & patches.keys():
        new = lora.calculate_weight(patches[place], old[place].clone(), place)
        distances.append(float((new - wanted[place]).norm() / (wanted[place] - old[place]).norm()))
    unknown, missed, farthest = tensors.keys() - read, changed - patches.keys(), max(distances, default=1.0)
    print(
        f"{what}: {len(unknown)} of {len(tensors)} tensors unknown, {len(missed)} of {len(changed)} layers unchanged, distance {farthest:.1e}"
    )
    for name in sorted(unknown | missed)[:3]:
        print(f"    {name}")
    return bool(unknown or missed or farthest > 1e-5) and what not in UNREAD


if __name__ == "__main__":
    raise SystemExit(1 if main(Path(sys.argv[1])) else 0)
