"""The host's words, signed with its key. It bans peers from its run and says why, trusts peers to lead and reduce, discards states, and countersigns one.

For each peer, and each state, the newest word counts: a ban, trust, or the end of either. Of all countersigned states the newest word's counts. So words can be repeated, and come late, in any order and from anybody. Two
machines that have the host's key agree as soon as each has heard the other's (docs/decisions/0016).
"""

import dataclasses
import json
import logging
import random
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from swarm import files
from swarm.budget import Budget
from swarm.digest import digest_json
from swarm.records import MOST_BANS, HostWord
from swarm.run_config import RunConfig
from swarm.signing import BadSignature, HostKey, check_signature

log = logging.getLogger(__name__)
_CHECKS_PER_SECOND = 10.0
"""Signatures of words that we do not know; each takes 0.2 ms, and 512 records under a run's key may bring two each. What is passed over comes round."""
_MOST_REFUSED = 4096
TRUSTED_NEEDED = 3
"""Where this many of a round's peers are trusted, nobody else averages. With two, one that is away would leave a single one to average everything."""
STATE = re.compile("[0-9a-f]{64}")
_WORDS: TypeAdapter[tuple[HostWord, ...]] = TypeAdapter(tuple[HostWord, ...])


class Bans:
    """host_key: whose words count; '': those of the host whose members the run is for, if any. path: where they are kept; None: nowhere.
    rng: which words are handed on first."""

    def __init__(
        self,
        run: RunConfig,
        host_key: str = "",
        words: Iterable[HostWord] = (),
        *,
        path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ):
        self._run, self._host_key, self._path, self._rng = run, host_key or run.members_of, path, rng or random.Random()
        self._checks = Budget(_CHECKS_PER_SECOND, 2 * MOST_BANS, clock)
        self._newest: dict[str, HostWord] = {}
        self._countersigning: HostWord | None = None
        """The newest of these words: the server says another one each minute, and they must not push out bans."""
        self._trusted = self._discarded = frozenset[str]()
        self._refused: dict[HostWord, None] = {}
        """Words that are not the host's: one signature costs 0.2 ms, and a stranger can repeat it with every record."""
        self.version = 0
        """Grows with each word that is news."""
        self.hear(words)
        if path is not None:
            self.hear(read_words(path))

    @property
    def trusted(self) -> frozenset[str]:
        """Those that the host trusts to lead and reduce (docs/decisions/0019); nobody in a run that is not for members."""
        return self._trusted

    @property
    def discarded(self) -> frozenset[str]:
        """Digests of the states that the host discards: nobody stands on them, or on what descends from them (docs/decisions/0020)."""
        return self._discarded

    @property
    def countersigned(self) -> str:
        """Digest of the state that the host's server last found on the run's one branch (docs/decisions/0026); '' for none, or a discarded one."""
        return self.countersigning.about if self.countersigning is not None else ""

    @property
    def countersigning(self) -> HostWord | None:
        """The word that says so."""
        word = self._countersigning
        return word if word is not None and word.about not in self._discarded else None

    def discards(self, digest: str, ancestors: Iterable[str]) -> bool:
        """Whether a state, or one of these ancestors of it, is discarded."""
        return bool(self._discarded) and not self._discarded.isdisjoint((digest, *ancestors))

    @property
    def words(self) -> tuple[HostWord, ...]:
        """Those in force, the newest first."""
        return tuple(sorted(self._all(), key=_age, reverse=True))

    def reason(self, peer: str) -> str:
        """Why `peer` is banned, or a state discarded; '' when it is not."""
        word = self._newest.get(peer)
        return (word.reason or "no reason given") if word and word.banned else ""

    def peers(self) -> set[str]:
        """Those that are banned."""
        return {word.about for word in list(self._newest.values()) if word.banned and not is_state(word)}

    def some(self, most: int) -> tuple[HostWord, ...]:
        """Words to hand on: others ones each time, so that all of them come round."""
        words = self._all()
        return tuple(self._rng.sample(words, min(most, len(words)))) if words else ()

    def _all(self) -> list[HostWord]:
        return [*self._newest.values(), *([self._countersigning] if self._countersigning is not None else ())]

    def hear(self, words: Iterable[HostWord], *, rumoured: bool = False) -> bool:
        """Take over what is the host's and newer than what we knew; whether anything was. rumoured: by a record that anybody could sign."""
        before = self.version
        for word in words:
            if self._is_news(word) and (self._checks.take() or not rumoured) and self._is_signed(word) and self._takes(word):
                self.version += 1
                log.log(logging.DEBUG if _countersigns(word) else logging.INFO, "the host %s %s%s", _does(word), word.about, f": {word.reason}" if word.reason else "")
        if self.version > before:
            if self._run.members_of:  # all peers know whose word counts; else one that does not would wait to lead, and nobody would come
                self._trusted = frozenset(word.about for word in self._newest.values() if word.trusted and not word.banned)
            self._discarded = frozenset(word.about for word in self._newest.values() if word.banned and is_state(word))
            self._keep()
        return self.version > before

    def _is_news(self, word: HostWord) -> bool:
        known = self._countersigning if _countersigns(word) else self._newest.get(word.about)
        return bool(self._host_key) and word not in self._refused and (known is None or _age(word) > _age(known))

    def _takes(self, word: HostWord) -> bool:
        """Whether there is room for it. If not, it is no news: it would be each time that it is said."""
        if _countersigns(word):
            self._countersigning = word
            return True
        self._newest[word.about] = word
        if len(self._newest) > MOST_BANS:
            del self._newest[min(self._newest.values(), key=_worth).about]
        return word.about in self._newest

    def _is_signed(self, word: HostWord) -> bool:
        try:
            check_signature("ban", _digest(self._run, word), word.signature, self._host_key)
        except BadSignature:
            self._refused[word] = None
            while len(self._refused) > _MOST_REFUSED:
                del self._refused[next(iter(self._refused))]
            return False
        return True

    def _keep(self) -> None:
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_words(self._path, self.words)
            except OSError as error:
                log.warning("cannot keep the host's bans in %s: %s", self._path, error.strerror)


