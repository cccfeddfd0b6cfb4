"""A volunteer's machine is its owner's: hours of the day, and orders that a running peer follows."""

import datetime
import logging
from zoneinfo import ZoneInfo

import pytest

from peer.supervise import cli as main
from peer.volunteer.resting import FILE, Hours, Resting
from swarm.errors import ExitCode, UserError


def at(text):
    return datetime.time.fromisoformat(text)


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("22-7", ["22:00", "23:59", "00:00", "06:59:59"], ["07:00", "12:00", "21:59:59"]),
        ("9-17", ["09:00", "16:59"], ["17:00", "08:59", "00:00"]),
        ("22:30-7:15", ["22:30", "07:14"], ["22:29", "07:15"]),
        ("0-24", ["00:00", "13:00", "23:59"], []),
        ("20-24", ["20:00", "23:59"], ["00:00", "19:59"]),
    ],
)
def test_hours_are_a_part_of_the_day_that_may_go_over_midnight(hours, inside, outside):
    parsed = Hours.parse(hours)
    assert all(parsed.now(at(time)) for time in inside) and not any(parsed.now(at(time)) for time in outside)


@pytest.mark.parametrize("text", ["22", "22-", "22-25", "7:60-8", "now", "22-7-9", ""])
def test_hours_that_are_none_are_a_users_error(text):
    with pytest.raises(UserError, match="hours is"):
        Hours.parse(text)


@pytest.mark.parametrize("day", ["2026-03-28", "2026-10-24"])
def test_hours_hold_by_the_clock_on_the_wall_through_both_changes_of_summer_time(tmp_path, day):
    """Berlin's nights of 23 and of 25 hours: the peer trains exactly while a clock in the room shows 22 to 7."""
    zone = ZoneInfo("Europe/Berlin")
    began = datetime.datetime.fromisoformat(f"{day}T12:00").replace(tzinfo=zone).astimezone(datetime.timezone.utc)
    now = [began]
    resting = Resting(tmp_path, "22-7", clock=lambda: now[0].timestamp(), wall=lambda: now[0].astimezone(zone).time())
    while now[0] < began + datetime.timedelta(hours=26):
        shown = now[0].astimezone(zone).time()
        assert resting() == (at("07:00") <= shown < at("22:00")), shown
        now[0] += datetime.timedelta(minutes=10)


def test_an_order_is_followed_within_a_second_and_a_peer_started_later_follows_it_too(tmp_path, capsys, caplog):
    now = [0.0]
    resting = Resting(tmp_path, clock=lambda: now[0])
    assert not resting()
    (tmp_path / "in_use.lock").touch()
    assert main(["pause", "--output_dir", str(tmp_path)]) == 0 and "paused" in capsys.readouterr().out
    assert not resting()
    now[0] += 1
    with caplog.at_level(logging.INFO, "peer.volunteer.resting"):
        assert resting() and Resting(tmp_path)()
    assert "resting: paused by dd-peer pause" in caplog.text
    (tmp_path / FILE).write_text("perhaps")
    now[0] += 1
    assert resting(), "what nobody understands changes nothing"
    now[0] += 1
    assert resting() and caplog.text.count("says neither running nor paused") == 1
    assert main(["resume", "--output_dir", str(tmp_path)]) == 0
    now[0] += 1
    assert not resting()


def test_an_order_rules_within_the_hours_too(tmp_path):
    resting = Resting(tmp_path, "22-7", clock=lambda: 0.0, wall=lambda: at("23:00"))
    assert not resting()
    (tmp_path / "in_use.lock").touch()
    main(["pause", "--output_dir", str(tmp_path)])
    assert Resting(tmp_path, "22-7", clock=lambda: 0.0, wall=lambda: at("23:00"))()


def test_an_order_for_a_peer_that_is_not_there_is_a_mistake(tmp_path, capsys):
    assert main(["pause", "--output_dir", str(tmp_path / "nowhere")]) == ExitCode.CONFIG
    assert "There is no folder" in capsys.readouterr().err
    assert main(["pause", "--output_dir", str(tmp_path)]) == ExitCode.CONFIG
    assert capsys.readouterr().err == f"error: No peer has run in {tmp_path}. Give the peer's --output_dir.\n" and not list(tmp_path.iterdir())


def test_a_helper_does_not_rest(tmp_path, capsys):
    (tmp_path / "settled").mkdir()
    (tmp_path / "run.json").touch()
    assert main(["pause", "--output_dir", str(tmp_path)]) == ExitCode.CONFIG
    assert "assists, and does not rest. Stop it with Ctrl-C" in capsys.readouterr().err
    (tmp_path / "contribution_number").touch()  # it trained here, too
    assert main(["pause", "--output_dir", str(tmp_path)]) == ExitCode.OK
