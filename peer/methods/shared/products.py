"""Adapters whose layers are products of small matrices, LoHa's and LoKr's: diffusers reads neither. peft does, and ComfyUI does LyCORIS's form."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peer.contracts import Model, Params
from peer.methods.shared.adapters import add_adapters, shown, uniform
from peer.methods.shared.parts import plain, trained_parts
from swarm.digest import seed_of
from swarm.run.adapters import alpha, targets
from swarm.run_config import RunConfig

_ZERO = ("hada_w2_b", "lokr_w1")


class Products:
    """On the denoiser, and with `--train_text_encoder` on the CLIP text encoders."""

    def __init__(self, run: RunConfig, config: Callable[..., Any]):
        """config: peft's class."""
        self._run, self._config = run, config

    def whole(self, model: Model) -> tuple[str, ...]:
        return ()

    def begin(self, model: Model) -> None:
        return None

    @torch.no_grad()
    def attach(self, model: Model) -> Params:
        """One matrix of each product is 0, so that training starts from the base model; all else is drawn, the same bits at every peer."""
        config = partial(self._config, r=self._run.rank, alpha=alpha(self._run))
        params = add_adapters(model, trained_parts(model, self._run), targets(self._run, model.facts), config)
        for key, parameter in params.items():
            if key.split(".")[-2] in _ZERO:  # by name: peft has several ways to begin, and a release may choose another
                parameter.zero_()
            else:
                parameter.copy_(uniform(parameter.shape, torch.Generator().manual_seed(seed_of(self._run.seed, key))))
        return params

    def export(self, model: Model, params: Params, folder: Path) -> None:
        """A folder in peft's form for each part, and all of it in `lycoris.safetensors`."""
        from peft.utils import get_peft_model_state_dict
        from safetensors.torch import save_file

        lycoris: dict[str, Tensor] = {}
        for name in trained_parts(model, self._run):
            tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in get_peft_model_state_dict(model.parts[name]).items()}
            (folder / name).mkdir()
            save_file({f"base_model.model.{key}": tensor for key, tensor in tensors.items()}, folder / name / "adapter_model.safetensors")
            config = shown(model.parts[name].peft_config["default"])
            (folder / name / "adapter_config.json").write_text(json.dumps({**config, "inference_mode": True}, indent=2), encoding="utf-8")
            lycoris |= self._lycoris(tensors, self._prefix(model, name))
        save_file(lycoris, folder / "lycoris.safetensors", metadata={"format": "pt"})

    def _lycoris(self, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """Under LyCORIS's names. Its readers scale by alpha / rank, but not a layer that has no matrices of that rank: there it is in the first one."""
        layers: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            layer, _, kind = plain(key).rpartition(".")
            layers.setdefault(prefix + layer.replace(".", "_"), {})[kind] = tensor
        for parts in layers.values():
            if not any(kind.endswith("_b") for kind in parts):
                first = min(parts)
                parts[first] = parts[first] * (alpha(self._run) / self._run.rank)
            parts["alpha"] = torch.tensor(float(alpha(self._run)))
        return {f"{layer}.{kind}": tensor for layer, parts in layers.items() for kind, tensor in parts.items()}

    def _prefix(self, model: Model, name: str) -> str:
        if name == model.facts.denoiser:
            return "lora_unet_" if model.facts.lora_processors else "lycoris_"
        return f"lora_te{[*model.facts.text_encoders].index(name) + 1}_text_model_"
