import json

from peer.sync.engine.round.met import Met


def test_who_averaged_with_us_is_met_also_after_a_restart(tmp_path):
    met = Met(tmp_path / "met.json", "run-1")
    met.averaged(["ann", "bob"])

    again = Met(tmp_path / "met.json", "run-1")

    assert "ann" in again and "bob" in again and "eve" not in again and len(again) == 2


def test_another_run_begins_with_nobody_met(tmp_path):
    Met(tmp_path / "met.json", "run-1").averaged(["ann"])

    assert "ann" not in Met(tmp_path / "met.json", "run-2")


def test_a_damaged_list_is_begun_anew(tmp_path, caplog):
    for damage in ("{", "[]", json.dumps({"run": "run-1", "peers": 7})):
        (tmp_path / "met.json").write_text(damage)
        assert len(Met(tmp_path / "met.json", "run-1")) == 0
        assert "ignored" in caplog.text
        caplog.clear()


def test_a_disk_that_takes_nothing_is_a_warning(tmp_path, caplog):
    met = Met(tmp_path / "gone" / "met.json", "run-1")
    met.averaged(["ann"])

    assert "ann" in met and "cannot keep" in caplog.text


def test_the_longest_not_met_is_forgotten_first(tmp_path):
    met = Met(tmp_path / "met.json", "run-1")
    met.averaged(f"peer-{number}" for number in range(4096))
    met.averaged(["peer-0", "one-more"])

    assert "peer-0" in met and "one-more" in met and "peer-1" not in met and len(met) == 4096
