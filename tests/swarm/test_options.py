import dataclasses

import pytest
from pydantic import TypeAdapter

from peer.config import PeerConfig
from swarm.arguments import ArgumentParser
from swarm.errors import UserError
from swarm.options import build, load_toml, option, options, parse_flags, read_toml, with_token
from swarm.other_trainers import OUR_NAMES
from swarm.run_config import RunConfig


@options
class Drink:
    """A drink (as everybody likes it)."""

    kind: str = option("tea", "What is in the cup.", choices=("tea", "coffee"))
    millilitres: int = option(200, "How much.", aliases=("ml",))
    sugar: float = option(0.0, "Share of sugar.", section="how it is served")
    hot: bool = option(True, "Whether it steams.")
    guests: tuple[str, ...] = option((), "Who drinks.")


def parse(*argv):
    given, _ = parse_flags(ArgumentParser(allow_abbrev=False), argv, Drink)
    return given


def test_only_what_was_given_is_in_the_answer():
    assert parse() == {}
    assert parse("--ml", "300") == {"millilitres": 300}


@pytest.mark.parametrize(("flag", "value"), [("--hot", True), ("--hot=True", True), ("--hot=False", False), ("--no_hot", False)])
def test_a_boolean_stands_alone_or_takes_a_word(flag, value):
    assert parse(flag) == {"hot": value}


