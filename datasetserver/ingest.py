"""From captioned pictures to shards: checked once, deterministic, and everything left out is listed with its reason.

Samples are shuffled once, so that every shard is an unbiased draw of the dataset. Equal datasets give equal digests.
This is the story; `cutting.py` makes shards of samples, and `prepared.py` knows what is on the disk.
"""

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from blake3 import blake3

from datasetserver.cutting import SHARD_BYTES, Batches
from datasetserver.kept import Kept, captions_in
from datasetserver.loading import load_all
from datasetserver.pictures import Sample
from datasetserver.prepared import (
    FORMAT,
    Ingested,
    Keeper,
    NoKeeper,
    Writer,
    finish,
    first_of,
    in_order,
    ingested,
    samples_of,
    shard_path,
    write_rejected,
    write_result,
)
from datasetserver.sources import Folder, Listing, Source, picture_of
from swarm.captions import Faults
from swarm.digest import canonical_json, digest_bytes
from swarm.errors import ExitCode, UserError
from swarm.held_out import MOST_HELD_OUT, WHOLE, rank_of, refuse_own_share, unfit
from swarm.picture_folder import Pair, nothing_in
from swarm.protocol import Generation, Manifest, Shard

SHARD_SAMPLES = 256


@dataclass(frozen=True)
class Policy:
    """missing_captions: 'reject', or 'empty' to train those pictures without words. duplicates: 'keep' or 'drop'; found in any case.

    masks: transparency says where the loss counts, and is kept. held_out: the share of the pictures that nobody trains on.
    """

    missing_captions: str = "reject"
    duplicates: str = "keep"
    masks: bool = False
    held_out: float = 0.0

    def told(self) -> dict[str, Any]:
        """Without masks and held-out pictures as before there were any."""
        return {name: value for name, value in asdict(self).items() if name not in ("masks", "held_out") or value}


def ingest(
    source: Source | Path,
    work_dir: Path,
    *,
    shard_samples: int = SHARD_SAMPLES,
    workers: int | None = None,
    policy: Policy = Policy(),
    dry: bool = False,
    grow_from: int | None = None,
    frozen: bool = False,
    resolution: int = 0,
    show: Callable = lambda pairs, count: pairs,
) -> Ingested:
    """Check `source` and write its shards and manifest into `work_dir`; nothing is done when they are there and up to date.

    An ingest that was cut off goes on after the last shard that it wrote. workers: processes, 0 for none, None for one per core.
    dry: check everything and write nothing. grow_from: keep the shards that are there, and add those of new samples as a generation that
    begins with this epoch. frozen: a run is under way, so that what is there may not be replaced; what an older version made is taken as it is.
    resolution: smaller pictures are noted; 0: none. show: wraps the iterable of samples, given how many there are or None, for a progress bar.
    Raises UserError for a source that is missing, has no sample that can be trained on, or changed though it is frozen.
    """
    if isinstance(source, Path):
        source = Folder(source)
    listing = source.list()
    if not listing.streamed:
        refuse_own_share((pair.validation_split for pair in listing.pairs), policy.held_out)
    identity = _identity(listing, policy, shard_samples)
    old = None if dry and grow_from is None else ingested(work_dir)
    if old and not dry:
        finish(work_dir, old)
        # Of rows that are streamed the identity names options only: whether there are more is seen by reading them.
        names_all = grow_from is None or not listing.streamed
        if (names_all and old.source == identity) or (old.older and frozen and grow_from is None):
            return old
    if old and frozen and grow_from is None:
        raise _changed(source, listing, policy, shard_samples, old, work_dir)
    grown = old if grow_from is not None else None
    known = samples_of(work_dir, grown.manifest) if grown else []
    kept = _kept(work_dir, grown, known) if grown else Kept()
    if grown and not listing.streamed:
        _refuse_another_weight(listing.pairs, kept, _weights(grown.manifest, known), work_dir)
    pairs, aside = kept.new(_by(policy, listing.pairs)), {}
    if policy.held_out:
        most = 0 if grown else MOST_HELD_OUT  # what is held out stays so for the run's life
        pairs = _without(pairs, policy.held_out, most, aside, listing.faults)
    drop = policy.duplicates == "drop"
    with contextlib.ExitStack() as closing:
        keeper = NoKeeper() if dry else closing.enter_context(Keeper(work_dir, identity))
        trained = Batches(shard_samples, drop, keeper.done, resolution, len(grown.manifest.shards) if grown else 0, known)
        count = None if listing.count is None else max(0, listing.count - len(kept))
        _cut(trained, keeper, show(load_all(islice(pairs, trained.taken, None), workers, listing.count), count))
        held_out = Batches(shard_samples, drop, (), resolution, 0, known + trained.found.samples)
        _cut(held_out, NoKeeper() if dry else Writer(work_dir), load_all(aside.values(), workers, len(aside)))
    found = trained.found
    found.extend(held_out.found.tables())
    rejected = sorted(listing.faults + found.rejected)
    if not grown:
        if not (trained.shards or held_out.shards or dry):
            write_rejected(work_dir, rejected)
        _refuse_unfit(source, policy, trained.shards, held_out.shards, len(aside), rejected)
    manifest = _grown(grown.manifest, trained.shards, grow_from or 0) if grown else Manifest.of(trained.shards, held_out=held_out.shards)
    data = canonical_json(manifest.model_dump())
    digest = digest_bytes(data)
    if frozen and not grown and not dry and first_of(work_dir) not in (None, digest):
        raise UserError(
            f"Shards of the run in {work_dir} are missing, and {source} no longer gives the same ones.",
            fix="Restore that folder from a copy; or give another --work_dir for a new run.",
            code=ExitCode.DISK,
        )
    result = Ingested(
        manifest,
        digest,
        grown.first if grown else digest,
        identity,
        rejected,
        True,
        found.duplicates,
        found.changed,
        [*found.notes, *kept.notes],
        held_out=grown.held_out if grown else policy.held_out,
    )
    if not dry:
        write_result(work_dir, result, data, known + found.samples)
    return result


