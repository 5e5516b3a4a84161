"""Import of other frameworks' configurations as plans, to simulate the job as configured and to plan it again."""

from debubble.imports.registry import imports
from debubble.registry import index_by_name

__all__ = ["imports"]

index_by_name(__name__)
