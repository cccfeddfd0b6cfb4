"""Frozen blocks wait outside of the device and are there when they compute: what is trained has the same bits, whatever is absent meanwhile."""

import contextlib
import dataclasses
import functools
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from benchmarks.device_memory import count
from peer.config import PeerConfig
from peer.contracts import LatentBatch
from peer.launch.starting_model import load_model
from peer.machine.swap import Swap, _Block, swaps
from peer.machine.waiting import Files
from peer.models.diffusion.packed import PRECISIONS
from peer.rooms import load_part
from swarm.errors import ExitCode, UserError
from swarm.run.optimizer import OPTIMIZERS
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.machine.test_held import nothing_left, own_bytes  # noqa: F401
from tests.peer.methods.test_base_precision import METHODS
from tests.peer.models.reading import folders_are_read_once  # noqa: F401
from tests.peer.test_alone import CPU, RUN, flat, start  # noqa: F401

_STREAMS = {"num_layers": 3, "num_single_layers": 3}
DEEPER = {
    "chroma": _STREAMS, "flux": _STREAMS, "flux2": _STREAMS, "klein": _STREAMS, "qwen_image": {"num_layers": 5}, "sd3": {"num_layers": 5},
    "z_image": {"n_layers": 4},
}  # fmt: skip
"""Denoisers of five or six blocks, by family."""


@pytest.fixture(scope="session")
def deep_family(tmp_path_factory):
    """`deep_family("flux")`: as `tiny_family`, with more blocks."""

    def write(family):
        pipeline = tiny.build(family)
        config = {name: value for name, value in pipeline.transformer.config.items() if name[0] != "_"} | DEEPER[family]
        with torch.random.fork_rng():
            torch.manual_seed(1)
            pipeline.register_modules(transformer=type(pipeline.transformer)(**config))
        folder = tmp_path_factory.mktemp(family) / "deep"
        pipeline.save_pretrained(folder)
        return folder

    return functools.cache(write)


class Alive:
    """How many blocks' memory there is on the device, whoever keeps it: now, and at most."""

    now = most = came = 0

    def meets(self, memory):
        self.now, self.came = self.now + 1, self.came + 1
        self.most = max(self.most, self.now)
        weakref.finalize(memory.untyped_storage(), self._gone)

    def _gone(self):
        self.now -= 1


@pytest.fixture
def alive(monkeypatch):
    """On a CPU all is at one place, at once: what waits is NaN here, where it can be, and what comes is so until it is waited for."""
    found, leave, come, arrive, travelling = Alive(), _Block.leave, _Block.come, Swap._arrive, []

    def left(self):
        leave(self)
        for tensor in self.tensors:
            tensor.data = torch.full_like(tensor.data, torch.nan if tensor.is_floating_point() else 255)

    def came(self, flat):
        found.meets(flat)
        come(self, flat)
        travelling.append((flat, flat.clone()))
        flat.fill_(255)

    def arrived(self):
        while travelling:
            flat, content = travelling.pop()
            flat.copy_(content)
        arrive(self)

    monkeypatch.setattr("peer.machine.swap._OWN_MEMORY", ("cpu",))
    monkeypatch.setattr(_Block, "leave", left)
    monkeypatch.setattr(_Block, "come", came)
    monkeypatch.setattr(Swap, "_arrive", arrived)
    return found


def placed(folder, count, precision="auto", dtype=None, files=None, **options):
    """A model as a peer has it, with what its method trains after a step of all of it, and what swaps `count` of its blocks, in `files` if given."""
    run = RunConfig(model=str(folder), **options)
    method, model = load_part("methods", run.method).build(run), load_model(run, {}, None)
    method.begin(model)
    hold = files.hold if files else torch.Tensor.cpu if count else None
    if precision != "auto":
        model.pack(precision, CPU, hold=hold)
    model.place(CPU, dtype, method.whole(model), hold=hold)
    swap = Swap(model, count, CPU, as_they_are=bool(files)) if count else None
    params = method.attach(model)
    torch.manual_seed(0)
    for parameter in params.values():
        parameter.data += 0.02 * torch.randn(parameter.shape)
    return model, params, swap


BF16, LORA, CAPTIONS = torch.bfloat16, METHODS["lora"], ["a cat", "<dicoo>"]


def reads_once(model):
    """Its text encoders, which nobody trains, answer with what they said first; FLUX.2's has 31 layers."""
    said = model.encode_text(CAPTIONS)
    model.encode_text = lambda captions: said
    return model


