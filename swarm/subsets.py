"""A dataset of several folders, each with its own repeats and captions, by a TOML file in the form of kohya's `--dataset_config`.

Its `[[datasets.subsets]]` are read, and what they inherit from `[[datasets]]` and `[general]`. What kohya's scripts let each folder have, and a
run here has for all its pictures, is named in a warning and left alone.
"""

import logging
import posixpath
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swarm.captions import CAPTION_COLUMNS, Faults
from swarm.errors import UserError
from swarm.options import check_names, load_toml
from swarm.picture_folder import CAPTION_SUFFIXES, Pair, list_folder

log = logging.getLogger(__name__)
_OWN = {
    "image_dir": str,
    "num_repeats": int,
    "loss_weight": float,
    "validation_split": float,
    **dict.fromkeys(("class_tokens", "caption_prefix", "caption_suffix", "caption_extension"), str),
}
_OF_THE_RUN = {
    "batch_size": "train_batch_size",
    "resolution": "resolution",
    "enable_bucket": "num_buckets",
    "min_bucket_reso": "bucket_side_min",
    "max_bucket_reso": "bucket_side_max",
    "bucket_reso_steps": "num_buckets",
    "bucket_no_upscale": "num_buckets",
    "resize_interpolation": "image_interpolation_mode",
    "flip_aug": "random_flip",
    "random_crop": "center_crop",
    "shuffle_caption": "shuffle_tags",
    "keep_tokens": "keep_tokens",
    "enable_wildcard": "enable_wildcard",
    "caption_dropout_rate": "proportion_empty_prompts",
    "caption_tag_dropout_rate": "caption_tag_dropout_rate",
    "alpha_mask": "masked_loss",
}
_NOT_HERE = {
    *("is_reg", "metadata_file", "conditioning_data_dir", "caption_dropout_every_n_epochs", "caption_separator", "keep_tokens_separator"),
    *("secondary_separator", "token_warmup_min", "token_warmup_step", "color_aug", "face_crop_aug_range", "custom_attributes"),
    *("network_multiplier", "validation_seed"),
}
_CHANGES_NOTHING = {"caption_separator": ",", "token_warmup_min": 1, "network_multiplier": 1.0}
"""kohya's defaults, beside those that are false, 0 or empty."""
_INSTEAD = {
    "is_reg": "Give that folder as --class_data_dir.",
    "conditioning_data_dir": "Put each mask beside its picture as NAME.mask.png, and add --masked_loss.",
    "validation_seed": "Remove it: the hash of a picture's name decides whether it is held out, the same at all peers.",
}
_NOTHING_SAID = {"cache_info"}
_MOST_REPEATS = 999
"""As in the names of kohya's folders."""
_MOST_WEIGHT = 1000.0
"""Beyond it a batch teaches that folder alone."""


@dataclass(frozen=True)
class Subset:
    """A folder of the dataset. class_tokens: the caption of pictures that have none.

    label: what the names of its pictures begin with: the folder as the file writes it, so that no other subset changes it.
    of_the_run: the file's keys that a run has for all pictures.
    """

    folder: Path
    label: str
    of_the_run: frozenset[str]
    num_repeats: int = 1
    class_tokens: str = ""
    caption_prefix: str = ""
    caption_suffix: str = ""
    caption_extension: str = CAPTION_SUFFIXES[0]
    loss_weight: float = 1.0
    validation_split: float | None = None

    def pairs(self, faults: Faults, column: str, masks: bool, without: Collection[Path]) -> list[Pair]:
        own: Faults = []
        pairs = list_folder(self.folder, own, column, masks, without, self.caption_extension)
        faults += [(self._named(name), reason) for name, reason in own]
        said = {"around": (self.caption_prefix, self.caption_suffix), "weight": self.loss_weight, "validation_split": self.validation_split}
        return [
            replace(
                pair,
                name=self._named(pair.name),
                repeats=self.num_repeats * pair.repeats,
                spare=pair.spare or self.class_tokens,
                **said,
            )
            for pair in pairs
        ]

    def _named(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self.label, name))


def list_dataset(
    path: Path, faults: Faults, column: str = CAPTION_COLUMNS[0], masks: bool = False, without: Collection[Path] = ()
) -> list[Pair]:
    """As `list_folder`, of a folder or of the folders that a TOML file names; what lies in one of them is not also the outer one's."""
    if not names_folders(path):
        return list_folder(path, faults, column, masks, without)
    subsets = read_subsets(path)
    if passed_over := sorted(frozenset().union(*(subset.of_the_run for subset in subsets))):
        ours = " ".join(sorted({f"--{_OF_THE_RUN[name]}" for name in passed_over}))
        log.warning("%s: ignored %s: a run sets this for all pictures, with %s", path, ", ".join(passed_over), ours)
    without = [*without, *(subset.folder.resolve() for subset in subsets)]
    return sorted((pair for subset in subsets for pair in subset.pairs(faults, column, masks, without)), key=lambda pair: pair.name)


