"""Options of a training run, and the plan, data and optimizer that follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from debubble.ir import InputError
from debubble.models.config import ModelConfig
from debubble.plans import Plan
from debubble.training.checkpoint.folder import (
    DamagedError,
    RunProgress,
    SavedRecipe,
    check_sizes,
    checkpoints,
    latest,
    progress_of,
)
from debubble.training.data.datasets import DatasetSamples, SampleSource, TextSamples, ValidationSet
from debubble.training.data.packed import PackedSequences, read_sequences
from debubble.training.data.text import VOCABULARY, Sequences, load_tokens
from debubble.training.data.tokenizer import HfTokenizer
from debubble.training.online.journal import Journal
from debubble.training.settings import Checkpoints, Execution, Records, TrainingData
from debubble.training.user_code import Dataset, current_folder_last, named_dataset

if TYPE_CHECKING:
    from debubble.runtime.parameters.optimizers import MakeOptimizer


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainingData, Checkpoints, Execution, Records):
    """Options of one training run, equal on all ranks."""

    plan: Path
    steps: int = 100
    learning_rate: float | None = None
    """Peak of the learning rate; None: 3e-3 from initial weights, 1e-5 from loaded ones."""
    warmup: int = 10
    lr_schedule: str = "cosine"
    """Learning rate after the warm-up: `cosine`, `linear`, `constant` or `wsd` (warm-up-stable-decay)."""
    optimizer: str | None = None
    """`adamw`, `adam`, `momentum`, `sgd` or `module:Class`; None: the plan's optimizer."""
    optimizer_settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the optimizer's class."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest global norm of the gradients."""
    ema_decay: float | None = None
    """Decay of the weights' moving average, which validation, samples and `save` use; None: no average."""
    load: tuple[Path, ...] = ()
    """Hugging Face checkpoints to start from, loaded in this order; empty: initial weights from the seed."""
    save: Path | None = None
    """Folder for a final Hugging Face checkpoint, in peft's format for LoRA adapters; None: not written."""
    json: bool = False
    explicit: Mapping[str, Any] | None = None
    """Settings given explicitly; a resumed checkpoint overrides all others.  None: it overrides none."""

    @property
    def peak_rate(self) -> float:
        """The learning rate's peak; its default depends on whether weights are loaded."""
        if self.learning_rate is not None:
            return self.learning_rate
        return FINE_TUNING_RATE if self.load else TRAINING_RATE

    @property
    def recipe(self) -> SavedRecipe:
        """The settings that a checkpoint stores."""
        return SavedRecipe(
            steps=self.steps, learning_rate=self.peak_rate, warmup=self.warmup, lr_schedule=self.lr_schedule,
            optimizer=self.optimizer, optimizer_settings=self.optimizer_settings, weight_decay=self.weight_decay,
            clip=self.clip, ema_decay=self.ema_decay,
        )  # fmt: skip

    @property
    def source(self) -> dict[str, str]:
        """The options that select the data; empty: the sources of Python's standard library."""
        sources = {name: getattr(self, name) for name in ("dataset", "lengths", "data", "tokenizer")}
        return {f"--{name}": str(value) for name, value in sources.items() if value is not None}


TRAINING_RATE, FINE_TUNING_RATE = 3e-3, 1e-5
"""Default peaks of the learning rate, for initial weights and for loaded ones, which the former would spoil."""


def start_remarks(options: TrainOptions, plan: Plan) -> Iterator[str]:
    """Sentences for the user on the run's data and on automatic choices."""
    of_plan = batch_remark(options, plan), frozen_remark(options, plan)
    return filter(None, (data_remark(options), rate_remark(options), schedule_remark(options), *of_plan))


def rate_remark(options: TrainOptions) -> str | None:
    """A sentence on the learning rate that was chosen for loaded weights; None if it was not chosen automatically."""
    if not options.load or options.learning_rate is not None:
        return None
    return f"The learning rate's peak is {FINE_TUNING_RATE:g}, as the weights are loaded: choose another with --lr."


def schedule_remark(options: TrainOptions) -> str | None:
    """A sentence if a resumed run's learning rate schedule ends at another step than before; otherwise None."""
    newest, name = start_of(options), options.lr_schedule
    before = None if newest is None else progress_of(newest).recipe.steps
    if before in (None, options.steps) or name == "constant":
        return None
    return f"The {name} schedule ends at step {options.steps} now, not at {before}."


def batch_remark(options: TrainOptions, plan: Plan) -> str | None:
    """A sentence if a resumed run's global batch or sequence length has changed; otherwise None."""
    newest = start_of(options)
    before = None if newest is None else progress_of(newest)
    if before is None or before.global_batch is None or before.sequence_length is None:
        return None
    had, has = (before.global_batch, before.sequence_length), (plan.degrees.global_batch, plan.options.sequence_length)
    if had == has:
        return None
    sequences = f"{has[0]} sequence{'s' * (has[0] != 1)} of {has[1]} tokens"
    return f"A step has {sequences} now, not {had[0]} of {had[1]}: the learning rate may have to change with it (--lr)."


