"""The trainer: a process of its own that stays warm between updates and knows files, not the store."""
