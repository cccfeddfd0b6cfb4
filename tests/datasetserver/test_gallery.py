"""Pictures on the page: from whom the host names and nobody else, encoded anew, and never more than there is room for."""

import base64
import io
import time

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from PIL import Image

from datasetserver.gallery import MAX_PIXELS, Gallery, encoded_anew
from swarm.identity import Identity
from swarm.peer_key import PeerKey, check_statement, peer_id_of
from swarm.picture_file import BadSample
from swarm.protocol import DrawnPicture, HistoryAnswer, PictureRequest, PicturesAnswer
from swarm.signed_request import Signer
from swarm.signing import BadSignature
from tests.datasetserver.hosting import Host
from tests.datasetserver.test_http import call, get_run, refused

RUN = "0123456789abcdef"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two peers' keys, read from files that p2pd wrote."""
    folder, found = tmp_path_factory.mktemp("keys"), {}
    for name in ("ada", "eve"):
        identity = Identity(folder / name)
        found[name] = PeerKey.read(folder / name)
        assert found[name].peer_id == identity.peer_id
        identity.close()
    return found


def encoded(side: int = 8, colour: str = "red", form: str = "PNG", **about) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(out, form, **about)
    return out.getvalue()


def request_of(key, run_id: str = RUN, *, data: bytes | None = None, peer: str | None = None, **values) -> PictureRequest:
    known = {"round": 3, "samples": 96, "prompt": "a cat", "picture": base64.b64encode(data or encoded()).decode()}
    return PictureRequest(run_id=run_id, peer=peer or key.peer_id, **{**known, **values})


def put(host, key, request: PictureRequest):
    """What the server answers when the holder of `key` sends it."""
    body = request.model_dump_json().encode()
    return call(host, "/v1/pictures", raw=body, method="PUT", headers=Signer(key).headers("PUT", "/v1/pictures", body))


def test_a_peers_signature_is_known_without_a_node(keys):
    ada, eve = keys["ada"], keys["eve"]
    signature = ada.sign(b"something")
    assert peer_id_of(ada.public.encode()) == ada.peer_id
    check_statement(ada.peer_id, b"something", ada.public, signature)
    with pytest.raises(ValueError, match="another exponent"):
        PeerKey(rsa.generate_private_key(public_exponent=3, key_size=2048))
    for peer, statement, key, sign in (
        (ada.peer_id, b"something else", ada.public, signature),
        (eve.peer_id, b"something", ada.public, signature),
        (ada.peer_id, b"something", eve.public, eve.sign(b"something")),
        (ada.peer_id, b"something", ada.public, eve.sign(b"something")),
        (ada.peer_id, b"something", ada.public, "no base64!"),
        (ada.peer_id, b"something", "ssh-ed25519 AAAA", signature),
        (ada.peer_id, b"something", ada.public + "A" * 2000, signature),
        (ada.peer_id, b"something", "", ""),
    ):
        with pytest.raises(BadSignature):
            check_statement(peer, statement, key, sign)


def test_what_is_no_identity_file_is_told(tmp_path):
    for content in (b"", b"\x08\x01\x12\x00", b"\x08\x00\x12\x82\x01torn", b"\x08\x00\x12\x03abc"):
        (tmp_path / "key").write_bytes(content)
        with pytest.raises(ValueError):
            PeerKey.read(tmp_path / "key")


def test_only_whom_the_host_names_may_send_pictures_and_only_in_its_own_name(tmp_path, keys):
    ada, eve = keys["ada"], keys["eve"]
    host = Host(tmp_path, "--pictures_from", ada.peer_id, samples=16)
    try:
        host.start()
        run_id = get_run(host).run_id
        refused(put(host, eve, request_of(eve, run_id)), 403, "not_asked_to_draw")
        refused(put(host, eve, request_of(eve, run_id, peer=ada.peer_id)), 403, "bad_signature")
        refused(put(host, ada, request_of(ada, run_id, data=b"no picture at all")), 422, "bad_picture")
        refused(put(host, ada, request_of(ada)), 409, "other_run")
        assert PicturesAnswer.model_validate_json(call(host, "/v1/pictures")[2]).pictures == []

        status, _, body = put(host, ada, request_of(ada, run_id, prompt="<b>a cat</b>"))
        (kept,) = PicturesAnswer.model_validate_json(call(host, "/v1/pictures")[2]).pictures
        assert status == 200 and kept == DrawnPicture.model_validate_json(body) and kept.prompt == "<b>a cat</b>"
        status, headers, picture = call(host, f"/v1/pictures/{kept.digest}")
        assert status == 200 and headers["Content-Type"] == "image/webp" and headers["X-Content-Type-Options"] == "nosniff"
        with Image.open(io.BytesIO(picture)) as image:
            assert image.size == (8, 8)
        refused(call(host, "/v1/pictures/" + "0" * 64), 404, "no_such_picture")
        host.stop()
        host.start()
        assert PicturesAnswer.model_validate_json(call(host, "/v1/pictures")[2]).pictures == [kept]
        assert HistoryAnswer.model_validate_json(call(host, "/v1/history")[2]).time == []
    finally:
        host.stop()


