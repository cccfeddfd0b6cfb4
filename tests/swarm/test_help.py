"""--help of the two programs with many options: one screen first, everything or one section when asked. And examples, of every command."""

import argparse
import dataclasses
import re
import shlex

import pytest

from datasetserver import __main__ as datasetserver
from datasetserver import bans, heads, orders
from datasetserver.config import ServerConfig
from peer import export, finetune, generate
from peer.config import PeerConfig
from peer.volunteer import purge, resting
from swarm import status
from swarm.arguments import ArgumentParser
from swarm.errors import UserError
from swarm.page import monitor
from swarm.run_config import RunConfig

PROGRAMS = [(finetune.main, PeerConfig), (datasetserver._main, ServerConfig)]
each_program = pytest.mark.parametrize(("main", "config"), PROGRAMS, ids=["dd-peer", "dd-datasetserver"])
OF_THE_HOST = ("init", "invite", "successor", "token", "token add", "token remove", "token list", *bans.VERBS, *heads.VERBS, *orders.VERBS)
COMMANDS = {
    **{f"dd-datasetserver {verb}": datasetserver._main for verb in OF_THE_HOST},
    **{f"dd-peer {verb}": resting.main for verb in resting.VERBS},
    "dd-peer --purge": purge.main, "dd-status": status._parse, "dd-monitor": monitor._parse,
    "dd-export": export.main, "dd-generate": generate.main,
}  # fmt: skip


@pytest.fixture
def shown(capsys, monkeypatch):
    """What a program prints on stdout for these flags, 100 columns wide."""

    def ask(main, *argv):
        monkeypatch.setenv("COLUMNS", "102")  # argparse leaves two free
        with pytest.raises(SystemExit) as ended:
            main(list(argv))
        assert ended.value.code == 0
        return capsys.readouterr().out

    return ask


@each_program
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_first_help_fits_one_screen_and_names_the_way_to_the_rest(shown, main, config, flag):
    lines = shown(main, flag).splitlines()
    assert 24 <= len(lines) <= 45 and max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert "--help all" in text and "examples:" in text and "  --model " in text


@each_program
def test_the_help_of_all_names_every_option(shown, main, config):
    text = shown(main, "--help", "all")
    for field in (*dataclasses.fields(config), *dataclasses.fields(RunConfig)):
        assert f"--{field.name}" in text.replace(",", " ").split(), field.name


@each_program
def test_the_first_help_counts_the_options_that_the_help_of_all_shows(shown, main, config):
    listed = [line for line in shown(main, "--help", "all").splitlines() if line.startswith("  -")]
    assert f"shows all {len(listed)} options" in shown(main, "--help")


def test_the_help_of_a_section_shows_that_section_alone(shown):
    text = shown(finetune.main, "--help", "training")  # a part of 'helping without training', too
    assert text.startswith("This peer: training:") and "--train_batch_size" in text and "--assist" not in text


def test_the_help_of_a_part_of_a_title_shows_all_sections_that_have_it(shown):
    text = shown(finetune.main, "--help=LoHa")
    assert "The run: the methods loha, lokr and lora:" in text and "--rank" in text and "--model " not in text


@each_program
def test_an_unknown_section_is_answered_with_the_sections_in_one_line(main, config):
    with pytest.raises(UserError) as refused:
        main(["--help", "nonesuch"])
    assert refused.value.message == "--help has no section 'nonesuch'." and "\n" not in str(refused.value)
    sections = [field.metadata["section"] for field in (*dataclasses.fields(config), *dataclasses.fields(RunConfig))]
    for section in filter(None, sections):
        assert section.split(": ")[-1] in refused.value.fix


@each_program
def test_a_wrong_flag_is_answered_with_the_way_to_all_options(main, config):
    with pytest.raises(UserError, match=r"^Unknown flag --nonesuch\. See --help all for all of them\.$"):
        main(["--nonesuch", "1"])
    with pytest.raises(UserError, match="See --help all"):
        main(["--resolution", "wide"])


@each_program
def test_the_examples_use_flags_that_there_are(shown, main, config):
    examples = shown(main, "--help").split("examples:")[1]
    used = set(re.findall(r"--\w+", examples))
    assert used <= {*re.findall(r"--\w+", shown(main, "--help", "all")), "--help"} and len(used) >= 4


def test_the_servers_examples_show_how_to_let_in_by_tokens(shown):
    examples = shown(datasetserver._main, "--help").split("examples:")[1]
    assert "token add" in examples and "--tokens FILE" in examples


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_fits_one_screen_and_ends_with_examples_that_it_can_read(shown, monkeypatch, command):
    main, (program, *verb) = COMMANDS[command], command.split()
    text = shown(main, *verb, "--help")
    *_, examples = text.split("\nexamples:\n")
    assert len(text.splitlines()) <= 50 and examples != text

    class Read(Exception):
        pass

    def read(parser, *args):
        _, unknown = argparse.ArgumentParser.parse_known_args(parser, *args)
        raise Read(unknown)

    monkeypatch.setattr(ArgumentParser, "parse_known_args", read)
    for line in examples.splitlines():
        first, *words = shlex.split(line)
        assert first == program and words[: len(verb)] == verb[: len(words)]
        with pytest.raises(Read) as was:
            main(words)
        assert was.value.args == ([],), f"it does not know {was.value.args[0]}"


def test_the_help_of_init_is_short_at_first(shown):
    assert "--lr_scheduler" not in shown(datasetserver._main, "init", "--help")
    assert "--lr_scheduler" in shown(datasetserver._main, "init", "--help", "all")
