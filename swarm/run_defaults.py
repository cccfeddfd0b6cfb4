"""What an option of the run is when the run does not send it: the frozen half of a run's identity (`run_identity.py`).

Data for ever. A run is the options that differ from these values, so that changing one would give running runs other ids and other meanings.
`RunConfig` may change a default: a run founded then sends its value, since it differs from the one here. An option that is new to `RunConfig`
is declared with `since`, the version that first has it (raise the version in setup.cfg), and `unsaid`, the value that means what programs
without that option do: neither may change. tests/swarm/test_run_identity.py pins what is here.
"""

import dataclasses
from typing import Any

from swarm.run.sections import SECTIONS

BY_VERSION: dict[str, dict[str, Any]] = {
    "0.1.0": {
        "run_name": "distributed-diffusion",
        "model": "",
        "model_digest": "",
        "family": "auto",
        "method": "auto",
        "sync": "parameters",
        "wire": "fp16",
        "outer_learning_rate": 0.7,
        "outer_momentum": 0.9,
        "dataset_digest": "",
        "total_samples": 0,
        "target_batch_size": 2048,
        "optimizer": "auto",
        "learning_rate": 0.0,
        "lr_scheduler": "constant",
        "lr_warmup_samples": 0,
        "lr_num_cycles": 1,
        "lr_power": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_weight_decay": 0.01,
        "adam_epsilon": 1e-08,
        "max_grad_norm": 1.0,
        "resolution": 512,
        "center_crop": False,
        "random_flip": False,
        "ucg": 0.1,
        "seed": 42,
        "shuffle_tags": False,
        "keep_tokens": 0,
        "num_buckets": 0,
        "bucket_side_min": 0,
        "bucket_side_max": 0,
        "image_interpolation_mode": "lanczos",
        "train_text_encoder": False,
        "rank": 4,
        "lora_alpha": 0.0,
        "placeholder_token": "",
        "initializer_token": "",
        "learnable_property": "object",
        "num_vectors": 1,
        "model_config": "",
        "clip_skip": 0,
        "max_token_chunks": 1,
        "max_sequence_length": 512,
        "prediction_type": "auto",
        "rescale_betas_zero_snr": None,
        "snr_gamma": 0.0,
        "noise_offset": 0.0,
        "input_perturbation": 0.0,
        "weighting_scheme": "none",
        "logit_mean": 0.0,
        "logit_std": 1.0,
        "mode_scale": 1.29,
        "guidance_scale": 3.5,
        "timestep_bias_strategy": "none",
        "timestep_bias_multiplier": 1.0,
        "timestep_bias_begin": 0,
        "timestep_bias_end": 1000,
        "timestep_bias_portion": 0.25,
    },
}
for _field in (field for section in SECTIONS for field in dataclasses.fields(section) if field.metadata["since"]):
    BY_VERSION.setdefault(_field.metadata["since"], {})[_field.name] = _field.metadata["unsaid"]
"""The version that first had the options: each of them, and its value where a run does not send it."""

DEFAULTS = {name: value for options in BY_VERSION.values() for name, value in options.items()}
SINCE = {name: version for version, options in BY_VERSION.items() for name in options}
