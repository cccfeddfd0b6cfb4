"""`--push_to_hub` against a small stand-in of the Hub in this process; the real one was never asked."""

import base64
import json
import signal
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import get_session

from peer.finetune import main
from peer.launch.starting_model import load_model
from peer.loop.train import Trainer
from peer.results import hub
from peer.results.result import Result, public, read_result, write_result
from peer.rooms import load_part
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig

TOKEN = "hf_secret"


class Hub(BaseHTTPRequestHandler):
    """Takes model repositories of the user `me`, whose token is TOKEN; every file is small enough to come with its commit."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server = self.server
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials"}, 401)
        if self.path == "/api/repos/create":
            name = json.loads(body)["name"]
            owner = json.loads(body).get("organization") or "me"
            if owner != "me":
                return self.answer({"error": "not yours"}, 403)
            return self.answer({"url": f"{constants.ENDPOINT}/{owner}/{name}"})
        if self.path.endswith("/preupload/main"):
            if server.full:
                return self.answer({"error": "out of storage"}, 507)
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            return self.answer({"files": files})
        if self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{constants.ENDPOINT}/me/mine/commit/{'a' * 40}"
            return self.answer({"success": True, "commitUrl": url, "commitOid": "a" * 40, "hookOutput": ""})
        return self.answer({"errors": [], "warnings": []})  # of a card's header

    def do_GET(self):
        self.answer({"error": "no such repository"}, 404)

    def answer(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.full = {}, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


def written(run, folder):
    """The result of a run that ended before its first step."""
    model = load_model(run, {}, torch.device("cpu"))
    method = load_part("methods", run.method).build(run)
    write_result(method, model, method.attach(model), folder, Result.of(run, samples=64, round=3))
    return folder


@pytest.fixture
def result(tmp_path, tiny_model):
    return written(RunConfig(model=str(tiny_model), family="stable_diffusion", method="lora", run_name="toys"), tmp_path / "model")


def test_a_result_is_uploaded_whole_with_its_card(server, result):
    assert hub.prepare("mine", TOKEN) == "me/mine"
    hub.push(result, "me/mine", TOKEN)
    assert server.files.keys() == {"README.md", "pytorch_lora_weights.safetensors", "result.json"}
    assert server.files["README.md"] == (result / "README.md").read_bytes()
    sent = json.loads(server.files["result.json"])
    assert sent["run"]["values"]["method"] == "lora" and sent["samples"] == 64
    assert read_result(result).run.model


@pytest.mark.parametrize("options", [{"method": "full"}, {"method": "lora", "train_text_encoder": True}], ids=["full", "lora"])
def test_no_path_of_this_machine_is_uploaded(server, tiny_family, tmp_path, options):
    base = tiny_family("sd")
    hub.push(written(RunConfig(model=str(base), family="stable_diffusion", **options), tmp_path / "model"), "me/mine", TOKEN)
    assert len(server.files) >= 3
    assert not [name for name, data in server.files.items() for place in (base.parent, tmp_path) if str(place).encode() in data]


def test_a_base_model_at_home_is_resolved_and_its_place_told_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base").mkdir()
    assert Result.of(RunConfig(model="~/base")).run.model == str(tmp_path / "base")
    for place in ("~/base", "~nobody/base"):
        assert "base" not in public(Result(run=RunConfig(model=place)))["run"]["values"].get("model", "")


@pytest.mark.parametrize(
    ("repo", "token", "message", "code"),
    [
        ("me/mine", "hf_wrong", r"does not let this peer write to me/mine: the token was refused \(401\).*--hub_token", ExitCode.AUTH),
        ("me/mine", "", r"does not let this peer write to me/mine: there is no token.*HF_TOKEN", ExitCode.AUTH),
        ("others/mine", TOKEN, r"does not let this peer write to others/mine: ", ExitCode.AUTH),
        ("no/such/name", TOKEN, r"does not let this peer write to no/such/name: .*--hub_model_id", ExitCode.CONFIG),
    ],
)
def test_who_may_not_write_hears_it_before_training(server, monkeypatch, tmp_path, repo, token, message, code):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match=message) as error:
        hub.prepare(repo, token)
    assert error.value.code == code and "\n" not in str(error.value) and "hf_wrong" not in str(error.value)


def test_an_upload_that_fails_leaves_the_result_and_says_how_to_try_again(server, result):
    before = {path.name: path.read_bytes() for path in result.iterdir()}
    server.full = True
    with pytest.raises(UserError, match=rf"upload to me/mine failed: .*507.*to try again: hf upload me/mine {result} --exclude result.json") as error:
        hub.push(result, "me/mine", TOKEN)
    assert error.value.code == ExitCode.NETWORK and TOKEN not in str(error.value)
    assert {path.name: path.read_bytes() for path in result.iterdir()} == before and not server.files


def test_a_hub_that_is_away_is_one_line(result, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="Check the network") as error:
        hub.prepare("me/mine", TOKEN)
    assert error.value.code == ExitCode.NETWORK and "\n" not in str(error.value)


@pytest.fixture
def silent_hub(monkeypatch):
    """It takes every connection and never answers, which is noticed after 0.2 s."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(hub, "SECONDS", 0.2)
        yield


