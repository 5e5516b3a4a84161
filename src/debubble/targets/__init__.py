"""The frameworks for which debubble plans: what each can run, as data that planners and exporters share."""

from debubble.registry import index_by_name
from debubble.targets.target import Target, targets

__all__ = ["Target", "targets"]

index_by_name(__name__)
