"""The host's key: what it signs, and which keys a peer takes."""

import re
import stat

import pytest

from swarm.digest import digest_bytes
from swarm.errors import ExitCode, UserError
from swarm.signing import MOST_SIGNATURE, SIGNATURE, BadSignature, HostKey, KnownHosts, check_signature

DIGEST = digest_bytes(b"a run")
URL, OTHER_URL, RUN, OTHER_RUN = "http://203.0.113.7:9090", "http://203.0.113.8:9090", "1" * 16, "2" * 16


def test_a_host_keeps_its_key_where_only_it_can_read_it(tmp_path):
    key = HostKey(tmp_path / "host.key")
    assert HostKey(tmp_path / "host.key").public == key.public and len(key.public) == 64
    assert stat.S_IMODE((tmp_path / "host.key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["host.key"]


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_file_that_is_no_key_is_named_and_left_alone(tmp_path, content):
    (tmp_path / "host.key").write_bytes(content)
    with pytest.raises(UserError, match=r"host\.key is not an Ed25519 key"):
        HostKey(tmp_path / "host.key")
    assert (tmp_path / "host.key").read_bytes() == content


def test_a_key_that_cannot_be_written_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match=r"Cannot use the host's key") as raised:
        HostKey(tmp_path / "missing" / "host.key")
    assert raised.value.code == ExitCode.DISK


def test_a_key_that_differs_behind_its_first_16_digits_is_shown_whole(tmp_path):
    key = "a" * 64
    for given, shown in ((key[:-1] + "b", (key, key[:-1] + "b")), ("b" + key[1:], (key[:16], "b" + key[1:16]))):
        with pytest.raises(UserError, match=f"signs with the key {shown[0]}, not with {shown[1]} as --host_key says"):
            KnownHosts(tmp_path / "known", given).check(URL, RUN, key)


def test_a_drawn_key_is_in_no_file_before_it_is_kept(tmp_path):
    path = tmp_path / "host.key"
    drawn = HostKey(path, missing="draw")
    assert drawn.is_new and not path.exists()
    drawn.keep()
    assert not drawn.is_new and HostKey(path, missing="refuse").public == drawn.public
    other = HostKey(path, missing="draw")
    other.keep()
    assert HostKey(path).public == drawn.public == other.public
    missing = HostKey(tmp_path / "missing" / "host.key", missing="draw")
    with pytest.raises(UserError, match=r"Cannot use the host's key"):
        missing.keep()


def test_a_key_that_is_only_to_be_read_is_not_made(tmp_path):
    with pytest.raises(UserError, match=r"There is no host key .*host\.key\. Restore it"):
        HostKey(tmp_path / "host.key", missing="refuse")
    assert not list(tmp_path.iterdir())


def flipped(text, position):
    digit = int(text[position], 16) ^ 1
    return f"{text[:position]}{digit:x}{text[position + 1 :]}"


def test_a_signature_is_of_one_key_for_one_digest_in_one_role(tmp_path):
    key, other = HostKey(tmp_path / "host.key"), HostKey(tmp_path / "other.key")
    signature = key.sign("run", DIGEST)
    check_signature("run", DIGEST, signature, key.public)
    with pytest.raises(BadSignature, match="not signed"):
        check_signature("run", DIGEST, "", key.public)
    forged = [("manifest", DIGEST, signature, key.public), ("run", DIGEST, signature, other.public), ("run", DIGEST, "00" * 64, key.public)]
    forged += [("run", flipped(DIGEST, i), signature, key.public) for i in range(64)]
    forged += [("run", DIGEST, flipped(signature, i), key.public) for i in range(128)]
    forged += [("run", DIGEST, signature, "00"), ("run", DIGEST, "no hex", key.public), ("run", DIGEST, signature, "")]
    for arguments in forged:
        with pytest.raises(BadSignature, match="not that of the key"):
            check_signature(*arguments)


def test_the_key_seen_first_at_a_url_and_for_a_run_is_the_only_one_taken_there(tmp_path):
    path = tmp_path / "known" / "hosts.json"
    KnownHosts(path).check(URL + "/", RUN, "a" * 64)
    KnownHosts(path).check(URL, RUN, "a" * 64)
    for url, run in [(URL, RUN), (URL, OTHER_RUN), (OTHER_URL, RUN)]:
        with pytest.raises(UserError, match="not the same host") as raised:
            KnownHosts(path).check(url, run, "b" * 64)
        assert raised.value.code == ExitCode.AUTH and "--host_key" in raised.value.fix and str(path) in raised.value.message
    KnownHosts(path).check(OTHER_URL, OTHER_RUN, "b" * 64)
    KnownHosts(path).check(URL, OTHER_RUN + "x", "a" * 64)


def test_a_key_that_was_given_overrules_what_was_seen_and_is_known_from_then_on(tmp_path):
    path = tmp_path / "hosts.json"
    KnownHosts(path).check(URL, RUN, "a" * 64)
    with pytest.raises(UserError, match="as --host_key says"):
        KnownHosts(path, "b" * 64).check(URL, RUN, "a" * 64)
    KnownHosts(path, "b" * 64).check(URL, RUN, "b" * 64)
    KnownHosts(path).check(URL, RUN, "b" * 64)
    with pytest.raises(UserError):
        KnownHosts(path).check(URL, RUN, "a" * 64)


def test_who_only_looks_remembers_nothing(tmp_path):
    KnownHosts(tmp_path / "hosts.json", remember=False).check(URL, RUN, "a" * 64)
    assert not list(tmp_path.iterdir())


def test_a_file_of_hosts_that_is_damaged_or_cannot_be_written_is_a_users_error(tmp_path):
    (tmp_path / "hosts.json").write_text("{")
    with pytest.raises(UserError, match="Cannot read"):
        KnownHosts(tmp_path / "hosts.json").check(URL, RUN, "a" * 64)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"Cannot (read|write)"):
        KnownHosts(tmp_path / "file" / "hosts.json").check(URL, RUN, "a" * 64)