def told(model, dtype=None, seed=0):
    """The losses of two pictures."""
    rng = torch.Generator().manual_seed(seed)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        latents = model.encode_pixels(torch.rand(2, 3, 16, 16, generator=rng) * 2 - 1).chunk(2, dim=1)[0]
        return model.loss(LatentBatch(latents, model.encode_text(CAPTIONS)), rng)


def gradients(model, params, dtype=None, seeds=(1, 2)):
    """Of as many micro-batches."""
    for parameter in params.values():
        parameter.grad = None
    for seed in seeds:
        told(model, dtype, seed).sum().backward()
    return flat({name: parameter.grad for name, parameter in params.items() if parameter.grad is not None})




@pytest.mark.parametrize("family", DEEPER)
def test_gradients_have_the_same_bits_and_two_blocks_that_wait_are_there_at_most(family, deep_family, alive):
    model, params, _ = placed(deep_family(family), 0, **LORA)
    exact, blocks = gradients(reads_once(model), params), len(model.blocks())
    assert exact.any() and not alive.came and blocks == {"qwen_image": 5, "sd3": 5}.get(family, 6)
    model, params, swap = placed(deep_family(family), blocks, **LORA)
    assert alive.now == 0 and len(swap._blocks) == blocks
    assert torch.equal(gradients(reads_once(model), params), exact), "without gradient checkpointing"
    assert alive.most == 2 and alive.came == 2 + 4 * (blocks - 2), "all but two travel twice in each of two micro-batches"
    with torch.no_grad():
        told(model)
    model.enable_gradient_checkpointing()
    assert torch.equal(gradients(model, params), exact)
    assert alive.most == 2
    swap.clear()
    assert alive.now == 0


@pytest.fixture(scope="module")
def unswapped(deep_family):
    """`unswapped(method, ...)`: the gradients of a FLUX of which nothing waits; what else is given is `gradients`' and `placed`'s."""

    def exact(method, precision="auto", dtype=None, seeds=(1,)):
        model, params, _ = placed(deep_family("flux"), 0, precision, dtype, **METHODS[method])
        return gradients(model, params, dtype, seeds)

    return functools.cache(exact)


HELD = [
    *(("lora", precision) for precision in ("auto", *PRECISIONS)),
    *(("dora", precision) for precision in ("auto", "nf4")),
    *(("lora with text encoder", "auto"), ("loha", "nf4"), ("lokr", "nf4"), ("textual_inversion", "auto")),
]
"""What waits is held in one of four ways, whatever is trained beside it. A DoRA reads it itself; LoHa and LoKr ask packed weights how large they are."""


@pytest.mark.parametrize(("method", "precision"), HELD)
def test_every_method_and_base_precision_has_the_same_bits(method, precision, deep_family, unswapped, alive):
    exact = unswapped(method, precision, BF16)
    assert not alive.came
    model, params, swap = placed(deep_family("flux"), 4, precision, BF16, **METHODS[method])
    assert not swap.tensors & {*params.values()}
    assert torch.equal(gradients(model, params, BF16, seeds=(1,)), exact) and exact.any()
    model.enable_gradient_checkpointing()
    assert torch.equal(gradients(model, params, BF16, seeds=(1,)), exact)
    assert alive.came and alive.most == 2
    assert precision == "auto" or {tensor.dtype for tensor in swap.tensors} >= {torch.uint8, torch.float32}, "scales travel with their bits"


def test_every_method_is_tried():
    assert {method for method, _ in HELD} == METHODS.keys()


def test_each_block_is_on_its_way_before_it_is_asked_for(deep_family, alive):
    model, params, swap = placed(deep_family("flux"), 6, **LORA)
    ask_for, sent = swap._ask_for, []

    def asked(number, following):
        sent.append(swap._blocks[number] in swap._there)
        ask_for(number, following)

    swap._ask_for = asked
    gradients(model, params)
    with torch.no_grad():
        told(model)
        told(model)
    gradients(model, params)
    assert not sent[0] and all(sent[1:]) and len(sent) > 48


def test_what_waits_lies_evenly_among_the_others(deep_family):
    model, _, swap = placed(deep_family("flux"), 3, **LORA)
    places = [number for number, block in enumerate(model.blocks()) if {*block.parameters()} & swap.tensors]
    assert places == [0, 2, 4]


