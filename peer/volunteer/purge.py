"""`dd-peer --purge`: delete what a peer stored on this machine, after saying what and how much. What it did not write, it does not touch, and names.

Results are the volunteer's: `model`, `model-steps-STEP` and drawn pictures stay unless `--purge all`.
"""

import fcntl
import glob
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peer.results.output_folder import EARLIER, RESULTS, links
from swarm.advice import size
from swarm.arguments import ArgumentParser
from swarm.errors import ExitCode, UserError

FLAG = "--purge"
_FILES = (
    "bans.json", "contribution_number", "extension.json", "identity.key", "identity.ports", "in_use.lock", "kind.json", "known_hosts.json", "memberships.json",
    "metrics.jsonl", "peer_state", "peers_met.json", "peers_met.tmp", "rounds.jsonl", "rounds.1.jsonl", "run.json",
)  # fmt: skip
"""What a peer writes into its output folder, by name."""
_WANDB_RUNS = ("wandb/run-????????_??????-*", "wandb/offline-run-????????_??????-*")
"""Folders that W&B makes, with whatever it keeps of a run: these go as a whole."""
_SHARD = f"shards/{'?' * 64}.tar"
_FOLDERS = {
    "state": (
        "samples-*-round-*.state", "samples-*-round-*.tmp", "means/*.mean", "means/*.tmp",
        "bans.json", "certificate.json", "discarded", "met.json", "proofs.json",
    ),
    "settled": ("round-*-samples-*.state",),
    "cache": (
        _SHARD, f"{_SHARD}.part", "latents/*/*/*.safetensors", "texts/*/*/*.safetensors",
        "manifest-*.json", "pictures-*.json", "seen-*.json", "train_batch_size.json", "unsaid-*.jsonl",
    ),
    "audit": ("*.state",),
    "supervised": ("life", "lock", "room", "stacks-*"),
    "logs": ("**/events.out.tfevents.*", "wandb/debug*.log", "wandb/latest-run", *_WANDB_RUNS),
    "profile": ("trace-*.json",),
}  # fmt: skip
"""And into each folder there. Whatever else is in one stays, and then the folder, too."""
_TORN = ".*.part"
"""Behind the name of a file that was being written when its peer was killed."""
_HALF = tuple(f".{name}.{kind}" for name in ("checkpoint-*", "model*", "learned_embeds*") for kind in ("writing", "old"))
"""The folder that a killed peer was writing, and the one that it was about to replace: of SD 1.5 up to 10 GB each."""
_PLACES = ("means", "shards", "latents", "latents/*", "latents/*/*", "texts", "texts/*", "texts/*/*", "waiting")
"""The folders in those that are ours, and go when they are empty."""
_LOCKS = (("supervised/lock", "rb", fcntl.flock), ("identity.key", "rb", fcntl.flock), ("in_use.lock", "r+b", fcntl.lockf))
"""How each is taken by dd-peer, by a swarm's peer and by every trainer: flock does not see a lock of lockf, which wants the file open for writing."""
_MOST_NAMED = 10


