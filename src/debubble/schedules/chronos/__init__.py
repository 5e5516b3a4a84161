"""ChronosPipe: the schedule, its timetable, and the offload of deep weights."""
