"""Models that others serve behind the chat API: text goes in and comes out, and no token ids."""
