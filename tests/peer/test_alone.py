"""Training on one machine, in this process: the loop, its accounts, stopping and resuming."""

import dataclasses
import json
import shutil
from contextlib import ExitStack
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import load_file

from peer.config import PeerConfig
from peer.contracts import LeaseLost, PixelBatch, SyncReport
from peer.launch.joining import Joined
from peer.launch.launch import Launch
from peer.machine.device import Rank, RankGroup
from peer.results.checkpoint import Checkpoints, about, run_of
from peer.results.result import read_result
from peer.sync.none import NoSync
from peer.wiring import assemble
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.peer.flat import flat
from tests.peer.machine.shallow import shallow_family, tiny_model  # noqa: F401
from tests.peer.models.reading import folders_are_read_once  # noqa: F401

CPU = torch.device("cpu")
RUN = RunConfig(
    sync="none",
    resolution=16,
    target_batch_size=10,
    total_samples=60,
    learning_rate=1e-3,
    lr_scheduler="cosine",
    lr_warmup_samples=20,
    seed=7,
)
SHORT = dataclasses.replace(RUN, total_samples=16)
"""Four steps of 4: a round, and more than the half of one; an epoch, and a third of one."""


class Recorded:
    """A trainer of this process, with the losses, learning rates and answers of its loop."""

    def __init__(self, closing, run, peer, stop_after=None, sync=None):
        stop = lambda: stop_after is not None and self.trainer.step >= stop_after  # noqa: E731
        alone = {"group": RankGroup(Rank(), CPU), "device": CPU, "stopping": stop, "closing": closing}
        self.trainer, self.results = assemble(Launch(joined=Joined(run), peer=peer, **alone))
        self.losses, self.rates = [], []
        if sync:
            self.trainer.sync = sync
        told = self.trainer.progress.stepped

        def stepped(**values):
            self.losses.append(values["loss"])
            self.rates.append(values["learning_rate"])
            told(**values)

        self.trainer.progress.stepped = stepped

    def run(self):
        self.trainer.run()
        return self


@pytest.fixture
def start(tiny_model, pictures, tmp_path):  # noqa: F811
    """Builds a trainer in output folder `name`; peer's and run's options as keywords."""
    with ExitStack() as closing:

        def build(name="out", run=RUN, stop_after=None, sync=None, **peer):
            options = {"train_data_dir": str(pictures), "output_dir": str(tmp_path / name), "train_batch_size": 4} | peer
            return Recorded(closing, dataclasses.replace(run, model=run.model or str(tiny_model)), PeerConfig(**options), stop_after, sync)

        yield build


def test_the_run_ends_at_its_total_and_leaves_a_checkpoint_and_metrics(start, tmp_path):
    before = flat(start("unused").trainer.params)
    done = start().run()
    assert done.trainer.trained == 60 and done.trainer.sync.samples == 60 and len(done.losses) == 15
    assert not torch.equal(before, flat(done.trainer.params)) and flat(done.trainer.params).isfinite().all()
    (line,) = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    assert line["step"] == 10 and line["samples"] == 40 and line["loss"] == pytest.approx(sum(done.losses[:10]) / 10)
    _, state = Checkpoints(tmp_path / "out", keep=2).load("latest")
    assert torch.equal(flat(state["params"]), flat(done.trainer.params))


def test_every_steps_loss_is_logged_on_wish(start, caplog):
    with caplog.at_level("INFO", "peer.figures.metrics"):
        done = start(run=SHORT, print_loss=True).run()
    assert [f"step={i} samples=4 loss={loss:.6f}" for i, loss in enumerate(done.losses, 1)] == [
        line for line in caplog.messages if line.startswith("step=")
    ]


def test_what_the_model_predicts_is_said_once_at_the_start(start, caplog):
    with caplog.at_level("INFO", "peer.learner"):
        start()
    assert [line for line in caplog.messages if "trained with" in line] == [
        "the model is trained with prediction_type=epsilon rescale_betas_zero_snr=False"
    ]


def test_a_model_that_was_made_for_larger_pictures_is_told_of(start, caplog):
    """An SDXL trained at the 512 px that --resolution is by default."""
    start("as made")
    assert "was made for" not in caplog.text
    start("smaller", run=dataclasses.replace(RUN, resolution=8))
    assert "the model was made for pictures of 16 px, and is trained at 8; --resolution 16 is what it knows" in caplog.text


def test_without_a_total_the_run_ends_with_the_epochs(start):
    run = dataclasses.replace(RUN, total_samples=0)
    done = start(run=run, num_train_epochs=2, train_batch_size=5).run()
    assert done.trainer.trained == 24 and len(done.losses) == 5


