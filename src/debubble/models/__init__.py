"""What a model is made of: configurations, families, layer types, known models.  Free of torch."""

from debubble.models.known import models, named_model
from debubble.models.model import Experts, Model
from debubble.registry import index_by_name

__all__ = ["Experts", "Model", "models", "named_model"]

index_by_name(__name__)
