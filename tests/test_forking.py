"""Forked programs, whose time is in no account of the worker that asked for them."""

from tests import warm


def test_what_a_forked_program_takes_is_written_down_with_the_test_that_asked_for_it(tmp_path, request):
    account = tmp_path / "account.tsv"
    busy = "import time\nwhile time.process_time() < 0.2: pass"
    assert warm.run(busy, env={"DD_TESTS_CPU": str(account)}).returncode == 0
    ((seconds, test, what),) = (line.split("\t") for line in account.read_text().splitlines())
    assert float(seconds) >= 0.2 and test == request.node.nodeid and "tests.warm:_run" in what