def test_two_runs_with_the_same_seed_are_equal_to_the_bit(start):
    run = dataclasses.replace(RUN, total_samples=8)
    one, two, other = (start(name, run=dataclasses.replace(run, seed=seed)).run() for name, seed in (("one", 7), ("two", 7), ("other", 8)))
    assert one.losses == two.losses != other.losses
    assert torch.equal(flat(one.trainer.params), flat(two.trainer.params))


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adamw", "use_ema": True, "random_flip": True},
        {"optimizer": "adamw8bit", "lr_scheduler": "linear"},
        {"optimizer": "adafactor", "weights": "bf16", "use_ema": True, "lr_scheduler": "polynomial", "lr_min_ratio": 0.1},
        {"optimizer": "adamw_schedulefree", "lr_scheduler": "constant", "train_text_encoder": True, "text_encoder_lr": 1e-4},
    ],
    ids=lambda options: options["optimizer"],
)
def test_a_run_stopped_after_every_single_step_equals_an_uninterrupted_one_to_the_bit(start, options):
    """Steps of 4 samples in two micro-batches, rounds of 10: most stops are in the middle of a round, some in that of an epoch."""
    own = {name: options[name] for name in ("use_ema", "weights") if name in options}
    peer = own | {"train_batch_size": 2, "gradient_accumulation_steps": 2, "checkpoints_total_limit": 1}
    run = dataclasses.replace(SHORT, **{name: value for name, value in options.items() if name not in own})
    whole = start("whole", run=run, **peer).run()
    losses, rates = [], []
    for step in range(1, 5):
        part = start("parts", run=run, stop_after=step, resume_from_checkpoint="latest", **peer).run()
        losses, rates = losses + part.losses, rates + part.rates
        assert part.trainer.step == step
    assert losses == whole.losses and rates == whole.rates and len(set(rates)) > 1
    assert torch.equal(flat(part.trainer.params), flat(whole.trainer.params))
    if "use_ema" in options:
        with part.trainer.average.applied(), whole.trainer.average.applied():
            assert torch.equal(flat(part.trainer.params), flat(whole.trainer.params))


def test_the_result_of_schedule_free_adamw_is_its_average_and_text_encoders_follow_their_own_rate(start, tmp_path):
    options = {"optimizer": "adamw_schedulefree", "lr_scheduler": "constant", "train_text_encoder": True, "text_encoder_lr": 2e-4}
    done = start(run=dataclasses.replace(RUN, total_samples=12, lr_warmup_samples=0, **options))
    points = []
    losses = done.trainer._losses
    done.trainer._losses = lambda *batch: points.append(flat(done.trainer.params)) or losses(*batch)
    done.run()
    assert done.trainer.step == 3 and not torch.equal(points[-1], flat(done.trainer.params))
    rest, texts = done.trainer.optimizer.param_groups
    assert done.rates[-1] == rest["lr"] == 1e-3 and texts["lr"] == pytest.approx(2e-4)
    done.results.export(tmp_path / "result")
    (file,) = (tmp_path / "result" / "unet").glob("*.safetensors")
    saved = load_file(file)
    assert all(torch.equal(tensor, done.trainer.params[f"unet.{name}"]) for name, tensor in saved.items())


def test_the_rate_that_is_shown_of_prodigy_is_the_one_that_it_found(start):
    found = start(run=dataclasses.replace(RUN, optimizer="prodigy", learning_rate=0.5, lr_scheduler="constant", lr_warmup_samples=0), stop_after=2)
    (group,) = found.trainer.optimizer.param_groups
    group["d"] = group["d_max"] = 1e-3
    assert found.run().rates == [pytest.approx(0.5 * group["d"])] * 2 and group["d"] >= 1e-3


def test_a_checkpoint_that_is_asked_for_must_have_this_optimizers_state(start):
    start(stop_after=1).run()
    for options, its in (({"optimizer": "prodigy", "learning_rate": 1.0}, "Prodigy"), ({"train_text_encoder": True, "text_encoder_lr": 1e-4}, "AdamW 0.1")):
        with pytest.raises(UserError, match=rf"has the state of AdamW, and this start has {its}\. Start with the --optimizer"):
            start(run=dataclasses.replace(RUN, **options), resume_from_checkpoint="latest")


def test_a_folder_says_other_options_only_once_they_have_gone_on_with_its_checkpoint(start, tmp_path):
    start(stop_after=1).run()
    first, said = dataclasses.asdict(RUN) | {"model": ANY}, tmp_path / "out" / "run.json"
    its = said.read_bytes()
    with pytest.raises(UserError, match="has the state of AdamW"):
        start(run=dataclasses.replace(RUN, optimizer="prodigy", learning_rate=1.0), resume_from_checkpoint="latest")
    assert said.read_bytes() == its
    start(run=dataclasses.replace(RUN, learning_rate=2e-3), resume_from_checkpoint="latest")
    assert said.read_bytes() != its
    (path,) = Checkpoints(tmp_path / "out", keep=2).paths()
    assert dataclasses.asdict(run_of(path)) == first


