"""ChronosPipe: the schedule, its timetable, and the offload of deep weights."""

from debubble.schedules.chronos.schedule import chronos, chronos_recomp, chronos_zero2

__all__ = ["chronos", "chronos_recomp", "chronos_zero2"]
