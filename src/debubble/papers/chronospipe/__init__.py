"""ChronosPipe (Lin et al., arXiv): schedules with temporal locality, selective recomputation and offload."""