def test_a_run_that_was_killed_in_the_middle_of_an_accumulation_goes_on_from_the_step_before_to_the_bit(start):
    peer = {"train_batch_size": 2, "gradient_accumulation_steps": 3, "checkpointing_steps": 1}
    run = dataclasses.replace(RUN, total_samples=18)
    whole = start("whole", run=run, **peer).run()
    killed = start("parts", run=run, **peer)
    encode, batches = killed.trainer.encode, iter(range(1000))

    def encode_until_killed(pixels, rng):
        if next(batches) == 3 + 1:  # the second micro-batch of the second step
            raise KeyboardInterrupt
        return encode(pixels, rng)

    killed.trainer.encode = encode_until_killed
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    assert any(parameter.grad is not None for parameter in killed.trainer.params.values())
    rest = start("parts", run=run, resume_from_checkpoint="latest", **peer).run()
    assert killed.losses + rest.losses == whole.losses and len(killed.losses) == 1
    assert torch.equal(flat(rest.trainer.params), flat(whole.trainer.params))


def test_a_run_with_decoding_processes_resumes_as_exactly(start):
    whole = start("whole", run=SHORT).run()
    first = start("parts", run=SHORT, stop_after=2, dataloader_num_workers=1).run()
    second = start("parts", run=SHORT, resume_from_checkpoint="latest", dataloader_num_workers=1).run()
    assert first.losses + second.losses == whole.losses


def test_a_finished_run_that_is_resumed_trains_nothing_more(start):
    whole = start(run=SHORT).run()
    again = start(run=SHORT, resume_from_checkpoint="latest")
    assert again.trainer.run() and again.losses == [] and again.trainer.step == whole.trainer.step
    assert torch.equal(flat(again.trainer.params), flat(whole.trainer.params))


def test_a_run_that_finds_no_checkpoint_yet_starts_afresh(start):
    assert start(resume_from_checkpoint="latest").trainer.step == 0


def test_alone_nothing_is_resumed_unasked_and_the_same_run_begun_again_takes_its_place(start, tmp_path):
    start(stop_after=3).run()
    again = start(stop_after=2).run()
    assert again.trainer.step == 2 and not (tmp_path / "out" / "earlier").exists()
    assert start(resume_from_checkpoint="none").trainer.step == 0


@pytest.mark.parametrize("change", ["options", "data", "model"])
def test_what_was_trained_alone_is_set_aside_when_another_run_is_trained_in_its_folder(start, tmp_path, pictures, tiny_model, change):  # noqa: F811
    first = start(stop_after=3).run()
    first.results.export(tmp_path / "out" / "model")
    run, own = RUN, {}
    if change == "options":
        run = dataclasses.replace(RUN, learning_rate=2e-3)
    elif change == "data":
        own = {"train_data_dir": str(shutil.copytree(pictures, tmp_path / "other_pictures"))}
    else:
        run = dataclasses.replace(RUN, model=str(shutil.copytree(tiny_model, tmp_path / "other_model")))
    second = start(run=run, stop_after=1, **own).run()
    assert second.trainer.step == 1 and not (tmp_path / "out" / "model").exists()
    (earlier,) = (tmp_path / "out" / "earlier").iterdir()
    assert read_result(earlier / "model").samples == first.trainer.sync.samples
    (kept,) = Checkpoints(earlier, keep=2).paths()
    assert about(kept)["step"] == 3 and [about(path)["step"] for path in Checkpoints(tmp_path / "out", keep=2).paths()] == [1]


def test_a_result_that_is_to_be_trained_further_is_not_moved_away(start, tmp_path):
    start(stop_after=1).run().results.export(tmp_path / "out" / "model")
    with pytest.raises(UserError, match=r"model is part of .*, which was trained alone"):
        start(run=dataclasses.replace(RUN, model=str(tmp_path / "out" / "model")))
    assert (tmp_path / "out" / "model" / "model_index.json").is_file()


def test_other_options_go_on_with_a_checkpoint_that_is_asked_for(start, tmp_path):
    start(stop_after=3).run()
    longer = start(run=dataclasses.replace(RUN, total_samples=80), stop_after=5, resume_from_checkpoint="latest").run()
    assert longer.trainer.step == 5 and not (tmp_path / "out" / "earlier").exists()


def test_the_optimizers_options_of_this_start_count_after_a_resume(start):
    start(run=dataclasses.replace(RUN, adam_weight_decay=0.0), stop_after=2).run()
    changed = dataclasses.replace(RUN, adam_weight_decay=0.1, adam_beta1=0.5)
    resumed = start(run=changed, resume_from_checkpoint="latest").trainer
    (group,) = resumed.optimizer.param_groups
    assert resumed.step == 2 and (group["weight_decay"], group["betas"][0]) == (0.1, 0.5)


def test_who_has_trained_nothing_saves_nothing(start, tmp_path):
    none = start(stop_after=0)
    none.trainer.resting = lambda: True  # rests from the start, and is stopped then
    none.run()
    assert none.trainer.trained == 0 and not none.trainer.has_learned and not Checkpoints(tmp_path / "out", keep=2).paths()


def test_in_a_swarm_only_its_state_is_worth_saving(start):
    trainer = start(stop_after=3).run().trainer
    assert trainer.has_learned
    trainer.averages, trainer.sync.samples = True, 0
    assert not trainer.has_learned
    trainer.sync.samples = 8
    assert trainer.has_learned


