import argparse
from dataclasses import dataclass, fields


@dataclass
class Settings:
    root: str = "data/clips"
    out: str = "out"
    seed: int = 1
    epochs: int = 5
    batch: int = 32
    lr: float = 3e-4
    accumulate: int = 4

    @classmethod
    def from_args(cls):
        parser = argparse.ArgumentParser()
        for f in fields(cls):
            parser.add_argument(f"--{f.name}", type=type(f.default), default=f.default)
        return cls(**vars(parser.parse_args()))