def names_folders(path: Path) -> bool:
    """Whether it is to be read as a TOML file that names folders, and not as a folder."""
    return path.suffix == ".toml" and not path.is_dir()


def folders_of(path: Path) -> list[Path]:
    """The folder, or those that the TOML file names. Raises UserError."""
    return [subset.folder for subset in read_subsets(path)] if names_folders(path) else [path]


def read_subsets(path: Path) -> list[Subset]:
    """Folders are relative to the file. Raises UserError for what is no such file, and for a key that changes what is trained and is not known here."""
    said = load_toml(path)
    check_names(said, ("general", "datasets"), where=str(path))
    general = said.get("general", {})
    if not isinstance(general, dict):
        raise UserError(f"{path}: 'general' is not a table.", fix="Write [general], and below it the keys that all folders share.")
    known = (*_OWN, *_OF_THE_RUN, *_NOT_HERE, *_NOTHING_SAID)
    check_names(general, known, where=str(path))
    found: list[Subset] = []
    for dataset in _tables(path, said, "datasets"):
        check_names(dataset, (*known, "subsets"), where=str(path))
        for subset in _tables(path, dataset, "subsets"):
            check_names(subset, known, where=str(path))
            found.append(_subset(path, {**general, **{name: dataset[name] for name in dataset if name != "subsets"}, **subset}))
    named: dict[Path, Subset] = {}
    for subset in found:
        before = named.setdefault(subset.folder.resolve(), subset)
        if before is not subset:
            raise UserError(
                f"{path} names one folder twice: {before.label!r} and {subset.label!r}.",
                fix="Name it once: a run has one resolution for all pictures, and num_repeats sets how often they are used.",
            )
    return found


def _tables(path: Path, said: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """At least one."""
    tables = said.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UserError(f"{path}: '{name}' is not a list of tables.", fix="Write [[datasets]], and below it [[datasets.subsets]] for each folder.")
    if not tables:
        what = "a [[datasets]] names no folder" if name == "subsets" else "it names no folder"
        raise UserError(f"{path}: {what}.", fix='Add [[datasets]], below it [[datasets.subsets]] with image_dir = "FOLDER".')
    return tables


def _subset(path: Path, values: Mapping[str, Any]) -> Subset:
    # TOML's 2 and 2.0
    values = {name: float(value) if _OWN.get(name) is float and type(value) is int else value for name, value in values.items()}
    for name, value in values.items():
        if name in _NOT_HERE and value and value != _CHANGES_NOTHING.get(name):
            raise UserError(f"{path}: there is no {name} here.", fix=_INSTEAD.get(name, "Remove it."))
        if name in _OWN and type(value) is not _OWN[name]:
            raise UserError(f"{path}: {name} is {value!r}.", fix=f"Give it a value of type {_OWN[name].__name__}.")
    if not values.get("image_dir"):
        raise UserError(f"{path}: a subset has no image_dir.", fix='Add image_dir = "FOLDER" to each [[datasets.subsets]].')
    if not 1 <= values.get("num_repeats", 1) <= _MOST_REPEATS:
        raise UserError(f"{path}: num_repeats is {values['num_repeats']}.", fix=f"Use 1 to {_MOST_REPEATS}.")
    if not 0 < values.get("loss_weight", 1.0) <= _MOST_WEIGHT:
        fix = f"Use more than 0, and at most {_MOST_WEIGHT:g}; 1 is usual."
        raise UserError(f"{path}: loss_weight is {values['loss_weight']:g}.", fix=fix)
    if not 0 <= values.get("validation_split", 0.0) <= 1:
        fix = "Use 0 to 1: 0 holds none of the folder's pictures out of training, 1 all of them."
        raise UserError(f"{path}: validation_split is {values['validation_split']:g}.", fix=fix)
    if values.get("caption_extension", CAPTION_SUFFIXES[0]) not in CAPTION_SUFFIXES:
        fix = f"Use {' or '.join(CAPTION_SUFFIXES)}; the other is read, too, where there is no such file."
        raise UserError(f"{path}: caption_extension is {values['caption_extension']!r}.", fix=fix)
    label = posixpath.normpath(values["image_dir"])
    folder = path.parent / label
    try:
        folder.resolve()
        folder.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # a name that is too long, or has a NUL; a link to itself
        raise UserError(f"{path}: image_dir is {label[:80]!r}: {error.args[-1]}.", fix="Give it a folder.") from None
    own = {name: value for name, value in values.items() if name in _OWN and name != "image_dir"}
    return Subset(folder, label, frozenset(name for name in values if name in _OF_THE_RUN), **own)
