import dataclasses
from itertools import permutations

import pytest

from peer.samples.decoding import choose_caption
from swarm.errors import UserError
from swarm.founding import check_values
from swarm.run.methods.textual_inversion import OBJECT_TEMPLATES, STYLE_TEMPLATES
from swarm.run_config import RunConfig

KEYS = [f"0:{i}" for i in range(2000)]
KEPT = RunConfig(ucg=0.0)


def captions(caption, run, keys=KEYS):
    return [choose_caption(key, caption, run) for key in keys]


def test_captions_are_dropped_at_the_rate_asked_for_and_always_for_the_same_samples():
    chosen = captions("a cat", RunConfig(ucg=0.1))
    assert set(chosen) == {"", "a cat"} and 0.08 < chosen.count("") / len(chosen) < 0.12
    assert chosen == captions("a cat", RunConfig(ucg=0.1)) != captions("a cat", RunConfig(ucg=0.1, seed=1))
    assert set(captions("a cat", RunConfig(ucg=1.0))) == {""} and set(captions("a cat", KEPT)) == {"a cat"}


def test_of_several_captions_one_is_taken_by_chance():
    chosen = captions(("a", "b", "c"), KEPT)
    assert {caption: chosen.count(caption) > 500 for caption in "abc"} == dict.fromkeys("abc", True)
    assert chosen == captions(["a", "b", "c"], KEPT) and captions((), KEPT, ["0:0"]) == [""]


def test_tags_are_shuffled_and_the_first_keep_their_places():
    run = dataclasses.replace(KEPT, shuffle_tags=True, keep_tokens=1)
    chosen = captions("1girl, hat,sea , sky", run)
    assert {tuple(sorted(caption.split(", "))) for caption in chosen} == {("1girl", "hat", "sea", "sky")}
    assert {caption.split(", ")[0] for caption in chosen} == {"1girl"} and len(set(chosen)) == 6
    assert len(set(captions("a, b, c", dataclasses.replace(run, keep_tokens=0)))) == 6
    assert captions("a, b", dataclasses.replace(run, keep_tokens=5), ["0:0"]) == ["a, b"]
    assert set(captions("no tags", run)) == {"no tags"}


def test_tags_are_dropped_at_the_rate_asked_for_but_not_the_first_that_are_kept():
    run = dataclasses.replace(KEPT, caption_tag_dropout_rate=0.25, keep_tokens=1)
    chosen = captions("1girl, hat,sea", run)
    assert set(chosen) == {"1girl, hat, sea", "1girl, hat", "1girl, sea", "1girl"} and chosen == captions("1girl, hat,sea", run)
    assert 0.22 < sum("sea" not in caption for caption in chosen) / len(chosen) < 0.28
    assert set(captions("a, b", dataclasses.replace(run, caption_tag_dropout_rate=1.0))) == {"a"}
    shuffled = captions("a, b, c", dataclasses.replace(run, shuffle_tags=True, keep_tokens=0))
    assert {"a, b, c", "c, b, a", "c, a", "b", ""} < set(shuffled)


def test_a_prefix_and_a_suffix_stand_around_every_caption_and_are_tags_like_others():
    run = dataclasses.replace(KEPT, caption_prefix="sks dog, ", caption_suffix=", photo")
    assert set(captions("a hat", run)) == {"sks dog, a hat , photo"} and set(captions("", run)) == {"sks dog, , photo"}
    assert set(captions(("a", "b"), dataclasses.replace(run, caption_suffix=""))) == {"sks dog, a", "sks dog, b"}
    tags = captions("a hat", dataclasses.replace(run, shuffle_tags=True, keep_tokens=1))
    assert set(tags) == {"sks dog, a hat, photo", "sks dog, photo, a hat"}
    assert 0.08 < captions("a hat", dataclasses.replace(run, ucg=0.1)).count("") / len(KEYS) < 0.12


