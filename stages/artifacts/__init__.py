"""The shelf: store, commit protocol, lineage, garbage collection, scanning."""
