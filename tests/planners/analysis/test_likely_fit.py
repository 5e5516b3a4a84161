import re

import pytest

import debubble as db
from debubble.planners.analysis.likely_fit import may_not_fit, safe_limit


@pytest.mark.parametrize(
    ("cluster", "limit"), [("2xA100-80GB", r"\d+GiB"), ("1xA100-80GB+1xA100-40GB", r"\d+%")], ids=["equal", "mixed"]
)
def test_the_safe_limit_of_mixed_devices_is_a_percentage(cluster: str, limit: str) -> None:
    plan = db.plan(
        db.models["llama3-8b"], db.Cluster.parse(cluster), micro_batches=4, planner="adapipe", master_dtype="bf16"
    )
    peaks = [float(plan.costs.limit_of(device) or 0.0) for device in range(plan.devices)]

    assert may_not_fit(plan, peaks)
    assert re.fullmatch(limit, safe_limit(plan, peaks) or "")
