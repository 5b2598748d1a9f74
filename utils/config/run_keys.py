"""What is trained, where, on what and how long: the first half of the keys; see `config`."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from utils.config.types import (
    Device,
    File,
    Fraction,
    Name,
    Number,
    PositiveFloat,
    PositiveInt,
    Seed,
    a_type_of_parameters,
    auto_or_a_bool,
    auto_or_a_count,
    key,
    off_is_a_word,
)


@dataclass(frozen=True)
class RunKeys:
    """What is trained, where, on what and how long."""

    # Code of one's own
    plugins: list[File] = key(
        [],
        "Python files that add to the registries, imported before anything else is checked; relative to the working "
        "directory",
        changes_training=False,
    )

    # Devices and seed
    training_seed: Seed = key(42, "seed of initialisation, data order and dropout")
    CUDA_VISIBLE_DEVICES: str | None = key(
        None, "GPUs that this run may see, as in the environment variable; null: all", changes_training=False
    )
    devices: Annotated[list[Device], Field(min_length=1)] | None = key(
        None, "devices to train on, counted among the visible ones; null: every visible GPU, or the CPU"
    )
    real_device_ids: list[str] | None = key(
        None, "labels for the devices in logs, one per device; null: their names", changes_training=False
    )
    processes: Annotated[Literal["auto"] | PositiveInt, BeforeValidator(auto_or_a_count)] = key(
        "auto",
        "processes of python run.py, each with its part of the nodes; auto: processes_per_gpu on every GPU, or without "
        "GPUs one per core, as far as there are nodes",
        changes_training=False,
    )
    processes_per_gpu: PositiveInt = key(
        1,
        "processes that share each GPU under processes: auto, for models too small to fill it",
        changes_training=False,
    )
    cpu_threads: PositiveInt | None = key(
        None,
        "threads of PyTorch on the CPU in each process; null: the cores shared by the processes that auto would start",
    )
    deterministic: bool | None = key(
        None,
        "sum in worker order, so that the number of processes does not change a bit; null: true on CPUs, false on GPUs",
    )
    autocast: Literal["bfloat16"] | None = key(
        None,
        "type that models compute in (torch.autocast); parameters, moments and sums stay float32; null: float32",
    )
    parameter_dtype: Annotated[Literal["float32", "float64"], BeforeValidator(a_type_of_parameters)] = key(
        "float32", "type of parameters, gradients, moments and sums"
    )
    compile_model: Annotated[Literal["auto"] | bool, BeforeValidator(auto_or_a_bool)] = key(
        "auto",
        "compile the model (torch.compile); passes with statistics run as they are; auto: on CPUs where parameters and "
        "tokens of the run say that it saves time",
    )
    activation_checkpointing: bool = key(
        False,
        "keep the inputs of layers alone for the backward pass and compute the rest anew in it, which takes less "
        "memory and a third more time; for models of transformers",
        changes_training=False,
    )
    outer_state: Literal["device", "cpu"] = key(
        "device",
        "where trainers keep what they need at the end of a round, parameters and outer momentum: cpu: in host memory, "
        "where the outer step is made then",
        changes_training=False,
    )
    idle_moments: Literal["device", "cpu"] = key(
        "device",
        "where the inner optimisers' state of workers is while others have their turn on the device",
        changes_training=False,
    )
    communication_dtype: str = key(
        "float32",
        "how pseudo-gradients are sent: as they are, rounded, or as integers of 8 or 4 bits with a scale per block; "
        "adaptive: of 4 bits at first, and of more as the loss falls",
        choices=True,
    )

    # Logs
    log_dir: Name = key("logs", "folder in which the run folder is made", changes_training=False)
    log_file: Name = key("training_log.log", "log file in the run folder")
    memory_report_dir: Name = key("memory_report", "folder for memory use, in the run folder")
    model_training_report_dir: Name = key(
        "model_training_report", "folder for CSVs, summary and plots, in the run folder"
    )
    model_weights_dir: Name = key("model_weights", "folder for models, in the run folder")
    plot_every: PositiveInt | None = key(
        None,
        "draw plots and report every so many rounds, as long as that is 2% of the run at most; null: never",
        changes_training=False,
    )
    plot_at_end: bool = key(
        True,
        "draw plots and report at the end; false: `python -m training_logs.training_monitoring RUN_DIR` draws them",
        changes_training=False,
    )
    memory_sample_seconds: PositiveFloat | None = key(
        1.0,
        "seconds between measurements of memory use, besides those after every round; null: only those",
        changes_training=False,
    )
    save_weights_every: PositiveInt | None = key(
        None,
        "write a checkpoint, and every living trainer's model, every so many rounds; null: only at the end, and "
        "checkpoints by checkpoint_every_minutes",
        changes_training=False,
    )
    checkpoint_every_minutes: PositiveFloat | None = key(
        10.0,
        "write a checkpoint after the first round that ends so many minutes after the last one; null: off",
        changes_training=False,
    )
    keep_checkpoints: PositiveInt = key(2, "checkpoints to keep, the newest", changes_training=False)
    clearml: Annotated[str, BeforeValidator(off_is_a_word)] = key(
        "auto",
        "ClearML dashboard; auto: online where there are credentials, else offline, a session in the run folder",
        choices=True,
        changes_training=False,
    )
    project_name: str | None = key(None, "project in the ClearML dashboard; null: AdLoCo", changes_training=False)
    task_name: str | None = key(
        None, "task in the ClearML dashboard; null: the name of the run folder", changes_training=False
    )

    # Dataset
    dataset: Name = key("python_docs", "what to train on", choices=True)
    data_sample_size: PositiveInt | None = key(None, "documents to train on; null: all")
    val_size: PositiveInt | None = key(
        None,
        "documents held out for validation; null: one for every twenty of data_sample_size, or of all documents, at "
        "most 500; of c4_tokenized_path all",
        datasets=("python_docs", "c4", "text"),
    )
    val_sequences: PositiveInt | None = key(
        10_000,
        "sequences that an evaluation reads at most, the first of the documents held out; null: all",
        datasets=("python_docs", "c4", "text"),
    )
    samples_per_class: PositiveInt | None = key(
        None,
        "evaluation reviews per class; null: as many as the smaller class of the test part has; without a test part "
        "one in twenty of it",
        datasets=("imdb",),
    )
    sequence_length: Annotated[int, Field(ge=2), Number] = key(
        128, "tokens per packed sequence; without packing, the longest document or review, cut there"
    )
    packing: bool = key(
        True,
        "join documents, end-of-text after each, into full sequences; false: one document per sequence, padded",
        datasets=("python_docs", "c4", "text"),
    )
    tokenizer: Name | None = key(
        None,
        "hub name or folder of a tokenizer; null: the pretrained model's own, or that of c4_tokenized_path, else one "
        "trained on the training documents",
    )
    vocab_size: Annotated[int, Field(ge=258), Number] = key(
        2048, "vocabulary of a tokenizer that is trained: byte-level BPE, or WordPiece for bert"
    )
    cache_dir: Name = key(".cache", "folder for tokenised documents, shared by runs", changes_training=False)
    trainer_data_fraction: Fraction | None = key(
        None,
        "share of the training examples in each trainer's own random subset; null: 1 / number_of_initial_trainers, "
        "so that the subsets are disjoint",
    )
    data_split: str = key(
        "iid",
        "how documents are divided into shares: at random, by k-means over TF-IDF, by origin (file, host, class), or a "
        "random part of each origin",
        choices=True,
    )
    data_split_over: Literal["trainers", "workers"] = key(
        "trainers", "whose shares differ: each trainer has some, or each worker slot"
    )
    data_shares: PositiveInt | None = key(
        None, "shares of data_split; null: number_of_initial_trainers, or over workers as many as nodes"
    )
    dirichlet_alpha: PositiveFloat = key(
        0.5, "data_split dirichlet: the smaller, the more shares differ; a large one is as good as iid"
    )
    weigh_shares: bool = key(
        False,
        "weight means by how much data of data_split each has: trainers in a merge, instead of by requests, and with "
        "data_split_over workers also workers when they synchronise, instead of by batches",
    )
    text_files: Annotated[list[Name], Field(min_length=1)] | None = key(
        None, "files, folders or globs of UTF-8 text, plain or gzip", datasets=("text",)
    )
    text_documents: str = key(
        "files", "what a document is: a whole file, or a block between blank lines", choices=True, datasets=("text",)
    )
    c4_tokenized_path: Name | None = key(
        None, "folder that c4/tokenize_c4.py wrote: the first source that is tried", datasets=("c4",)
    )
    c4_local_path: Name | None = key(
        None, "file, folder or glob of C4's own shards (JSON lines, plain or gzip): the second", datasets=("c4",)
    )
    c4_language: Name = key("en", "configuration of allenai/c4 on the hub: the last", datasets=("c4",))
    c4_streaming: bool = key(
        True, "read C4 over the network; false: download the shards that are needed", datasets=("c4",)
    )
    dataset_fallback: Name = key(
        "python_docs",
        "what to train on, with a warning in log and summary, where no source of C4 can be read; none: stop",
        choices=True,
        datasets=("c4",),
    )
    imdb_local_path: Name | None = key(
        None, "the folder that aclImdb_v1.tar.gz unpacks to; null: the hub", datasets=("imdb",)
    )

    # Model
    model_type: Name = key("microllama", "family of the model", choices=True)
    model_config: dict[str, Any] = key(
        {"preset": "demo"},
        "preset, or name (of a preset, a hub model or a folder), pretrained, and any architecture value to change",
    )
    identical_initialisation: bool = key(True, "start all trainers from the same weights")
    need_to_reinit_output_layers: bool = key(False, "draw the output layer anew (Xavier uniform) before training")
    single_seed: bool = key(False, "with need_to_reinit_output_layers: the same output layer for all trainers")

    # Length of the run: the first limit that is reached ends it
    number_of_outer_steps: PositiveInt | None = key(None, "rounds to train; null: no limit", changes_training=False)
    number_of_training_epochs: PositiveFloat | None = key(
        None, "passes over the training sample, all trainers together; null: no limit", changes_training=False
    )
    max_tokens: PositiveInt | None = key(
        None, "training tokens, all trainers together; null: no limit", changes_training=False
    )