def test_what_is_on_the_device_at_most_is_counted(deep_family, monkeypatch):
    model, params, swap = placed(deep_family("flux"), 4, "int8", **LORA)
    held = sum(tensor.nbytes for tensor in swap.tensors)
    most = max(one.num_bytes + other.num_bytes for one, other in pairwise(swap._blocks))
    latents, rows = torch.zeros(1, 4, 8, 8), {"states": torch.ones(1, 32, 16), "pooled": torch.ones(1, 16)}
    monkeypatch.setattr("benchmarks.device_memory.count_step", lambda *_, **__: 0)  # what flows through the layers is asked for without --blocks_to_swap
    model, params, _ = placed(deep_family("flux"), 0, "int8", **LORA)
    without, with_swap = (count(model, params, LatentBatch(latents, rows), OPTIMIZERS["adamw"], swapped=swapped) for swapped in (0, 4))
    assert without.trained == with_swap.trained > 0
    saved = without.parts["transformer"] - with_swap.parts["transformer"]
    assert held - most < saved < held - most + 256 * len(swap.tensors), "each tensor is rounded up to 256 bytes there"
    assert 0 < saved < held


class Broke(Exception):
    pass


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward", "on its way"])
def test_a_step_after_one_that_broke_off_is_right(where, checkpointing, deep_family, unswapped, alive, monkeypatch):
    exact = unswapped("lora")
    model, params, swap = placed(deep_family("flux"), 6, **LORA)
    if checkpointing:
        model.enable_gradient_checkpointing()
    inside = model.blocks()[3].norm.linear

    def breaks(*_):
        raise Broke

    with contextlib.ExitStack() as broken:
        if where == "forward":
            broken.callback(inside.register_forward_hook(breaks).remove)
        elif where == "backward":
            layer = model.blocks()[3].proj_out
            broken.callback(layer.register_full_backward_hook(breaks).remove)
        else:
            patch = broken.enter_context(monkeypatch.context())
            come = _Block.come
            patch.setattr(_Block, "come", lambda self, flat: breaks() if self is swap._blocks[3] else come(self, flat))
        with pytest.raises(Broke):
            gradients(model, params)
    assert torch.equal(gradients(model, params, seeds=(1,)), exact) and alive.most == 2


ACCUMULATED = {"train_batch_size": 2, "gradient_accumulation_steps": 2}
DRAWING = {"validation_prompts": ("a red square",), "num_validation_images": 1, "validation_steps": 1, "validation_inference_steps": 1}


@pytest.mark.parametrize("other", [{}, {"offload": True}, {"base_precision": "int8", "gradient_checkpointing": True}], ids=str)
def test_a_run_that_draws_is_the_same_and_goes_on_with_another_number(other, start, deep_family, alive, monkeypatch):  # noqa: F811
    monkeypatch.setattr("peer.machine.turns._OWN_MEMORY", ("cpu",))
    monkeypatch.setattr("peer.drawing.held_out._LEAST_DRAWS", 2)
    run = dataclasses.replace(RUN, total_samples=8, validation_split=0.2, model=str(deep_family("flux")), **LORA)
    plain = start("plain", run=run, **other, **ACCUMULATED).run()
    assert not alive.came
    first = start("parts", run=run, stop_after=1, blocks_to_swap=6, **other, **ACCUMULATED, **DRAWING).run()
    second = start("parts", run=run, resume_from_checkpoint="latest", blocks_to_swap=3, **other, **ACCUMULATED, **DRAWING).run()
    assert first.losses + second.losses == plain.losses and len(plain.losses) == 2
    assert torch.equal(flat(second.trainer.params), flat(plain.trainer.params)) and alive.came


def test_a_turn_that_ends_takes_all_blocks_along(start, deep_family, alive, monkeypatch):  # noqa: F811
    monkeypatch.setattr("peer.machine.turns._OWN_MEMORY", ("cpu",))
    run = dataclasses.replace(RUN, total_samples=4, model=str(deep_family("flux")), **LORA)
    trainer = start(run=run, blocks_to_swap=4, offload=True).run().trainer
    assert alive.now == 2
    trainer.model.encode_text(["a cat"])
    assert alive.now == 0