def test_a_successor_signs_in_the_place_of_the_key_that_signed_it(tmp_path):
    key = HostKey(tmp_path / "host.key")
    key.write_successor(tmp_path / "spare")
    assert stat.S_IMODE((tmp_path / "spare").stat().st_mode) == 0o600
    spare = HostKey(tmp_path / "spare", missing="refuse")
    signature = spare.sign("run", DIGEST)
    assert spare.public == key.public and len(signature) == MOST_SIGNATURE and re.fullmatch(SIGNATURE, signature)
    check_signature("run", DIGEST, signature, key.public)
    forged = [("manifest", DIGEST, signature), ("run", flipped(DIGEST, 0), signature), ("run", DIGEST, signature[:-1]), ("run", DIGEST, signature + "0")]
    forged += [("run", DIGEST, flipped(signature, i)) for i in range(MOST_SIGNATURE)]
    forged.append(("run", DIGEST, signature[:128]))  # the spare's own, without the host's word for it
    for arguments in forged:
        with pytest.raises(BadSignature, match="not that of the key"):
            check_signature(*arguments, key.public)


def test_nobody_makes_itself_a_successor(tmp_path):
    key, other = HostKey(tmp_path / "host.key"), HostKey(tmp_path / "other.key")
    other.write_successor(tmp_path / "spare")
    with pytest.raises(BadSignature):
        check_signature("run", DIGEST, HostKey(tmp_path / "spare").sign("run", DIGEST), key.public)
    (tmp_path / "spare").write_text((tmp_path / "spare").read_text().replace(other.public, key.public))
    with pytest.raises(UserError, match=f"successor of {key.public[:16]}, which has not signed it"):
        HostKey(tmp_path / "spare")
    claimed = key.sign("run", other.public)  # the host's signature in another role endorses nobody
    with pytest.raises(BadSignature):
        check_signature("run", DIGEST, other.sign("run", DIGEST) + other.public + claimed, key.public)


def test_a_spare_overwrites_nothing_and_names_no_successor_itself(tmp_path):
    key = HostKey(tmp_path / "host.key")
    (tmp_path / "taken").write_text("a letter")
    with pytest.raises(UserError, match="taken exists"):
        key.write_successor(tmp_path / "taken")
    with pytest.raises(UserError, match="Cannot use the host's key"):
        key.write_successor(tmp_path / "missing" / "spare")
    key.write_successor(tmp_path / "spare")
    with pytest.raises(UserError, match="is a successor itself"):
        HostKey(tmp_path / "spare").write_successor(tmp_path / "third")
    assert (tmp_path / "taken").read_text() == "a letter" and not (tmp_path / "third").exists()
