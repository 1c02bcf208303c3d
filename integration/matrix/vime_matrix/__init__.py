"""The test matrix: what vime is meant to be combined with, and what of it was run, skipped or is unconfirmed.

::

    definition.py   the cells of pyproject.toml, as hatch expands them, and what is excluded with its reason
    machine.py      why a cell cannot be run on this machine
    checks.py       what is checked inside an environment: unit tests, vLLM's interface, a pipeline
    running.py      environments made by uv, checks run in them under a deadline
    covering.py     which cells stand for the others
    results.py      what came out, one record a check, kept in results.json
    table.py        the table in integration/README.md
"""
