"""`scripts/mutants`: a mutation has one place, is made in a copy, and is found by the simulator, which makes what it found smaller."""

import json
import os
import subprocess
import sys

import pytest

from scripts.mutation import mutants
from scripts.mutation.mutations import MUTATIONS, Mutation
from simulation.shrink import promise
from swarm.errors import UserError
from tests.conftest import ROOT

BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutation_has_its_place_and_is_still_python(mutation):
    path, text = mutation.apply(ROOT)
    compile(text, str(path), "exec")
    assert text != (ROOT / path).read_text() and mutation.breaks


def test_names_are_all_different():
    assert len(BY_NAME) == len(MUTATIONS) >= 10


@pytest.mark.parametrize(("old", "times"), [("nowhere at all", "0 times"), ("import asyncio\n", "times under")])
def test_a_mutation_without_exactly_one_place_is_an_error(old, times):
    with pytest.raises(UserError, match=times):
        Mutation("moved", "x", old, "y").apply(ROOT)


def test_a_mutation_is_made_in_a_copy_which_is_gone_afterwards():
    mutation = BY_NAME["counted_twice"]
    path, text = mutation.apply(ROOT)
    with mutants.mutated(mutation) as tree:
        assert (tree / path).read_text() == text and mutation.old in (ROOT / path).read_text()
        assert (tree / "simulation" / "__main__.py").exists()
    assert not tree.exists()


def test_the_table_and_the_last_line_say_what_was_found(capsys):
    def look_for(mutation, seconds):
        return mutants.Found(mutation.name, "a promise" if mutation.name == "counted_twice" else "", 3, 2.5, 40)

    names = ["--only", "counted_twice", "--only", "mixed_mean"]
    assert mutants.main(names, look_for) == 1
    *rows, last = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows] == [["mutation", "found"], ["counted_twice", "yes"], ["mixed_mean", "NO"]]
    assert (json.loads(last)["found"], json.loads(last)["of"]) == (1, 2)
    assert mutants.main(names[:2], look_for) == 0


def test_the_list_says_what_each_breaks(capsys):
    assert mutants.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(MUTATIONS)
    with pytest.raises(UserError, match="No such mutations: soap"):
        mutants.main(["--only", "soap"])


class Told(mutants.Player):
    """Mutated trees break with these seeds, and the tree as it is with those."""

    def __init__(self, mutated, anyway):
        super().__init__(0)
        self._mutated, self._anyway = mutated, anyway

    def _play(self, tree, seed, seconds, *options):
        broken = {seed: self._anyway[seed]} if tree == ROOT and seed in self._anyway else {}
        if tree != ROOT:
            broken = {one: promise for one, promise in self._mutated.items() if one >= seed}
        return 10.0, {"rounds": 5, "breaches": len(broken), "broken_seeds": list(broken)[:1], "promises": list(broken.values())[:1]}


def test_a_seed_that_breaks_the_same_without_the_mutation_proves_nothing():
    mutation = BY_NAME["counted_twice"]
    found = Told({4: "one", 9: "other"}, {4: "one"}).look_for(mutation, 60)
    assert (found.promise, found.seed, found.seconds, found.rounds) == ("other", 9, 20.0, 10)
    assert Told({4: "one"}, {4: "one"}).look_for(mutation, 60).promise == ""
    assert Told({4: "one"}, {4: "another"}).look_for(mutation, 60).promise == "one"


def test_a_mutation_that_names_what_is_not_there_is_an_error():
    with pytest.raises(UserError, match="leaves no engine to run"):
        Told({1: "a trainer ended with AttributeError('no anchor')"}, {}).look_for(BY_NAME["counted_twice"], 60)


@pytest.mark.slow
def test_a_mutation_is_found_shrunk_and_the_smaller_scenario_breaks_the_same():
    """What the last line plays is what broke: tests/simulation/test_strikes.py has it that a scenario's line says all of it."""
    with mutants.mutated(BY_NAME["encoded_again"]) as tree:
        words = ["--mixed", "--until_breach", "--seed", "2", "--seeds", "20", "--shrink_seconds", "5"]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        ended = subprocess.run([sys.executable, "-m", "simulation", *words], cwd=tree, env=environment, capture_output=True, text=True, timeout=500)
    lines = ended.stdout.splitlines()
    assert json.loads(lines[-1])["promises"] == ["the bytes of contribution .. changed"], lines[-1]
    smaller = next(at for at, line in enumerate(lines) if line.startswith("the same promise, after"))
    breach, line = lines[smaller + 1 : -1]
    assert promise(breach.removeprefix("BREACH: ")) == "the bytes of contribution .. changed" and line.startswith("  python -m simulation")
