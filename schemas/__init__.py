"""The contracts of Rollmill: tables, records, artifact manifests and references.

Everything else may import this package; it imports only the standard library, pyarrow and pydantic.
"""
