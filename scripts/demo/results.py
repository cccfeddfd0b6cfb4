"""What a swarm's own files say about its run, and whether that is good enough. Data in, data out; no process, no network.

Each peer writes `rounds.jsonl`, one line per committed state that it held, and `metrics.jsonl`, one line per ten local steps.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MIN_ACCURACY = 0.9
ENOUGH_SAMPLES = 32_768
"""What the quickstart trains unless told otherwise: enough to be read right."""
MIN_SHARE_OF_ROUNDS = 0.9
FAIR_SHARE = 0.4  # of an equal share: with two peers, at least 20 % of a round's samples from each

Lines = Sequence[Mapping[str, Any]]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a .jsonl file; [] where there is none. A last line that a killed peer left unfinished is passed over."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = text.split("\n")
    found = [json.loads(line) for line in lines[:-1] if line]
    try:
        return [*found, json.loads(lines[-1])] if lines[-1] else found
    except ValueError:
        return found


def unequal_rounds(held: Mapping[str, Lines]) -> list[int]:
    """Rounds for which peers hold different digests, or come from different states; held: the lines of each peer."""
    digests, parents = defaultdict(set), defaultdict(set)
    for lines in held.values():
        for line in lines:
            digests[line["round"]].add(line["digest"])
            if line.get("parent"):
                parents[line["round"]].add(line["parent"])
    for number in parents:
        if digests.get(number - 1):
            parents[number] |= digests[number - 1]
    return sorted(number for number in digests if len(digests[number]) > 1 or len(parents[number]) > 1)


def shared_rounds(held: Mapping[str, Lines]) -> int:
    """How many rounds at least two peers hold: those in which a comparison of digests says something."""
    holders = Counter(number for lines in held.values() for number in {line["round"] for line in lines})
    return sum(count > 1 for count in holders.values())


def distinct_rounds(held: Mapping[str, Lines]) -> list[Mapping[str, Any]]:
    """One line per committed round, in order; of several peers' lines the one that saw most peers alive."""
    best: dict[int, Mapping[str, Any]] = {}
    for lines in held.values():
        for line in lines:
            known = best.get(line["round"])
            if line["members"] and (known is None or line["live_peers"] > known["live_peers"]):
                best[line["round"]] = line
    return [best[number] for number in sorted(best)]


def by_all_peers(line: Mapping[str, Any]) -> bool:
    """Whether every live peer is in the round, each with a fair share of its samples."""
    shares = [samples for _, _, samples in line["members"]]
    return len(shares) >= line["live_peers"] and min(shares) >= FAIR_SHARE / len(shares) * sum(shares)


def samples_by_peer(rounds: Lines, names: Mapping[str, str]) -> dict[str, int]:
    """Samples in committed rounds by peer; names: peer id -> what we call it."""
    counted: Counter[str] = Counter()
    for line in rounds:
        for peer_id, _, samples in line["members"]:
            counted[names.get(peer_id, peer_id)] += samples
    return dict(sorted(counted.items()))


def peer_names(held: Mapping[str, Lines]) -> dict[str, str]:
    """peer id -> name, from what each peer wrote about itself."""
    return {line["peer"]: name for name, lines in held.items() for line in lines if line.get("peer")}


def summarize(held: Mapping[str, Lines]) -> dict[str, Any]:
    """The part of result.json that the peers' files give."""
    rounds = distinct_rounds(held)
    sizes = Counter(len(line["members"]) for line in rounds)
    unequal = unequal_rounds(held)
    return {
        "peers": len(held),
        "rounds": len(rounds),
        "rounds_by_group_size": {str(size): sizes[size] for size in sorted(sizes)},
        "share_of_rounds_by_all_peers": round(sum(map(by_all_peers, rounds)) / len(rounds), 4) if rounds else 0.0,
        "samples": max((line["samples"] for line in rounds), default=0),
        "samples_by_peer": samples_by_peer(rounds, peer_names(held)),
        "digests_equal": not unequal and shared_rounds(held) > 0,
        "unequal_rounds": unequal,
        "rounds_held_by_several_peers": shared_rounds(held),
    }


def survived(held: Mapping[str, Lines], killed: str | None) -> dict[str, Lines]:
    """`held` without the last state of the peer that was killed, where nobody else made that round of the same contributions.

    A kill between one peer's commit and the others' takes that state with it: the others make that round once more, without the dead.
    Whoever averaged the same contributions must have come to the same state, and is compared.
    """
    if killed is None or not held.get(killed):
        return dict(held)
    *before, last = held[killed]
    made = _made(last)
    elsewhere = any(_made(line) == made for name, lines in held.items() if name != killed for line in lines)
    return {**held, killed: [*before, last] if elsewhere else before}


def _made(line: Mapping[str, Any]) -> tuple[int, list]:
    """Of what a state was made: its round and its members."""
    return line["round"], line["members"]


def in_step(names: Iterable[str], held: Mapping[str, Lines], number: int) -> bool:
    """Whether these peers hold one and the same state, of round `number` or a later one."""
    last = [lines[-1] if (lines := held.get(name)) else None for name in names]
    return all(line is not None and line["round"] >= number for line in last) and len({line["digest"] for line in last if line}) == 1


def first_round_with(peer: str, held: Mapping[str, Lines]) -> int | None:
    """The first round in which the peer of this name had a part; None while there is none."""
    ids = {line["peer"] for line in held.get(peer, ()) if line.get("peer")}
    numbers = [line["round"] for line in distinct_rounds(held) if any(member[0] in ids for member in line["members"])]
    return min(numbers, default=None)


def shortcomings(result: Mapping[str, Any], *, churn: bool, strangers: bool = False, total_samples: int) -> list[str]:
    """What is not as it should be, one sentence each; [] when all is well."""
    found = []
    if result["digit_accuracy"] < MIN_ACCURACY:
        few = f" {total_samples:,} samples are few: {ENOUGH_SAMPLES:,}, the default, are enough." if total_samples < ENOUGH_SAMPLES else ""
        found.append(f"The judge reads only {result['digit_accuracy']:.0%} of the digits right; {MIN_ACCURACY:.0%} is asked for.{few}")
    if result["unequal_rounds"]:
        found.append(f"Peers held different states after round {result['unequal_rounds'][0]}.")
    elif not result["digests_equal"]:
        found.append("No two peers ever held the same round, so nothing shows that they agree.")
    if not result["models_equal"]:
        found.append("The peers' final models differ.")
    if result["samples"] < total_samples:
        found.append(f"Only {result['samples']:,} of {total_samples:,} samples are in committed rounds.")
    if not churn and result["share_of_rounds_by_all_peers"] < MIN_SHARE_OF_ROUNDS:
        share = result["share_of_rounds_by_all_peers"]
        found.append(f"Only {share:.0%} of the rounds were averaged by all live peers with a fair share of the samples from each.")
    if churn and not result["caught_up"]:
        found.append("The late peer never had a part in a round; on a fast machine give it more time with --total_samples.")
    if churn and result["killed_at_round"] is None:
        found.append("The first peer was not killed before the run ended; give it more time with --total_samples.")
    if churn and result["rounds_after_kill"] < 1:
        found.append("No round was committed after the first peer was killed.")
    if strangers and not result["strangers"]:
        found.append("The strangers never came; give the run more time with --total_samples.")
    if strangers and result["rounds_with_strangers"]:
        found.append(f"A stranger had a part in round {result['rounds_with_strangers'][0]}.")
    if result["processes_left"]:
        found.append(f"Processes outlived the swarm: {', '.join(result['processes_left'])}.")
    return found
