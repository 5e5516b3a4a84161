"""`debubble import`: another framework's configuration, simulated as it is and replanned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from debubble.cli import options as o
from debubble.cli.app import app
from debubble.cli.job_file import save_job
from debubble.cli.names import (
    PLANNER_LOADER,
    cluster_completion,
    completion,
    dtype_names,
    import_names,
    known_frameworks,
    name_argument,
    name_option,
    planner_names,
)
from debubble.cli.output import Json, SearchProgress, log, print_answer, print_wrapped, with_delayed_message
from debubble.files import check_writable
from debubble.ir import InfeasibleError
from debubble.processes import raise_gc_threshold

if TYPE_CHECKING:
    from debubble.imports.comparison import JobComparison
    from debubble.imports.job import ImportedJob
    from debubble.imports.registry import UserFacts
    from debubble.plans import Plan


@dataclass(frozen=True, kw_only=True)
class JobFacts(o.OptionGroup):
    """The devices of a job, and settings that its configuration may lack."""

    section: ClassVar[str] = "The job"

    cluster: str | None = o.option(o.CLUSTER, autocompletion=cluster_completion)
    memory_limit: o.MemoryLimit = None
    model: str | None = o.option("The model, as for `plan`, where the configuration does not describe it.")
    pipeline: int | None = o.option("Pipeline devices, where it does not say.")
    sequence_length: int | None = o.option("Tokens per sequence, where it does not say.")
    micro_batches: int | None = o.option("Micro-batches per step, where it does not say.")
    dtype: str | None = o.option("Dtype of computing, in place of its own.", names=dtype_names, noun="dtype")
    lora: int | None = o.option("Rank of LoRA adapters, in place of the configuration's (0: the whole model).")
    quantize: str | None = o.option("Format of the frozen weights next to adapters: nf4 or nf4-dq.")
    recompute: str | None = o.option(
        "What every layer recomputes, in place of the configuration's: none, or full (gradient checkpointing)."
    )
    framework: str | None = o.option(
        "What is priced of the framework, in place of its own: NAME@VERSION[,TRAIT=VALUE ...].",
        autocompletion=completion(known_frameworks),
    )
    args: str | None = o.option(
        "The command line that starts the job: variables, then arguments, such as 'TP=4 1 8 --vocab-size 32000'."
    )

    def read(self) -> UserFacts:
        """Parse the facts for an importer.  Raises InputError if the cluster is missing or a name is unknown."""
        from debubble.imports.registry import UserFacts
        from debubble.models import named_model

        names = ("pipeline", "sequence_length", "micro_batches", "dtype", "lora", "quantize", "framework", "recompute")
        return UserFacts(
            cluster=o.with_memory_limit(o.parse_cluster(self.cluster), self.memory_limit),
            model=None if self.model is None else named_model(self.model),
            **{name: getattr(self, name) for name in names},
        )


@app.command("import", rich_help_panel="Take along")
@o.with_option_groups
@with_delayed_message("Reading the job and planning it again")
def import_(
    target: Annotated[
        str, name_argument(import_names, noun="framework", help="The framework, such as megatron; see docs/imports.md.")
    ],
    file: Annotated[Path, typer.Argument(help="Its configuration.", metavar="FILE")],
    *,
    facts: JobFacts,
    degrees: Annotated[
        bool, typer.Option("--degrees", help="Search the degrees of parallelism too, for the same global batch.")
    ] = False,
    planner: Annotated[
        str,
        name_option(planner_names, noun="planner", loader=PLANNER_LOADER, help="A planner's name; see `planners`."),
    ] = "auto",
    search: o.SearchLimits,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the faster plan here, or a job file: NAME.toml.")
    ] = None,
    as_it_is: Annotated[
        bool, typer.Option("--as-it-is", help="Do not plan again; -o writes the job's own plan.")
    ] = False,
    json: Json = False,
) -> None:
    """Predict another framework's job, and what would speed it up."""
    from debubble.imports import imports
    from debubble.imports.advice import setting_advice
    from debubble.imports.comparison import JobComparison, compare
    from debubble.imports.figures import Figures
    from debubble.planners.plan_model import plan_again

    raise_gc_threshold()
    check_writable(output)
    importer, user_facts = imports[target], facts.read()
    settings = importer.read(file, facts.args)
    job = importer.job(settings, file, user_facts)
    yours = job.plan(user_facts.cluster)
    if as_it_is:
        comparison, best = JobComparison(yours=Figures.from_plan(yours), planned=None), yours
    else:
        with log().status("Planning again ...") as status:
            replan = partial(
                plan_again, yours, degrees=degrees, planner=planner, progress=SearchProgress(status), **asdict(search)
            )
            comparison, best = compare(importer, settings, yours, replan)
    comparison = replace(comparison, advice=setting_advice(importer, settings, file, user_facts, yours))
    if output is not None:
        _save(yours, best if comparison.yours.fits or best is not yours or as_it_is else None, output)
    warnings = job.all_warnings(peak=comparison.yours.peak_memory, limit=comparison.yours.memory_limit)
    if json:
        print_answer(
            target=target, degrees=yours.degrees, **vars(comparison), summary=job.summary,
            warnings=list(warnings), not_predicted=job.rest.not_predicted, unread=list(job.unread),
        )  # fmt: skip
    else:
        _show(job, yours, comparison, warnings=warnings, own_degrees=not degrees and not as_it_is)
    if not comparison.fits:
        raise typer.Exit(InfeasibleError.exit_code)


def _save(yours: Plan, best: Plan | None, output: Path) -> None:
    """Write the job file, or the best plan if one fits, and print what is written."""
    if output.suffix == ".toml":
        save_job(yours, output)
        log().print(f"The job is in {output}: `debubble plan {output}`.", soft_wrap=True)
    elif best is not None:
        best.save(output)
        kind = "The job's own plan" if best is yours else "The new plan"
        log().print(f"{kind} is in {output}.", soft_wrap=True)
    else:
        log().print(f"{output} is not written: the job does not fit, and there is no other plan.", soft_wrap=True)


def _show(
    job: ImportedJob, yours: Plan, comparison: JobComparison, *, warnings: Sequence[str], own_degrees: bool
) -> None:
    """Print the job's settings and prediction, what would help, and entries that are not predicted."""
    from debubble.costs.calibration import calibration_words
    from debubble.imports.comparison import recomputation_words
    from debubble.imports.unread import MAX_FREE_NAMES
    from debubble.views.scene import model_title

    for warning in warnings:
        print_wrapped(f"Warning: {warning}", style="yellow")
    share = yours.options.host_optimizer
    hosts = [f"{share:.0%} of the optimizer states on hosts"] if share else []
    assert yours.cluster is not None
    subject = f"{model_title(job.model, yours.cluster)}: {yours.degrees}"
    first = [subject, yours.schedule.name, f"recomputing {recomputation_words(yours)}", *hosts]
    print_wrapped("; ".join(filter(None, [*first, job.left_out])))
    print_wrapped(f"It {job.summary}.")
    if corrected := calibration_words(job.model, yours.cluster, yours.options):
        print_wrapped(corrected)
    for sentence in comparison.sentences():
        print_wrapped(sentence)
    if own_degrees:
        print_wrapped("Degrees are the job's own: --degrees searches them too.", style="dim")
    if job.unread:
        print_wrapped("\nEntries that are not in the prediction, or cost nothing:")
        for sentence in job.rest.sentences(MAX_FREE_NAMES):
            print_wrapped(f"  - {sentence}")
