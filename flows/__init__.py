"""Prefect flows, how their stages are executed, and the command line. The only place that knows Prefect."""
