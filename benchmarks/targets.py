"""The plan of every target beside the unrestricted one: ten models on five clusters.

    python benchmarks/targets.py [--model NAME ...] [--cluster NAME ...]

A pipeline of eight devices (of all, where there are fewer), replicas with ZeRO-1 on the others, 64 sequences of 2048
tokens; each plan is the faster of AdaPipe's and the portfolio's.  A cell is its step over the unrestricted plan's, or
the step where there is none; `-` stands where nothing fits, `refused` where the target runs no such model.
"""

from __future__ import annotations

import argparse

import debubble as db
from debubble.exports import exports
from debubble.ir import DebubbleError, InputError, Plan
from debubble.planners.plan_model import step_time, tail_of
from debubble.targets import targets

MODELS = (
    "llama3-8b", "llama2-13b", "llama3-70b", "llama3.2-1b", "qwen3-8b", "qwen2.5-32b", "mistral-7b", "mixtral-8x7b",
    "gpt3-13b", "glm-4.5-air",
)  # fmt: skip
CLUSTERS = ("4xL40S", "8xA100-40GB", "8xH100-80GB", "16xA100-80GB", "64xH100-80GB")


def seconds(plan: Plan) -> float:
    return float(step_time(plan.simulate(), plan.options, tail=tail_of(plan)))


def planned(model: str, name: str, target: str | None, effort: float) -> Plan:
    cluster = db.Cluster.parse(name)
    pipeline = min(8, cluster.count)
    data = cluster.count // pipeline
    plans, reasons = [], []
    for planner in ("adapipe", "portfolio"):
        try:
            plan = db.plan(
                db.models[model], cluster, pipeline=pipeline, data=data, zero=int(data > 1), micro_batches=64 // data,
                sequence_length=2048, effort=effort, planner=planner, target=target,
            )  # fmt: skip
        except DebubbleError as reason:
            reasons.append(reason)
        else:
            plans.append(plan)
    if not plans:
        raise reasons[0]
    return min(plans, key=seconds)


def cell(model: str, cluster: str, target: str, free: float | None, effort: float) -> str:
    try:
        plan = planned(model, cluster, target, effort)
    except InputError:
        return "refused"
    except DebubbleError:
        return "-"
    if target in exports:
        slower = [loss for loss in exports[target](plan).losses if "times as long" in loss]
        assert not slower, slower
    return f"{seconds(plan):.2f} s" if free is None else f"{seconds(plan) / free:.3f}"


def row(model: str, cluster: str, effort: float) -> str:
    try:
        free = seconds(planned(model, cluster, None, effort))
    except DebubbleError:
        free = None
    cells = [cell(model, cluster, target, free, effort) for target in targets]
    return " | ".join([model, cluster, "-" if free is None else f"{free:.3f} s", *cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--cluster", nargs="+", default=CLUSTERS)
    parser.add_argument("--effort", type=float, default=0.5)
    arguments = parser.parse_args()
    names = ["model", "cluster", "unrestricted", *targets]
    print(f"| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    for model in arguments.model:
        for cluster in arguments.cluster:
            print(f"| {row(model, cluster, arguments.effort)} |", flush=True)


if __name__ == "__main__":
    main()