@pytest.mark.timeout(60)
def test_a_hub_that_never_answers_is_one_line(silent_hub, result):
    before = get_session().timeout
    with pytest.raises(UserError, match=r"does not let this peer write to me/mine: .*timed out.*Check the network") as first:
        hub.prepare("me/mine", TOKEN)
    with pytest.raises(UserError, match=rf"upload to me/mine failed: .*timed out.*to try again: hf upload me/mine {result}") as second:
        hub.push(result, "me/mine", TOKEN)
    assert {first.value.code, second.value.code} == {ExitCode.NETWORK}
    assert get_session().timeout == before, "what else asks the Hub waits as before"


def test_sessions_of_huggingface_hub_before_1_0_have_a_limit_too(silent_hub):
    requests = pytest.importorskip("requests")
    session = hub._limit_session(requests.Session())
    with pytest.raises(requests.exceptions.ReadTimeout):
        session.post(constants.ENDPOINT, json={})


@pytest.fixture
def undisturbed(monkeypatch):
    """The program runs in this process: its signal handlers and its token go with the test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setenv("HF_TOKEN", "of this machine")
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def words(tiny_model, pictures, out, *more):
    where = [
        "--model",
        tiny_model,
        "--train_data_dir",
        pictures,
        "--output_dir",
        out,
        "--resolution",
        16,
        "--device",
        "cpu",
        "--num_threads",
        1,
    ]
    word = ["--placeholder_token", "<dicoo>", "--initializer_token", "a", "--max_train_steps", 2, "--batch_size", 2]
    return [str(argument) for argument in (*where, *word, "--push_to_hub", "--hub_token", TOKEN, *more)]


def test_a_run_ends_with_its_result_on_the_hub_and_its_token_nowhere(server, tiny_model, pictures, tmp_path, undisturbed, capfd):
    out = tmp_path / "toy"
    assert main(words(tiny_model, pictures, out, "--save_as_full_pipeline")) == ExitCode.OK
    assert {
        "README.md",
        "learned_embeds.safetensors",
        "model_index.json",
        "unet/diffusion_pytorch_model.safetensors",
    } <= server.files.keys()
    assert (out / "learned_embeds.safetensors").samefile(out / "model" / "learned_embeds.safetensors")
    printed = "".join(capfd.readouterr())
    assert "pushed" in printed and "to me/toy" in printed and "method=textual_inversion learning_rate=0.0005" in printed
    kept = [path.read_bytes() for path in out.rglob("*") if path.is_file()]
    assert TOKEN not in printed and not any(TOKEN.encode() in data for data in kept)
    assert main(words(tiny_model, pictures, out, "--dry_run")) == ExitCode.OK
    printed = capfd.readouterr().out
    assert TOKEN not in printed and json.loads(printed)["peer"]["hub_token"] == "(hidden)"


def test_a_run_whose_upload_fails_has_its_result_all_the_same(server, tiny_model, pictures, tmp_path, undisturbed):
    server.full = True
    with pytest.raises(UserError, match="hf upload me/toy") as error:
        main(words(tiny_model, pictures, tmp_path / "toy"))
    assert error.value.code == ExitCode.NETWORK and read_result(tmp_path / "toy" / "model").samples == 4


def test_a_run_that_is_stopped_before_its_end_stays_here_and_says_how_to_upload_it(
    server, tiny_model, pictures, tmp_path, undisturbed, monkeypatch, capfd
):
    run = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda trainer: run(trainer) and False)
    assert main(words(tiny_model, pictures, tmp_path / "toy")) == ExitCode.OK
    assert not server.files and read_result(tmp_path / "toy" / "model").samples == 4
    folder = tmp_path / "toy" / "model"
    assert f"stopped before its end; to upload it: hf upload me/toy {folder} --exclude result.json" in "".join(capfd.readouterr())


def test_a_run_that_may_not_upload_does_not_begin(server, tiny_model, pictures, tmp_path, undisturbed):
    with pytest.raises(UserError, match="does not let this peer write to others/toy"):
        main(words(tiny_model, pictures, tmp_path / "toy", "--hub_model_id", "others/toy"))
    assert not (tmp_path / "toy").exists()
