"""One file per published schedule: numbers in, Schedule out."""

from debubble.registry import index_by_name
from debubble.schedules.registry import ScheduleEntry, schedule, schedules

__all__ = ["ScheduleEntry", "schedule", "schedules"]

index_by_name(__name__)
