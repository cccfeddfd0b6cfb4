"""Facts about training methods: whoever needs one asks here, and names no method."""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from swarm.options import names_of, option, options
from swarm.run.family import Family
from swarm.run.rooms import modules


@options
class TextEncoders:
    """For methods that may train a text encoder."""

    train_text_encoder: bool = option(
        False,
        "Train the CLIP text encoders too, all that the family has; a T5 stays as it is, as in diffusers' scripts.",
        section="the method",
    )
    text_encoder_lr: float = option(
        0.0,
        "Peak learning rate of the text encoders that are trained; 0: the same as the rest's.",
        lt=10, only_with={"train_text_encoder": (True,)}, since="0.1.1", unsaid=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class Method:
    """Everything about a method that is not a tensor."""

    since: str
    """The version of this program that first had it."""
    learning_rate: float
    """What --learning_rate 0 stands for."""
    sections: tuple[type, ...] = ()
    """The options that it has."""
    usual: bool = False
    """Whether it is the one where nothing asks for another."""
    asked_by: str = ""
    """The option that asks for it with --method auto."""
    resolve: Callable[[Any], Mapping[str, Any]] = lambda run: {}
    """What its options stand for that were left to the program, in a run of this method."""
    found: Callable[[Any, Collection[str]], Mapping[str, Any]] = lambda run, given: {}
    """What the founder reads from files that the run begins with, the names of the options that were given beside it. Raises UserError."""
    check_files: Callable[[Any], None] = lambda run: None
    """Raises UserError when a file that the run begins with, beside the base model, is not on this machine, or is another."""
    check: Callable[[Any], None] = lambda run: None
    """Raises UserError for options that no peer could train with, in a run of this method."""
    check_with: Callable[[Any, Family], None] = lambda run, family: None
    """Raises UserError for options that a model of the family cannot have, in a run of this method."""
    learns_words: bool = False
    """Whether its result is a word, which not every family's pipeline reads."""
    whole: bool = False
    """Whether its result is a whole model; else it is small, and goes onto the base model."""
    changes_model: bool = True
    """Whether the base model's own weights act differently afterwards: else there is no prior to preserve."""
    adapter: bool = False
    """Whether its result is an adapter of the pipeline, with a scale."""
    in_one_file: str = ""
    """Why its result has no place in a single file of the whole model; '': it has."""
    bare_pictures: bool = False
    """Whether pictures without captions can be trained on."""
    caption: Callable[[str, Any, Callable[[str], Random]], str | None] = lambda caption, run, chance: None
    """The caption that a sample is trained with in place of its own, the run and random generators by purpose given; None: as for other methods."""
    steps_name: str = "model"
    """How results on the way are called."""
    has_forms: bool = False
    """Whether it has a use for --save_as_full_pipeline and --safe_serialization."""
    network: Callable[[Any, Family], Mapping[str, Any]] = lambda run, family: {}
    """What kohya's scripts say of it in the header of a file, without `ss_network_`."""
    kind: str
    """What its result is called in the model card."""
    tags: tuple[str, ...]
    """The Hub's."""
    loading: Callable[[str, str, Any, str], str]
    """Python that loads its result with plain diffusers, from the pipeline's class, what makes the base model's, the run, and the suffix of
    its files."""


@functools.cache
def methods() -> dict[str, Method]:
    return {name: module.METHOD for name, module in modules("methods").items()}


def usual() -> str:
    return next(name for name, method in methods().items() if method.usual)


def method_named(name: str) -> Method:
    """Of a name that is none, the usual method."""
    return methods().get(name) or methods()[usual()]


@functools.cache  # each run that is made asks twice
def owners() -> dict[str, list[str]]:
    """The methods that have an option, by the option."""
    found: dict[str, list[str]] = {}
    for name, method in methods().items():
        for section in method.sections:
            for each in names_of(section):
                found.setdefault(each, []).append(name)
    return found
