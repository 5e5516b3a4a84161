"""Descriptions of models: configs, families, layers, known models.  Does not import torch."""

from debubble.models.architecture import Experts
from debubble.models.config import ModelConfig
from debubble.models.known_models import as_model, hub_model, models, named_model
from debubble.registry import index_by_name

Model = ModelConfig
"""The public name."""

__all__ = ["Experts", "Model", "ModelConfig", "as_model", "hub_model", "models", "named_model"]

index_by_name(__name__)
