"""A plan's run options in another framework: each is written or listed as a loss; targets have refused the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from debubble.costs.frameworks import framework_name
from debubble.ir import RunOptions
from debubble.plans import Plan
from debubble.simulator import Timeline


@dataclass(frozen=True)
class Lost:
    """The target runs the plan without it; the sentence says what that changes."""

    sentence: str


Decision = Mapping[str, Any] | Lost
"""The target's settings for it, none where its own default is what the plan has; or what is lost."""

OptionTable = Mapping[str, Callable[[Plan], Decision]]
"""The rule of one target for every field of RunOptions."""


def settings_of(plan: Plan, table: OptionTable) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The target's settings for a plan's options, and what is lost.

    Only a plan of a model has options.
    """
    settings: dict[str, Any] = {}
    losses: list[str] = []
    if plan.model is None:
        return settings, ()
    for field in fields(RunOptions):
        decision = table[field.name](plan)
        if isinstance(decision, Lost):
            losses.append(decision.sentence)
        else:
            settings |= decision
    return settings, tuple(losses)


def one_setting(name: str, option: str) -> Callable[[Plan], Decision]:
    """The rule of an option that is one setting of the target."""
    return lambda plan: {name: getattr(plan.options, option)}


def global_batch(name: str) -> Callable[[Plan], Decision]:
    """The rule of `data` where the target counts the sequences of a step."""
    return lambda plan: {name: plan.degrees.global_batch}


def by_value(option: str, settings: Mapping[str, Mapping[str, Any]]) -> Callable[[Plan], Decision]:
    """The rule of an option for each of whose values the target has settings."""
    return lambda plan: settings[getattr(plan.options, option)]


def set_by_target_rules(plan: Plan) -> Decision:
    """Write nothing: the target has one value alone, and a rule of the target refuses the others."""
    return {}


def adapters(plan: Plan) -> Decision:
    """LoRA, for targets whose adapters the user configures."""
    rank = plan.options.lora
    if not rank:
        return {}
    return Lost(
        f"LoRA of rank {rank}: configure adapters of that rank in the target; whole parameters take more memory than"
        " the plan counts on."
    )


def quantized(plan: Plan) -> Decision:
    """Decide on quantised weights: no target is told of them."""
    if plan.options.quantize is None:
        return {}
    return Lost(
        f"Frozen weights in {plan.options.quantize}: configure the target's own quantisation; weights of the run's"
        " dtype take more memory than the plan counts on."
    )


def post_validation(plan: Plan) -> Decision:
    """Decide on post-validation: no target updates before the norm of all gradients is known."""
    if not plan.options.post_validation:
        return {}
    timeline: Timeline = plan.simulate()
    slowed = float(timeline.makespan / timeline.span)
    return Lost(
        "Post-validation: devices wait for the norm of all gradients before they update; the pipeline is predicted to"
        f" take {slowed:.3f} times as long as with it."
    )


def of_frameworks(*names: str, settings: Callable[[Plan], Decision]) -> Callable[[Plan], Decision]:
    """The rule of the framework that is priced, in a target with settings for what those of these names do."""
    return lambda plan: settings(plan) if framework_name(plan.options.framework) in ("", *names) else framework(plan)


def framework(plan: Plan) -> Decision:
    """Decide on what a named framework fuses, overlaps and keeps: no target is told of it."""
    if not plan.options.framework:
        return {}
    priced = plan.options.framework.removeprefix("target,")
    return Lost(
        f"The plan's times are those of {priced}: set what that fuses and overlaps, and the dtype of its gradients, in"
        " the target's configuration."
    )


def full_bf16(plan: Plan) -> Decision:
    """Weights that the optimizer steps in bf16, for targets whose script makes the model."""
    if plan.options.master_dtype == "fp32":
        return {}
    return Lost("The optimizer steps weights in bf16: load the model in bf16 in your script, without fp32 copies.")


UNSETTABLE: OptionTable = {
    "framework": framework,
    "expert_tensor": set_by_target_rules,
    "lora": adapters,
    "quantize": quantized,
    "post_validation": post_validation,
    "host_optimizer": set_by_target_rules,
    "expert_overlap": set_by_target_rules,
    "slices": set_by_target_rules,
    "gradient_dtype": set_by_target_rules,
    "moment_dtype": set_by_target_rules,
    "master_dtype": full_bf16,
    "sequence_parallel": set_by_target_rules,
    "flash_attention": set_by_target_rules,
    "image_patches": set_by_target_rules,
    "images": set_by_target_rules,
    "freeze": set_by_target_rules,
}
"""The rules of options that most targets have no setting for."""


def as_tree(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose names are paths, such as `model.dtype`, as a tree."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *branches, leaf = path.split(".")
        node = tree
        for branch in branches:
            node = node.setdefault(branch, {})
        node[leaf] = value
    return tree
