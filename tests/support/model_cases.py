"""Models for plans with hand-written costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from debubble.costs import Cluster
from debubble.models import ModelConfig
from debubble.plans import ModelOnCluster


def on_cpus(config: Mapping[str, Any]) -> ModelOnCluster:
    """The model of a Hugging Face config on more CPUs than any test's plan needs."""
    return ModelOnCluster(ModelConfig.from_hf(config), Cluster.parse("64xCPU"))


def entries_of(model: ModelConfig | Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of a model's Hugging Face config."""
    return model.config if isinstance(model, ModelConfig) else model
