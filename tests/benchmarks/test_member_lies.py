"""What the arithmetic of one liar among five says of the two averages: decision 0022 and docs/security.md rest on it."""

import pytest
import torch

from benchmarks.member_lies import LIES, Rule, Swarm, costs
from scripts.attacks.rows import MOST_PROGRESS_LOST, ROWS
from tests.peer.sync.test_centering import centered

EQUAL, ONE_STRONG = (4, 4, 4, 4), (40, 4, 4, 4)


def test_its_liars_are_those_of_the_rows():
    assert {f"member-{name}" for name in LIES} - ROWS.keys() == {"member-opposite"} and "opposite" in ROWS


def test_a_mean_is_weighted_by_samples_and_clipped_and_a_centre_is_the_products_own():
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 600.0]])
    assert Rule("mean", 20.0).average(vectors, [1, 1, 2]).tolist() == pytest.approx([0.25, 20.25])  # 20 of 1 a sample, for two
    assert Rule("mean", 0.0).average(vectors, [1, 1, 2]).tolist() == pytest.approx([0.25, 300.25])
    torch.testing.assert_close(Rule("centered", 0.0).average(vectors, [8, 8, 8]), centered(vectors, [8, 8, 8]))


def test_among_equals_centered_keeps_every_liar_to_a_tenth_of_the_progress_and_a_mean_does_not():
    centre, mean = (costs(Rule(averaging, 20.0), EQUAL, [0]) for averaging in ("centered", "mean"))
    assert max(centre.values()) < MOST_PROGRESS_LOST / 2
    assert {name for name, share in mean.items() if share > MOST_PROGRESS_LOST} >= {"opposite", "x10", "x1e6", "random", "wrong-labels"}


def test_where_one_honest_member_does_most_of_the_work_centered_costs_more_than_a_mean():
    strong = {averaging: Swarm(Rule(averaging, 20.0), ONE_STRONG, None, 0).progress() for averaging in ("centered", "mean")}
    assert strong["centered"] < 0.95 * strong["mean"]
