"""What the server withstands, on the real engine with the bundled demo: one module per kind of trouble.

    PYTHONPATH=src:tests python -m tools.robustness schemas|malformed|leaving|gap [--out benchmarks/robustness.json]

Each writes its section of the file, with machine, versions, commit and command. `tests/http` holds the same checks in
small, for every run of the suite.
"""
