"""What the host of a run may choose for its machine. What all peers must agree on is in `swarm.run_config.RunConfig`."""

import socket
from pathlib import Path

from datasetserver.sources import Folder, Hub, Source
from swarm.errors import UserError
from swarm.listening import is_loopback
from swarm.logs import FORMATS
from swarm.options import option, options
from swarm.urls import check_url


@options
class ServerConfig:
    """This server (the host's own choice)."""

    dataset: str = option(
        "",
        "Folder of pictures with a .txt or .caption beside each or a metadata file, of WebDataset tars, or of both; or a .toml file that names several, "
        "as kohya's --dataset_config does.",
        aliases=("dataset_config",),
        section="the dataset",
    )
    dataset_name: str = option(
        "", "Instead of --dataset: a dataset of the Hugging Face Hub, or a folder that `datasets` can load; streamed."
    )
    dataset_config_name: str = option("", "Configuration of --dataset_name.")
    dataset_split: str = option("train", "Split of --dataset_name.")
    dataset_revision: str = option("", "Commit, tag or branch of --dataset_name on the Hub.")
    image_column: str = option("image", "Column of --dataset_name with the pictures.")
    caption_column: str = option(
        "text", "Column of --dataset_name, or key of a metadata file, with the captions; of several a peer takes one by chance, each epoch."
    )
    max_train_samples: int = option(0, "Take only N rows of --dataset_name; 0: all.")
    grow: bool = option(False, "The dataset has grown: train what is new in it from the run's next epoch on.")
    work_dir: str = option(
        "",
        "Where shards, ledger and identity are kept; default: DATASET.datasetserver beside the dataset. Without a dataset: serve what is ready there.",
    )
    shard_samples: int = option(
        256,
        "Samples per shard; a shard is what a peer leases, and what another repeats when it dies. Take fewer for slow peers or large pictures.",
        ge=1,
        le=100_000,
    )
    ingest_workers: int = option(
        -1, "Processes that check pictures; -1: one per core. Fewer leave cores to other programs; 0: none but the server's own.", ge=-1
    )
    missing_captions: str = option(
        "reject",
        "Pictures without a caption: 'reject', or 'empty' (or 'none') to train them without words, or with textual inversion's templates.",
        aliases=("captions",), choices=("reject", "empty", "none"),
    )
    duplicates: str = option("keep", "Pictures that are there more than once, byte by byte: 'keep' or 'drop'; they are listed in any case.", choices=("keep", "drop"))
    dry_run: bool = option(False, "Check the run's options and the pictures, say what would be left out, and end; nothing is written or served.")

    lease_seconds: float = option(
        60.0, "A lease that is not renewed for N seconds goes to another peer. Raise it for links that break off for minutes.", ge=1, le=86_400,
        section="the run",
    )  # fmt: skip
    grace_seconds: float = option(
        60.0,
        "A gone peer's work may still be averaged for N seconds; then its samples are leased again. Raise it for rounds that take minutes.",
        le=86_400,
    )
    copy_seconds: float = option(
        3600.0, "Lease a shard to a second peer after N seconds, when the others train a later epoch already; 0: never.", le=1e9
    )
    states: str = option(
        "", "Output folder of a helper (--assist) on this machine: the newest final state in it is offered for download."
    )

    host: str = option(
        "127.0.0.1",
        "Address to listen on; 0.0.0.0 for peers on other machines, together with --tokens or --open.",
        section="its address, and who may come in",
    )
    port: int = option(9090, "Port to listen on; 0: any free one.", le=65535)
    public_url: str = option("", "URL under which peers reach this server, when it is not http://HOST:PORT.")
    server_names: tuple[str, ...] = option(
        (), "Further names under which this server is reached, besides its addresses, localhost, this machine's name and that of --public_url."
    )
    tokens: str = option(
        "", "File of tokens, without one of which nobody gets in; 'dd-datasetserver token add NAME --tokens FILE' makes them."
    )
    members: str = option(
        "auto",
        "Make new runs for members: peers ignore a peer without a membership, which this server gives to each peer it lets in; auto: with --tokens.",
        choices=("auto", "yes", "no"),
    )
    open: bool = option(False, "Let in anyone who can reach --host, without tokens.")
    tls_cert: str = option("", "Certificate chain (PEM): serve https, together with --tls_key.")
    tls_key: str = option("", "The certificate's key (PEM).")
    max_requests_per_second: float = option(50.0, "Requests of one address; a burst may have ten seconds' worth; 0: no limits per address.", le=1e6)

    dht: bool = option(
        True,
        "Run a DHT node, where peers meet. --no_dht: open no port for one; peers then need each other's addresses (--peers).",
        section="its DHT node",
    )
    host_maddrs: tuple[str, ...] = option((), "Multiaddrs where that node listens; default: --host, any free port.")
    announce_maddrs: tuple[str, ...] = option((), "Multiaddrs under which others reach that node, when they differ.")
    identity_path: str = option(
        "", "That node's key file, made when missing: with it the node keeps its multiaddr. Default: identity.key inside --work_dir."
    )

    pictures_from: tuple[str, ...] = option(
        (),
        "Ids of the peers whose pictures the page shows (they need --validation_prompts). Default: the helper on this very machine, "
        "if it draws, else any there.",
        section="the page and the log",
    )
    log_format: str = option("text", "Log lines on stderr: for people, or a JSON object per line.", choices=FORMATS)
    debug: bool = option(False, "Log more, and show tracebacks.")

    def __post_init__(self) -> None:
        if bool(self.dataset) + bool(self.dataset_name) != 1 and (self.dataset or not self.work_dir or self.grow or self.dry_run):
            raise UserError(
                "Two datasets are given." if self.dataset else "No dataset is given.",
                fix="Add --dataset DIR, a folder of pictures with a .txt beside each; or --dataset_name; or --work_dir with one that is ready.",
            )
        if self.public_url:
            check_url(self.public_url, "public_url")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise UserError("A certificate needs its key, and a key its certificate.", fix="Give both --tls_cert and --tls_key.")
        if self.tokens and self.open:
            raise UserError("--open lets everybody in, --tokens does not.", fix="Give one of them.")
        if not (self.is_local or self.tokens or self.open):
            raise UserError(
                f"--host {self.host} lets other machines in, and nothing says whom.",
                fix="Add --open (anyone who can reach it, for a network you trust), or --tokens FILE (only those who hold a token).",
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def for_members(self) -> bool:
        """Whether runs that begin here are for members."""
        return self.members == "yes" or (self.members == "auto" and bool(self.tokens))

    def source(self, masks: bool) -> Source | None:
        """Where the samples come from; None for what is ready in the work folder. masks: whether the run has a use for them."""
        if self.dataset_name:
            columns = self.image_column, self.caption_column
            return Hub(
                self.dataset_name, self.dataset_config_name, self.dataset_split, self.dataset_revision, *columns, self.max_train_samples
            )
        if not self.dataset:
            return None
        shards = (self.work_folder().resolve(),)  # which are no pictures of it, wherever they lie
        return Folder(Path(self.dataset), self.caption_column, masks, without=shards)

    def work_folder(self) -> Path:
        folder = Path(self.dataset or self.dataset_name.replace("/", "--")).resolve()
        return Path(self.work_dir) if self.work_dir else folder.with_name(folder.name + ".datasetserver")

    def listen_maddrs(self) -> list[str]:
        """Where the DHT node listens: as wide as the HTTP server, so that a run on one machine stays on it."""
        if self.host_maddrs:
            return list(self.host_maddrs)
        if self.host in ("localhost", "::1"):
            return ["/ip4/127.0.0.1/tcp/0"]
        return [f"/ip6/{self.host}/tcp/0" if ":" in self.host else f"/ip4/{socket.gethostbyname(self.host)}/tcp/0"]