def test_a_class_is_drawn_with_it_before_anything_is_trained(start, deep_family, tmp_path, alive):  # noqa: F811
    run = dataclasses.replace(RUN, total_samples=8, model=str(deep_family("flux")), **LORA)
    prior = {"with_prior_preservation": True, "class_prompt": "a dog", "num_class_images": 2, "validation_inference_steps": 1}
    plain = start("plain", run=run, class_data_dir=str(tmp_path / "some dogs"), **prior).run()
    assert not alive.came
    swapped = start("swapped", run=run, class_data_dir=str(tmp_path / "more dogs"), blocks_to_swap=6, **prior)
    assert alive.came and alive.most == 2
    assert swapped.run().losses == plain.losses and torch.equal(flat(swapped.trainer.params), flat(plain.trainer.params))


def test_a_new_words_whole_pipeline_is_saved_as_without(start, deep_family, tmp_path, monkeypatch):  # noqa: F811
    """What waits is there for whoever writes it."""
    from safetensors.torch import load_file

    monkeypatch.setattr("peer.machine.swap._OWN_MEMORY", ("cpu",))
    run = dataclasses.replace(RUN, total_samples=4, model=str(deep_family("flux")), method="textual_inversion", **METHODS["textual_inversion"])
    for name, swapped in (("plain", 0), ("swapped", 4)):
        started = start(name, run=run, blocks_to_swap=swapped, save_as_full_pipeline=True).run()
        started.results.export(tmp_path / f"{name} whole")
    files = {path.relative_to(tmp_path / "plain whole") for path in (tmp_path / "plain whole").rglob("*.safetensors")}
    assert any("transformer" in str(path) for path in files)
    for path in files:
        plain, swapped = (load_file(tmp_path / f"{name} whole" / path) for name in ("plain", "swapped"))
        assert plain.keys() == swapped.keys() and all(torch.equal(plain[name], swapped[name]) for name in plain), path


# ------------------------------------------------------------ on disk


@pytest.mark.parametrize("precision", ["auto", "int8", "nf4"])
def test_blocks_that_wait_in_files_have_the_same_bits(precision, deep_family, unswapped, tmp_path, alive):
    """In the model's own where its precision is kept: this one's is not."""
    exact = unswapped("lora", precision, BF16)
    files = Files(tmp_path / "waiting")
    model, params, _ = placed(deep_family("flux"), 6, precision, BF16, files, **LORA)
    assert torch.equal(gradients(model, params, BF16, seeds=(1,)), exact) and alive.most == 2
    assert not [*(tmp_path / "waiting").iterdir()], "the files have no names"


@pytest.mark.parametrize(("filed", "precision"), [(BF16, "auto"), (torch.float32, "auto"), (BF16, "nf4")])
def test_a_process_has_no_memory_of_its_own_for_what_waits_in_files(filed, precision, tmp_path, deep_family, nothing_left):  # noqa: F811
    pipeline = tiny.build("flux")
    wide = {name: value for name, value in pipeline.transformer.config.items() if name[0] != "_"} | {"num_attention_heads": 24} | _STREAMS
    pipeline.register_modules(transformer=type(pipeline.transformer)(**wide))
    size = 2 * sum(parameter.numel() for name, parameter in pipeline.transformer.named_parameters() if "blocks." in name)
    pipeline.to(filed).save_pretrained(tmp_path / "model")
    del pipeline
    placed(deep_family("flux"), 6, precision, BF16, Files(tmp_path / "first"), **LORA)  # loads what computes with it
    held = {}
    for files in (None, Files(tmp_path / "waiting")):
        before = own_bytes()
        kept = placed(tmp_path / "model", 6, precision, BF16, files, **LORA)
        held[files is not None] = own_bytes() - before
        del kept
    least = {"auto": 0.9, "nf4": 0.25}[precision]
    assert size > 40e6 and held[False] > least * size and held[True] < 0.1 * size, (size, held)