@pytest.mark.parametrize(
    ("caption", "drawn"),
    [
        ("a {red|green|} hat{s|}", {"a red hats", "a red hat", "a green hats", "a green hat", "a  hats", "a  hat"}),
        ("{{a|b}} {c}", {"{a|b} c"}),  # escaped, as kohya has it; one word alone is that word
        ("a } b { c {}", {"a } b { c {}"}),
    ],
)
def test_a_wildcard_is_one_of_its_words_by_chance(caption, drawn):
    run = dataclasses.replace(KEPT, enable_wildcard=True)
    chosen = captions(caption, run)
    assert set(chosen) == drawn and min(map(chosen.count, drawn)) > len(chosen) / len(drawn) / 1.4 and chosen == captions(caption, run)
    assert set(captions(caption, KEPT)) == {caption}


def test_a_prefix_may_hold_wildcards_whose_words_are_tags():
    run = dataclasses.replace(KEPT, caption_prefix="{sks, dog|cat},", enable_wildcard=True, shuffle_tags=True)
    assert {tuple(sorted(caption.split(", "))) for caption in captions("hat", run)} == {("dog", "hat", "sks"), ("cat", "hat")}


def test_shuffling_changes_nothing_of_what_is_dropped():
    run = RunConfig(ucg=0.3)
    dropped = [caption == "" for caption in captions("a, b", run)]
    assert dropped == [caption == "" for caption in captions("a, b", dataclasses.replace(run, shuffle_tags=True))]


def test_less_than_no_tags_cannot_be_kept():
    with pytest.raises(UserError, match="keep_tokens is -1"):
        RunConfig(shuffle_tags=True, keep_tokens=-1)


INVERSION = RunConfig(method="textual_inversion", placeholder_token="<dicoo>", initializer_token="toy", ucg=0.5)


@pytest.mark.parametrize(("learned", "templates"), [("object", OBJECT_TEMPLATES), ("style", STYLE_TEMPLATES)])
def test_a_new_word_is_learned_in_templates_of_what_it_stands_for_and_never_dropped(learned, templates):
    run = dataclasses.replace(INVERSION, learnable_property=learned)
    chosen = captions("", run)
    assert set(chosen) == {template.format("<dicoo>") for template in templates} and chosen == captions("", run)
    assert set(captions("a toy on a table", run)) == set(chosen), "a caption without the word teaches nothing of it"


def test_a_caption_that_has_the_new_word_is_kept():
    assert set(captions("<dicoo> on a table", INVERSION)) == {"<dicoo> on a table"}
    prefixed = dataclasses.replace(INVERSION, caption_prefix="<dicoo>", enable_wildcard=True)
    assert set(captions("on a {table|chair}", prefixed)) == {"<dicoo> on a table", "<dicoo> on a chair"}


def test_the_tags_of_a_caption_with_a_new_word_are_shuffled_too_and_none_is_dropped():
    run = dataclasses.replace(INVERSION, shuffle_tags=True, caption_suffix=", film")
    assert set(captions("<dicoo>, hat", run)) == {", ".join(order) for order in permutations(("<dicoo>", "hat", "film"))}
    kept = captions("a table", dataclasses.replace(run, caption_prefix="sks,", keep_tokens=1))  # a template takes its place
    tags = [caption.split(", ") for caption in kept]
    assert {first for first, *_ in tags} == {"sks"} and {second == "film" for _, second, *_ in tags} == {True, False}


def test_a_template_stands_between_prefix_and_suffix_too():
    run = dataclasses.replace(INVERSION, caption_prefix="{red|blue},", caption_suffix=", {x|y}", enable_wildcard=True)
    said = set(captions("a table", run))
    ends = {(caption.split(", ")[0], caption.split(", ")[-1]) for caption in said}
    assert ends == {("red", "x"), ("red", "y"), ("blue", "x"), ("blue", "y")}
    assert {caption.partition(", ")[2].rpartition(" , ")[0] for caption in said} == {text.format("<dicoo>") for text in OBJECT_TEMPLATES}


def test_there_are_templates_with_one_place_for_the_word():
    for templates in (OBJECT_TEMPLATES, STYLE_TEMPLATES):
        assert len(set(templates)) == len(templates) > 10 and all(template.count("{}") == 1 for template in templates)


def test_a_prefix_may_be_of_any_characters_of_a_line():
    for text in ("絵　柄,", "a\u00a0b", "👩\u200d🚀,"):  # spaces of their own width, and a joiner
        check_values(dataclasses.replace(KEPT, caption_prefix=text))