def sign_word(
    key: HostKey,
    run: RunConfig,
    about: str,
    *,
    banned: bool = False,
    trusted: bool = False,
    reason: str = "",
    clock: Callable[[], float] = time.time,
) -> HostWord:
    """The host's word that a peer is banned from `run`, or trusted in it, or neither any more; or that a state is discarded (`banned`) or
    countersigned (`trusted`)."""
    word = HostWord(about=about, at=int(clock() * 1000), banned=banned, trusted=trusted, reason=reason, signature="")
    return dataclasses.replace(word, signature=key.sign("ban", _digest(run, word)))


def words_of(values: Any) -> tuple[HostWord, ...]:
    """From what `said` made of them. Raises ValueError."""
    return _WORDS.validate_python(values)


def said(words: Iterable[HostWord]) -> list[dict[str, Any]]:
    """As another process or a file is told of them."""
    return [dict(vars(word)) for word in words]


def read_words(path: Path) -> tuple[HostWord, ...]:
    """Those kept in a file; none where there is none, or where it is damaged: whoever has them says them again."""
    try:
        return words_of(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        log.warning("cannot read the host's bans in %s: %s", path, str(error)[:200])
        return ()


def write_words(path: Path, words: Iterable[HostWord]) -> None:
    """Raises OSError."""
    files.replace(path, (json.dumps(said(words), indent=1) + "\n").encode())


def is_state(word: HostWord) -> bool:
    """Whether the word is about a state; else it is about a peer."""
    return STATE.fullmatch(word.about) is not None


def _countersigns(word: HostWord) -> bool:
    return word.trusted and not word.banned and is_state(word)


def _does(word: HostWord) -> str:
    if _countersigns(word):
        return "countersigns state"
    if is_state(word):
        return "discards state" if word.banned else "takes back what it said of state"
    return "bans" if word.banned else "trusts" if word.trusted else "neither bans nor trusts"


def _worth(word: HostWord) -> tuple[bool, int, str]:
    """Of more than `MOST_BANS` the least goes."""
    return word.banned or word.trusted, *_age(word)


def _age(word: HostWord) -> tuple[int, str]:
    return word.at, word.signature  # of two words of one millisecond all take the same


def _digest(run: RunConfig, word: HostWord) -> str:
    said = {"run": run.digest, "about": word.about, "at": word.at, "banned": word.banned, "reason": word.reason}
    return digest_json({**said, "trusted": True} if word.trusted else said)
