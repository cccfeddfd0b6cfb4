"""Of the mixed worlds, those for members in which some of them lie."""

from simulation.campaign import KINDS, WITH_STRANGERS, mixed


def test_in_some_worlds_for_members_a_reducer_signs_two_means_with_all_faults_or_some_make_states_up_with_few():
    """Who makes states up must not be believed for as long as one that the victim has met is live (docs/internals.md, R5)."""
    worlds = [mixed(seed) for seed in range(2000)]
    two_faced, liars = [world for world in worlds if world.two_faced], [world for world in worlds if world.liars]
    assert 100 < len(two_faced) < 300 and 20 < len(liars) < 100
    assert all(world.members and world.peers >= 3 for world in (*two_faced, *liars))
    assert any(set(KINDS) <= set(world.faults) for world in two_faced) and {world.faults for world in liars} == {WITH_STRANGERS}
    assert {world.liars for world in liars} == {1, 2, 3, 4}