def data_remark(options: TrainOptions) -> str:
    """A sentence on the data that the run reads."""
    newest = start_of(options)
    before = None if newest is None else progress_of(newest).data
    other = "" if before in (None, options.source) else f" (the run before read {words_of(before or {})})"
    if set(options.source) <= {"--tokenizer"}:
        return f"It reads {words_of({})}{other}: give text of your own with --data."
    return f"It reads {words_of(options.source)}{other}."


def words_of(source: Mapping[str, str]) -> str:
    """Format the options that select a run's data, as on the command line."""
    words = " ".join(f"{option} {value}" for option, value in source.items())
    return words or "the sources of Python's standard library"


def frozen_remark(options: TrainOptions, plan: Plan) -> str | None:
    """A sentence if adapters would be trained on top of frozen random weights; otherwise None."""
    from debubble.runtime.models.lora import CONFIG

    if not plan.options.lora or options.resume or options.auto_resume:
        return None
    if any(not (folder / CONFIG).is_file() for folder in options.load):
        return None
    return (
        "The frozen weights next to the adapters are random ones from the seed: give the checkpoint that the adapters"
        " are for with --load FOLDER."
    )


def with_settings(arguments: Mapping[str, Any], options: TrainOptions) -> TrainOptions:
    """The options with explicitly given settings; all others come from the checkpoint to resume, if any."""
    settings: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    options = replace(options, **settings, explicit=settings)
    newest = start_of(options)
    return options if newest is None else with_checkpoint_settings(progress_of(newest), options)


def with_checkpoint_settings(progress: RunProgress, options: TrainOptions) -> TrainOptions:
    """The options with a checkpoint's settings, except for those given explicitly.

    Raises InputError if the checkpoint names an optimizer class that was not given explicitly.
    """
    if options.explicit is None:
        return options
    optimizer = progress.recipe.optimizer
    if optimizer is not None and ":" in optimizer and "optimizer" not in options.explicit:
        raise InputError(
            f"The checkpoint was written with --optimizer {optimizer}: give it again, as what a checkpoint names is not"
            " imported."
        )
    settings: dict[str, Any] = {**progress.recipe.settings, **options.explicit}
    return replace(options, **settings)


def start_of(options: TrainOptions) -> Path | None:
    """The checkpoint to resume by a quick check of file sizes; the ranks verify the contents later.

    Raises InputError if a required checkpoint does not exist, or its files are incomplete.
    """
    if options.checkpoint is None or not (options.resume or options.auto_resume):
        return None
    if not options.auto_resume:
        newest = latest(options.checkpoint)
        try:
            check_sizes(newest)
        except DamagedError as error:
            raise InputError(f"{error} {DAMAGED_ADVICE}") from error
        return newest
    damaged: list[DamagedError] = []
    for checkpoint in reversed(checkpoints(options.checkpoint)):
        try:
            check_sizes(checkpoint)
        except DamagedError as error:
            damaged.append(error)
        else:
            return checkpoint
    refuse_if_all_damaged(options.checkpoint, damaged)
    return None


def refuse_if_all_damaged(folder: Path, damaged: Sequence[DamagedError]) -> None:
    """Raise InputError if there are damaged checkpoints (newest first), and thus no intact one."""
    if damaged:
        raise InputError(
            f"No checkpoint in {folder} is whole, so there is none to resume: give another folder, in which the run"
            f" begins. {damaged[0]}"
        )


DAMAGED_ADVICE = "--auto-resume in place of --resume goes on from the newest that is whole."
"""Advice if the checkpoint to resume is damaged."""


NO_MODEL_MESSAGE = (
    "is of given costs and names no model to train: run your own modules with `debubble.Pipeline(modules, plan)` under"
    " torchrun, or plan a MODEL."
)
"""Error text for plans of a user's units or stages."""


def runnable(path: Path) -> Plan:
    """Load a plan that `debubble train` can run.

    Raises:
        InputError: If it has no model, or the runtime cannot run it.
    """
    plan = Plan.load(path)
    if plan.model is None:
        raise InputError(f"{path} {NO_MODEL_MESSAGE}")
    from debubble.runtime.assembly import check_runnable

    check_runnable(plan, plan.ranks)
    return plan


def model_of(plan: Plan) -> ModelConfig:
    """The model that a plan trains.  Raises InputError if it was made from abstract costs."""
    if plan.model is None:
        raise InputError(f"The plan {NO_MODEL_MESSAGE}")
    return plan.model


def maker_of(options: TrainOptions, plan: Plan) -> MakeOptimizer:
    """The factory of the run's optimizers, by the options or else the plan.

    Raises InputError if the optimizer is unknown.
    """
    from debubble.training.optimizer import OPTIMIZERS, optimizer_maker

    name = options.optimizer or plan.options.optimizer
    if options.optimizer is None and name not in OPTIMIZERS:
        raise InputError(
            f"debubble train has no {name}, for which the plan was made: name a class that is one with --optimizer"
            f" module:Class, or plan with --optimizer {' or '.join(OPTIMIZERS)}."
        )
    return optimizer_maker(
        name, options.optimizer_settings, weight_decay=options.weight_decay, learning_rate=options.peak_rate
    )


