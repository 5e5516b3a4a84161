"""The corpus: one short input per form of configuration, and how it is read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.imports import imports
from debubble.imports.job import ImportedJob
from debubble.imports.registry import UserFacts
from debubble.ir import InputError

CORPUS = Path(__file__).parent / "corpus"
FORMS: list[dict[str, Any]] = tomllib.loads((CORPUS / "table.toml").read_text())["forms"]
READ = [form for form in FORMS if "read" in form]
REFUSED = [form for form in FORMS if "refused" in form]


def job_of(form: dict[str, Any]) -> ImportedJob:
    path, importer = CORPUS / form["file"], imports[form["framework"]]
    facts: dict[str, Any] = {**form.get("given", {})}
    if "model" in facts:
        facts["model"] = db.models[facts["model"]]
    cluster = db.Cluster.parse(f"{form.get('devices', 8)}xH100-80GB")
    return importer.job(importer.read(path, form.get("args")), path, UserFacts(cluster=cluster, **facts))


def facts_of(job: ImportedJob) -> dict[str, Any]:
    options, model, ways = job.options, job.model, list(job.strategies.values())
    fully_recomputed = ways.count(("full", "full"))
    optional = {"lora": options.lora, "quantize": options.quantize, "host_optimizer": options.host_optimizer}
    order = None if job.order in ("1f1b", "interleaved") or not isinstance(job.order, str) else job.order
    return {
        "degrees": [job.pipeline, options.tensor, options.data, options.context, options.expert],
        "batch": [options.micro_batch_size, job.micro_batches, options.sequence_length],
        "dtype": options.dtype,
        "zero": options.zero,
        "recomputed": [fully_recomputed, len(ways) - fully_recomputed],
        "model": [model.family, model.layers, model.hidden, model.vocab],
        "billions": round(model.parameters / 1e9, 2),
        "stages": sorted(set(job.layers)),
        **{name: value for name, value in {**optional, "order": order}.items() if value},
    }


def names(forms: list[dict[str, Any]]) -> list[str]:
    return [f"{form['file']}{'-args' * ('args' in form)}{'-given' * ('given' in form)}" for form in forms]


@pytest.mark.parametrize("form", READ, ids=names(READ))
def test_a_form_is_read_as_its_framework_reads_it(form: dict[str, Any]) -> None:
    assert facts_of(job_of(form)) == form["read"]


@pytest.mark.parametrize("form", REFUSED, ids=names(REFUSED))
def test_a_form_is_refused_in_a_sentence(form: dict[str, Any]) -> None:
    with pytest.raises(InputError) as refusal:
        job_of(form)

    assert form["refused"] in str(refusal.value)


def test_every_file_of_the_corpus_is_in_the_table() -> None:
    used = {form["file"] for form in FORMS} | {"table.toml", "house_model.yaml", "house_base.yaml"}

    assert {path.name for path in CORPUS.iterdir() if path.is_file()} == used


def test_order_with_a_wrong_number_of_stages_is_refused(tmp_path: Path) -> None:
    text = (CORPUS / "primus_v_half.yaml").read_text().replace("num_virtual_stages_per_pipeline_rank: 2", "lr: 1.0")
    (tmp_path / "job.yaml").write_text(text)
    cluster = db.Cluster.parse("8xH100-80GB")
    job = imports["primus"].job(
        imports["primus"].read(tmp_path / "job.yaml", None), tmp_path / "job.yaml", UserFacts(cluster=cluster)
    )

    with pytest.raises(
        InputError, match="v-half has 16 stages on 8 pipeline devices, but the layers are divided into 8"
    ):
        job.plan(cluster)
