"""Speed beside others on real servers: `python -m benchmarks`. README.md says how to run and read it."""
