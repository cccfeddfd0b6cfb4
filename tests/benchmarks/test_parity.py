"""What parity.py makes of what it saw. The runs themselves are the benchmark."""

import json
import math
from dataclasses import replace

import pytest

from benchmarks import exact_gradients, parity
from scripts.demo import swarm_run


def test_between_two_checkpoints_the_line_is_straight():
    assert parity.crossing([(10, 0.5), (20, 0.9), (30, 1.0)], 0.95) == pytest.approx(25)


def test_a_run_that_is_there_at_the_first_look_counts_from_that_look():
    assert parity.crossing([(10, 0.97), (20, 1.0)], 0.95) == 10


def test_a_run_that_never_comes_there_has_no_figure():
    assert parity.crossing([(10, 0.5), (20, 0.94)], 0.95) is None
    assert parity.ratio(None, 3.0) is None


def test_the_one_machine_counts_at_the_better_of_its_learning_rates():
    learned = [parity.Learned(parity.Run("", 0, 64, {"learning_rate": rate}), at, at) for rate, at in ((1e-3, 40.0), (2e-3, 30.0))]
    assert parity.best([*learned, parity.Learned(parity.Run("", 0, 64, {}), None, None)], "samples", 0, 64) == 30
    assert parity.best(learned, "samples", 0, 128) is None
    assert parity.best(learned, "samples", 1, 64) is None


@pytest.mark.parametrize("full", [False, True])
def test_every_swarm_has_its_one_machine_with_the_same_global_batch_at_both_rates(full):
    runs = list(parity.plan(full))
    swarms = [run for run in runs if run.peers > 1]
    assert {run.name for run in swarms} == {f"{strategy}/{peers}" for strategy in parity.SWARMS for peers in ((2, 4) if full else (2,))}
    assert [(run.batch, run.settings["learning_rate"]) for run in runs if run.peers == 1] == [parity.ONE_PEER]
    for batch in (run.global_batch for run in swarms):
        alone = [run.settings["learning_rate"] for run in runs if not run.peers and run.batch == batch]
        assert sorted(alone) == sorted(parity.LEARNING_RATES[batch]) and len(alone) == 2
    assert len({parity.slug(run) for run in runs}) == len(runs)


def test_one_strategy_alone_is_compared_with_the_one_machine_of_its_global_batch_only():
    swarm, *alone = parity.plan(False, only="diloco")
    assert swarm.name == "diloco/2" and [run.batch for run in alone] == [swarm.global_batch] * 2
    assert [run.peers for run in parity.plan(False, only="small-rounds")] == [2, 1, 0, 0]


def test_a_swarm_s_global_step_is_a_round_and_one_machine_s_a_batch():
    swarm, alone = (next(run for run in parity.plan(False) if bool(run.peers) is peers) for peers in (True, False))
    assert swarm.saving() == ("--checkpointing_steps", "2", "--checkpoints_total_limit", "1000")
    assert alone.saving()[1] == str(parity.EVERY // alone.batch)
    assert (swarm.total, replace(swarm, longest=65_536).total) == (parity.TOTALS[swarm.global_batch], 65_536)
    decays = [float(run.flags()[2]) ** (parity.AVERAGED / step) for run, step in ((swarm, swarm.round), (alone, alone.batch))]
    assert decays == pytest.approx([math.exp(-1)] * 2)


def test_ratio_and_speedup_are_over_the_better_one_machine_and_a_run_that_never_came_there_has_none(capsys):
    def learned(peers, batch, samples, seconds, rate=1e-3):
        settings = {"learning_rate": rate, "target_batch_size": 1024, "seed": 42}
        name = f"swarm/{peers}" if peers > 1 else f"{peers}: {batch} at {rate}"
        return parity.Learned(parity.Run(name, peers, batch, settings), samples, seconds)

    alone = [learned(0, 32, 100.0, 60.0), learned(0, 32, 90.0, 66.0, 2e-3), learned(0, 64, 120.0, 70.0), learned(0, 128, None, None)]
    peers = [learned(1, 32, 100.0, 80.0), learned(1, 64, 110.0, 64.0), learned(2, 32, 126.0, 40.0), learned(4, 32, 200.0, 30.0)]
    parity.report([*alone, *peers], {"2": 1e-7})
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["samples_ratio"] == {"swarm/2": 1.05, "swarm/4": None}
    assert result["speedup"] == 1.6 and result["speedup_over_no_swarm"] == 1.5


def test_repeats_count_by_their_median_and_differ_in_their_seed():
    runs = [next(parity.plan(False, repeat)) for repeat in range(3)]
    assert len({run.settings["seed"] for run in runs}) == len({parity.slug(run) for run in runs}) == 3
    (one,) = parity.medians([parity.Learned(run, samples, samples) for run, samples in zip(runs, (30.0, None, 20.0), strict=True)])
    assert one.samples == one.seconds == 30
    assert parity.medians([parity.Learned(run, None, None) for run in runs])[0].samples is None


def test_while_a_run_is_far_from_the_goal_every_second_checkpoint_is_looked_at():
    assert parity.next_look(10_240, 0.5) == pytest.approx(10_240 + 2 * parity.EVERY, abs=parity.EVERY // 2)
    assert parity.next_look(10_240, 0.9) <= 10_240 + parity.EVERY


def test_a_run_of_the_benchmark_overrides_the_quickstart_s_settings(tmp_path):
    plan = swarm_run.Plan(tmp_path, settings={"sync": "diloco", "learning_rate": 0.002})
    written = swarm_run.run_settings(plan)
    assert 'sync = "diloco"' in written and "learning_rate = 0.002" in written and written.count("learning_rate") == 1


def test_the_comparison_of_gradients_sees_a_contribution_that_is_missing():
    samples = {("a", 1): [1, 2, 3], ("b", 1): [4, 5], ("a", 2): [6], ("b", 2): [7, 8]}
    rounds = [[("a", 1), ("b", 1)], [("a", 2), ("b", 2)]]
    whole = exact_gradients.alone(rounds, samples)
    turned = exact_gradients.alone([rounds[0][::-1], rounds[1]], samples)
    without = exact_gradients.alone([rounds[0], rounds[1][:1]], samples)
    assert exact_gradients.difference(turned, whole) < 1e-5
    assert exact_gradients.difference(without, whole) > 1e-4


def test_what_is_in_a_state_is_read_along_its_parents_past_states_that_lost():
    def line(round, parent, *members):
        return {"round": round, "parent": parent, "members": [[peer, round, 8] for peer in members]}

    made = {"x1": line(1, "zero", "a", "b"), "lost": line(2, "x1", "b"), "x2": line(2, "x1", "a"), "x3": line(3, "x2", "b")}
    assert exact_gradients.ancestry("x3", made) == [[("a", 1), ("b", 1)], [("a", 2)], [("b", 3)]]
    with pytest.raises(KeyError, match="nobody noted"):
        exact_gradients.ancestry("x3", {name: made[name] for name in ("x1", "x3")})
