"""`python -m simulation`: play one seed, or many, and say what happened."""

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import replace


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings have an order, too
        os.execve(sys.executable, [sys.executable, "-m", "simulation", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"})
    from simulation.faults import FAULTS
    from simulation.world import STRANGERS, Scenario, play

    parser = argparse.ArgumentParser(prog="python -m simulation", description="Real peers in a simulated world; a seed repeats it exactly.")
    parser.add_argument("--peers", type=int, default=8, help="peers that train (default: 8)")
    parser.add_argument("--hours", type=float, default=1.0, help="virtual hours with faults; then all must commit within 10 minutes (default: 1)")
    parser.add_argument("--rounds", type=int, default=0, help="end the faults after so many rounds")
    parser.add_argument("--seed", type=int, default=1, help="what happens (default: 1)")
    parser.add_argument("--seeds", type=int, default=1, help="play so many seeds, from --seed on (default: 1)")
    parser.add_argument("--faults", default="all", help=f"all, none, or some of: {', '.join([*FAULTS, 'nat'])} (default: all)")
    parser.add_argument("--fault_seconds", type=float, default=60.0, help="each fault strikes so often on average (default: 60)")
    parser.add_argument("--assistants", type=int, default=0, help="peers that assist, besides those that train (default: 0)")
    parser.add_argument("--strangers", default="", help="who comes and means harm: 'all', or rows of scripts/strangers (docs/simulation.md)")
    parser.add_argument("--sync", default="parameters", choices=["parameters", "diloco", "gradients"])
    parser.add_argument("--wire", default="int8", choices=["fp32", "fp16", "int8", "int4"])
    parser.add_argument("--overlap", action="store_true", help="peers train while a round is averaged")
    parser.add_argument("--until_breach", action="store_true", help="stop at the first seed that breaks something")
    parser.add_argument("--trace", action="store_true", help="print the last lines of what happened also where nothing broke")
    options = parser.parse_args()
    every = (*FAULTS, "nat")
    faults = {"all": every, "none": ()}.get(options.faults) or tuple(name for name in options.faults.split(",") if name and name != "none")
    if unknown := sorted(set(faults) - set(every)):
        parser.error(f"no such faults: {', '.join(unknown)}; there are {', '.join(every)}")
    strangers = STRANGERS if options.strangers == "all" else tuple(filter(None, options.strangers.split(",")))
    if unknown := sorted(set(strangers) - set(STRANGERS)):
        parser.error(f"no such strangers: {', '.join(unknown)}; there are {', '.join(STRANGERS)}")
    scenario = Scenario(
        options.seed, options.peers, options.hours, options.rounds, faults, options.fault_seconds, sync=options.sync, wire=options.wire, overlap=options.overlap,
        assistants=options.assistants, strangers=strangers,
    )  # fmt: skip
    began, rounds, messages, breaches, struck, shares, trace = time.monotonic(), 0, 0, [], Counter(), [], ""
    for seed in range(options.seed, options.seed + options.seeds):
        outcome = play(replace(scenario, seed=seed))
        rounds, messages, trace = rounds + outcome.rounds, messages + outcome.messages, outcome.trace
        struck.update(outcome.faults)
        shares.append(outcome.committed)
        print(
            f"seed {seed}: {outcome.rounds} rounds in {outcome.virtual_seconds / 3600:.2f} h, slowest commit {outcome.slowest_commit_seconds} s, "
            f"{outcome.adopted}, faults {sum(outcome.faults.values())}, apart {outcome.apart}, withdrawn {outcome.withdrawn}, trace {outcome.trace[:16]}", flush=True,
        )  # fmt: skip
        if outcome.breach or options.trace:
            print("\n".join(outcome.lines))
        if outcome.breach:
            breaches.append(seed)
            print(f"BREACH with seed {seed}: {outcome.breach}", flush=True)
            if options.until_breach:
                break
    seconds = time.monotonic() - began
    print(json.dumps({
        "rounds": rounds, "rounds_per_minute": round(60 * rounds / seconds, 1), "committed": round(sum(shares) / len(shares), 4),
        "breaches": len(breaches), "seed": options.seed, "seeds": options.seeds, "peers": options.peers, "messages": messages,
        "faults": dict(struck), "broken_seeds": breaches, "seconds": round(seconds, 1), "trace": trace,
    }))  # fmt: skip
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
