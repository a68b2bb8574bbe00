"""One self-contained HTML page over stored artifacts, and the tables behind its numbers."""
