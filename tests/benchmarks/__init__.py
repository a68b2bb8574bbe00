"""The budgets, measured: ``make bench`` runs every ``bench_*.py`` here in one process and prints one table."""
