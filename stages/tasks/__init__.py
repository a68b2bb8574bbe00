"""Stage tasks: a file, a benchmark or a generator becomes rows of the ``tasks`` table."""
