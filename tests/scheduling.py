"""Which of pytest's workers gets which tests: a file at a time, so that what a file builds is built once, and beside them a few swarms.

A swarm is several processes that wait for each other. Two at a time leave a third of two cores idle, which the other tests use meanwhile.
"""

import ast
import functools

from xdist.scheduler import LoadFileScheduling

from tests.forking import ROOT
from tests.sources import tree_of

_AT_ONCE = 2


class Scheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        """What is given away at once: a swarm, or all other tests of its file."""
        file, name, *_ = nodeid.split("::")
        return nodeid if name.partition("[")[0] in swarms(file) else file

    def _assign_work_unit(self, node) -> None:
        taken = [of for of, units in self.assigned_work.items() for scope, done in units.items() if "::" in scope and not all(done.values())]
        swarm_is_next = len(taken) < _AT_ONCE and node not in taken
        for scope in self.workqueue:
            if ("::" in scope) == swarm_is_next:
                self.workqueue.move_to_end(scope, last=False)
                break
        super()._assign_work_unit(node)


@functools.cache
def swarms(file: str) -> frozenset[str]:
    """The tests of a file that are marked so. They are read there: who shares the tests out does not import them."""
    module = tree_of((ROOT / file).read_text(encoding="utf-8"))
    tests = {test.name: test.decorator_list for test in module.body if isinstance(test, ast.FunctionDef)}
    of_all = [line.value for line in module.body if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "pytestmark"]
    return frozenset(name for name, marks in tests.items() if any("mark.swarm" in ast.unparse(mark) for mark in [*of_all, *marks]))
