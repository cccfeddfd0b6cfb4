import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from swarm.digest import canonical_json, digest_json, digest_model, weight_files
from swarm.errors import UserError


def write_model(folder, *, weight=1.0, metadata=None):
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    save_file({"w": np.full((4,), weight, np.float32)}, folder / "unet" / "model.safetensors", metadata=metadata)
    return folder


def test_json_is_canonical_whatever_the_order_of_its_keys():
    assert canonical_json({"b": 1, "a": [1.5, "é"]}) == '{"a":[1.5,"é"],"b":1}'.encode()
    assert digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1})


def test_a_number_that_is_none_has_no_digest():
    with pytest.raises(ValueError):
        digest_json({"a": float("nan")})


def test_a_models_digest_is_of_its_weights_alone(tmp_path):
    one = digest_model(write_model(tmp_path / "one"))
    saved_elsewhere = digest_model(write_model(tmp_path / "two", metadata={"format": "pt"}))
    (tmp_path / "one" / "unet" / "model.fp16.safetensors").write_bytes(b"a variant")

    assert one == saved_elsewhere == digest_model(tmp_path / "one")
    assert one != digest_model(write_model(tmp_path / "three", weight=2.0))


def test_a_models_weights_are_its_parts_files_and_a_variant_counts_where_there_is_nothing_else(tmp_path):
    unet = write_model(tmp_path) / "unet"
    for name in ("vae", "safety_checker"):
        (tmp_path / name).mkdir()
        save_file({"w": np.ones(3, np.float16)}, tmp_path / name / "model.fp16.safetensors")
    (unet / "model.fp16.safetensors").write_bytes(b"a variant")

    assert weight_files(tmp_path) == [unet / "model.safetensors", tmp_path / "vae" / "model.fp16.safetensors"]
    assert weight_files(unet / "model.safetensors") == [unet / "model.safetensors"]


def test_a_folder_that_is_no_pipeline_is_named(tmp_path):
    with pytest.raises(UserError, match="not a diffusers pipeline"):
        digest_model(tmp_path)


def test_a_pipeline_without_weights_is_named(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")

    with pytest.raises(UserError, match=r"no \.safetensors weights"):
        digest_model(tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"", lambda data: struct.pack("<Q", 1 << 40) + data[8:]]
)
def test_a_damaged_file_is_named(tmp_path, damage):
    file = write_model(tmp_path / "m") / "unet" / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))

    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        digest_model(tmp_path / "m")


@pytest.mark.parametrize("header", [[], {"w": {}}, {"w": {"data_offsets": [0, "x"]}}, {}])
def test_a_header_of_another_shape_is_damage_too(tmp_path, header):
    file = write_model(tmp_path / "m") / "unet" / "model.safetensors"
    packed = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(packed)) + packed)

    with pytest.raises(UserError, match="damaged"):
        digest_model(tmp_path / "m")
