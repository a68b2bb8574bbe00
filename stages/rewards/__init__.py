"""Scores stored trajectories: graders run in worker processes with hard limits, never in the pipeline's own."""
