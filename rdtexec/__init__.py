"""rdtexec: the small runtime that executes a plan. It discovers nothing and decides nothing."""
