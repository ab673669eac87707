"""The ``impress`` command: parse, call, render. The work is done in pipelines and store."""