@pytest.fixture
def swarming(start, monkeypatch):
    """As `start`, for a peer of a swarm."""
    monkeypatch.setattr(PeerConfig, "swarming", True)
    monkeypatch.setattr("peer.wiring.peer_id", lambda launch: "alone")
    return start


def test_a_swarms_peer_goes_on_from_its_own_latest_unasked_unless_it_does_not_fit(swarming, tmp_path, caplog):
    swarming(stop_after=3, checkpointing_steps=100).run()
    with caplog.at_level("INFO", "peer.wiring"):
        assert swarming().trainer.step == 3 and swarming(resume_from_checkpoint="none").trainer.step == 0
    assert f"resumed checkpoint={tmp_path / 'out' / 'checkpoint-000001'} step=3 trained=12" in caplog.messages
    assert swarming(weights="bf16").trainer.step == 0 and "its weights is fp32, not bf16" in caplog.text
    (path,) = Checkpoints(tmp_path / "out", keep=2).paths()
    (path / "state.json").write_text("torn")
    assert swarming().trainer.step == 0 and "damaged, state.json is not what was written" in caplog.text
    with pytest.raises(UserError, match=r"No checkpoint in .* is whole"):
        swarming(resume_from_checkpoint="latest")


def test_a_checkpoint_of_another_run_is_refused_where_it_is_asked_for(swarming, tmp_path):
    swarming(stop_after=3).run()
    other = dataclasses.replace(RUN, run_name="another")
    with pytest.raises(UserError, match="there is no checkpoint of the run 'another'"):
        swarming(run=other, resume_from_checkpoint="latest")
    elsewhere = str(tmp_path / "out" / "checkpoint-000001")
    with pytest.raises(UserError, match=r"checkpoint-000001 is of the run [0-9a-f]{16}, not of 'another' \([0-9a-f]{16}\)"):
        swarming("elsewhere", run=other, resume_from_checkpoint=elsewhere)
    assert swarming("elsewhere", resume_from_checkpoint=elsewhere).trainer.step == 3
    assert swarming(run=other).trainer.step == 0, "a newcomer, not a failure"
    assert swarming().trainer.step == 3, "its own, which has come back"


def test_a_checkpoint_of_another_model_is_refused(start, tmp_path):
    trainer = start().trainer
    state = trainer.state_dict()
    del state["params"]["unet.conv_in.weight"]
    with pytest.raises(UserError, match=r"unet\.conv_in\.weight differs"):
        trainer.load_state_dict(state)


def test_a_checkpoint_of_a_swarm_is_refused_by_a_run_without_one(start):
    trainer = start().trainer
    swarms = {"digest": "d", "round": 3, "samples": 24, "contributions": []}
    with pytest.raises(UserError, match=r"made with another --sync"):
        trainer.load_state_dict(trainer.state_dict() | {"sync": swarms})


def test_checkpoints_are_saved_every_so_many_steps(start, tmp_path):
    start(run=dataclasses.replace(RUN, total_samples=20), checkpointing_steps=2, checkpoints_total_limit=9).run()
    assert [about(path)["step"] for path in Checkpoints(tmp_path / "out", keep=9).paths()] == [2, 4, 5]


def test_the_result_so_far_is_written_every_so_many_steps(start, tmp_path):
    done = start(save_steps=2, run=dataclasses.replace(RUN, total_samples=16)).run()
    assert sorted(path.name for path in (tmp_path / "out").glob("model*")) == ["model-steps-2", "model-steps-4"]
    saved, own = load_file(tmp_path / "out" / "model-steps-4" / "unet" / "diffusion_pytorch_model.safetensors"), done.trainer.params
    assert all(torch.equal(saved[name.removeprefix("unet.")], parameter) for name, parameter in own.items())


def test_accumulated_micro_batches_make_the_steps_of_one_large_batch(start):
    run = dataclasses.replace(RUN, total_samples=12)
    large = start("large", run=run, train_batch_size=6)
    parts = start("parts", run=run, train_batch_size=2, gradient_accumulation_steps=3)
    before = flat(parts.trainer.params).clone()
    for done in (large, parts):
        draw_by_picture(done.trainer)
        done.run()
    assert len(parts.losses) == len(large.losses) == 2 and parts.trainer.trained == large.trainer.trained == 12
    # Sums in another order: 2e-7 of the losses and 2e-6 of all that moved were measured.
    assert parts.losses == pytest.approx(large.losses, rel=1e-5)
    expected = flat(large.trainer.params) - before
    assert (flat(parts.trainer.params) - before - expected).norm() < 1e-3 * expected.norm()


def draw_by_picture(trainer):
    """What is drawn for a picture follows from the step and the picture alone, not from the others of its micro-batch."""
    losses = trainer._losses

    def one_by_one(pixels, number):
        pictures = [PixelBatch(pixels.pixels[i : i + 1], pixels.captions[i : i + 1]) for i in range(len(pixels.captions))]
        return torch.cat([losses(picture, round(float(picture.pixels.double().sum()) * 255)) for picture in pictures])

    trainer._losses = one_by_one


