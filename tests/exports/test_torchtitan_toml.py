"""The TOML file for torchtitan up to 0.2."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import debubble as db
from debubble.exports import exports
from debubble.imports import imports
from debubble.imports.registry import UserFacts
from debubble.plans import Plan
from tests.exports.hand_plans import full, priced

PIPELINE = priced(data=2, zero=1, micro_batch_size=2)
ALONE = priced(layers=(4,), data=4, zero=3)


@pytest.mark.parametrize("plan", [PIPELINE, ALONE], ids=["pipeline", "no pipeline"])
def test_the_importer_reads_the_plan_from_it(plan: Plan, tmp_path: Path) -> None:
    for name, content in exports["torchtitan"](plan).files.items():
        (tmp_path / name).write_text(content)
    assert plan.model is not None
    cluster = db.Cluster.parse(f"{plan.degrees.devices}xA100-80GB")
    importer, facts = imports["torchtitan"], UserFacts(cluster=cluster, model=db.Model.from_hf(plan.model.config))
    file = tmp_path / "plan.toml"
    read = importer.job(importer.read(file, None), file, facts)

    assert (read.pipeline, read.options.data, read.options.zero) == (plan.devices, plan.options.data, plan.options.zero)
    assert (read.options.micro_batch_size, read.micro_batches) == (plan.options.micro_batch_size, plan.micro_batches)


def test_the_head_has_its_older_name() -> None:
    modules = tomllib.loads(exports["torchtitan"](PIPELINE).files["plan.toml"])["parallelism"]
    assert modules["module_fqns_per_model_part"][-1] == ["layers.2", "layers.3", "norm", "output"]


@pytest.mark.parametrize(("layers", "mode"), [((), "none"), ((0, 1, 2, 3), "full"), ((0,), None)])
def test_config_has_the_recomputation_mode_or_none(layers: tuple[int, ...], mode: str | None) -> None:
    text = exports["torchtitan"](priced(full(*layers))).files.get("plan.toml")
    assert (None if text is None else tomllib.loads(text)["activation_checkpoint"]["mode"]) == mode


def test_a_job_without_fsdp_is_said_to_compute_in_fp32(tmp_path: Path) -> None:
    file, importer, cluster = tmp_path / "job.toml", imports["torchtitan"], db.Cluster.parse("4xA100-80GB")
    degrees = "[parallelism]\npipeline_parallel_degree = {}\npipeline_parallel_schedule = '1F1B'\n"
    said = []
    for pipeline in (4, 2):
        file.write_text(f"[model]\nname = 'llama3'\nflavor = '8B'\n{degrees.format(pipeline)}")
        job = importer.job(importer.read(file, None), file, UserFacts(cluster=cluster))
        said.append(any("computes in fp32" in warning for warning in job.warnings))
    assert said == [True, False]
