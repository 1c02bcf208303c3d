"""The processes of a run, each a Ray actor that wraps one part: trainer rank, engine, rollout."""
