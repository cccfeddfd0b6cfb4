"""Real handwritten digits (scikit-learn's, 1,797 of 8x8 grey pixels), as a captioned folder and as a judge of drawn ones.

The first 1,500 are for training; the other 297 are never shown to the model. The judge learns from real digits only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TRAIN_COUNT = 1500
SIDE = 16


def caption(digit: int) -> str:
    return f"a handwritten {WORDS[digit]}"


def load() -> tuple[np.ndarray, np.ndarray]:
    """(1797, 8, 8) ink in [0, 1] and (1797,) the digit it stands for."""
    from sklearn.datasets import load_digits  # late: with scipy and pandas it takes a second, and captions need none of it

    pixels, labels = load_digits(return_X_y=True)
    return (pixels / 16).reshape(-1, 8, 8), labels


def picture(ink: np.ndarray) -> Image.Image:
    """One digit (8, 8) as the RGB picture of 16x16 pixels that the model learns from."""
    grey = Image.fromarray(np.round(ink * 255).astype(np.uint8))
    return grey.resize((SIDE, SIDE), Image.Resampling.BILINEAR).convert("RGB")


def pictures(ink: np.ndarray) -> list[Image.Image]:
    return [picture(one) for one in ink]


def write_folder(folder: Path, count: int = TRAIN_COUNT) -> None:
    """Write the first `count` digits as NNNN.png, each with its caption in NNNN.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    ink, labels = load()
    for index in range(count):
        picture(ink[index]).save(folder / f"{index:04d}.png")
        (folder / f"{index:04d}.txt").write_text(caption(labels[index]), encoding="utf-8")


@dataclass(frozen=True)
class Judge:
    """A classifier of real digits; `accuracy` is its share of right answers on real ones that it never saw."""

    classifier: Any
    """A LogisticRegression of scikit-learn."""
    accuracy: float

    @classmethod
    def from_real_digits(cls) -> "Judge":
        from sklearn.linear_model import LogisticRegression

        ink, labels = load()
        seen = look_at(pictures(ink))
        classifier = LogisticRegression(max_iter=2000).fit(seen[:TRAIN_COUNT], labels[:TRAIN_COUNT])
        return cls(classifier, float(classifier.score(seen[TRAIN_COUNT:], labels[TRAIN_COUNT:])))

    def read(self, drawn: Sequence[Image.Image]) -> np.ndarray:
        """(N,) the digit it sees in each picture, of any size."""
        return self.classifier.predict(look_at(drawn))


def look_at(drawn: Sequence[Image.Image]) -> np.ndarray:
    """(N, 64) what the judge sees of each picture, real or drawn: the ink in 8x8 fields, in [0, 1]."""
    small = [np.asarray(one.convert("L").resize((8, 8), Image.Resampling.BOX), dtype=float) / 255 for one in drawn]
    return np.stack(small).reshape(len(small), 64)