def _cut(batches: Batches, keeper: Writer | NoKeeper, loaded: Iterable[tuple[Pair, Sample | str]]) -> None:
    """All of these pairs, as `load_all` gives them, into shards."""
    for pair, result in loaded:
        batches.add(pair.name, result, keeper)
    batches.end(keeper)


def _refuse_unfit(source: Source, policy: Policy, trained: Sequence[Shard], held_out: Sequence[Shard], aside: int, rejected: Faults) -> None:
    """Raise UserError where a new dataset has nothing to train on, or nothing to hold out. aside: pictures that were to be held out."""
    if not trained and held_out:
        raise unfit(policy.held_out, aside, aside)
    if not trained:
        raise nothing_in(source, rejected)
    if policy.held_out and not held_out:
        raise unfit(policy.held_out, 0, sum(shard.samples for shard in trained))


def _identity(listing: Listing, policy: Policy, shard_samples: int) -> str:
    """Of what shards are made: another one gives others."""
    hasher = blake3(canonical_json([FORMAT, shard_samples, SHARD_BYTES, policy.told()]).removesuffix(b"]") + b",")
    for piece in listing.identity():
        hasher.update(piece)
    return hasher.update(b"]").hexdigest()


def _changed(source: Source, listing: Listing, policy: Policy, shard_samples: int, old: Ingested, work_dir: Path) -> UserError:
    for before in {SHARD_SAMPLES, *(shard.samples for shard in old.manifest.shards)}:
        if _identity(listing, policy, before) == old.source:
            return UserError(
                f"shard_samples is {shard_samples}, and the run in {work_dir} began with {before}.",
                fix=f"Start with --shard_samples {before}, or give another --work_dir for a new run.",
            )
    return UserError(
        f"{source} or how to read it has changed since the run in {work_dir} began.",
        fix="Add --grow: what is new is trained from the next epoch on, what is gone stays. Or give another --work_dir for a new run.",
    )


def _by(policy: Policy, pairs: Iterable[Pair]) -> Iterable[Pair]:
    """The pairs as the policy has them read."""
    asked = {"empty_ok": policy.missing_captions == "empty", "masked": policy.masks}
    changes: Mapping[str, Any] = {name: True for name, wanted in asked.items() if wanted}
    return (replace(pair, **changes) for pair in pairs) if changes else pairs


def _without(pairs: Iterable[Pair], share: float, most: int, aside: dict[str, Pair], faults: Faults) -> Iterator[Pair]:
    """The pairs that are trained; of each picture that is held out, at most `most`, one is put `aside`, by its picture's name.

    faults: gets the others of a folder that is never trained.
    """
    for pair in pairs:
        picture, part = picture_of(pair.name), share if pair.validation_split is None else pair.validation_split
        if picture in aside:
            continue
        if rank_of(picture) < part and len(aside) < most:
            aside[picture] = replace(pair, name=picture)
        elif part < WHOLE:
            yield pair
        elif picture == pair.name:
            faults.append((picture, "its folder is never trained (validation_split 1), and nothing more is held out"))


def _kept(work_dir: Path, ready: Ingested, known: Sequence[tuple[str, str]]) -> Kept:
    """What the run has of its pictures; known: as `samples_of` has them. Raises UserError for a damaged shard."""
    kept, rest, aside = Kept(), iter(known), {shard.digest for shard in ready.manifest.held_out}
    for shard in in_order(ready.manifest):
        # An older version composed captions by other rules: they would differ though nobody changed them.
        captions = [None] * shard.samples if ready.older else captions_in(shard_path(work_dir, shard.digest), shard.samples)
        for text, (name, _) in zip(captions, rest):  # noqa: B905 (the rest is for the next shards)
            kept.add(name, text, trained=shard.digest not in aside)
    return kept


def _weights(manifest: Manifest, samples: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Of the pictures of these samples, in the order of `in_order`, whose loss weight is not 1."""
    weights = (weight for shard in in_order(manifest) for weight in shard.weights or [1.0] * shard.samples)
    return {picture_of(name): weight for (name, _), weight in zip(samples, weights, strict=True) if weight != 1}


def _refuse_another_weight(pairs: Iterable[Pair], names: Container[str], weights: Mapping[str, float], work_dir: Path) -> None:
    """Raise UserError where a picture with one of these `names`, so that it is in a shard already, has another weight than there.

    The weight is not taken: it is in the manifest whose digest names the run's dataset, and peers would train by two weights.
    """
    for pair in pairs:
        before = weights.get(picture_of(pair.name), 1.0)
        if pair.weight != before and picture_of(pair.name) in names:
            raise UserError(
                f"loss_weight of {pair.name} is {pair.weight:g}, but {work_dir} was prepared with {before:g}.",
                fix=f"Set it back to {before:g}: what a run has stays; new pictures of another weight go into a folder of their own.",
            )


def _grown(old: Manifest, new: Sequence[Shard], from_epoch: int) -> Manifest:
    """`old` with further shards, if there are any, of a generation that begins with `from_epoch`."""
    if not new:
        return old
    begins = max(from_epoch, old.generations[-1].from_epoch)
    generations = [*old.generations, Generation(from_epoch=begins, shards=len(old.shards) + len(new))]
    return Manifest.of([*old.shards, *new], generations, old.held_out)
