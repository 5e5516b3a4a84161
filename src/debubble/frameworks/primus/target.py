"""AMD Primus as a target, which takes the arguments of Megatron-LM."""

from __future__ import annotations

from debubble.frameworks.megatron.target import MEGATRON, OFFLOAD, OFFLOAD_RELEASE, OVERLAPPED_MODULES
from debubble.targets.levers import FULL_OR_NONE, PerLayer, TargetLevers, Uniform
from debubble.targets.limits import fsdp_with_a_pipeline
from debubble.targets.orders import COMBINED, OwnOrders
from debubble.targets.target import Target, targets

targets.add(
    "primus",
    Target(
        name="primus",
        title="AMD Primus",
        framework="megatron-lm",
        zero=(0, 1, 2, 3),
        zero_alone=(0, 1, 2, 3),
        rules=MEGATRON,
        untested=(fsdp_with_a_pipeline,),
        levers=TargetLevers(OwnOrders(("1f1b", "interleaved", "zb-h1")), PerLayer(FULL_OR_NONE), offload=OFFLOAD),
        overlapping=TargetLevers(OwnOrders((COMBINED,)), Uniform(OVERLAPPED_MODULES, full=False), offload=OFFLOAD),
        offload_release=OFFLOAD_RELEASE,
    ),
)
