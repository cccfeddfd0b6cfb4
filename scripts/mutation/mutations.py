"""The changes that `scripts/mutants` makes: each breaks one promise of docs/internals.md, at one place.

To add one: a name, what it breaks in a sentence, the text that is there and the text to put in its place. The text must stand at exactly one
place of the files under `under`, so that it is found also where a file was moved, and missed as soon as the line is another one.
"""

from dataclasses import dataclass
from pathlib import Path

from swarm.errors import UserError


@dataclass(frozen=True)
class Mutation:
    """world: the simulator's options for the worlds that are to find it."""

    name: str
    breaks: str
    old: str
    new: str
    under: str = "peer/sync/engine"
    world: tuple[str, ...] = ("--mixed",)

    def apply(self, root: Path) -> tuple[Path, str]:
        """The file, from `root`, and its new text. Raises UserError unless `old` stands at exactly one place."""
        there = root / self.under
        files = sorted(there.rglob("*.py")) if there.is_dir() else [there]
        texts = {file: file.read_text(encoding="utf-8") for file in files if file.exists()}
        places = {file: text.count(self.old) for file, text in texts.items() if self.old in text}
        if sum(places.values()) != 1:
            where = ", ".join(str(file.relative_to(root)) for file in places) or "nowhere"
            raise UserError(
                f"The mutation {self.name} has no place: its text stands {sum(places.values())} times under {self.under} ({where}).",
                fix="The engine has changed: write it again in scripts/mutation/mutations.py, or take it out with the promise that it broke.",
            )
        file = next(iter(places))
        return file.relative_to(root), texts[file].replace(self.old, self.new)