def test_gradients_are_clipped_at_their_true_norm(start):
    trainer = start(run=dataclasses.replace(SHORT, max_grad_norm=0.5)).trainer
    seen = []
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(norm(trainer.params)))
    trainer.run()
    assert seen and max(seen) <= 0.5 + 1e-4


@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_what_is_clipped_is_the_mean_gradient_over_all_micro_batches_of_all_ranks_and_not_a_scaled_one(start, scale):
    """Rank 0 has two micro-batches of the step and rank 1 the third; one loss of all samples at once is the judge."""
    trainer = start(train_batch_size=2, gradient_accumulation_steps=3, run=dataclasses.replace(RUN, max_grad_norm=0.05)).trainer
    if scale:
        trainer._scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    work = next(iter(trainer.feed))
    trainer.step = 1
    torch.cat([trainer._losses(batch, number) for number, batch in enumerate(work.batches)]).mean().backward()
    mean = gradient(trainer.params)
    assert mean.norm() > 0.1
    trainer.optimizer.zero_grad()

    others = []
    trainer.group.sum_ = lambda tensors: others.extend(tensor.clone() for tensor in tensors)
    trainer._accumulate(dataclasses.replace(work, batches=work.batches[2:], first=2))
    trainer.optimizer.zero_grad()
    trainer.group.sum_ = lambda tensors: torch._foreach_add_(tensors, others)
    stepped = []
    trainer.optimizer.register_step_pre_hook(lambda *_: stepped.append(gradient(trainer.params)))
    trainer.step = 0
    trainer._train(dataclasses.replace(work, batches=work.batches[:2]))
    torch.testing.assert_close(stepped[0], mean * (0.05 / mean.norm()), rtol=1e-4, atol=1e-7)


def norm(params):
    return float(torch.cat([parameter.grad.flatten() for parameter in params.values()]).norm())


def test_a_pictures_weight_multiplies_its_loss(start):
    trainer = start().trainer
    (batch,) = next(iter(trainer.feed)).batches
    plain = trainer._losses(batch, 0)
    weighted = trainer._losses(dataclasses.replace(batch, weights=torch.tensor([1.0, 0.0, 0.5, 2.0])), 0)
    assert torch.equal(weighted, plain * torch.tensor([1.0, 0.0, 0.5, 2.0]))


def test_bf16_autocast_trains_almost_as_float32_does(start):
    full, half = start("full", run=SHORT, mixed_precision="no"), start("half", run=SHORT, mixed_precision="bf16")
    before = flat(full.trainer.params).clone()
    assert half.run().losses != full.run().losses
    assert_learned_alike(half, full, before, likeness=0.99)


def assert_learned_alike(one, other, before, likeness):
    """Losses alone do not tell: in a few steps they fall by less than the noise of a batch.

    What moved the weights does. Measured over 15 steps: another seed moves them elsewhere (a cosine of 0.24), autocast to the same place (0.9994), weights of
    bf16 nearly (0.975, as each is rounded by chance). Losses differed by 0.0016 at most.
    """
    assert one.losses == pytest.approx(other.losses, rel=0.01)
    moved, expected = flat(one.trainer.params).float() - before, flat(other.trainer.params).float() - before
    assert torch.nn.functional.cosine_similarity(moved, expected, dim=0) > likeness
    assert float(moved.norm()) == pytest.approx(float(expected.norm()), rel=0.1)


@pytest.mark.parametrize(
    ("family", "options", "weights"),
    [
        ("sdxl", {"optimizer": "adamw"}, "fp32"),
        ("sdxl", {"optimizer": "adamw8bit"}, "fp32"),
        ("sdxl", {"optimizer": "adafactor"}, "bf16"),
        ("sdxl", {"optimizer": "adamw_schedulefree", "lr_scheduler": "constant"}, "fp32"),
        ("sdxl", {"optimizer": "muon"}, "bf16"),
        ("sdxl", {"method": "lora", "rank": 2}, "fp32"),
        ("sd", {"clip_skip": 1}, "fp32"),
    ],
)
def test_what_no_loss_depends_on_stays_as_it_was(start, shallow_family, family, options, weights):  # noqa: F811
    """SDXL reads its first text encoder below the last layer, which decayed by the learning rate times 0.01 at each step."""
    run = dataclasses.replace(
        RUN, model=str(shallow_family(family)), train_text_encoder=True, learning_rate=0.01, lr_warmup_samples=0, total_samples=8, **options
    )
    done = start(run=run, weights=weights)
    unread = {id(parameter) for module in done.trainer.model.unread() for parameter in module.parameters()}
    before = {name: parameter.detach().clone() for name, parameter in done.trainer.params.items()}
    done.run()
    stayed = {name for name, parameter in done.trainer.params.items() if torch.equal(parameter.float(), before[name].to(parameter.dtype).float())}
    assert stayed == {name for name, parameter in done.trainer.params.items() if id(parameter) in unread} != set()
    assert any(name.startswith("text_encoder.") for name in before.keys() - stayed)