def test_help_shows_the_options_below_their_headings_after_one_line_of_usage(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    shown = [line for line in capsys.readouterr().out.splitlines() if line and (not line.startswith("   ") or "--" in line)]
    assert shown[0].endswith(" [options]")
    after = shown[shown.index("A drink:") + 1 :]
    assert [line.split()[0].rstrip(",") for line in after] == ["as", "--kind", "--millilitres", "A", "--sugar", "--hot", "--guests"]
    assert "A drink: how it is served:" in after


def test_a_list_takes_any_number_of_values():
    assert build(Drink, parse("--guests", "ann", "bob")).guests == ("ann", "bob")
    assert build(Drink, parse("--guests", "ann", "--hot", "--guests=bob", "--guests", "eve", "dan")).guests == ("ann", "bob", "eve", "dan")
    assert parse("--guests") == {"guests": []}


def test_an_unknown_flag_is_answered_with_the_nearest_right_one():
    with pytest.raises(UserError, match=r"--mililitres.*Did you mean '--millilitres'"):
        parse("--mililitres", "3")


@pytest.mark.parametrize(
    ("argv", "what"), [(["--ml", "many"], r"--millilitres/--ml: invalid int value: 'many'\. "), (["--ml"], "--ml: expected one argument")]
)
def test_a_wrong_value_is_one_line_without_a_page_of_usage(argv, what, capsys):
    with pytest.raises(UserError, match=what):
        parse(*argv)
    assert capsys.readouterr() == ("", "")


def test_a_stray_word_is_an_error():
    with pytest.raises(UserError, match="Unknown argument coffee"):
        parse("coffee")


def test_flags_overrule_the_file_which_overrules_defaults(tmp_path):
    file = tmp_path / "drink.toml"
    file.write_text('kind = "coffee"\nmillilitres = 50\n')

    drink = build(Drink, read_toml(file, Drink), parse("--ml", "70"))

    assert (drink.kind, drink.millilitres, drink.sugar) == ("coffee", 70, 0.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sugr = 0.5", r"no option 'sugr'.*Did you mean 'sugar'"),
        ("kind = ", "not valid TOML"),
        ("sugar = " + "9" * 5000, "not valid TOML"),
        ("sugar = " + "[" * 5000, "not valid TOML"),
    ],
)
def test_a_file_with_a_mistake_names_it(tmp_path, text, expected):
    file = tmp_path / "drink.toml"
    file.write_text(text)

    with pytest.raises(UserError, match=expected):
        read_toml(file, Drink)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbfrank = 4\n")
    assert load_toml(path) == {"rank": 4}


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_toml(tmp_path, Drink)
    with pytest.raises(UserError, match="There is no file"):
        read_toml(tmp_path / "none.toml", Drink)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"kind": "cofee"}, "Did you mean 'coffee'"),
        ({"millilitres": "many"}, "not int"),
        ({"millilitres": True}, "not int"),
        ({"hot": 1}, "not bool"),
        ({"guests": "ann"}, "guests"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(values, expected):
    with pytest.raises(UserError, match=expected):
        build(Drink, values)


def test_a_whole_number_passes_for_a_share():
    assert build(Drink, {"sugar": 1}).sugar == 1.0


@options
class Switch:
    """A switch."""

    on: bool | None = option(None, "Whether it is on; auto: by what is found out.")


@pytest.mark.parametrize(
    ("words", "value"), [([], None), (["--on"], True), (["--on", "True"], True), (["--no_on"], False), (["--on=auto"], None)]
)
def test_a_switch_may_be_left_to_the_program(words, value):
    given, _ = parse_flags(ArgumentParser(allow_abbrev=False), words, Switch)
    assert build(Switch, given).on is value


def test_a_switch_in_a_file_takes_the_same_words(tmp_path):
    file = tmp_path / "switch.toml"
    for text, value in (('on = "auto"', None), ("on = true", True), ("on = false", False)):
        file.write_text(text)
        assert build(Switch, read_toml(file, Switch)).on is value
    with pytest.raises(UserError, match="on is 'perhaps'"):
        build(Switch, {"on": "perhaps"})


def test_a_token_that_begins_with_a_dash_is_a_token():
    token = "-_l" + "a" * 40
    assert with_token(["--token", token, "--found"]) == [f"--token={token}", "--found"]
    for others in (["--token", "--found"], ["--token"], ["--token", "abc"], ["--name", token], [f"--token={token}"]):
        assert with_token(others) == others


def test_a_program_takes_a_token_that_begins_with_a_dash(monkeypatch):
    from peer.launch.command_line import parse
    from swarm import status

    token, seen = "--" + "a" * 41, []
    assert parse(["--datasetserver", "http://203.0.113.7", "--token", token, "--found"], {})[0].token == token
    monkeypatch.setattr(status, "_main", lambda args: seen.append(args.token))
    assert status.cli(["http://203.0.113.7", "--token", token]) == 0 and seen == [token]


def test_another_trainers_flag_is_answered_with_our_name_for_it():
    for theirs, ours in (("--network_dim", "--rank"), ("--cache-text-encoder-outputs", "--cache_text")):
        with pytest.raises(UserError, match=rf"Unknown flag {theirs}\. It is '{ours}' here"):
            parse_flags(ArgumentParser("peer"), [theirs, "4"], RunConfig, PeerConfig)


def test_a_program_without_that_option_does_not_name_it():
    with pytest.raises(UserError, match=r"^Unknown flag --network_dim\. See --help"):
        parse("--network_dim", "4")


def test_another_trainers_key_in_a_file_is_answered_too(tmp_path):
    (tmp_path / "run.toml").write_text("network_dim = 4\n")
    with pytest.raises(UserError, match=r"there is no option 'network_dim'\. It is 'rank' here"):
        read_toml(tmp_path / "run.toml", RunConfig)


def test_what_resembles_nothing_is_answered_without_a_guess():
    with pytest.raises(UserError, match=r"^Unknown flag --network_width\. See --help"):
        parse_flags(ArgumentParser("peer"), ["--network_width", "4"], RunConfig, PeerConfig)


@pytest.mark.parametrize(("theirs", "ours"), OUR_NAMES.items())
def test_other_trainers_names_lead_to_options_that_exist_here_and_are_none_themselves(theirs, ours):
    fields = [field for cls in (RunConfig, PeerConfig) for field in dataclasses.fields(cls)]
    known = {name for field in fields for name in (field.name, *field.metadata["aliases"], *field.metadata["switches"])}
    assert ours in known and theirs not in known


@options
class Kettle:
    """A kettle (of its owner's choice)."""

    litres: float = option(1.5, "How much it holds.", gt=0, lt=10)
    cups: int = option(4, "How many that makes.", le=20)
    below: float = option(0.0, "Depth.", ge=None)
    shape: str = option("round", "Its shape.", choices=("round", "tall"))


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"litres": 0.0}, "litres is 0.0. Use a value in (0, 10)."),
        ({"litres": float("nan")}, "litres is nan. Use a finite number."),
        ({"cups": -1}, "cups is -1. Use a value in [0, 20]."),
        ({"shape": "rund"}, "shape is 'rund'. Did you mean 'round'? Use one of round, tall."),
        ({"cups": "4"}, "cups is '4', which is not int. Give cups a value of type int."),
        ({"shape": 3}, "shape is '3'. Use one of round, tall."),
        ({"liters": 1.0}, "There is no option 'liters'. Did you mean 'litres'? Correct or remove it."),
    ],
)
def test_whoever_makes_it_is_told_in_one_line_what_is_wrong(values, line):
    with pytest.raises(UserError) as caught:
        Kettle(**values)
    assert str(caught.value) == line


def test_one_declaration_is_the_schema_too_and_numbers_are_0_or_more_where_nothing_else_is_said():
    schema = TypeAdapter(Kettle).json_schema()
    assert schema["additionalProperties"] is False
    assert schema["properties"]["cups"] == {"default": 4, "description": "How many that makes.", "maximum": 20, "minimum": 0, "title": "Cups", "type": "integer"}
    assert schema["properties"]["shape"]["enum"] == ["round", "tall"]
    assert Kettle(below=-3.5).below == -3.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        Kettle().cups = 3
