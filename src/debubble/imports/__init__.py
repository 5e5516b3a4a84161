"""Other frameworks' configurations -> Plan: the job as it is, to simulate and to plan again."""

from debubble.imports.registry import imports
from debubble.registry import index_by_name

__all__ = ["imports"]

index_by_name(__name__)