def test_where_the_host_names_nobody_a_peer_that_is_not_live_may_not_send(tmp_path, keys):
    host = Host(tmp_path, samples=16)
    try:
        host.start()
        refused(put(host, keys["ada"], request_of(keys["ada"], get_run(host).run_id)), 403, "not_asked_to_draw")
    finally:
        host.stop()


def test_where_the_host_names_nobody_its_assisting_peer_is_asked_once_it_draws(tmp_path, keys):
    gallery = Gallery(tmp_path / "gallery")
    ada, here = keys["ada"].peer_id, {keys["ada"].peer_id: "assist", keys["eve"].peer_id: "train"}
    assert set(gallery.asked(here)) == set(here), "it may be one that does not draw"
    gallery.add(request_of(keys["ada"]), time.time())
    assert set(gallery.asked(here)) == {ada}
    assert set(gallery.asked({**here, ada: "train"})) == set(here)
    assert set(gallery.asked({keys["eve"].peer_id: "train"})) == {keys["eve"].peer_id}, "when it has gone, all others are asked again"


def test_nothing_but_pixels_comes_through():
    secret = Image.Exif()
    secret[0x010E] = "from Ada's home"
    data = encoded(1500, form="JPEG", exif=secret)
    assert b"Ada" in data
    anew, size = encoded_anew(base64.b64encode(data).decode())
    assert size == (1024, 1024) and b"Ada" not in anew and anew[8:12] == b"WEBP"


def test_bombs_and_other_formats_are_refused():
    out = io.BytesIO()
    Image.new("1", (2049, 2048)).save(out, "PNG")
    assert MAX_PIXELS < 2049 * 2048
    pictures = [base64.b64encode(data).decode() for data in (out.getvalue(), encoded(form="GIF"), encoded()[:40], b"", b"<svg onload=alert(1)>")]
    for picture in (*pictures, "A", "AB"):
        with pytest.raises(BadSample):
            encoded_anew(picture)


def test_more_prompts_in_one_round_than_there_is_room_for_leave_the_newest(tmp_path, keys):
    gallery = Gallery(tmp_path / "gallery", most=3)
    request = request_of(keys["ada"])
    for number in range(5):
        gallery.add(request.model_copy(update={"prompt": f"prompt {number}"}), time.time())
    assert [picture.prompt for picture in gallery.pictures()] == ["prompt 4", "prompt 3", "prompt 2"]


def test_a_gallery_keeps_the_newest_rounds_and_some_of_all_before(tmp_path, keys):
    gallery = Gallery(tmp_path / "gallery", most=12)
    request = request_of(keys["ada"])
    for number in range(60):
        for prompt, colour in (("a cat", (number, 0, 0)), ("a dog", (0, number, 0))):
            picture = base64.b64encode(encoded(colour=colour)).decode()
            gallery.add(request.model_copy(update={"round": number, "prompt": prompt, "picture": picture}), time.time())
        assert len(gallery.pictures()) <= 12
    rounds = [picture.round for picture in gallery.pictures()]
    assert rounds == sorted(rounds, reverse=True) and rounds[0] == 59 and rounds[-1] == 0 and rounds.count(59) == 2
    assert {path.stem for path in (tmp_path / "gallery").glob("*.webp")} == {picture.digest for picture in gallery.pictures()}
    assert Gallery(tmp_path / "gallery").pictures() == gallery.pictures()


def test_the_second_picture_of_a_round_and_prompt_changes_nothing(tmp_path, keys):
    gallery = Gallery(tmp_path / "gallery")
    first = gallery.add(request_of(keys["ada"]), 1.0)
    version = gallery.version
    assert gallery.add(request_of(keys["ada"], data=encoded(colour="blue")), 2.0) == first and gallery.version == version


@pytest.mark.parametrize("content", [b"{", b"[5]", b""])
def test_a_gallery_whose_list_is_broken_begins_anew(tmp_path, keys, content, caplog):
    (tmp_path / "pictures.json").write_bytes(content)
    gallery = Gallery(tmp_path)
    assert gallery.pictures() == [] and "the gallery starts empty" in caplog.text
    gallery.add(request_of(keys["ada"]), 1.0)
    assert len(Gallery(tmp_path).pictures()) == 1