def test_gradient_checkpointing_changes_nothing_but_memory(start):
    plain, checkpointed = start("plain", run=SHORT).run(), start("checkpointed", run=SHORT, gradient_checkpointing=True).run()
    assert checkpointed.losses == pytest.approx(plain.losses, rel=1e-4)


def test_a_step_with_an_infinite_loss_is_left_out_and_its_samples_are_given_back_at_the_end(start, caplog):
    done = start(stop_after=4)
    spoil(done.trainer.model, calls={1})
    done.run()
    assert [loss is None for loss in done.losses] == [False, True, False, False]
    assert done.trainer.trained == 12 and "skipped step=2 because the loss is nan" in caplog.text
    assert len(done.trainer.accounts._source.state_dict()["again"]) == 4
    assert flat(done.trainer.params).isfinite().all()


def test_ten_infinite_losses_in_a_row_end_the_run_with_advice(start):
    done = start()
    spoil(done.trainer.model, calls=range(100))
    with pytest.raises(UserError, match=r"10 steps in a row failed: the loss is nan\. Lower --learning_rate"):
        done.run()


def scaled(done, scale):
    """Have the loss scaled, as with fp16 on a GPU, and the first parameter's gradient overflow in the backward passes of `overflows`."""
    done.trainer._scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    count, overflows = iter(range(1000)), set()
    next(iter(done.trainer.params.values())).register_hook(lambda gradient: gradient * (float("inf") if next(count) in overflows else 1.0))
    return overflows


def test_a_scale_that_no_gradient_fits_ends_the_run_with_a_reason(start):
    done = start()
    scaled(done, scale=4.0).update(range(1000))
    with pytest.raises(UserError, match=r"10 steps in a row failed: a gradient is not finite\. Lower --learning_rate"):
        done.run()
    assert done.losses == [None] * 10 and done.trainer._scaler.get_scale() == 1.0  # the first of the eleven looked for a scale


def test_a_scale_is_sought_without_an_end_to_the_run_and_stays_above_its_floor(start):
    done = start(stop_after=30)
    scaled(done, scale=2.0**14).update([*range(13), *range(14, 22), *range(23, 28)])
    done.run()
    assert [step for step, loss in enumerate(done.losses) if loss is not None] == [13, 22, 28, 29]
    assert done.trainer._scaler.get_scale() == 1.0 and flat(done.trainer.params).isfinite().all()


def spoil(model, calls):
    loss, count = model.loss, iter(range(1000))
    model.loss = lambda batch, rng: loss(batch, rng) * (float("nan") if next(count) in calls else 1.0)


def test_a_picture_that_breaks_after_the_start_is_left_out_and_the_others_are_trained(start, pictures):
    done = start(run=dataclasses.replace(RUN, total_samples=0))
    (pictures / "003.png").write_bytes(b"broken")
    assert done.run().trainer.trained == 11


class Gradients:
    """A strategy in the manner of `--sync gradients`: it takes over the gradients, and every second round fails."""

    def __init__(self, target=10):
        self.round = self.samples = 0
        self.peers = 1
        self.target, self._waiting, self._number, self.left = target, 0, 0, False
        self.params, self.taken = {}, []

    def catch_up(self):
        return SyncReport()

    def before_step(self):
        self.taken.append(gradient(self.params))
        return False

    def step(self, samples, loss=None):
        self._waiting += samples
        if self._waiting < self.target:
            return SyncReport(done=self.samples >= 36)
        if samples:
            self._number += 1
            return SyncReport(frozen=self._number)
        waiting, self._waiting = self._waiting, 0
        if self._number % 2 == 0:
            return SyncReport(dropped=(self._number,))
        self.round, self.samples = self.round + 1, self.samples + waiting
        return SyncReport(final=(self._number,), done=self.samples >= 36)

    def withdraw(self, number):
        self._waiting = 0
        return SyncReport(dropped=(number,))

    def leave(self, *, hurry):
        self.left = True
        return SyncReport(dropped=(0,))

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        return SyncReport(final=(1,), dropped=(0, 2))

    def close(self):
        pass


def test_a_strategy_may_take_over_the_gradients_and_lose_rounds_and_every_sample_is_accounted_for(start):
    sync = Gradients()
    done = start(sync=sync, run=dataclasses.replace(RUN, total_samples=1000))
    source, told = done.trainer.accounts._source, {"done": [], "back": []}
    give_back = source.give_back
    source.acknowledge = told["done"].extend
    source.give_back = lambda keys: (told["back"].extend(keys), give_back(keys))
    sync.params = done.trainer.params
    before = [parameter.detach().clone() for parameter in sync.params.values()]
    done.run()
    assert len(sync.taken) == 15 and sync.left
    assert all(torch.equal(parameter, old) for parameter, old in zip(sync.params.values(), before, strict=True))
    assert len(told["done"]) == len(set(told["done"])) == 36 == sync.samples
    assert len(told["back"]) == 24 and not done.trainer.accounts._open and not done.trainer.accounts._contributions


