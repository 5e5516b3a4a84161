"""Plan -> torch CSV, torchtitan, Megatron-LM, NeMo Automodel, DeepSpeed, MindFormers."""

from debubble.exports.registry import Export, Exporter, exporter, exports
from debubble.registry import index_by_name

__all__ = ["Export", "Exporter", "exporter", "exports"]

index_by_name(__name__)
