import pytest

from swarm.errors import ExitCode, UserError, run_program


def test_a_users_mistake_is_one_line_and_an_exit_code_of_its_kind(capsys):
    def main():
        raise UserError("The disk is full.", fix="Free some space.", code=ExitCode.DISK)

    assert run_program(main) == ExitCode.DISK
    assert capsys.readouterr().err == "error: The disk is full. Free some space.\n"


def test_debug_shows_where_it_came_from(capsys):
    def main():
        raise UserError("No.", fix="Yes.")

    run_program(main, debug=True)

    assert "Traceback" in capsys.readouterr().err


def test_a_mistake_of_ours_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        run_program(lambda: 1 // 0)


def test_a_program_that_returns_nothing_went_well():
    assert run_program(lambda: None) == 0
    assert run_program(lambda: 3) == 3


def test_ctrl_c_is_no_traceback(capsys):
    def main():
        raise KeyboardInterrupt

    assert run_program(main) == 130
    assert capsys.readouterr().err == "stopped.\n"
