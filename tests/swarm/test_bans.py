"""The host's words about peers: a union, in which for each peer the newest signed one counts."""

import dataclasses
import itertools
import random

import pytest

from swarm import bans
from swarm.bans import Bans, read_words, sign_word, write_words
from swarm.run_config import RunConfig
from swarm.signing import HostKey

RUN = RunConfig(model="x")


def word(key, peer, at, banned=True, reason="", run=RUN):
    return sign_word(key, run, peer, banned=banned, reason=reason, clock=lambda: at)


def test_in_whatever_order_words_come_the_newest_of_each_peer_counts(key):
    words = [word(key, "a", 1), word(key, "a", 3, banned=False), word(key, "a", 2, reason="later"), word(key, "b", 2, reason="spam")]
    for order in itertools.permutations(words):
        held = Bans(RUN, key.public)
        assert any([held.hear([each]) for each in order])
        assert (held.reason("a"), held.reason("b"), held.reason("c")) == ("", "spam", "") and held.peers() == {"b"}
        assert [each.at for each in held.words] in ([3000, 2000], [2000, 3000][::-1]) and not held.hear(order)


def test_whom_the_host_trusts_the_newest_word_says_and_a_ban_ends_it(key):
    run = dataclasses.replace(RUN, members_of=key.public)

    def trust(peer, at):
        return sign_word(key, run, peer, trusted=True, clock=lambda: at)

    for order in itertools.permutations([trust("a", 1), word(key, "b", 1, run=run), trust("b", 2), trust("c", 3), word(key, "c", 4, run=run)]):
        held = Bans(run, words=order)
        assert held.trusted == {"a", "b"} and held.peers() == {"c"}
    assert held.hear([word(key, "a", 5, banned=False, run=run)]) and held.trusted == {"b"}


def test_in_a_run_that_is_not_for_members_nobody_is_trusted(key):
    """Not every peer knows whose word would count."""
    assert not Bans(RUN, key.public, [sign_word(key, RUN, "a", trusted=True)]).trusted


def test_a_ban_cannot_be_made_trust_nor_trust_be_given_by_others(key, tmp_path):
    run, stranger = dataclasses.replace(RUN, members_of=key.public), HostKey(tmp_path / "other.key")
    held, ban = Bans(run), word(key, "a", 1, banned=False, run=run)
    assert not held.hear([dataclasses.replace(ban, trusted=True), sign_word(stranger, run, "a", trusted=True)]) and not held.trusted


def test_a_discarded_state_is_no_banned_peer(key):
    state, other = "a" * 64, "b" * 64
    held = Bans(RUN, key.public, [word(key, state, 1, reason="forged"), word(key, other, 1), word(key, "c", 1)])
    assert held.discarded == {state, other} and held.peers() == {"c"} and held.reason(state) == "forged"
    assert held.discards(state, ()) and held.discards("d" * 64, ["e" * 64, other]) and not held.discards("d" * 64, ["e" * 64])
    assert held.hear([word(key, other, 2, banned=False)]) and held.discarded == {state}


def test_two_words_of_one_millisecond_are_one_for_all(key):
    one, other = word(key, "a", 1, reason="one"), word(key, "a", 1, banned=False)
    held = [Bans(RUN, key.public, order) for order in ([one, other], [other, one])]
    assert held[0].words == held[1].words


def test_a_word_that_the_host_did_not_sign_is_passed_over_and_looked_at_once(key, tmp_path, monkeypatch):
    good, stranger = word(key, "a", 1), HostKey(tmp_path / "other.key")
    forged = [
        word(stranger, "a", 2),
        word(key, "a", 2, run=dataclasses.replace(RUN, seed=RUN.seed + 1)),
        dataclasses.replace(good, at=5000),
        dataclasses.replace(good, about="b"),
        dataclasses.replace(good, banned=False, at=2000),
        dataclasses.replace(good, reason="other", at=2000),
        dataclasses.replace(good, signature="", at=2000),
        dataclasses.replace(good, signature="no hex", at=2000),
    ]
    held, looked = Bans(RUN, key.public, [good]), []
    check = bans.check_signature
    monkeypatch.setattr(bans, "check_signature", lambda *said: looked.append(said) or check(*said))
    assert not held.hear(forged) and not held.hear(forged) and len(looked) == len(forged)
    assert held.words == (good,) and held.version == 1
    assert not Bans(RUN, "", [good]).words, "who knows no host believes nobody"


def test_what_is_refused_is_remembered_within_bounds(key, monkeypatch):
    monkeypatch.setattr(bans, "_MOST_REFUSED", 3)
    held, good = Bans(RUN, key.public), word(key, "a", 1)
    held.hear([dataclasses.replace(good, at=at) for at in range(2, 9)])
    assert len(held._refused) == 3