def test_what_a_resumed_strategy_lost_is_given_back_and_what_others_tell_the_ledger_of_is_forgotten(start):
    trainer = start(sync=Gradients()).trainer
    source, told = trainer.accounts._source, {"done": [], "back": []}
    source.acknowledge, source.give_back = told["done"].extend, told["back"].extend
    accounts = {"open": ["of the last step"], "contributions": {1: ["in a state"], 2: ["lost"]}, "aside": ["for later"]}
    trainer.load_state_dict({**trainer.state_dict(), "accounts": accounts})
    assert told == {"done": ["in a state"], "back": ["of the last step", "lost"]}
    assert trainer.accounts.state_dict() == {"open": [], "contributions": {}, "aside": ["for later"]}


def test_a_contribution_whose_lease_was_lost_is_withdrawn_and_its_samples_are_given_back(start):
    sync = Gradients()
    done = start(sync=sync, run=dataclasses.replace(RUN, total_samples=1000), stop_after=6)
    sync.params = done.trainer.params
    source, back = done.trainer.accounts._source, []
    give_back = source.give_back
    source.give_back = lambda keys: (back.extend(keys), give_back(keys))

    def register(number, keys):
        if number == 1:
            raise LeaseLost("expired")
        return ""

    source.register = register
    done.run()
    assert len(back) == 24 and done.trainer.sync.samples == 0  # the first was refused, the second failed
    assert not done.trainer.accounts._contributions


def test_what_a_report_says_besides_a_contribution_that_is_refused_is_heard(start):
    trainer = start(sync=Gradients()).trainer
    accounts, source, final, back = trainer.accounts, trainer.accounts._source, [], []
    source.acknowledge, source.give_back = final.extend, back.extend
    accounts._contributions, accounts._open = {1: ["a"]}, ["b"]

    def refuse(number, keys):
        raise LeaseLost("expired")

    source.register = refuse
    trainer._take(SyncReport(frozen=2, final=(1,)))
    assert (final, back) == (["a"], ["b"])


def test_the_last_report_of_a_rest_is_followed_once(start):
    sync = Gradients()
    trainer = start(sync=sync).trainer
    rests, reports, registered = iter([True]), iter([SyncReport(frozen=1)]), []
    trainer.resting = lambda: next(rests, False)
    sync.rest = lambda resting: None
    sync.step = lambda samples, loss=None: next(reports, SyncReport())
    trainer.accounts.register = lambda number: registered.append(number) or ""
    assert not trainer._rest() and registered == [1]


def test_the_gradients_handed_over_add_up_to_those_of_the_whole_round_at_once(start):
    """Neither clipped nor divided: what three steps hand over is the gradient of the sum over all twelve samples."""
    sync = Gradients()
    done = start(sync=sync, run=dataclasses.replace(RUN, total_samples=1000, max_grad_norm=1e-3))
    trainer = done.trainer
    sync.params = trainer.params
    works = iter(trainer.feed)
    batches = [next(works) for _ in range(3)]
    losses = []
    for trainer.step, work in enumerate(batches, start=1):
        losses.append(trainer._losses(work.batches[0], 0))
    torch.cat(losses).sum().backward()
    expected = gradient(trainer.params)
    trainer.optimizer.zero_grad()
    trainer.step = 0
    for work in batches:
        trainer._train(work)
    torch.testing.assert_close(sum(sync.taken), expected, rtol=1e-4, atol=1e-5)


FUSED = dataclasses.replace(RUN, clip_grad="tensor", max_grad_norm=0.05, total_samples=12, optimizer="adamw")


def test_fused_steps_are_the_same_run_to_the_bit_and_each_goes_on_from_the_others_checkpoint(start):
    whole = start("whole", run=FUSED).run()
    for name, first in (("fused then whole", True), ("whole then fused", False)):
        start(name, run=FUSED, fused_step=first, stop_after=2).run()
        done = start(name, run=FUSED, fused_step=not first, resume_from_checkpoint="latest").run()
        assert whole.losses[2:] == done.losses and torch.equal(flat(whole.trainer.params), flat(done.trainer.params))


def test_clipping_all_together_is_another_run(start):
    one, other = (start(kind, run=dataclasses.replace(FUSED, clip_grad=kind), stop_after=1).run() for kind in ("global", "tensor"))
    assert one.losses == other.losses and not torch.equal(flat(one.trainer.params), flat(other.trainer.params))


class Anchored(NoSync):
    """A swarm of one that knows the parameters of its last round."""

    def __init__(self, run, params):
        super().__init__(run)
        self.params, self.undone = params, []
        self.anchor = flat(params).clone()

    def _commit(self, number):
        self.anchor = flat(self.params).clone()
        return super()._commit(number)

    def undo(self):
        self.undone.append(self._waiting)
        self._waiting = 0
        torch.nn.utils.vector_to_parameters(self.anchor, self.params.values())
        return SyncReport(dropped=(0,))


