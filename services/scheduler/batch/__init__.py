"""The running batch: what each step schedules, and what its result means."""
