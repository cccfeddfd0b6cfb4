import os
import signal
from multiprocessing import active_children

import pytest

from swarm.workers import Workers
from tests.swarm.ending import answer, broken, deaf, nothing


@pytest.fixture
def started():
    """A function that makes workers, which are closed when the test has ended, and are gone then."""
    made, before = [], set(active_children())

    def start(*arguments):
        made.append(Workers(*arguments))
        return made[-1]

    yield start
    for workers in made:
        workers.close()
    assert set(active_children()) <= before


def test_a_process_that_dies_costs_its_job_alone_also_in_the_middle_of_an_answer(started):
    workers = started(2, answer, deaf, "crashed")
    futures = [workers.submit(number % 4) for number in range(8)]
    assert [future.result(60) for future in futures] == [0, 1, "crashed", "crashed"] * 2


def test_one_that_died_while_it_had_nothing_to_do_costs_nothing(started):
    before = set(active_children())
    workers = started(1, answer, deaf, "crashed")
    assert workers.submit(0).result(60) == 0
    (process,) = set(active_children()) - before
    os.kill(process.pid, signal.SIGKILL)
    assert [workers.submit(number).result(60) for number in (0, 1)] == [0, 1]


def test_what_a_job_raises_is_raised_here_and_ends_no_process(started, caplog):
    workers = started(1, answer, nothing, "crashed")
    with pytest.raises(OSError, match="no such number"):
        workers.submit(4).result(60)
    assert workers.submit(1).result(60) == 1 and not caplog.text


def test_no_job_is_blamed_where_no_process_starts(started):
    with pytest.raises(RuntimeError, match="does not start"):
        started(1, answer, broken, "crashed").submit(0).result(60)