def plan_of(options: TrainOptions, *, resuming: bool) -> Plan:
    """The plan to run; a resumed online run continues with its adopted plan."""
    plan, adopted = runnable(options.plan), journal_of(options).plan
    if not (options.online and resuming and adopted.exists()):
        return plan
    order = runnable(adopted)
    return order if order.reorders(plan) else plan


def journal_of(options: TrainOptions) -> Journal:
    """The journal of an online run, in its checkpoint folder, or else next to the plan file."""
    folder = options.checkpoint or options.plan.parent
    return Journal(log=folder / f"{options.plan.stem}.online.jsonl", plan=folder / f"{options.plan.stem}.online.json")


def tokenizer_of(options: TrainOptions, plan: Plan) -> HfTokenizer | None:
    """The tokenizer of the options; None: tokens are bytes."""
    if options.tokenizer is None:
        return None
    return HfTokenizer(options.tokenizer, end=_end_of_text(model_of(plan)))


def separator_of(options: TrainOptions, plan: Plan) -> int | None:
    """The end-of-text token if attention is restricted to a token's own text; otherwise None.

    Raises InputError if the model's units take no positions, or there is no such token.
    """
    if not options.separate_texts:
        return None
    if options.dataset is not None:
        raise InputError("--separate-texts is for --data: give the items of a --dataset 'position_ids'.")
    if model_of(plan).whole_layers:
        raise InputError("--separate-texts needs positions, which transformers' modules count by themselves.")
    tokenizer = tokenizer_of(options, plan)
    separator = 0 if tokenizer is None else tokenizer.separator
    if separator is None:
        raise InputError("--separate-texts needs a token that ends a text, which neither tokenizer nor model names.")
    return separator


def sequences_of(options: TrainOptions, plan: Plan, data: Path | None) -> Sequences:
    """Load a text as samples.  Raises InputError for unsuitable data, or if the model's vocabulary is too small."""
    vocabulary, tokenizer = model_of(plan).vocab, tokenizer_of(options, plan)
    if tokenizer is None:
        needed, kind = VOCABULARY, "text as bytes"
    else:
        needed, kind = tokenizer.vocabulary, f"the tokenizer {options.tokenizer}"
    if vocabulary < needed:
        raise InputError(f"The model's vocabulary has {vocabulary} tokens, but {kind} needs {needed}.")
    tokens = load_tokens(data, tokenizer)
    return Sequences(tokens=tokens, sequence_length=plan.options.sequence_length, seed=options.seed)


def samples_of(options: TrainOptions, plan: Plan, dataset: Dataset | None = None) -> SampleSource:
    """The samples of a run, from the dataset if given, or else by the options."""
    if dataset is not None:
        return DatasetSamples(dataset=dataset, sequence_length=plan.options.sequence_length, seed=options.seed)
    if options.dataset is not None:
        return _dataset_samples(options, plan, options.dataset, option="--dataset")
    return _text_samples(options, plan, options.data)


def validation_of(options: TrainOptions, plan: Plan) -> ValidationSet | None:
    """The validation set of a run, if its options specify one."""
    if options.validation is None:
        return None
    if options.dataset is None:
        source = _text_samples(options, plan, Path(options.validation))
    else:
        source = _dataset_samples(options, plan, options.validation, option="--validation")
    rows = plan.micro_batches * plan.options.micro_batch_size
    return ValidationSet(source=source, rows=rows, replicas=plan.options.data)


def _text_samples(options: TrainOptions, plan: Plan, data: Path | None) -> SampleSource:
    return TextSamples(sequences_of(options, plan, data), separator_of(options, plan))


def _dataset_samples(options: TrainOptions, plan: Plan, function: str, *, option: str) -> SampleSource:
    with current_folder_last():  # the function may import more from there
        return samples_of(options, plan, named_dataset(function, option=option)(plan))


def packed_of(options: TrainOptions, plan: Plan) -> PackedSequences | None:
    """The sequences of --lengths as steps of the run; None without it.  Raises InputError for unsuitable sequences."""
    if options.lengths is None:
        return None
    o, model = plan.options, model_of(plan)
    sequences = read_sequences(options.lengths, longest=o.sequence_length, vocabulary=model.vocab)
    return PackedSequences(
        sequences=sequences, micro_batches=plan.micro_batches, micro_batch_size=o.micro_batch_size, replicas=o.data,
        seed=options.seed,
    )  # fmt: skip


def _end_of_text(model: ModelConfig) -> int | None:
    """The end-of-text token by the model's config, the first of several."""
    token = model.config.get("eos_token_id")
    return token[0] if isinstance(token, list) else token
