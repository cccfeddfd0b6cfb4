"""A scenario that breaks a promise, made smaller for as long as it breaks the same one: fewer strikes, fewer peers, shorter, simpler.

Each candidate is played; nothing is guessed from the trace. A smaller scenario is another world, so that what is left need not be the smallest.
"""

import math
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from simulation.faults import Strike, written
from simulation.world import Outcome, Scenario

_NAMES = re.compile(r"\b[0-9a-f]{5,64}\b|\b[0-9a-zA-Z]{6}\b(?=:)|[0-9]+(?:\.[0-9]+)?")


def promise(breach: str) -> str:
    """What was broken, without when, by whom and with which figures: the same words for the same promise."""
    first = breach.splitlines()[0] if breach else ""
    first = re.sub(r"^[0-9.]+ (?:[0-9a-f]{6}: )?", "", first)
    return _NAMES.sub("..", re.sub("(not all have committed).*", r"\1", first))


def command(scenario: Scenario) -> str:
    """A line that plays it."""
    words = ["python", "-m", "simulation", "--seed", str(scenario.seed), "--peers", str(scenario.peers), "--hours", f"{scenario.hours:g}"]
    words += ["--assistants", str(scenario.assistants)] if scenario.assistants else []
    words += ["--lease_seconds", str(scenario.lease_seconds)] if scenario.lease_seconds != Scenario.lease_seconds else []
    words += ["--total_samples", str(scenario.total_samples)] if scenario.total_samples else []
    words += ["--min_peers", str(scenario.min_peers)] if scenario.min_peers > 1 else []
    words += ["--members"] if scenario.members else []
    words += ["--averaging", scenario.averaging] if scenario.averaging != "mean" else []
    words += ["--trusted", str(scenario.trusted)] if scenario.trusted else []
    words += ["--liars", str(scenario.liars)] if scenario.liars else []
    words += ["--two_faced"] if scenario.two_faced else []
    words += ["--wrong_mean"] if scenario.wrong_mean else []
    words += ["--met_child"] if scenario.met_child else []
    words += ["--chunks", str(scenario.chunks)] if scenario.chunks > 1 else []
    words += ["--strangers", ",".join(scenario.strangers)] if scenario.strangers else []
    words += ["--sync", scenario.sync, "--wire", scenario.wire, *(["--overlap"] if scenario.overlap else [])]
    words += ["--rounds", str(scenario.rounds)] if scenario.rounds else []
    words += ["--step_seconds", "+".join(f"{seconds:g}" for seconds in scenario.step_seconds)] if scenario.step_seconds else []
    words += ["--faults", ",".join(scenario.faults) or "none"]
    if scenario.strikes is None:
        words += ["--fault_seconds", f"{scenario.fault_seconds:g}"]
    else:
        words += ["--strikes", written(scenario.strikes)]
    return shlex.join(words)


@dataclass
class Shrinking:
    """scenario: the smallest so far that breaks `promise`, and what came of it; tried: how many were played."""

    scenario: Scenario
    outcome: Outcome
    seconds: float
    play: Callable[[Scenario], Outcome]
    clock: Callable[[], float] = time.monotonic
    tried: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._until, self.promise = self.clock() + self.seconds, promise(self.outcome.breach)

    def run(self) -> None:
        self._name_strikes()
        before = None
        while before != self.scenario and self._has_time():
            before = self.scenario
            self._shorten()
            for candidate in self._simpler():
                self._try(candidate)
            if self.scenario.strikes is not None:
                self._without_kinds()
                self._fewer_strikes()
            self._fewer_peers()

    def _has_time(self) -> bool:
        return self.clock() < self._until

    def _try(self, candidate: Scenario) -> bool:
        if candidate == self.scenario or not self._has_time():
            return False
        self.tried += 1
        outcome = self.play(candidate)
        if promise(outcome.breach) != self.promise:
            return False
        self.scenario, self.outcome = candidate, outcome
        return True

    def _name_strikes(self) -> None:
        """The strikes that were drawn, as a list: what is not drawn any more can be left out one by one."""
        scenario = self.scenario
        if scenario.strikes is None:
            traits = tuple(name for name in scenario.faults if name == "nat")
            self._try(replace(scenario, strikes=self.outcome.strikes, faults=traits, rounds=0))

    def _shorten(self) -> None:
        """To the breach; where that is one of the calm afterwards, to the last strike."""
        scenario, end = self.scenario, self.outcome.virtual_seconds
        if end > scenario.hours * 3600:
            end = max((strike.at + strike.values.get("seconds", 0.0) for strike in scenario.strikes or ()), default=scenario.hours * 1800)
        hours = math.ceil(end / 3600 * 1e4) / 1e4
        if hours < scenario.hours:
            strikes = scenario.strikes and tuple(strike for strike in scenario.strikes if strike.at <= hours * 3600)
            self._try(replace(scenario, hours=hours, strikes=strikes))

    def _simpler(self) -> Iterator[Scenario]:
        yield replace(self.scenario, faults=tuple(name for name in self.scenario.faults if name != "nat"))
        yield replace(self.scenario, overlap=False)
        yield replace(self.scenario, assistants=0)
        yield replace(self.scenario, assistants=min(self.scenario.assistants, 1))
        yield replace(self.scenario, strangers=())
        yield replace(self.scenario, liars=0)
        yield replace(self.scenario, two_faced=False)
        yield replace(self.scenario, wrong_mean=False)
        yield replace(self.scenario, met_child=False)
        yield replace(self.scenario, trusted=0)
        yield replace(self.scenario, members=False)
        yield replace(self.scenario, chunks=1)
        yield replace(self.scenario, sync="parameters")
        yield replace(self.scenario, wire="fp32")
        if self.scenario.strikes is None:
            for name in self.scenario.faults:
                yield replace(self.scenario, faults=tuple(other for other in self.scenario.faults if other != name))

    def _without_kinds(self) -> None:
        for name, _ in Counter(strike.fault for strike in self.scenario.strikes).most_common():
            self._try(replace(self.scenario, strikes=tuple(strike for strike in self.scenario.strikes if strike.fault != name)))

    def _fewer_strikes(self) -> None:
        """Zeller's delta debugging: leave out a half, a quarter .. a single one, for as long as that breaks the same promise."""
        parts = 2
        while self.scenario.strikes and self._has_time():
            strikes = self.scenario.strikes
            size = math.ceil(len(strikes) / parts)
            if any(self._try(replace(self.scenario, strikes=strikes[:at] + strikes[at + size :])) for at in range(0, len(strikes), size)):
                parts = max(parts - 1, 2)
            elif size == 1:
                return
            else:
                parts = min(2 * parts, len(strikes))

    def _fewer_peers(self) -> None:
        for number in range(self.scenario.peers, 0, -1):
            if self.scenario.peers > 1:
                strikes = self.scenario.strikes and _without_peer(self.scenario.strikes, number)
                self._try(replace(self.scenario, peers=self.scenario.peers - 1, strikes=strikes))


def _without_peer(strikes: Sequence[Strike], gone: int) -> tuple[Strike, ...]:
    """The strikes that do not hit the peer `gone`; those born after it have a smaller number without it."""
    kept = []
    for strike in strikes:
        if strike.peer == gone:
            continue
        values = dict(strike.values)
        if "peers" in values:
            values["peers"] = tuple(number - (number > gone) for number in values["peers"] if number != gone)
        kept.append(replace(strike, peer=strike.peer - (strike.peer > gone), values=values))
    return tuple(kept)
