"""The main job: data, launcher, training loop, checkpoints, rehearsal.  Needs torch."""
