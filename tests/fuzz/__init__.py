"""Fuzzing that stays: a seeded, structure-aware generator for every reader of outside data.

    python -m tests.fuzz --cases 100000              # all readers; `make fuzz`
    python -m tests.fuzz frames manifest --seed 7    # some
    python -m tests.fuzz manifest --seed 123 --show  # one case again: a case is a reader and a seed, nothing else

`reader.py` says what a reader is, `json_values.py` and `raw_bytes.py` change good samples, `run.py` runs cases in
children, `sites.py` lists where the product reads, `of_*.py` hold the generators. docs/guide/fuzzing.md tells more.
"""
