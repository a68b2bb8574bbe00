"""The stages: each turns input artifacts and a config into one output artifact. None knows Prefect or another stage."""
