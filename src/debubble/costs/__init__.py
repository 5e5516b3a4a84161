"""Hardware, and what each unit and stage of a model costs on it."""

from debubble.costs.analytical.model_units import model_units
from debubble.costs.devices.cluster import Cluster, parse_size
from debubble.costs.devices.known_hardware import hardware
from debubble.costs.files import (
    apply_profile,
    load_costs,
    load_profile,
    load_units,
    measured_source,
    read_profile,
    with_profile,
)
from debubble.costs.frameworks import (
    DEBUBBLE,
    DEEPSPEED,
    EAGER,
    FSDP,
    MEGATRON,
    TORCH,
    Framework,
    framework_of_options,
    framework_with,
)
from debubble.costs.partition import Partition
from debubble.costs.step import StepTail
from debubble.costs.unit import Strategy, Unit, joined_unit
from debubble.costs.units import Units

__all__ = [
    "Cluster",
    "DEBUBBLE",
    "DEEPSPEED",
    "EAGER",
    "FSDP",
    "Framework",
    "MEGATRON",
    "Partition",
    "StepTail",
    "Strategy",
    "TORCH",
    "Unit",
    "Units",
    "apply_profile",
    "framework_of_options",
    "framework_with",
    "hardware",
    "load_costs",
    "load_profile",
    "with_profile",
    "read_profile",
    "load_units",
    "measured_source",
    "joined_unit",
    "model_units",
    "parse_size",
]
