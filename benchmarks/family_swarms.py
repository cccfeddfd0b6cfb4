"""Two real peers average a LoRA of each family, and plain diffusers draws with it; weights are random and tiny.

    .venv/bin/python -m benchmarks.family_swarms                     all families, a minute or two each on two busy cores
    .venv/bin/python -m benchmarks.family_swarms --only sd,z_image
    .venv/bin/python -m benchmarks.family_swarms --record FILE       all families, and their figures into FILE

For each family a dataset server and two peers, with the program's own commands. Both peers must have a part in a round, hold equal digests after
every round and end with one LoRA, to the bit. The last line is JSON: `families`, and `holds` for all of them.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import about, argument_parser, heed_sigterm, print_result, print_table, start
from benchmarks.full_size import same_loras
from scripts.demo import results, swarm_run
from scripts.demo.display import Display
from swarm import files
from swarm.errors import ExitCode, UserError
from swarm.run.family import families
from tests import tiny

ROUNDS, TARGET, BATCH, PICTURES, SIDE = 3, 64, 4, 12, 16
RUN = {"method": "lora", "rank": 2, "learning_rate": 1e-2, "wire": "int8", "ucg": 0.0, "resolution": SIDE}
# A tiny model's round takes less than a second: the first peer would make all of them before the second has come.
FLAGS = ("--min_peers", "2")


def average(family: str, folder: Path) -> dict[str, Any]:
    """What two peers made of this family's LoRA. Raises UserError when one ends too early."""
    base = tiny.write_family(folder / "base", family)
    tiny.write_pictures(folder / "dataset", PICTURES, SIDE)
    plan = swarm_run.Plan(
        folder,
        total_samples=ROUNDS * TARGET,
        target_batch_size=TARGET,
        batch=BATCH,
        settings={**RUN, **tiny.MODELS[family].run},
        peer_flags=FLAGS,
    )
    with Display() as display, swarm_run.SwarmRun(plan, display) as swarm:
        story = swarm.run()
        held = swarm.held()
    said, models = results.summarize(held), [folder / name / "model" for name in held]
    found = {
        "rounds": said["rounds"],
        "rounds_of_both": said["rounds_by_group_size"].get("2", 0),
        "digests_equal": said["digests_equal"],
        "loras_equal": same_loras(models),
        "draws": draws(family, base, models[0]),
        "seconds": story.seconds_training,
    }
    holds = found["rounds_of_both"] > 0 and found["digests_equal"] and found["loras_equal"] and found["draws"]
    return {**found, "holds": holds}


def draws(family: str, base: Path, lora: Path) -> bool:
    """Whether plain diffusers draws something else with the LoRA than without it."""
    import diffusers
    import numpy as np
    import torch

    facts = families()[tiny.FAMILIES[family]]
    pipeline = getattr(diffusers, facts.pipeline).from_pretrained(base, **facts.unused)
    pipeline.set_progress_bar_config(disable=True)

    def picture() -> np.ndarray:
        rng = torch.Generator().manual_seed(0)
        return pipeline(
            prompt="a red square", num_inference_steps=2, height=SIDE, width=SIDE, output_type="np", generator=rng, **tiny.drawing(pipeline)
        ).images

    without = picture()
    pipeline.load_lora_weights(lora)
    drawn = picture()
    return bool(np.isfinite(drawn).all() and not np.array_equal(drawn, without))


def chosen(only: str) -> list[str]:
    """The families of `--only`. Raises UserError."""
    names = only.split(",") if only else tiny.ONE_OF_EACH
    if unknown := sorted(set(names) - set(tiny.ONE_OF_EACH)):
        raise UserError(f"--only has {unknown[0]!r}.", fix=f"Choose from {', '.join(tiny.ONE_OF_EACH)}.")
    return list(names)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", default="", metavar="NAMES", help="families, with commas between them [all]")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the figures there, too")
    return start(parser, lambda options: run(chosen(options.only), options.record))


def run(names: list[str], record: Path | None) -> int:
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="family-swarms-") as folder:
            found[name] = average(name, Path(folder))
    print_table([{"": name, **one} for name, one in found.items()])
    result = {"families": found, "holds": all(one["holds"] for one in found.values())}
    if record:
        files.replace(record, (json.dumps({**result, "about": about()}, indent=1) + "\n").encode())
    print_result(result)
    return ExitCode.OK if result["holds"] else ExitCode.FAILED


if __name__ == "__main__":
    heed_sigterm()
    sys.exit(main())