def test_only_so_many_signatures_are_checked_a_second_and_what_was_passed_over_is_heard_later(key, monkeypatch):
    now, looked = [0.0], []
    check = bans.check_signature
    monkeypatch.setattr(bans, "check_signature", lambda *said: looked.append(said) or check(*said))
    held, good = Bans(RUN, key.public, clock=lambda: now[0]), word(key, "a", 1)
    junk = [dataclasses.replace(good, at=at) for at in range(2000, 4000)]
    assert not held.hear([*junk, good], rumoured=True) and len(looked) == 2 * bans.MOST_BANS
    now[0] += 1
    assert held.hear([good], rumoured=True) and held.peers() == {"a"}
    held.hear(junk[1000:], rumoured=True)
    assert len(looked) <= 2 * bans.MOST_BANS + 11
    assert held.hear([word(key, "b", 1)]), "from the host itself, whatever others say meanwhile"


def test_only_so_many_words_are_kept_bans_before_their_ends_and_the_newest(key, monkeypatch):
    monkeypatch.setattr(bans, "MOST_BANS", 3)
    held = Bans(RUN, key.public, [word(key, "old", 1), word(key, "ended", 9, banned=False), word(key, "b", 3), word(key, "c", 4)])
    assert held.peers() == {"old", "b", "c"}
    held.hear([word(key, "d", 5)])
    assert held.peers() == {"b", "c", "d"}


def test_a_word_for_which_there_is_no_room_is_no_news_however_often_it_is_said(key, monkeypatch):
    monkeypatch.setattr(bans, "MOST_BANS", 3)
    held = Bans(RUN, key.public, [word(key, name, 5) for name in ("a", "b", "c")])
    assert not any(held.hear([word(key, "old", 1)]) for _ in range(3)) and held.version == 3


def test_a_word_has_one_spelling(key):
    """With spaces behind its signature it was the newer one of two, as often as somebody added one."""
    (said,) = bans.said([word(key, "a", 1)])
    assert bans.words_of([said])
    for signature in (said["signature"] + " ", said["signature"].upper(), " ".join(said["signature"])):
        with pytest.raises(ValueError):
            bans.words_of([said | {"signature": signature}])


def test_words_to_hand_on_all_come_round(key):
    held = Bans(RUN, key.public, [word(key, name, 1) for name in "abcde"], rng=random.Random(1))
    handed = [held.some(2) for _ in range(30)]
    assert all(len(some) == 2 for some in handed) and {each.about for some in handed for each in some} == set("abcde")
    assert Bans(RUN, key.public).some(2) == ()


def test_words_are_kept_and_a_damaged_file_is_passed_over(key, tmp_path, caplog):
    path = tmp_path / "bans.json"
    Bans(RUN, key.public, path=path).hear([word(key, "a", 1, reason="spam")])
    assert Bans(RUN, key.public, path=path).reason("a") == "spam"
    path.write_text('[{"about": "a"}]')
    assert read_words(path) == () and "cannot read" in caplog.text
    assert Bans(RUN, key.public, path=path / "bans.json").hear([word(key, "a", 1)]), "a disk that takes nothing stops nobody"
    assert "cannot keep" in caplog.text
    forged = dataclasses.replace(word(key, "b", 1), reason="changed on the disk")
    write_words(path, [forged])
    assert not Bans(RUN, key.public, path=path).words


def test_of_the_states_that_are_countersigned_the_newest_word_counts_and_pushes_out_no_ban(key, tmp_path):
    run = dataclasses.replace(RUN, members_of=key.public)

    def countersign(state, at):
        return sign_word(key, run, state * 64, trusted=True, clock=lambda: at)

    banning = [word(key, f"peer{number}", number, run=run) for number in range(1, bans.MOST_BANS + 1)]
    held = Bans(run, words=banning, path=tmp_path / "bans.json")
    assert held.countersigned == ""
    for order in itertools.permutations([countersign("a", 1), countersign("b", 3), countersign("c", 2)]):
        held.hear(order)
        assert held.countersigned == "b" * 64 and len(held.peers()) == bans.MOST_BANS and not held.trusted
    assert len(held.words) == bans.MOST_BANS + 1 and {each.about for each in held.some(500)} >= {"b" * 64, "peer1"}
    assert Bans(run, path=tmp_path / "bans.json").countersigned == "b" * 64
    stranger = HostKey(tmp_path / "other.key")
    assert not held.hear([sign_word(stranger, run, "d" * 64, trusted=True), dataclasses.replace(countersign("b", 9), about="d" * 64)])
    held = Bans(run, words=[countersign("b", 3), word(key, "b" * 64, 1, run=run)])
    assert held.countersigned == "", "discarded, whenever that was said"
    assert held.hear([countersign("e", 4)]) and held.countersigned == "e" * 64
