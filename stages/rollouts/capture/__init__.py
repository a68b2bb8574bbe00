"""The gateway alone: sessions of programs that run elsewhere, captured on disk, and committed as rollouts."""