def break_a_step(trainer, step, at):
    """Have the gradient that the backward pass of this step makes as the `at`-th, from 0, overflow; returns whether that step left the parameters alone."""
    count, before, left = iter(range(len(trainer.params))), [], []

    def overflow(gradient):
        if trainer.step != step:
            return gradient
        before[:] = before or [flat(trainer.params).clone()]
        return gradient * (float("inf") if next(count) == at else 1.0)

    for parameter in trainer.params.values():
        parameter.register_hook(overflow)
    use = trainer._step_by_tensor

    def used(*arguments):
        finite = use(*arguments)
        left.extend([] if finite else [torch.equal(flat(trainer.params), before[0])])
        return finite

    trainer._step_by_tensor = used
    return left


@pytest.mark.parametrize(("alone", "at"), [(True, "middle"), (False, "first"), (False, "middle"), (False, "last")])
def test_a_fused_step_that_breaks_off_is_lost_and_every_sample_is_counted_once(start, caplog, alone, at):
    """Three steps of 4 samples are a round, and the fifth step breaks off: the fourth one's samples are in no contribution yet."""
    done = start(run=dataclasses.replace(FUSED, total_samples=24), fused_step=True)
    trainer, source, told = done.trainer, done.trainer.accounts._source, {"done": [], "back": []}
    if not alone:
        trainer.sync = Anchored(dataclasses.replace(FUSED, total_samples=24), trainer.params)
    give_back = source.give_back
    source.acknowledge = told["done"].extend
    source.give_back = lambda keys: (told["back"].extend(keys), give_back(keys))
    place = {"first": 0, "middle": len(trainer.params) // 2, "last": len(trainer.params) - 1}[at]
    unchanged = break_a_step(trainer, step=5, at=place)
    done.run()
    assert [loss is None for loss in done.losses][:6] == [False] * 4 + [True, False] and flat(trainer.params).isfinite().all()
    assert unchanged[0] == (at == "first") != (f"step=5 broke off after {place} tensors" in caplog.text)
    lost = 4 if alone or at == "first" else 8
    assert len(told["back"]) == lost and len(told["done"]) == trainer.sync.samples == 24
    assert alone or trainer.sync.undone == ([] if at == "first" else [4])


def test_a_picture_that_breaks_a_step_off_comes_back_when_the_peer_leaves_and_ends_no_run(start):
    run = dataclasses.replace(FUSED, total_samples=40)  # more than three epochs: it would come back in each
    done, bad = start(run=run, fused_step=True), set()
    trainer, source, back = done.trainer, done.trainer.accounts._source, []
    trainer.sync, trainer.averages = Anchored(run, trainer.params), True
    give_back, learn = source.give_back, trainer._learn
    source.give_back = lambda keys: (back.extend((trainer.step, key) for key in keys), give_back(keys))

    def learned(work):
        bad.update(work.keys[:1] if not bad else ())  # the first picture that it trains is a bad one for good
        trainer.breaks = bool(bad.intersection(work.keys))
        return learn(work)

    trainer._learn = learned
    next(iter(trainer.params.values())).register_hook(lambda gradient: gradient * (float("inf") if trainer.breaks else 1.0))
    done.run()
    assert sum(loss is None for loss in done.losses) == 1 and trainer.sync.samples == 40
    assert bad <= {key for step, key in back if step == trainer.step}


def test_steps_that_break_off_again_and_again_before_a_contribution_end_the_run(start):
    """Each undoes the good step before it, so the peer would train for ever and bring nothing."""
    run = dataclasses.replace(FUSED, total_samples=24)
    done, seen = start(run=run, fused_step=True), []
    trainer = done.trainer
    trainer.sync, trainer.averages = Anchored(run, trainer.params), True

    def overflow(gradient):
        seen.append(trainer.step)
        return gradient * (float("inf") if trainer.step % 2 == 0 and seen.count(trainer.step) == 2 else 1.0)

    for parameter in trainer.params.values():
        parameter.register_hook(overflow)
    with pytest.raises(UserError, match="10 steps failed before a contribution was complete: a gradient is not finite"):
        done.run()
    assert trainer.step == 20 and trainer.sync.undone == [4] * 10


def gradient(params):
    return torch.cat([parameter.grad.flatten() for parameter in params.values()])


def test_a_peer_that_rests_trains_nothing_and_goes_on_to_the_same_result(start, tmp_path):
    run = dataclasses.replace(RUN, total_samples=20)
    whole = flat(start("whole", run=run).run().trainer.params)
    resting = start("resting", run=run)
    rests = iter([False, True, True, True, False, False, True, False])
    asked = []

    def rest():
        asked.append((resting.trainer.step, next(rests, False)))
        return asked[-1][1]

    resting.trainer.resting = rest
    resting.run()
    while_resting = [step for step, now in asked if now]
    assert while_resting[:3] == [1, 1, 1] and len(asked) > 8
    assert torch.equal(flat(resting.trainer.params), whole), "alone, a rest changes nothing"


def test_a_stop_ends_a_rest(start, tmp_path):
    resting = start("resting", stop_after=0)
    resting.trainer.resting = lambda: True
    assert resting.run().trainer.step == 0
