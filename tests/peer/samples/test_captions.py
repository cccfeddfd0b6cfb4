import dataclasses

import pytest

from peer.samples.decoding import choose_caption
from swarm.errors import UserError
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


def test_there_are_templates_with_one_place_for_the_word():
    for templates in (OBJECT_TEMPLATES, STYLE_TEMPLATES):
        assert len(set(templates)) == len(templates) > 10 and all(template.count("{}") == 1 for template in templates)