MUTATIONS = (
    Mutation(
        "unflushed_number",
        "a contribution's number is not flushed before it is used: after a power cut it is given to other bytes",
        "            file.write(data)\n            sync(file)\n        part.replace(path)\n",
        "            file.write(data)\n        part.replace(path)\n",
        under="swarm/files.py",
    ),
    Mutation(
        "number_not_written",
        "a peer that was started again forgets which numbers it has used",
        "            files.replace(path, str(self._number).encode())\n",
        "            pass\n",
    ),
    Mutation(
        "unflushed_state",
        "a state counts as on disk before it is flushed: a power cut takes what was reported as final",
        "            if durable:\n                files.sync(file)\n        temporary.replace(path)\n        if durable:\n            files.flush(path.parent)\n",
        "        temporary.replace(path)\n",
    ),
    Mutation(
        "member_missing",
        "a reducer averages as soon as all but one of a group's members have sent a part",
        "        if len(self._received[index]) == len(self.senders):\n",
        "        if len(self._received[index]) >= max(len(self.senders) - 1, 1):\n"
        "            self._received[index] |= dict.fromkeys(self.senders - self._received[index].keys(), data)\n",
    ),
    Mutation(
        "mixed_mean",
        "a round that failed at one reducer is committed with whatever stood in its part of the memory",
        "            raise self._round_failed(failure, run, reduction) from None\n",
        "            log.info('%s', failure)\n",
    ),
    Mutation(
        "closed_again_anyway",
        "a group is closed again without a member that failed, though another one may have the mean of its first closing",
        "                if not error.void:\n                    raise\n",
        "",
        world=("--peers=4", "--hours=0.06", "--faults=failpoint,kill,reset,sidecar"),
    ),
    Mutation(
        "no_error_feedback",
        "what the codec dropped of a contribution is forgotten instead of going into the next one",
        "            self._move(old, new, self.frozen.encoded.bytes())\n            self.included",
        "            self._flat.write(0, new.vector(self._wire.size))\n            self.included",
    ),
    Mutation(
        "no_fork_rule",
        "nobody follows a state on another branch, however many peers stand there",
        "        return [head for head in others if not self.lineage.descends(self.ours, head)]\n",
        "        return [head for head in others if self.from_base or self.lineage.descends(head, self.ours)]\n",
    ),
    Mutation(
        "adopt_an_ancestor",
        "a peer takes over an older state of its own lineage when most stand there",
        "        return [head for head in others if not self.lineage.descends(self.ours, head)]\n",
        "        return others\n",
    ),
    Mutation(
        "reported_too_early",
        "a state is reported as final before the disk has it",
        "    return {digest for digest in waiting if is_on_disk(digest, 0.0 if digest in signed or not others else FINAL_SECONDS)}\n",
        "    return {digest for digest in waiting if digest in signed or is_on_disk(digest, FINAL_SECONDS if others else 0.0)}\n",
    ),
    Mutation(
        "counted_twice",
        "a contribution that is in the state already is offered once more",
        "        return not included and follows(",
        "        return follows(",
    ),
    Mutation(
        "encoded_again",
        "a contribution is encoded anew whenever it is offered",
        "            self._sidecar.send(Offer(frozen.number,",
        "            if self._strategy.steps_locally:\n"
        "                self._work._encode_steps(frozen.encoded.bytes())\n"
        "            self._sidecar.send(Offer(frozen.number,",
    ),
    Mutation(
        "landed_without_moving",
        "a peer that lands on a newer state keeps its parameters where they were",
        "        elif follows(new.digest, new.header, old.digest, self._strategy):\n            self._move(old, new)\n",
        "        elif follows(new.digest, new.header, old.digest, self._strategy):\n            pass\n",
    ),
    # Races that were mended once (git log, benchmarks/records/log.md), put back.
    Mutation(
        "final_by_another_branch",
        "3391f4e: a contribution counts as done when a state of another branch with a higher round is final",
        "max((round for digest, round in self._final if digest in lineage), default=0)",
        "max((round for digest, round in self._final), default=0)",
    ),
    Mutation(
        "handed_over_is_on_disk",
        "6fea4f3: a state that was handed over counts as on disk although nobody has written it",
        "            with found:\n                self._saved[state.digest] = clock()\n        elif state.header.round:\n",
        "            found.close()\n        if state.header.round:\n            self._saved[state.digest] = clock()\n",
    ),
    Mutation(
        "withdrawn_work_stays",
        "0466687: what the server would not register stays in the parameters, and is offered by another number",
        "        self._move(self.state, self.state, self.frozen.encoded.bytes())\n        self.frozen = None\n",
        "        self.frozen = None\n",
    ),
    Mutation(
        "earlier_one_counts",
        "06061db: a contribution counts as in a state that holds only an earlier one of its peer",
        "        if self.frozen is not None and own_number >= self.frozen.number:\n            self._move(",
        "        if self.frozen is not None and own_number > 0:\n            self._move(",
    ),
    Mutation(
        "lost_with_its_branch",
        "a contribution whose branch lost is never given back: nobody trains its samples again",
        "        dropped = [number for number in self.included if number > own_number]\n",
        "        dropped: list[int] = []\n",
    ),
    Mutation(
        "included_forgotten",
        "a state forgets whose work is in it, but for that of its last round: the others give theirs back",
        "            included={**self.included, **{member.peer: member.number for member in members}},\n",
        "            included={member.peer: member.number for member in members},\n",
    ),
    Mutation(
        "peers_instead_of_samples",
        "a mean counts every member alike, however many samples it brings",
        "self._samples[peer] / self._all_samples * self._factors[peer]",
        "1 / len(self.senders) * self._factors[peer]",
    ),
    Mutation(
        "clipped_by_nobody",
        "a member counts with all of its contribution, however long it is beside the others'",
        "clipping.factors(members, run.group.norms), strict=True))\n",
        "[1.0] * len(members), strict=True))\n",
    ),
    Mutation(
        "claims_count",
        "a member counts with all samples that it claims, though others have the host's receipt and it has none",
        "members = run.group.weighed\n",
        "members = run.group.members\n",
        under="peer/sync/engine/round/reduction.py",
    ),
    # Written apart from the simulator, by somebody who had not worked on it, and tried only when they were all written.
    Mutation(
        "unsaid_not_kept",
        "what is offered while the server is away is not put on the disk: killed then, the ledger never hears of it",
        "                return self._result(letter.answer, 0)\n            self._unsaid.keep(letter.body)\n",
        "                return self._result(letter.answer, 0)\n",
        under="peer/data/client/outbox.py",
    ),
    Mutation(
        "failed_write_is_answered",
        "the server answers as if it had written what the disk did not take",
        "            outcomes = [error] * len(operations)\n",
        "            pass\n",
        under="datasetserver/ledger.py",
        world=("--peers=3", "--hours=0.1", "--faults=ledger,server", "--fault_seconds=10"),
    ),
    Mutation(
        "late_count_leaves_leases",
        "a contribution that was withdrawn and counts after all leaves its samples with those who leased them since",
        "                self._strip(uid, mask)\n",
        "                pass\n",
        under="datasetserver/book.py",
    ),
    Mutation(
        "foreign_samples_are_taken",
        "a peer may register samples that others hold",
        "        if lost:\n            counted =",
        "        if False:\n            counted =",
        under="datasetserver/book.py",
    ),
    Mutation(
        "late_report_changes_nothing",
        "a report that comes late and changes the head's chain is noted and not counted",
        "            if news is News.REDRAWN:\n                self._change_branch()\n",
        "            if news is News.REDRAWN:\n                pass\n",
        under="datasetserver/book.py",
    ),
    Mutation(
        "dropped_not_given_back",
        "the samples of a contribution that will be in no state are forgotten instead of going back",
        "        for number in report.dropped:\n            self.lost(self._take(number))\n",
        "        for number in report.dropped:\n            self._take(number)\n",
        under="peer/loop/accounts.py",
    ),
    Mutation(
        "leased_again_trained_again",
        "a shard that the same peer is given once more, by a second lease, is trained twice",
        "            self._drop_again(shard_epochs)\n",
        "",
        under="peer/data/client/work.py",
        world=("--peers=4", "--hours=0.06", "--lease_seconds=8", "--faults=stop,sleep,answers", "--fault_seconds=10"),
    ),
    Mutation(
        "gradients_of_an_old_anchor",
        "gradients that were taken at the state before count as if they had been taken at the new one",
        "[: REBASED_ANCESTORS if strategy.steps_locally else 0]",
        "[:REBASED_ANCESTORS]",
    ),
    Mutation(
        "sum_as_they_come",
        "a reducer adds the members' parts up in the order in which they came",
        "        for count, peer in enumerate(sorted(self.senders)):\n",
        "        for count, peer in enumerate(self._received[index]):\n",
    ),
    Mutation(
        "lost_branch_stays_on_disk",
        "a state of a branch that lost is left on the disk, and leads its peer back there after a restart",
        "[file for file in there if _samples(file) <= _samples(path)]",
        "there",
    ),
    Mutation(
        "two_means_are_no_news",
        "members whose states part after one group compare nothing: a reducer may give each another mean for ever",
        "        return record.peer_id in self.peers and self.parent in line[1:]",
        "        return False and self.parent in line[1:]",
        world=("--members", "--two_faced", "--peers=4", "--hours=0.08", "--faults=none"),
    ),
    Mutation(
        "signatures_of_a_proof_unread",
        "a proof counts whoever signed it, so anybody can frame a peer",
        "            and all(self._signed(proof.accused, statement(self._run.digest, proof.group, digest), proof.key, by) for digest, by in signed)\n",
        "            and bool(signed)\n",
        under="swarm/proofs.py",
        world=("--members", "--two_faced", "--peers=4", "--hours=0.05", "--faults=none"),
    ),
    Mutation(
        "one_mean_is_a_proof",
        "a proof may hold one mean twice, which every reducer has signed",
        "            and one != other\n",
        "",
        under="swarm/proofs.py",
        world=("--members", "--two_faced", "--peers=4", "--hours=0.05", "--faults=none"),
    ),
    Mutation(
        "checkers_compare_nothing",
        "a checker takes every mean for right, so a reducer may give all a wrong one for ever",
        "    return slack is None or bool((abs(mean - exact) > slack)[_real(place)].any())\n",
        "    return False\n",
        under="swarm/wrong_means.py",
        world=("--members", "--wrong_mean", "--peers=4", "--hours=0.08", "--faults=none"),
    ),
    Mutation(
        "anybody_may_check",
        "a lot counts whoever signed it, so anybody may ask everybody for what it sent",
        "        if not self._node.is_lot(channel.peer, statement, asked.key, asked.lot) or not is_drawn(asked.lot, len(kept.group.peers)):\n",
        "        if False:\n",
        world=("--members", "--wrong_mean", "--peers=4", "--hours=0.05", "--faults=none"),
    ),
    Mutation(
        "wrong_states_stay",
        "the state that a proven wrong mean made is not discarded: the run goes on from it",
        "        await bury(service, owner, state)\n",
        "        pass\n",
        under="datasetserver/app.py",
        world=("--members", "--wrong_mean", "--peers=4", "--hours=0.015", "--faults=none"),
    ),
    Mutation(
        "certificates_count_for_nothing",
        "in a run for members a newcomer goes by who is live, whatever state the others have certified",
        "        if not self._seals.needed:\n            return Judgement(strangers)\n",
        "        return Judgement(strangers)\n",
        world=(
            "--members", "--liars=4", "--peers=3", "--hours=0.05", "--faults=none",
            "--strikes=guests@70/0(peers=1,seconds=30);guests@120/0(peers=2,seconds=30)",
        ),
    ),
    Mutation(
        "strangers_lead_who_is_alone",
        "in a run for members a peer whose company has just gone follows whoever is left",
        "        if not (judgement.signed or leaderless) and self._waits_for_company():\n",
        "        if False:\n",
        world=("--members", "--liars=2", "--peers=3", "--hours=0.035", "--faults=none", "--strikes=partition@65/0(peers=2+3,seconds=50)"),
    ),
)
