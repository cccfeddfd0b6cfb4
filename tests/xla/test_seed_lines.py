"""The lines of the XLA page as people type them, but for the script's name, a tiny model and tiny pictures, on a CPU's four devices."""

import json
import os
import re
import shlex
import subprocess
import sys

import datasets
import pytest
from PIL import Image

from tests.conftest import ROOT

LINE = (
    "python peer/finetune.py --pretrained_model_name_or_path={model} --dataset_name=$DATASET_NAME --resolution=16 --center_crop --random_flip "
    "--train_batch_size=$PER_HOST_BATCH_SIZE  --max_train_steps=$TRAIN_STEPS --learning_rate=1e-03 --mixed_precision={precision} "
    "--profile_duration=300 --output_dir=$OUTPUT_DIR --dataloader_num_workers=1 --loader_prefetch_size=4 --device_prefetch_size=4 --print_loss"
)
STEPS, BATCH = 5, 4


@pytest.fixture(scope="module")
def captioned(tmp_path_factory):
    """A folder as `datasets` loads it, with the columns of the original's dataset."""
    folder = tmp_path_factory.mktemp("captioned")
    tint = lambda i: Image.new("RGB", (20, 16), (i * 12, 255 - i * 12, 128))  # noqa: E731
    rows = {"image": [tint(i) for i in range(20)], "text": [f"a toy {i % 3}" for i in range(20)]}
    datasets.Dataset.from_dict(rows, features=datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})).to_parquet(
        folder / "train.parquet"
    )
    return folder


@pytest.fixture
def run(captioned, tiny_family, tmp_path):
    """`run(family, precision, devices)`: the line, run to its end; returns its folder, its losses by step and all that it said."""

    def start(family, precision, devices, *flags):
        place = tmp_path / f"{family}-{devices}"
        place.mkdir()
        line = LINE.format(model=tiny_family(family), precision=precision)
        environ = os.environ | {
            "TORCH_DISABLE_FUNCTIONALIZATION_META_REFERENCE": "1",
            "PROFILE_DIR": str(place / "profile"),
            "CACHE_DIR": str(place / "cache"),
            "DATASET_NAME": str(captioned),
            "PER_HOST_BATCH_SIZE": str(BATCH),
            "TRAIN_STEPS": str(STEPS),
            "OUTPUT_DIR": str(place / "trained-model"),
            "CPU_NUM_DEVICES": str(devices),
            "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        }
        command = shlex.join(["bash", "-c", line + "".join(f" {flag}" for flag in flags)])
        done = subprocess.run(shlex.split(command), cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1500)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        return place, [float(loss) for loss in re.findall(r"step=\d+ samples=4 loss=([\d.]+)", said)], said

    return start


def parts_of(folder):
    return {path.parent.name for path in folder.rglob("*.safetensors")}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("family", "precision"), [("flux", "bf16"), ("sdxl", "bf16")])
def test_the_original_line_runs_as_written_and_its_losses_are_those_of_one_device(run, family, precision):
    place, losses, said = run(family, precision, 4)
    assert "device=xla devices=4 (CPU)" in said
    assert len(losses) == STEPS
    assert json.loads((place / "trained-model" / "model" / "model_index.json").read_text())
    assert parts_of(place / "trained-model" / "model") > {"vae", "text_encoder"}
    assert [path for path in (place / "profile").rglob("*") if path.is_file()], "no profile"
    assert list((place / "cache").iterdir()), "no compiled programs"

    _, of_one, said = run(family, precision, 1)
    assert "device=xla devices=1 (CPU)" in said
    assert losses == pytest.approx(of_one, rel=1e-3)