@dataclass(frozen=True)
class Stored:
    """name: for the list. paths: files and whole folders to delete. folders: that go when they are empty then."""

    name: str
    paths: tuple[Path, ...]
    folders: tuple[Path, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(file.lstat().st_size for path in self.paths for file in _files(path))


def stored(output: Path, cache: Path | None = None, *, log_file: Path | None = None, results: bool = False) -> list[Stored]:
    """What a peer with these folders stored, as far as it is there: of its run, and of those that were set aside for it."""
    found = _stored_in(output, cache, results=results)
    if log_file and (logs := _logs(log_file)):
        found.insert(0, Stored(str(log_file), logs))
    for place in _earlier(output):
        of_run = _stored_in(place, None, results=results)
        found += [*of_run[:-1], *(replace(each, folders=(*each.folders, place, place.parent)) for each in of_run[-1:])]
    return found


def _logs(log_file: Path) -> tuple[Path, ...]:
    """The file of --log_file, and those that it was turned over into: NAME.1, NAME.2, ..."""
    turned = (path for path in log_file.parent.glob(f"{glob.escape(log_file.name)}.*") if path.name[len(log_file.name) + 1 :].isdecimal())
    return tuple(sorted(path for path in (log_file, *turned) if path.is_file()))


def _earlier(output: Path) -> list[Path]:
    """Where the runs are that were set aside."""
    return sorted(path for path in (output / EARLIER).glob("*") if path.is_dir() and not path.is_symlink())


def _stored_in(output: Path, cache: Path | None, *, results: bool) -> list[Stored]:
    found = []
    folders = [(output / name, patterns) for name, patterns in _FOLDERS.items()]
    if cache and cache.resolve() != (output / "cache").resolve():  # that of the output folder is of a start without --cache_dir
        folders.append((cache, _FOLDERS["cache"]))
    for folder, patterns in folders:
        if folder.is_symlink() or not folder.is_dir():
            continue
        files = _named(folder, patterns)
        above = {parent for path in files for parent in path.parents if folder in parent.parents}
        above |= {path for pattern in _PLACES for path in folder.glob(pattern) if path.is_dir()}
        own = () if folder == cache else (folder,)
        found.append(Stored(str(folder), files, (*sorted(above, reverse=True), *own)))
    checkpoints = tuple(sorted(path for path in output.glob("checkpoint-*") if (path / "manifest.json").is_file()))
    found.append(Stored(f"{output}/checkpoint-*", checkpoints))
    half = tuple(sorted(path for pattern in _HALF for path in output.glob(pattern) if path.is_dir() and not path.is_symlink()))
    found.append(Stored(f"{output}: half written when the peer was killed", half))
    found.append(Stored(f"{output}/* (identity, what it knows of the run, figures)", _named(output, _FILES)))
    if results:
        found.append(Stored(f"{output}: results", tuple(_results_in(output))))
    return [each for each in found if each.paths or each.folders]


def _named(folder: Path, patterns: Iterable[str]) -> tuple[Path, ...]:
    found = {path for pattern in patterns for name in (pattern, pattern + _TORN) for path in folder.glob(name)}
    return tuple(sorted(path for path in found if path.is_file() or path.is_symlink() or any(map(path.match, _WANDB_RUNS))))


def others(found: Sequence[Stored], output: Path, cache: Path | None = None) -> list[Path]:
    """The files in these folders that are none of `found`, and no results: others wrote them, or a peer of another version."""
    results = {file for path in _results(output) for file in (path, *_files(path))}
    ours = results | {file for each in found for path in each.paths for file in (path, *_files(path))}
    folders = [output, *([cache] if cache and cache.is_dir() else [])]
    return sorted({path for folder in folders for path in folder.rglob("*") if path not in ours and (path.is_symlink() or path.is_file())})


def remove(found: Sequence[Stored], output: Path) -> None:
    """Raises UserError when something cannot be deleted."""
    try:
        for each in found:
            for path in each.paths:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            for folder in (*each.folders, *([output] if each is found[-1] else [])):
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
    except OSError as error:
        raise UserError(f"Cannot delete {error.filename}: {error.strerror}.", fix="Check whose it is.", code=ExitCode.DISK) from None


def main(argv: Sequence[str], ask: Callable[[str], str] = input) -> int:
    """`dd-peer --purge [all] --output_dir out [--yes]`. Raises UserError, also when the peer runs."""
    parser = ArgumentParser(
        "dd-peer --purge",
        description="Delete what a peer stored here, after a list of it. Results stay, unless: all.",
        examples=["dd-peer --purge --output_dir out"],
    )
    parser.add_argument(FLAG, nargs="?", const="stored", choices=("stored", "all"), help="all: results, too")
    parser.add_argument("--output_dir", default="output", metavar="DIR", help="the peer's [output]")
    parser.add_argument("--cache_dir", default="", metavar="DIR", help="the peer's, if it was given one; other files in it stay")
    parser.add_argument("--log_file", default="", metavar="FILE", help="the peer's, if it was given one")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args(argv)
    output = Path(args.output_dir)
    if not output.is_dir():
        raise UserError(f"There is no folder {output}.", fix="Give the peer's --output_dir.")
    _refuse_running(output)
    cache = Path(args.cache_dir) if args.cache_dir else None
    found = stored(output, cache, log_file=Path(args.log_file) if args.log_file else None, results=args.purge == "all")
    if not found:
        print(f"nothing of a peer is in {output}")
        return ExitCode.OK
    left = others(found, output, cache)
    for each in found:
        print(f"{size(each.num_bytes):>10}  {each.name}")
    print(f"{size(sum(each.num_bytes for each in found)):>10}  together")
    kept = [path.relative_to(output).as_posix() for path in _results(output) if not path.is_symlink()]
    if args.purge != "all" and kept:
        print(f"{'':>10}  stays: {', '.join(sorted(kept))} (--purge all takes these, too)")
    if left:
        more = f", and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
        print(f"{'':>10}  stays, not a file of a peer: {', '.join(map(str, left[:_MOST_NAMED]))}{more}")
    if not args.yes and not _agreed(ask):
        print("nothing was deleted")
        return ExitCode.OK
    remove(found, output)
    print("deleted, except what stays" if left or (kept and args.purge != "all") else "deleted")
    return ExitCode.OK


def _results_in(folder: Path) -> list[Path]:
    return sorted({*(path for pattern in RESULTS for path in folder.glob(pattern)), *links(folder)})


def _results(output: Path) -> list[Path]:
    return [path for folder in (output, *_earlier(output)) for path in _results_in(folder)]


def _agreed(ask: Callable[[str], str]) -> bool:
    try:
        return ask("Delete it? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print("\nnobody is there to ask: add --yes", file=sys.stderr)
        return False


def _refuse_running(output: Path) -> None:
    """Raises UserError while a peer uses the folder: it holds these files locked."""
    for name, mode, take in _LOCKS:
        try:
            with (output / name).open(mode) as file:
                take(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"The peer in {output} is running.", fix="Stop it first (Ctrl-C where it runs), then purge.") from None
        except OSError:  # not there, or not ours to read: then it cannot be deleted either, which is said then
            continue


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir() and not path.is_symlink():
        yield from (file for file in path.rglob("*") if file.is_file() or file.is_symlink())
    elif path.exists():
        yield path
