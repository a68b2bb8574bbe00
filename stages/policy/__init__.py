"""Makes policies: imports, initialises and warm-starts them, and updates them from rollouts and advantages."""