def test_a_run_whose_blocks_wait_on_disk_is_the_same(start, deep_family, alive, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setattr("peer.machine.turns._OWN_MEMORY", ("cpu",))
    run = dataclasses.replace(RUN, total_samples=8, model=str(deep_family("flux")), **LORA)
    plain = start("plain", run=run, base_precision="int8").run()
    swapped = start("swapped", run=run, base_precision="int8", blocks_to_swap=6, swap_to="disk", offload=True, cache_dir=str(tmp_path / "kept")).run()
    assert swapped.losses == plain.losses and torch.equal(flat(swapped.trainer.params), flat(plain.trainer.params))
    assert alive.most == 2 and (tmp_path / "kept" / "waiting").is_dir()


def test_a_disk_that_is_full_ends_the_start_with_one_line(tmp_path, monkeypatch):
    files = Files(tmp_path / "waiting")
    monkeypatch.setattr("peer.sync.engine.buffers.shutil.disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
    with pytest.raises(UserError, match=r"Cannot keep weights that wait in .*waiting: No space left on device") as refused:
        files.hold(torch.zeros(1))
    assert refused.value.code == ExitCode.DISK and "--cache_dir on another disk" in refused.value.fix


def test_tensors_of_all_kinds_are_held_as_they_are_and_many_share_a_file(tmp_path, monkeypatch):
    files, made = Files(tmp_path), []
    new = Files.private
    monkeypatch.setattr(Files, "private", lambda self, num_bytes: made.append(num_bytes) or new(self, num_bytes))
    kinds = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.tensor(2.0), torch.arange(9, dtype=torch.uint8), torch.zeros(0), torch.tensor([True])]
    held = [files.hold(tensor) for tensor in kinds]
    assert all(torch.equal(one, other) and one.dtype is other.dtype for one, other in zip(kinds, held, strict=True)) and len(made) == 1
    assert files.hold(torch.zeros(made[0] + 1, dtype=torch.uint8)).numel() == made[1] - 255, "a larger one has a file of its own"


# ------------------------------------------------------------ refused


def test_where_nothing_waits_it_waits_nowhere():
    with pytest.raises(UserError, match="swap_to says where blocks wait, and none is swapped"):
        PeerConfig(swap_to="disk")


@pytest.mark.parametrize("other", [{"device": "cpu"}, {"device": "xla"}, {"compile": True}, {"ipex": True}, {"assist": True, "peers": ("a",)}])
def test_options_that_do_not_go_with_it_are_refused(other):
    with pytest.raises(UserError, match=f"blocks_to_swap.*{next(iter(other))}"):
        PeerConfig(blocks_to_swap=4, **other)


def test_where_there_is_no_use_for_it_one_line_says_so(caplog):
    peer, lora, gpu = PeerConfig(blocks_to_swap=4), RunConfig(**LORA), torch.device("cuda", 0)
    assert swaps(peer, lora, gpu) and not swaps(PeerConfig(), RunConfig(method="full"), gpu)
    assert not swaps(peer, lora, CPU) and "blocks_to_swap=0: it makes room on a GPU" in caplog.text
    with pytest.raises(UserError, match="--method full trains all of the denoiser's"):
        swaps(peer, RunConfig(method="full"), gpu)
    with pytest.raises(UserError, match="was not tried on XLA"):
        swaps(peer, lora, torch.device("xla"))


@pytest.mark.parametrize(
    ("family", "count", "said"),
    [
        ("sd", 4, "the denoiser of Stable Diffusion is none"),
        ("flux", 2, "Two of them are on the GPU at a time, and blocks_to_swap is 2"),
        ("flux", 7, "This FLUX has 6 blocks, and blocks_to_swap is 7"),
    ],
)
def test_a_denoiser_without_so_many_blocks_is_refused(family, count, said, tiny_family, deep_family):
    folder = deep_family(family) if family in DEEPER else tiny_family(family)
    with pytest.raises(UserError, match=said):
        Swap(load_model(RunConfig(model=str(folder)), {}, None), count, CPU)


class Cudart:
    """CUDA's library as far as it pins memory; code: what it answers."""

    def __init__(self, code):
        self.code, self.pinned = code, {}

    def cudaHostRegister(self, place, num_bytes, flags):
        if not self.code:
            self.pinned[place] = num_bytes
        return self.code

    def cudaHostUnregister(self, place):
        del self.pinned[place]


def test_what_waits_for_a_gpu_is_pinned_as_long_as_it_is_there_and_else_one_line_says_so(monkeypatch):
    library = Cudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: library)
    linear = torch.nn.Linear(100, 10)
    block = _Block(linear)
    block.gather(pinned=True)
    assert library.pinned == {linear.weight.data_ptr(): 4096 + 256} == {linear.weight.data_ptr(): block.num_bytes}
    del block, linear
    assert not library.pinned
    library.code = 2
    with pytest.raises(UserError, match=r"CUDA cannot pin 0\.0 GB of this machine's memory.*error 2") as refused:
        _Block(torch.nn.Linear(100, 10)).gather(pinned=True)
    assert refused.value.code == ExitCode.MEMORY and "lower --blocks_to_swap" in refused.value.fix
