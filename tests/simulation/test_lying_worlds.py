"""Of the mixed worlds, those for members in which some of them lie."""

from simulation.campaign import KINDS, RARE, WITH_AN_END, WITH_STRANGERS, mixed


def test_in_some_worlds_for_members_a_reducer_signs_two_means_or_some_make_states_up_with_all_faults():
    """Who makes states up brings no run to its end: what the others then make of it is the liars'."""
    worlds = [mixed(seed) for seed in range(2000)]
    two_faced, liars = [world for world in worlds if world.two_faced], [world for world in worlds if world.liars]
    assert 100 < len(two_faced) < 300 and 100 < len(liars) < 300
    assert all(world.members and world.peers >= 3 for world in (*two_faced, *liars))
    assert all(any(set(faults) <= set(world.faults) for world in some) for some in (two_faced, liars) for faults in (KINDS, RARE, WITH_STRANGERS))
    assert WITH_AN_END not in {world.faults for world in liars} and {world.liars for world in liars} == {1, 2, 3, 4}
    assert any(world.liars and world.two_faced for world in worlds)
