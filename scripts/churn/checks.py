"""What must hold however a swarm fared: one digest per parent and group, and a ledger that agrees with the states to the sample."""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

Round = Mapping[str, Any]
Key = tuple[int, int, int]
"""(epoch, shard, index) of a sample."""
Contribution = tuple[str, int]
"""(peer, number)."""


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """The lines of a peer's rounds.jsonl; a kill may cut the last one of a life short."""
    try:
        lines = (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    rounds = []
    for line in lines:
        with suppress(ValueError):
            rounds.append(json.loads(line))
    return rounds


def unequal_states(rounds: Iterable[Round]) -> list[str]:
    """Parents and groups after which peers hold different states."""
    digests = defaultdict(set)
    for line in rounds:
        digests[line["parent"], json.dumps(line["members"])].add(line["digest"])
    return [f"{len(found)} states after {parent[:8]} of {members}" for (parent, members), found in digests.items() if len(found) > 1]


def false_sums(rounds: Iterable[Round]) -> list[str]:
    """States whose samples are not their parent's and their members' together, where the parent is known."""
    rounds = list(rounds)
    samples = {line["digest"]: line["samples"] for line in rounds} | {"": 0}
    wrong = []
    for line in rounds:
        parent = 0 if line["round"] == 1 else samples.get(line["parent"])
        if parent is not None and line["samples"] != parent + sum(member[2] for member in line["members"]):
            wrong.append(f"round {line['round']} ({line['digest'][:8]}) has {line['samples']} samples after {parent}")
    return wrong


def read_ledger(path: Path) -> tuple[list[dict[str, Any]], dict[Contribution, set[Key]], dict[Contribution, int]]:
    """The ledger's states from the first round to its head, the sample keys that every registered contribution has for itself, and how many
    samples more it holds that another has: a peer that trains by its own choice, the server being away, may hit upon those.
    """
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        names = ("digest", "parent", "round", "samples", "members")
        states = {row[0]: dict(zip(names, row, strict=True)) for row in db.execute(f"SELECT {', '.join(names)} FROM state")}
        keys: dict[tuple[str, int], set[Key]] = defaultdict(set)
        for peer, number, epoch, shard, samples in db.execute("SELECT peer, number, epoch, shard, samples FROM contribution_unit"):
            mask = int.from_bytes(samples, "little")
            keys[peer, number] |= {(epoch, shard, index) for index in range(mask.bit_length()) if mask >> index & 1}
        repeated = {(peer, number): count for peer, number, count in db.execute("SELECT peer, number, repeated FROM contribution")}
    chain, state = [], max(states.values(), key=lambda state: state["samples"], default=None)
    while state is not None:
        chain.append({**state, "members": [tuple(member) for member in json.loads(state["members"])]})
        state = states.get(state["parent"])
    return chain[::-1], keys, repeated


def ledger_faults(
    chain: Sequence[Mapping[str, Any]], keys: Mapping[Contribution, set[Key]], repeated: Mapping[Contribution, int], rounds: Iterable[Round]
) -> list[str]:
    """Where the ledger and the states that peers hold differ, by a single sample."""
    if not chain:
        return ["no state became final"]
    faults = [] if chain[0]["round"] == 1 else [f"the ledger knows nothing before round {chain[0]['round']}"]
    held = {line["digest"]: line for line in rounds}
    owners: dict[Key, Contribution] = {}
    total = 0
    for state in chain:
        line = held.get(state["digest"])
        if line is None:
            faults.append(f"no peer held the final state of round {state['round']}")
        elif (line["samples"], sorted(map(tuple, line["members"]))) != (state["samples"], sorted(state["members"])):
            faults.append(f"round {state['round']} has other members or samples in the ledger than at a peer")
        for peer, number, samples in state["members"]:
            mine = keys.get((peer, number), set())
            registered = len(mine) + repeated.get((peer, number), 0)
            if registered != samples:
                faults.append(
                    f"round {state['round']}: contribution {number} of {peer[-6:]} has {samples} samples, {registered} are registered"
                )
            twice = [key for key in mine if key in owners]
            if twice:
                faults.append(
                    f"round {state['round']}: {len(twice)} samples of {peer[-6:]}'s {number} are counted already in {owners[twice[0]]}"
                )
            owners.update(dict.fromkeys(mine, (peer, number)))
            total += samples
    if total != chain[-1]["samples"]:
        faults.append(f"the head has {chain[-1]['samples']} samples, its rounds {total}")
    return faults


def faults_of(rounds: Sequence[Round], ledger: Path) -> dict[str, list[str]]:
    """Everything here, of all that peers committed and of the ledger in the end."""
    return {"states": unequal_states(rounds) + false_sums(rounds), "ledger": ledger_faults(*read_ledger(ledger), rounds)}
