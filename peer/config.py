"""What each machine may choose for itself. Whatever all peers must agree on is in `swarm.run_config.RunConfig`."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from peer.volunteer.resting import Hours
from swarm.errors import UserError
from swarm.logs import FORMATS
from swarm.options import option, options
from swarm.records import MAX_NAME
from swarm.urls import check_token, check_url


@options
class PeerConfig:
    """This peer (every machine chooses its own)."""

    datasetserver: str = option("", "URL of the run's dataset server; alone enough to join.", section="the run it joins or founds")
    token: str = option("", "What the host gave you for --datasetserver; other users of this machine see flags, not the variable DD_TOKEN.")
    host_key: str = option(
        "", "The key that the host's server prints at its start; refuse a server with another key. Default: the first key it shows."
    )
    peers: tuple[str, ...] = option((), "Multiaddrs of peers that are in the run; alone enough to join.", aliases=("initial_peers",))
    found: bool = option(False, "Found a run: listen for peers, with this peer's flags as the run's.", aliases=("hivemind",))
    run_id: str = option("", "Which run to join, when the peers given serve several.")
    min_peers: int = option(1, "Wait until N peers are live, this one included, unless this one has a state of the run from before.", ge=1)
    peer_name: str = option(
        "", "This peer's name on the page and in dd-status: up to 32 characters. Default: its key's end."
    )
    check: str = option(
        "", "Test what works between this machine and the run at this URL (or multiaddr), and end; trains and leases nothing."
    )
    dry_run: bool = option(False, "Print the resolved configuration and end.")

    host_maddrs: tuple[str, ...] = option(
        ("/ip4/0.0.0.0/tcp/0",), "Multiaddrs to listen on for other peers.", section="how others reach it"
    )
    announce_maddrs: tuple[str, ...] = option((), "Multiaddrs under which others reach this peer, when they differ.")
    identity_path: str = option(
        "", "This peer's key file, made when missing: with it the peer keeps its id in another folder. Default: identity.key inside --output_dir."
    )
    client_mode: bool | None = option(
        None, "Open no port: this peer dials the others. auto: when the peers it asks cannot dial it."
    )
    discard_state: tuple[str, ...] = option(
        (), "Digests of forged states, or their first 8 digits or more: they, and all that descend from them, are never used again. "
        "What the host discards, this peer hears by itself."
    )
    max_upload_mbit: float = option(0.0, "Upload limit to other peers in Mbit/s; 0: as fast as the link takes it.", lt=1e6)

    assist: bool = option(
        False,
        "Train nothing, but reduce, lead, relay and keep the run's states, for peers that nobody can dial; needs no GPU, model or data.",
        section="helping without training",
    )
    states_total_limit: int = option(0, "With --assist: keep this many final states, the newest; 0: all of them.")
    audit: int = option(
        0,
        "With --assist and a dataset server: measure what N members' contributions of each round do to the loss, and report those that make the "
        "model worse; needs the model, on the CPU unless --device says otherwise. 0: none.",
        le=64,
    )

    train_batch_size: int | None = option(
        1,
        "Samples per local step and rank; auto: the largest that fits, measured once on one GPU or CPU and remembered in --cache_dir.",
        aliases=("batch_size",),
        section="training",
        ge=1,
    )
    gradient_accumulation_steps: int = option(1, "Micro-batches per local optimizer step.", ge=1)
    mixed_precision: str = option(
        "auto", "Autocast; auto: by device, the reason is printed.", choices=("auto", "no", "fp16", "bf16"), switches={"fp16": "fp16"}
    )
    weights: str = option(
        "fp32",
        "Precision of the trained weights on this machine; bf16 halves memory, and stochastic rounding keeps small updates.",
        choices=("fp32", "bf16"),
    )
    base_precision: str = option(
        "auto",
        "How this machine keeps the denoiser's weights where they are not trained: 16 bits (bf16), 8 (fp8, int8) or 4 (nf4), off by 0.2, 2.6, 0.8 "
        "and 9 %; auto: as --mixed_precision computes, exactly.",
        choices=("auto", "bf16", "fp8", "int8", "nf4"),
    )
    state_on: str = option(
        "memory",
        "Where the swarm's copies of what is trained lie; disk: in files without names in --output_dir, for machines with little memory. "
        "Rounds then take longer.",
        choices=("memory", "disk"),
    )
    fused_step: bool = option(
        False,
        "Step each tensor as soon as its gradient is there, so that one tensor's gradient is held in place of all; the run needs --clip_grad tensor or none.",
        aliases=("fused_backward_pass",),
    )
    offload: bool = option(
        False,
        "Text encoders, VAE and denoiser are on the GPU in turns, the others wait in RAM; 64 samples are encoded at a time. With both --cache_latents and "
        "--cache_text they do so without it. Tried on a GPU with tiny models only.",
    )
    blocks_to_swap: int | None = option(
        0,
        "N of the denoiser's blocks wait in RAM, if they are not trained; two of these are on the GPU at a time. auto: as many as must. Tried on "
        "a GPU with tiny models only.",
        lt=2**31,
    )
    swap_to: str = option(
        "ram",
        "Where these blocks wait; disk: in the model's files, or in files without names in --cache_dir, for machines with little memory.",
        choices=("ram", "disk"),
    )
    fit: str = option(
        "none",
        "auto: count what the run needs of the GPU's memory, and add the cheapest of this machine's options with which it fits.",
        choices=("none", "auto"),
    )
    overlap: bool = option(False, "Train on while a contribution is averaged: no waiting, but what is learned meanwhile is a little stale.")
    gradient_checkpointing: bool = option(False, "Trade compute for memory in the backward pass.")
    max_train_steps: int = option(0, "End the run after N global steps: another way to say --total_samples.", lt=2**40)
    num_train_epochs: int = option(1, "Passes over the data when the run sets no --total_samples.", aliases=("epochs",), ge=1)
    lr_warmup_steps: float = option(
        0.0,
        "Global steps over which the learning rate rises, below 1 the share of the run: another way to say --lr_warmup_samples.",
        aliases=("lr_scheduler_warmup",), lt=2**40,
    )
    scale_lr: bool = option(False, "Multiply --learning_rate by the samples of a global step, once, when the run begins.")
    use_ema: bool = option(False, "Keep a moving average of the weights by global steps; it is what is exported and drawn.")
    ema_decay: float = option(0.9999, "Its final decay; (1 + n) / (10 + n) after n steps until then.", lt=1)
    lease_samples: int = option(
        0,
        "Lease at least N samples ahead from --datasetserver, for a link that breaks off at times; 0: ten seconds' worth.",
        aliases=("wantedimages",),
        lt=2**40,
    )

    device: str = option(
        "auto", "auto, cpu, cuda, cuda:N, or xla: all TPU chips of this host, by PyTorch/XLA (docs/hardware.md).", section="this machine"
    )
    num_threads: int = option(0, "Threads of torch on a CPU; 0: the cores divided by the local ranks.")
    compile: bool = option(
        False,
        "Compile the denoiser (torch.compile), if its gradients of the first batch are right; see docs/hardware.md.",
        aliases=("torch_compile",),
    )
    channels_last: bool = option(False, "Compute convolutions with channels last in memory, on a GPU.")
    ipex: bool = option(False, "On a CPU with PyTorch 2.8: use the kernels of Intel's extension, which has ended.")
    dataloader_num_workers: int = option(0, "Processes that decode pictures; 0: in the training process.")
    loader_prefetch_size: int = option(1, "With --dataloader_num_workers: local steps that are read and decoded ahead.", lt=2**31)
    device_prefetch_size: int = option(
        0, "Of these, how many are moved to the GPU or to the XLA devices ahead; nothing where parts take turns (--offload).", lt=2**31
    )
    cache_dir: str = option("", "Where shards, latents and texts are kept; default: inside --output_dir.")
    cache_gib: float = option(20.0, "Limit in GiB of each of these three.")
    cache_latents: bool = option(
        False,
        "Keep what the VAE makes of each picture in --cache_dir: computed and decoded once. A picture is then always cropped at one place.",
    )
    cache_text: bool = option(False, "Keep what the frozen text encoders make of each caption in --cache_dir.")
    hours: str = option(
        "", "Train only at this local time: 22-7, or 22:30-7:15. Otherwise rest, as after dd-peer pause."
    )

    train_data_dir: str = option(
        "",
        "Folder of pictures, each with a .txt or .caption beside it, or described in a metadata.jsonl or metadata.csv; folders in it, too. "
        "Or a .toml file that names several folders, as kohya's --dataset_config does.",
        aliases=("dataset", "dataset_config"),
        section="pictures of its own",
    )
    dataset_name: str = option(
        "",
        "Instead of --train_data_dir: a dataset of the Hugging Face Hub, or a folder that `datasets` can load; streamed.",
        aliases=("hfstream",),
    )
    dataset_config_name: str = option("", "Configuration of --dataset_name.")
    dataset_split: str = option("train", "Split of --dataset_name.")
    dataset_part: str = option(
        "", "This peer's part of --dataset_name, such as 2/3: no row of another part. Default: all of it, in an order of this peer's own."
    )
    image_column: str = option("image", "Column of --dataset_name with the pictures.")
    caption_column: str = option(
        "text", "Column of --dataset_name, or key of a metadata file, with the captions; of several one is taken by chance."
    )
    instance_prompt: str = option("", "Caption of the pictures in --train_data_dir or --dataset_name that have none.")
    max_train_samples: int = option(
        0, "Use only N pictures: of a folder a subset that the seed decides, of a stream the first; 0: all."
    )
    repeats: int = option(1, "How often a picture of --train_data_dir comes in an epoch; those below a folder 10_NAME ten times as often.", ge=1)
    with_prior_preservation: bool = option(
        False,
        "Train each picture together with one of its class as the model draws it, so that the class is not forgotten; local data only.",
    )
    class_data_dir: str = option(
        "", "With --with_prior_preservation: folder of the class's pictures; those that are missing are drawn into it."
    )
    class_prompt: str = option("", "With --with_prior_preservation: what they show, such as 'a photo of a dog'.")
    prior_loss_weight: float = option(1.0, "With --with_prior_preservation: weight of their losses.", lt=1e6)
    num_class_images: int = option(100, "With --with_prior_preservation: how many to have.", ge=1)
    output_bucket_info: bool = option(False, "Log the buckets at the start, and at the end how many samples were in each.")

    output_dir: str = option(
        "output", "Where checkpoints, logs and the result go.", aliases=("output_path",), section="checkpoints and the result"
    )
    checkpointing_steps: int = option(
        0,
        "Save a resumable checkpoint every N global steps; 0: after a swarm's rounds for 1 % of the time, alone every 10,000 samples.",
        aliases=("checkpointing_rounds",), lt=2**40,
    )
    checkpoints_total_limit: int = option(2, "Keep this many checkpoints.", ge=1)
    resume_from_checkpoint: str = option(
        "auto",
        "A checkpoint's folder, 'latest', or 'none'. auto: in a swarm this peer's own latest of the same run, alone none.",
        aliases=("resume",),
    )
    save_steps: int = option(0, "Write the result so far to OUTPUT_DIR/model-steps-STEP (learned_embeds-steps-STEP of a new word) every N global steps; 0: at the end only.", lt=2**40)
    save_as_full_pipeline: bool = option(False, "Of a new word: also write the whole pipeline with it.")
    safe_serialization: bool = option(
        True, "Of a new word: write .safetensors; --no_safe_serialization: torch's own format, learned_embeds.bin."
    )
    push_to_hub: bool = option(False, "Upload the result to the Hugging Face Hub when training has ended; the token is checked at the start.")
    hub_model_id: str = option("", "Repository for --push_to_hub, such as owner/name; default: the name of --output_dir.")
    hub_token: str = option(
        "", "Token for the Hub; other users of this machine see flags, not the variable HF_TOKEN.", aliases=("hf_token",)
    )

    validation_prompts: tuple[str, ...] = option(
        (),
        "Draw these while training, into OUTPUT_DIR/validation and --report_to; with --assist, from the newest final state.",
        aliases=("validation_prompt",),
        section="watching it",
    )
    num_validation_images: int = option(4, "Pictures of each prompt, always from the same seeds.", aliases=("image_log_amount",), ge=1)
    validation_steps: int = option(
        0,
        "Draw every N global steps, and measure the held-out loss (--validation_split); 0: every round of a swarm, alone every 100 steps and "
        "at the end of a shorter run. The held-out loss then takes at most 1 % of the time.",
        aliases=("image_log_steps",),
        lt=2**40,
    )
    validation_inference_steps: int = option(25, "Denoising steps of these pictures.", aliases=("image_log_inference_steps",), ge=1)
    report_to: str = option(
        "none", "Also show metrics and pictures there.", choices=("none", "tensorboard", "wandb", "all"), switches={"wandb": "wandb"}
    )
    logging_dir: str = option("logs", "Where trackers keep their files, inside --output_dir.")
    tracker_project_name: str = option("distributed-diffusion", "Name of the project in the tracker.", aliases=("project_id",))
    metrics_port: int = option(
        0, "Serve this peer's figures to Prometheus at this port, as http://METRICS_HOST:PORT/metrics; 0: not at all.", le=65535
    )
    metrics_host: str = option("127.0.0.1", "Address to serve them at; they have no password.")
    print_loss: bool = option(False, "Log the loss of every local step; metrics.jsonl has the means of ten.")
    profile_duration: int = option(
        0,
        "Record what the device does for N milliseconds, from the third local step on, into PROFILE_DIR (a variable) or OUTPUT_DIR/profile.", lt=2**31,
    )
    log_format: str = option("text", "Log lines on stderr: for people, or a JSON object per line.", choices=FORMATS)
    debug: bool = option(False, "Log more, and show tracebacks.")

    nproc_per_node: int = option(1, "dd-peer: ranks to start here, one for each GPU.", section="dd-peer, which starts it again", ge=1, le=1000)
    stall_seconds: float = option(
        600.0,
        "dd-peer: restart a trainer that shows no sign of life for N seconds, or 6 N while it loads, saves or draws; 0: never.", lt=1e7,
    )
    max_restarts: int = option(5, "dd-peer: give up after N failures in a row; a minute of training forgives them; 0: never.", lt=2**31)
    log_file: str = option("", "dd-peer: the log of all this peer's processes goes there instead of to the terminal.")
    log_file_mib: float = option(10.0, "dd-peer: turn --log_file over at this size.", ge=0.001, lt=1e6)
    log_files: int = option(5, "dd-peer: keep N log files, the current one included.", ge=1, le=1000)

    def __post_init__(self) -> None:
        for name in ("peers", "host_maddrs", "announce_maddrs"):  # also quoted as one word, as scripts for other programs have them
            object.__setattr__(self, name, tuple(re.findall(r"[^\s,]+", " ".join(getattr(self, name)))))
        self._check_access()
        self._check_computing()
        self._check_shown()
        self._check_data()
        self._check_running()
        self._check_assistant()

    def _check_access(self) -> None:
        for url in (self.datasetserver, self.check):
            if url and not (url is self.check and url.startswith("/")):
                check_url(url)
        check_token(self.token)
        if self.host_key and not re.fullmatch("[0-9a-f]{64}", self.host_key):
            raise UserError(
                "host_key is not a host's key.", fix="Copy it whole: 64 digits and small letters a to f, which the server prints."
            )

    def _check_computing(self) -> None:
        if self.device_prefetch_size and self.device == "cpu":
            raise UserError("device_prefetch_size moves batches to a GPU or to XLA devices, and --device is cpu.", fix="Remove it.")

        if self.weights == "bf16" and self.mixed_precision not in ("auto", "bf16"):
            raise UserError(
                f"--weights bf16 does not work with --mixed_precision {self.mixed_precision}.", fix="Use --mixed_precision bf16."
            )
        self._check_making_room()
        self._check_swap()
        self._check_fused()
        if self.base_precision != "auto" and self.save_as_full_pipeline:
            raise UserError(
                "save_as_full_pipeline writes the whole model, whose weights --base_precision has rounded.", fix="Remove one of them."
            )
        if self.compile and self.ipex:
            raise UserError("--compile and --ipex cannot be combined: each replaces the code that computes.", fix="Remove one of them.")

    def _check_making_room(self) -> None:
        swaps = self.blocks_to_swap != 0
        for name, given in (("offload", self.offload), ("blocks_to_swap", swaps)):
            if given and self.device in ("cpu", "xla"):
                raise UserError(f"{name} makes room on a GPU, and --device is {self.device}.", fix=f"Remove --{name}.")
        faster = "compile" if self.compile else "ipex" if self.ipex else ""
        untried = {
            f"base_precision {self.base_precision}": self.base_precision != "auto", "fused_step": self.fused_step,
            "offload": self.offload, "blocks_to_swap": swaps,
        }  # fmt: skip
        for name, given in untried.items():
            if given and faster:
                raise UserError(f"--{name} was not tried with --{faster}.", fix="Remove one of them.")

    def _check_swap(self) -> None:
        if self.swap_to == "disk" and self.blocks_to_swap == 0 and self.fit == "none":
            raise UserError("swap_to says where blocks wait, and none is swapped.", fix="Add --blocks_to_swap, or remove --swap_to disk.")
        if self.blocks_to_swap != 0 and self.assist:
            raise UserError("blocks_to_swap is for training, and --assist trains nothing.", fix="Remove it; --offload makes room for its pictures.")

    def _check_fused(self) -> None:
        if self.fused_step and self.gradient_accumulation_steps > 1:
            raise UserError(
                f"--fused_step keeps no gradient, and gradient_accumulation_steps is {self.gradient_accumulation_steps}.",
                fix="Remove one of them; in a swarm, a round adds up --target_batch_size samples.",
            )

    def _check_shown(self) -> None:
        if len(self.peer_name) > MAX_NAME or not self.peer_name.isprintable():
            raise UserError(f"peer_name has {len(self.peer_name)} characters.", fix=f"Use up to {MAX_NAME} printable ones.")

    def _check_data(self) -> None:
        self._check_prior()
        if self.train_data_dir and self.dataset_name:
            raise UserError("Two datasets are given.", fix="Give --train_data_dir or --dataset_name.")
        if self.repeats > 1 and not self.train_data_dir:
            raise UserError("repeats is for the pictures of --train_data_dir.", fix="Remove it, and give --num_train_epochs more.")
        if self.dataset_part and not self.dataset_name:
            raise UserError(
                "dataset_part is a part of --dataset_name, and none is given.", fix="Add --dataset_name, or remove --dataset_part."
            )

    def _check_running(self) -> None:
        if self.log_files < 2 and self.log_file:
            raise UserError("log_files is 1: each time the file is full, the whole log would be lost.", fix="Use 2 or more.")
        if self.hours:
            Hours.parse(self.hours)
        if 0 < self.max_upload_mbit < 1:
            raise UserError(
                f"max_upload_mbit is {self.max_upload_mbit}.",
                fix="Use 1 or more, or 0 for no limit: with less, this peer is too slow for the others.",
            )

    def _check_assistant(self) -> None:
        if self.assist and (self.found or not (self.datasetserver or self.peers)):
            raise UserError("--assist needs a run that exists already.", fix="Name the run with --datasetserver or --peers, and remove --found.")
        if self.audit and not self.assist:
            raise UserError("--audit is for a helper: it measures what it reduces for others.", fix="Add --assist, or remove --audit.")

    def shown(self) -> dict[str, Any]:
        """All options as they may be printed and logged: without the tokens."""
        secret = {name: "(hidden)" for name in ("token", "hub_token") if getattr(self, name)}
        return {**dataclasses.asdict(self), **secret}

    def _check_prior(self) -> None:
        if not self.with_prior_preservation:
            if self.class_data_dir or self.class_prompt:
                raise UserError(
                    "Pictures of a class are for --with_prior_preservation.", fix="Add it, or remove --class_data_dir and --class_prompt."
                )
            return
        if not (self.class_data_dir and self.class_prompt):
            raise UserError(
                "with_prior_preservation needs to know the class.",
                fix="Give --class_data_dir a folder, and --class_prompt 'a photo of a dog'.",
            )
        if not self.own_data:
            raise UserError(
                "with_prior_preservation needs this peer's own pictures: a server's samples go to all peers, and have no class in common.",
                fix="Give --train_data_dir, or put the pictures of the class into the server's dataset.",
            )
        from swarm.subsets import folders_of  # imports Pillow, which few starts need here

        trained = folders_of(Path(self.train_data_dir)) if self.train_data_dir else []
        if any(Path(self.class_data_dir).resolve().is_relative_to(folder.resolve()) for folder in trained):
            raise UserError("class_data_dir lies in train_data_dir, and all folders there are trained on.", fix="Put it elsewhere.")

    @property
    def unmeasured(self) -> "PeerConfig":
        """The same with micro-batches of 1, where the largest that fits is still to be measured (--train_batch_size auto)."""
        return dataclasses.replace(self, train_batch_size=1) if self.train_batch_size is None else self

    @property
    def fits_itself(self) -> bool:
        """Whether some of its options are still to be counted (--fit auto, --blocks_to_swap auto)."""
        return self.fit == "auto" or self.blocks_to_swap is None

    @property
    def unfitted(self) -> "PeerConfig":
        """The same without swapped blocks, where their number is still to be counted. --swap_to may then say where none wait."""
        return dataclasses.replace(self, blocks_to_swap=0, fit="auto") if self.blocks_to_swap is None else self

    @property
    def cache_folder(self) -> Path:
        """Where shards, latents, texts and what was measured are kept."""
        return Path(self.cache_dir) if self.cache_dir else Path(self.output_dir) / "cache"

    @property
    def own_data(self) -> bool:
        """Whether this peer brings its own pictures."""
        return self.source != "dataset_server"

    @property
    def source(self) -> str:
        """The module of peer/data where its samples come from."""
        return "directory" if self.train_data_dir else "huggingface" if self.dataset_name else "dataset_server"

    @property
    def own_data_told(self) -> str:
        """Which data it brings, by which an output folder and a checkpoint know them again; '' when a server has them."""
        if self.train_data_dir:
            return str(Path(self.train_data_dir).resolve())
        return " ".join(
            filter(None, (self.dataset_name, self.dataset_config_name, self.dataset_name and self.dataset_split, self.dataset_part))
        )

    @property
    def identity_file(self) -> Path:
        """Of this peer's key."""
        return Path(self.identity_path or Path(self.output_dir) / "identity.key")

    @property
    def swarming(self) -> bool:
        """Whether this peer takes part in a swarm; if not, nothing listens."""
        return bool(self.datasetserver or self.peers or self.found)
